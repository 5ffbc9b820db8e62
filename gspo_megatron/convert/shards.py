"""TP/PP/EP/ETP shards of Megatron tensors: filled from and gathered to Hugging Face tensors. Never imports Megatron.

The address of a shard (global shape, offset) is megatron-core's own, taken from `sharded_state_dict`, so that no
layout needs code of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.checksum import bytes_of
from gspo_megatron.convert.ops import Block, Box, Shape, TensorMap, mcore_problems, raise_problems, slices
from gspo_megatron.convert.safetensors_io import TensorSpec, in_groups, spec_bytes

T = TypeVar("T")

MESSAGE_BYTES = 32 * 2**20
"""Of one point-to-point message, at most."""
ALONE_BYTES = 32 * 2**10
"""From this size on a tensor, or a piece of one, is a message of its own on a CPU."""
MESSAGES_AHEAD = 4
"""That are on their way at once; what rank 0 holds beside the bucket that it assembles, and a server in all."""


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


def is_sent_alone(num_bytes: int, device: torch.device) -> bool:
    """Whether so many bytes are a message of their own, from where they lie to where they belong.

    A CPU takes as long to copy as to send; a GPU copies fast, and there it is the messages that are to be few.
    """
    return device.type == "cpu" and num_bytes >= ALONE_BYTES


def few_at_once(begins: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Call these, each when MESSAGES_AHEAD - 1 of the ones before it are still to be waited for; yields in order.

    Who gives up in the middle leaves no more than these behind, each of which a backend can hold to its time limit.
    """
    under_way: deque[T] = deque()
    for begin in begins:
        under_way.append(begin())
        if len(under_way) == MESSAGES_AHEAD:
            yield under_way.popleft()
    while under_way:
        yield under_way.popleft()


def runs(sizes: Iterable[int], least_bytes: int) -> Iterator[range]:
    """Runs of things of these sizes, of least_bytes or little more; the last one has what is left."""
    start, stop, held_bytes = 0, 0, 0
    for stop, size in enumerate(sizes, 1):
        held_bytes += size
        if held_bytes >= least_bytes:
            yield range(start, stop)
            start, held_bytes = stop, 0
    if start < stop:
        yield range(start, stop)


