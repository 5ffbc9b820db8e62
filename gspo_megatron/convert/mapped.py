"""Tensors that are a plain range of a file's bytes, mapped into memory box by box."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gspo_megatron.convert.ops import Box, ConversionError, Shape, extent


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a file; its storage is a plain range of the file's bytes."""

    dtype: torch.dtype
    shape: Shape
    stride: tuple[int, ...]
    """Elements."""
    offset: int
    """Bytes from the file's start to element (0, ..., 0)."""


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """Of a tensor whose elements follow each other row by row."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def map_box(fd: int, tensor: StoredTensor, box: Box, *, where: str) -> Tensor:
    """A box of a tensor, as a view of a private mapping of just its range of the file.

    Not of the whole file: a mapping counts towards limits of memory (RLIMIT_DATA, strict overcommit) at its full size.

    Args:
        fd: the file, which may be closed afterwards.
        tensor: its place there.
        box: inside the tensor.
        where: for the message.

    Returns:
        In the box's shape. Its memory is the page cache's; a page that is written to becomes the process's own.

    Raises:
        ConversionError: the file has become shorter than it was when its tensors were found.
    """
    size = extent(box)
    if prod(size) == 0:
        return torch.empty(size, dtype=tensor.dtype)
    itemsize = tensor.dtype.itemsize
    first = tensor.offset + itemsize * sum(a * step for (a, _), step in zip(box, tensor.stride, strict=True))
    span = 1 + sum((n - 1) * step for n, step in zip(size, tensor.stride, strict=True))
    page = first - first % mmap.ALLOCATIONGRANULARITY
    # Private and writable: torch has no read-only tensors, and a write into one would end the process.
    length = first - page + span * itemsize
    try:
        mapped = mmap.mmap(fd, length, access=mmap.ACCESS_COPY, offset=page)
    except ValueError as error:  # beyond the end
        raise ConversionError(f"{where}: the file was shortened while it was read") from error
    mapped.madvise(mmap.MADV_WILLNEED)  # one long read, not one per page
    data = torch.frombuffer(mapped, dtype=torch.uint8, offset=first - page)
    if first % itemsize:  # other writers do not align
        data = data.clone()
    return data.view(tensor.dtype).as_strided(size, tensor.stride)
