"""TP/PP/EP/ETP shards of Megatron tensors: filled from and gathered to Hugging Face tensors. Never imports Megatron.

The address of a shard (global shape, offset) is megatron-core's own, taken from `sharded_state_dict`, so that no
layout needs code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.convert.ops import Block, Box, Shape, TensorMap, mcore_problems, raise_problems, slices

MESSAGE_BYTES = 32 * 2**20
"""Of one point-to-point message; what rank 0 holds beside the bucket that it assembles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """This rank's part of one global tensor."""

    mcore_name: str
    data: Tensor
    """A view of the live parameter."""
    global_shape: Shape
    global_offset: Shape
    """Same length as global_shape; axes that data lacks (the expert axis) have extent 1."""
    is_owner: bool
    """One of the replicas owns the shard; the owners' shards cover each tensor exactly once."""

    @property
    def box(self) -> Box:
        """The shard's place in the global tensor."""
        missing = len(self.global_shape) - self.data.dim()
        extents = (1,) * missing + tuple(self.data.shape)
        return tuple((o, o + n) for o, n in zip(self.global_offset, extents, strict=True))

    @property
    def boxed(self) -> Tensor:
        """data in the box's shape."""
        return self.data.detach().view(tuple(b - a for a, b in self.box))


def load_shards(
    shards: Sequence[Shard], table: Sequence[TensorMap], read_hf: Callable[[str, Box], Tensor]
) -> None:
    """Fill this rank's shards from Hugging Face tensors, reading only the boxes that they own.

    Args:
        shards: every shard of this rank.
        table: the family's.
        read_hf: (hf_name, box) -> that box.

    Raises:
        ConversionError: the model has a tensor that the table lacks, or shapes differ.
    """
    global_shapes = {s.mcore_name: s.global_shape for s in shards}
    raise_problems("the model does not fit config.json", mcore_problems(table, global_shapes, is_whole=False))
    by_name = {op.mcore_name: op for op in table}
    for shard in shards:
        by_name[shard.mcore_name].load_into(shard.boxed, shard.box, read_hf)


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one owner's shard lies; what ranks tell each other."""

    rank: int
    global_shape: Shape
    box: Box
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Piece:
    """A block of a shard, at most MESSAGE_BYTES large where it has more than one row."""

    part: _Part
    mcore_name: str
    block: Block

    @property
    def num_bytes(self) -> int:
        return prod(self.block.size) * self.part.dtype.itemsize


