"""Boxes of tensors out of the data files of a torch_dist checkpoint, mapped into memory where possible."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from itertools import combinations
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gspo_megatron.convert.manifest import Manifest, verify_files
from gspo_megatron.convert.mapped import StoredTensor, map_box
from gspo_megatron.convert.mcore_layout import METADATA, Chunk, Stored, meet, relative
from gspo_megatron.convert.ops import Box, ConversionError, extent, slices
from gspo_megatron.convert.unpickle import locate_tensor


class DataFiles:
    """The data files of one folder; each is opened, and with a manifest verified, when first needed."""

    def __init__(self, folder: Path, manifest: Manifest | None, progress: Callable[[int], None] | None) -> None:
        """With a manifest a file is hashed before its first byte is used; progress gets the bytes."""
        self._folder, self._manifest, self._progress = folder, manifest, progress
        self._fds: dict[str, int] = {}
        self._located: dict[Chunk, StoredTensor] = {}

    def read(self, key: str, stored: Stored, box: Box) -> Tensor:
        """A box of a tensor: a view of the file where one chunk covers it, else assembled.

        Raises:
            ConversionError: the chunks do not tile the box, or a data file is damaged.
        """
        size = extent(box)
        if prod(size) == 0:
            return torch.empty(size, dtype=stored.dtype)
        chunks = stored.within(box)
        parts = [meet(c.box, box) for c in chunks]
        covered = sum(prod(extent(p)) for p in parts)
        if covered != prod(size) or any(prod(extent(meet(a, b))) for a, b in combinations(parts, 2)):
            raise ConversionError(
                f"{self._folder}: {key} {stored.shape}: its stored chunks do not tile the box {box}; "
                f"they have {covered} of {prod(size)} elements"
            )
        if len(chunks) == 1:
            return self._map(key, stored, chunks[0], box)
        out = torch.empty(size, dtype=stored.dtype)
        for chunk, part in zip(chunks, parts, strict=True):
            out[slices(relative(part, box))] = self._map(key, stored, chunk, part)
        return out

    def _map(self, key: str, stored: Stored, chunk: Chunk, box: Box) -> Tensor:
        """A box inside a chunk, as a view of a private mapping of just its range of the file."""
        fd = self._open(chunk, key)
        tensor = self._locate(key, stored, chunk, fd)
        return map_box(fd, tensor, relative(box, chunk.box), where=f"{self._folder / chunk.file}: {key}")

    def _locate(self, key: str, stored: Stored, chunk: Chunk, fd: int) -> StoredTensor:
        if chunk not in self._located:
            try:
                tensor = locate_tensor(fd, chunk.offset, chunk.length)
            except ConversionError as error:
                raise ConversionError(f"{self._folder / chunk.file}: {key} at {chunk.offset}: {error}") from error
            found, want = (tensor.dtype, tensor.shape), (stored.dtype, extent(chunk.box))
            if found != want:
                raise ConversionError(f"{self._folder / chunk.file}: {key} is {found} there, {METADATA} says {want}")
            self._located[chunk] = tensor
        return self._located[chunk]

    def _open(self, chunk: Chunk, key: str) -> int:
        path = self._folder / chunk.file
        if chunk.file not in self._fds:
            if self._manifest is not None:
                verify_files(self._folder, self._manifest, names=[chunk.file], progress=self._progress)
            try:
                # NONBLOCK: a named pipe would be waited for; it has no size, and is refused below
                self._fds[chunk.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                raise ConversionError(f"{path}: holds {key}: {error.strerror}") from error
        fd = self._fds[chunk.file]
        status = os.fstat(fd)
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        if size < chunk.offset + chunk.length:
            raise ConversionError(
                f"{path}: is cut off: {key} ends at byte {chunk.offset + chunk.length}, the file at {size}"
            )
        return fd

    def read_item(self, key: str, chunk: Chunk) -> bytes:
        """The bytes of an item that is no tensor."""
        return os.pread(self._open(chunk, key), chunk.length, chunk.offset)

    def close(self) -> None:
        """Close the files; mapped tensors stay."""
        while self._fds:
            os.close(self._fds.popitem()[1])
