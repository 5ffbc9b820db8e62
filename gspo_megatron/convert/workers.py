"""Worker processes of a conversion: each makes whole files, reports as it goes, and is missed when it dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.process import die_with_parent

Record = dict[str, Any]
"""What the journal keeps of a finished file, JSON: its `bytes` and `hash`; the rest is the conversion's own."""

M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
STOP_LIMIT_S = 5.0
REPORT_S = 0.05
"""A worker reports its bytes at most this often."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HINTS = {
    signal.SIGKILL: "the machine may have run out of memory",
    signal.SIGBUS: "a source file was shortened, or its disk could not be read",
}


class JobError(RuntimeError):
    """A conversion that could not go on (disk full, a worker killed); the message names the file."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file to be made."""

    name: str
    """Relative to the target."""
    num_bytes: int
    """Of the tensors in it."""


class Conversion(Protocol):
    """What a job carries out. A file's bytes depend on nothing but the conversion and the file's index."""

    @property
    def files(self) -> Sequence[PlannedFile]:
        """Everything that workers make; the small rest is `finish`'s."""
        ...

    def identity(self) -> dict[str, dict[str, Any]]:
        """JSON: options, source files and plan; equal when and only when a resumed job would make the same bytes."""
        ...

    def write_file(self, index: int, directory: Path, report: Callable[[int], None]) -> Record:
        """Make one file, synced to disk, and tell report how many bytes of tensors were written since last told."""
        ...

    def preload(self) -> None:
        """Import what `finish` needs and workers do not; called beside them."""
        ...

    def finish(self, directory: Path, records: Sequence[Record]) -> None:
        """Check that the records are complete and write the rest of the directory; records in the order of files."""
        ...


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of tensors that a worker wrote since its last report."""

    num_bytes: int
    peak_anon_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A file is complete on disk."""

    index: int
    record: Record


class Workers:
    """Processes that make the files of one conversion; a context manager, which stops them."""

    def __init__(self, conversion: Conversion, directory: Path, *, num_workers: int) -> None:
        """Fork them.

        Forking spares each the seconds in which torch loads, in which it writes a GiB. What a lock of another thread
        could do to them is kept small: start them before a thread of one's own (a progress bar's).
        """
        self._workers = [_Worker(conversion, directory) for _ in range(num_workers)]

    def __enter__(self) -> Workers:
        """The workers themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them, whatever they do."""
        for worker in self._workers:
            worker.stop()

    def write(self, indices: Sequence[int]) -> Iterator[Written | Finished]:
        """Make these files.

        Raises:
            ConversionError: the source cannot be converted.
            JobError: a file cannot be written, or a worker died.
        """
        pending = deque(indices)
        busy = {}
        for worker in self._workers[: len(pending)]:
            worker.give(pending.popleft())
            busy[worker.connection] = worker
        while busy:
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]  # wait returns what it was given
                event = worker.receive()
                yield event
                if isinstance(event, Finished):
                    if pending:
                        worker.give(pending.popleft())
                    else:
                        del busy[worker.connection]


class _Worker:
    """A child process with a pipe."""

    def __init__(self, conversion: Conversion, directory: Path) -> None:
        self._files = conversion.files
        self._index = -1
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(conversion, directory, theirs), daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # this process's handlers are not for the child
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()  # so that a dead child is an end of file here

    def give(self, index: int) -> None:
        """Order one file."""
        self._index = index
        try:
            self.connection.send(index)
        except BrokenPipeError as error:
            raise self._death() from error

    def receive(self) -> Written | Finished:
        """The next report.

        Raises:
            ConversionError: as the worker raised it.
            JobError: what the worker could not write, or that it died.
        """
        try:
            event = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._death() from error
        if isinstance(event, Exception):
            raise event
        return event

    def _death(self) -> JobError:
        self.process.join(STOP_LIMIT_S)
        status, name = self.process.exitcode, self._files[self._index].name
        if status is None or status >= 0:
            return JobError(f"{name}: the worker that was writing it ended with status {status}; see its error above")
        number = signal.Signals(-status)
        hint = f"; {_HINTS[number]}" if number in _HINTS else ""
        return JobError(f"{name}: the worker that was writing it was killed by {number.name}{hint}")

    def stop(self) -> None:
        """End the child, whatever it does."""
        self.process.terminate()
        self.process.join(STOP_LIMIT_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.connection.close()


def _serve(conversion: Conversion, directory: Path, connection: Connection) -> None:
    """A worker: makes the files that it is told to."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal reaches it too; its parent will stop it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    die_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    return_large_blocks()
    reports = _Reports(connection)
    while True:
        try:
            index = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent is gone
            return
        try:
            record = conversion.write_file(index, directory, reports.add)
        except ConversionError as error:  # of an OSError: the file is good, the disk is not
            connection.send(JobError(str(error)) if isinstance(error.__cause__, OSError) else error)
            return
        except OSError as error:
            name = error.filename or directory / conversion.files[index].name
            connection.send(JobError(f"{name}: {error.strerror or error}"))
            return
        reports.flush()
        connection.send(Finished(index, record))


class _Reports:
    """Adds up what a worker wrote and sends it now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_bytes = self._peak_anon_bytes = 0
        self._sent_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count these bytes."""
        self._num_bytes += num_bytes
        self._peak_anon_bytes = max(self._peak_anon_bytes, anon_bytes())
        if time.monotonic() - self._sent_s >= REPORT_S:
            self.flush()

    def flush(self) -> None:
        """Send what was counted."""
        self._connection.send(Written(self._num_bytes, self._peak_anon_bytes))
        self._num_bytes = 0
        self._sent_s = time.monotonic()


def return_large_blocks() -> None:
    """Let glibc map every block of a MiB or more by itself, and so give it back to the system when it is freed.

    By default it soon takes them from the heap, where small objects settle in the holes that they leave: a chunk of
    experts after another would each lie in new memory.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def anon_bytes() -> int:
    """RssAnon of this process: its memory without the mapped files."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
