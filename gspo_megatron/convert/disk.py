"""How large files are brought to the disk."""

from __future__ import annotations

import ctypes

WRITE_BYTES = 2**17
"""Hashed and written at a time, as by cp. For larger writes Linux looks for larger free pages for its cache, which
took up to five times as long on the virtual machine of RESULTS.md."""
_WRITEBACK_BYTES = 32 * 2**20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class Writeback:
    """Lets the disk begin while a file is still written, so that the fsync at its end waits for little.

    A hint: it promises nothing and reports no error, both of which fsync does.
    """

    def __init__(self, fd: int) -> None:
        """For a file that is written from its start."""
        self._fd, self._num_begun = fd, 0

    def advance(self, num_bytes: int) -> None:
        """Tell how long the file is."""
        if num_bytes - self._num_begun >= _WRITEBACK_BYTES:
            _sync_file_range(self._fd, self._num_begun, num_bytes - self._num_begun, _SYNC_FILE_RANGE_WRITE)
            self._num_begun = num_bytes
