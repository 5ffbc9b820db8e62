"""TP/PP/EP/ETP shards of Megatron tensors: cut from and gathered to the global tensor. Never imports Megatron.

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

from gspo_megatron.convert.ops import ConversionError, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """This rank's part of one global tensor."""

    mcore_name: str
    data: Tensor
    """A view of the live parameter."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Same length as global_shape; axes that data lacks (the expert axis) have extent 1."""
    is_owner: bool
    """One of the replicas owns the shard; the owners' shards cover each tensor exactly once."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The shard's place in the global tensor."""
        missing = len(self.global_shape) - self.data.dim()
        extents = (1,) * missing + tuple(self.data.shape)
        return tuple(slice(o, o + n) for o, n in zip(self.global_offset, extents, strict=True))


def load_shards(shards: Sequence[Shard], ops: Sequence[Op], read: Callable[[str], Tensor]) -> None:
    """Fill this rank's shards from Hugging Face tensors; each source is read once per rank.

    Args:
        shards: every shard of this rank.
        ops: the family's table.
        read: Hugging Face name -> tensor.

    Raises:
        ConversionError: the model has a tensor that the table lacks, or shapes differ.
    """
    table = {op.mcore_name: op for op in ops}
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.mcore_name, []).append(shard)
    unknown = sorted(set(by_name) - set(table))
    if unknown:
        raise ConversionError(f"the model has tensors without an operation: {', '.join(unknown)}")
    for name, parts in by_name.items():
        whole = table[name].to_mcore([read(n) for n in table[name].hf_names])
        for shard in parts:
            if tuple(whole.shape) != shard.global_shape:
                raise ConversionError(f"{name}: file gives {tuple(whole.shape)}, model has {shard.global_shape}")
            with torch.no_grad():
                shard.data.copy_(whole[shard.slices].view(shard.data.shape))


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one owner's shard lies; what ranks tell each other."""

    rank: int
    global_shape: tuple[int, ...]
    slices: tuple[slice, ...]
    shape: tuple[int, ...]


class Gatherer:
    """Brings whole tensors to rank 0, one at a time, in the table's order.

    Building it is "Collective over the default group": owners' addresses are exchanged and checked once.
    """

    def __init__(self, shards: Sequence[Shard], ops: Sequence[Op]) -> None:
        self._ops = list(ops)
        self._own = {(s.mcore_name, s.global_offset): s for s in shards if s.is_owner}
        mine = [
            (s.mcore_name, _Part(dist.get_rank(), s.global_shape, s.slices, tuple(s.data.shape)))
            for s in shards
            if s.is_owner
        ]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._parts: dict[str, list[_Part]] = {}
        for name, part in (item for rank_items in everyone for item in rank_items):
            self._parts.setdefault(name, []).append(part)
        self._check_cover()

    def _check_cover(self) -> None:
        """Each operation's tensor is covered exactly once, and nothing else exists."""
        names = {op.mcore_name for op in self._ops}
        problems = [f"no rank owns {n}" for n in sorted(names - set(self._parts))]
        problems += [f"{n} has no operation" for n in sorted(set(self._parts) - names)]
        for name, parts in self._parts.items():
            owned = sum(prod(p.shape) for p in parts)
            distinct = len({tuple((s.start, s.stop) for s in p.slices) for p in parts})
            if owned != prod(parts[0].global_shape) or distinct != len(parts):
                problems.append(f"{name}: owners hold {owned} of {prod(parts[0].global_shape)} elements")
        if problems:
            raise ConversionError("trainer shards do not make up the model:\n" + "\n".join(f"  {p}" for p in problems))

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (hf_name, tensor) on rank 0; other ranks yield nothing but take part. Collective: exhaust it.

        Memory on rank 0: one global tensor and its Hugging Face parts at a time.
        """
        rank = dist.get_rank()
        for op in self._ops:
            whole = self._gather(op.mcore_name, rank)
            if whole is not None:
                yield from zip(op.hf_names, op.to_hf(whole), strict=True)

    def _gather(self, name: str, rank: int) -> Tensor | None:
        """Point to point from each owner to rank 0, in one order on all ranks."""
        whole: Tensor | None = None
        for part in self._parts[name]:
            offset = tuple(s.start for s in part.slices)
            own = self._own[name, offset].data.detach() if part.rank == rank else None
            if rank != 0:
                if own is not None:
                    dist.send(own.contiguous(), dst=0)
                continue
            if whole is None:
                like = next(iter(self._own.values())).data
                whole = like.new_empty(part.global_shape)
            if own is None:
                own = whole.new_empty(part.shape)
                dist.recv(own, src=part.rank)
            whole[part.slices].copy_(own.view(whole[part.slices].shape))
        return whole