class Gatherer:
    """Brings whole Hugging Face tensors to rank 0, a bucket at a time, in the order of specs.

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
        shapes = {name: shape for op in table for name, shape in op.hf_shapes.items()}
        self._pieces: dict[str, list[_Piece]] = {name: [] for name in shapes}
        self._whole: dict[str, _Piece] = {}
        for op in table:
            for part in parts[op.mcore_name]:
                for block in op.blocks_within(part.box):
                    name = block.hf_name
                    piece = _Piece(part, op.mcore_name, block)
                    is_whole = part.rank == 0 and prod(block.size) == prod(shapes[name])
                    if is_whole and piece.num_bytes >= MESSAGE_BYTES:
                        self._whole[name] = piece
                    bands = _row_bands(block, MESSAGE_BYTES // part.dtype.itemsize)
                    self._pieces[name] += [_Piece(part, op.mcore_name, band) for band in bands]
        specs = [(name, pieces[0].part.dtype, shapes[name]) for name, pieces in self._pieces.items()]
        self.specs = sorted(specs, key=lambda spec: spec_bytes(spec) < MESSAGE_BYTES)
        """Of every tensor, in order: the table's, but large ones first, since nothing hides the loading of the last
        one."""
        self._device = device or next((s.data.device for s in self._own.values()), torch.device("cpu"))
        self._rows = self._new_rows() if self._device.type == "cpu" else None
        """A CPU's memory costs more to get than to fill, so it is kept; a GPU's is left to torch."""

    def _new_rows(self) -> deque[Tensor]:
        return deque([torch.empty(0, dtype=torch.uint8, device=self._device)] * 2)

    def buckets(self, max_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield lists of (hf_name, tensor) on rank 0; other ranks yield empty ones. Collective: exhaust it.

        The tensors are for reading, and until the list after the next is asked for: that one takes their memory. One
        of MESSAGE_BYTES or more that lies whole on rank 0 is not copied.

        Args:
            max_bytes: of one list's tensors; a larger tensor is a list of its own. Rank 0 holds two lists and
                MESSAGES_AHEAD messages, the others these messages.
        """
        rows = self._new_rows() if self._rows is None else self._rows
        for bucket in self.plan(max_bytes):
            yield self._gather(bucket, rows)

    def plan(self, max_bytes: int) -> list[list[TensorSpec]]:
        """Which tensors buckets(max_bytes) yields in each list."""
        return in_groups(self.specs, max_bytes)

    def _gather(self, bucket: list[TensorSpec], rows: deque[Tensor]) -> list[tuple[str, Tensor]]:
        """Owners send their pieces to rank 0, rank by rank, in messages."""
        is_first = self._rank == 0
        whole, assembled = {}, {}
        if is_first:
            whole = {name: self._in_hf(self._whole[name]).contiguous() for name, _, _ in bucket if name in self._whole}
            assembled = _in_a_row([spec for spec in bucket if spec[0] not in whole], rows)
        by_rank: dict[int, list[_Piece]] = {}
        for name, _, _ in bucket:
            for piece in self._pieces[name] if name not in self._whole else []:
                by_rank.setdefault(piece.part.rank, []).append(piece)
        for owner in sorted(by_rank):
            messages = self._messages(by_rank[owner])
            if owner == 0 == self._rank:
                for piece in by_rank[owner]:
                    _place_of(piece, assembled).copy_(self._in_hf(piece))
            elif owner == self._rank:
                self._send(messages)
            elif is_first:
                self._receive(owner, messages, assembled)
        return [(name, whole[name] if name in whole else assembled[name]) for name, _, _ in bucket] if is_first else []

    def _send(self, messages: Iterator[list[_Piece]]) -> None:
        def begin(message: list[_Piece]) -> tuple[Any, Tensor]:
            parts = [bytes_of(self._in_hf(piece)) for piece in message]
            flat = torch.cat(parts) if len(parts) > 1 else parts[0]
            return dist.isend(flat, dst=0), flat

        for work, _ in few_at_once(partial(begin, message) for message in messages):
            work.wait()

    def _receive(self, owner: int, messages: Iterator[list[_Piece]], tensors: dict[str, Tensor]) -> None:
        def begin(message: list[_Piece]) -> tuple[Any, Tensor, list[_Piece]]:
            place = _place_of(message[0], tensors)
            if len(message) == 1 and place.is_contiguous():
                flat = bytes_of(place)
            else:
                flat = torch.empty(sum(p.num_bytes for p in message), dtype=torch.uint8, device=self._device)
            return dist.irecv(flat, src=owner), flat, message

        for work, flat, message in few_at_once(partial(begin, message) for message in messages):
            work.wait()
            for piece, data in zip(message, flat.split([p.num_bytes for p in message]), strict=True):
                place = _place_of(piece, tensors)
                if place.data_ptr() != data.data_ptr():
                    place.copy_(data.view(place.dtype).view(place.shape))

    def _messages(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Pieces that are sent alone, and runs of others of one dtype of at most MESSAGE_BYTES."""
        run: list[_Piece] = []
        for piece in pieces:
            is_alone = is_sent_alone(piece.num_bytes, self._device)
            if run and (
                is_alone
                or piece.part.dtype != run[0].part.dtype
                or sum(p.num_bytes for p in run) + piece.num_bytes > MESSAGE_BYTES
            ):
                yield run
                run = []
            if is_alone:
                yield [piece]
            else:
                run.append(piece)
        if run:
            yield run

    def _in_hf(self, piece: _Piece) -> Tensor:
        """Of this rank, in the Hugging Face box's shape, on the device: a view of the shard where possible."""
        return piece.block.to_hf(self._data_of(piece))

    def _data_of(self, piece: _Piece) -> Tensor:
        shard = self._own[piece.mcore_name, piece.part.box]
        start = [a for a, _ in piece.part.box]
        inside = tuple((a - s, b - s) for (a, b), s in zip(piece.block.mcore_box, start, strict=True))
        return shard.boxed[slices(inside)].to(self._device, non_blocking=True)


def _in_a_row(bucket: list[TensorSpec], rows: deque[Tensor]) -> dict[str, Tensor]:
    """Uninitialised tensors in the memory of rows[0], which grows as needed and goes to the end.

    The widest dtype comes first, so that each tensor is aligned.
    """
    num_bytes = sum(map(spec_bytes, bucket))
    row = rows.popleft()
    if row.numel() < num_bytes:
        device = row.device
        del row  # before the next one is there
        row = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rows.append(row)
    tensors, start = {}, 0
    for name, dtype, shape in sorted(bucket, key=lambda spec: -spec[1].itemsize):
        stop = start + prod(shape) * dtype.itemsize
        tensors[name] = row[start:stop].view(dtype).view(shape)
        start = stop
    return tensors


def _place_of(piece: _Piece, tensors: dict[str, Tensor]) -> Tensor:
    return tensors[piece.block.hf_name][slices(piece.block.hf_box)]


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