class Gatherer:
    """Brings whole Hugging Face tensors to rank 0, a bucket at a time, in the table's order.

    Building it is "Collective over the default group": owners' addresses are exchanged and checked once.
    """

    def __init__(
        self, shards: Sequence[Shard], table: Sequence[TensorMap], *, device: torch.device | None = None
    ) -> None:
        """Of shards that lie on this device, or on the host and are then copied piece by piece; None: where they lie.

        Raises:
            ConversionError: the ranks' shards do not make up the table's tensors.
        """
        self._rank = dist.get_rank()
        self._own = {(s.mcore_name, s.box): s for s in shards if s.is_owner}
        mine = [
            (s.mcore_name, _Part(self._rank, s.global_shape, s.box, s.data.dtype)) for s in shards if s.is_owner
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        parts: dict[str, list[_Part]] = {}
        for name, part in (item for rank_items in everyone for item in rank_items):
            parts.setdefault(name, []).append(part)
        _check_cover(table, parts)
        self._pieces: dict[str, list[_Piece]] = {name: [] for op in table for name in op.hf_shapes}
        for op in table:
            for part in parts[op.mcore_name]:
                for block in op.blocks_within(part.box):
                    bands = _row_bands(block, MESSAGE_BYTES // part.dtype.itemsize)
                    self._pieces[block.hf_name] += [_Piece(part, op.mcore_name, band) for band in bands]
        shapes = {name: shape for op in table for name, shape in op.hf_shapes.items()}
        self.specs = [(name, pieces[0].part.dtype, shapes[name]) for name, pieces in self._pieces.items()]
        """(hf_name, dtype, shape) of every tensor, in order."""
        self._device = device or next((s.data.device for s in self._own.values()), torch.device("cpu"))

    def buckets(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield lists of (hf_name, tensor) on rank 0; other ranks yield empty ones. Collective: exhaust it.

        Args:
            max_bytes: of one list's tensors; a larger tensor is a list of its own. Rank 0 holds one list and one
                message, the others one message.
        """
        bucket: list[tuple[str, torch.dtype, Shape]] = []
        held_bytes = 0
        for spec in self.specs:
            size = prod(spec[2]) * spec[1].itemsize
            if bucket and held_bytes + size > max_bytes:
                yield self._gather(bucket)
                bucket, held_bytes = [], 0
            bucket.append(spec)
            held_bytes += size
        yield self._gather(bucket)

    def _gather(self, bucket: list[tuple[str, torch.dtype, Shape]]) -> list[tuple[str, Tensor]]:
        """Owners send their pieces to rank 0, rank by rank, in messages of many pieces."""
        tensors = _in_a_row(bucket, self._device) if self._rank == 0 else {}
        by_rank: dict[int, list[_Piece]] = {}
        for name, _, _ in bucket:
            for piece in self._pieces[name]:
                by_rank.setdefault(piece.part.rank, []).append(piece)
        for owner in sorted(by_rank):
            for message in _messages(by_rank[owner]):
                if owner == 0 == self._rank:
                    for piece in message:
                        _place(piece, self._data_of(piece), tensors)
                elif owner == self._rank:
                    flat = torch.cat([self._data_of(p).contiguous().flatten().view(torch.uint8) for p in message])
                    dist.send(flat, dst=0)
                elif self._rank == 0:
                    self._receive(owner, message, tensors)
        return list(tensors.items())

    def _receive(self, owner: int, message: list[_Piece], tensors: dict[str, Tensor]) -> None:
        flat = torch.empty(sum(p.num_bytes for p in message), dtype=torch.uint8, device=self._device)
        dist.recv(flat, src=owner)
        for piece, data in zip(message, flat.split([p.num_bytes for p in message]), strict=True):
            _place(piece, data.view(piece.part.dtype).view(piece.block.size), tensors)

    def _data_of(self, piece: _Piece) -> Tensor:
        shard = self._own[piece.mcore_name, piece.part.box]
        start = [a for a, _ in piece.part.box]
        inside = tuple((a - s, b - s) for (a, b), s in zip(piece.block.mcore_box, start, strict=True))
        return shard.boxed[slices(inside)].to(self._device, non_blocking=True)


def _in_a_row(bucket: list[tuple[str, torch.dtype, Shape]], device: torch.device) -> dict[str, Tensor]:
    """Uninitialised tensors in the bucket's order, in one piece of memory that a push can send as it is.

    There the widest dtype comes first, so that each tensor is aligned (transports.widest_first).
    """
    num_bytes = sum(prod(shape) * dtype.itemsize for _, dtype, shape in bucket)
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    tensors, start = {}, 0
    for name, dtype, shape in sorted(bucket, key=lambda spec: -spec[1].itemsize):
        stop = start + prod(shape) * dtype.itemsize
        tensors[name] = flat[start:stop].view(dtype).view(shape)
        start = stop
    return {name: tensors[name] for name, _, _ in bucket}


def _place(piece: _Piece, data: Tensor, tensors: dict[str, Tensor]) -> None:
    tensors[piece.block.hf_name][slices(piece.block.hf_box)] = piece.block.to_hf(data)


def _messages(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Runs of one dtype of at most MESSAGE_BYTES."""
    message: list[_Piece] = []
    for piece in pieces:
        if message and (
            piece.part.dtype != message[0].part.dtype
            or sum(p.num_bytes for p in message) + piece.num_bytes > MESSAGE_BYTES
        ):
            yield message
            message = []
        message.append(piece)
    if message:
        yield message


def _row_bands(block: Block, max_elements: int) -> Iterator[Block]:
    """The block cut along its first axis with more than one row; a row is never cut."""
    axis = next((i for i, n in enumerate(block.size) if n > 1), 0)
    rows = max(1, max_elements // (prod(block.size) // block.size[axis]))
    start, stop = block.mcore_box[axis]
    for first in range(start, stop, rows):
        band = (first, min(first + rows, stop))
        cut = block.within((*block.mcore_box[:axis], band, *block.mcore_box[axis + 1 :]))
        assert cut is not None
        yield cut


def _check_cover(table: Sequence[TensorMap], parts: dict[str, list[_Part]]) -> None:
    """Each of the table's tensors is covered exactly once, and nothing else exists."""
    problems = mcore_problems(table, {name: of_name[0].global_shape for name, of_name in parts.items()})
    for name, of_name in parts.items():
        owned = sum(prod(b - a for a, b in p.box) for p in of_name)
        if owned != prod(of_name[0].global_shape) or len({p.box for p in of_name}) != len(of_name):
            problems.append(f"{name}: owners hold {owned} of {prod(of_name[0].global_shape)} elements")
    raise_problems("trainer shards do not make up the model", problems)
