"""Invertible operations between Hugging Face tensors and one Megatron tensor. Pure torch.

A Megatron tensor here is the *global* one, as if no parallelism existed, under its Transformer Engine checkpoint name;
`shards.py` cuts it. Shapes: H = hidden, E = experts, F = expert ffn, d = head size, g = query groups, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ConversionError(ValueError):
    """Tensor names or shapes that do not fit; the message lists them."""


class Op(Protocol):
    """One Megatron tensor, the Hugging Face tensors that make it up, and the way back."""

    @property
    def mcore_name(self) -> str:
        """Global checkpoint name."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Sources, in the order that to_mcore takes and to_hf returns."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Their shapes."""

    def to_mcore(self, hf: Sequence[Tensor]) -> Tensor:
        """Global Megatron tensor."""

    def to_hf(self, mcore: Tensor) -> list[Tensor]:
        """Hugging Face tensors, contiguous."""


@dataclass(frozen=True, slots=True)
class Rename:
    """The same tensor under two names."""

    mcore_name: str
    hf_name: str
    shape: tuple[int, ...]

    @property
    def hf_names(self) -> tuple[str, ...]:
        """One source."""
        return (self.hf_name,)

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Its shape."""
        return (self.shape,)

    def to_mcore(self, hf: Sequence[Tensor]) -> Tensor:
        """Unchanged."""
        return hf[0]

    def to_hf(self, mcore: Tensor) -> list[Tensor]:
        """Unchanged."""
        return [mcore.contiguous()]


@dataclass(frozen=True, slots=True)
class FuseQKV:
    """q [n*d, H], k [g*d, H], v [g*d, H] <-> [g * (n/g + 2) * d, H]: per group its queries, its key, its value."""

    mcore_name: str
    hf_names: tuple[str, str, str]
    num_heads: int
    num_groups: int
    head_dim: int
    hidden: int

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v."""
        kv = (self.num_groups * self.head_dim, self.hidden)
        return ((self.num_heads * self.head_dim, self.hidden), kv, kv)

    def to_mcore(self, hf: Sequence[Tensor]) -> Tensor:
        """Interleave by group."""
        by_group = [t.view(self.num_groups, -1, self.hidden) for t in hf]
        return torch.cat(by_group, dim=1).reshape(-1, self.hidden)

    def to_hf(self, mcore: Tensor) -> list[Tensor]:
        """Separate again."""
        queries = self.num_heads // self.num_groups * self.head_dim
        by_group = mcore.view(self.num_groups, -1, self.hidden)
        parts = by_group.split([queries, self.head_dim, self.head_dim], dim=1)
        return [p.reshape(-1, self.hidden).contiguous() for p in parts]


@dataclass(frozen=True, slots=True)
class StackExperts:
    """One tensor per expert <-> [E, ...]. With two tensors per expert (gate, up) they are joined on the first axis.

    hf_names has `parts` names per expert, expert by expert.
    """

    mcore_name: str
    hf_names: tuple[str, ...]
    parts: int
    shape: tuple[int, int]
    """Of each Hugging Face tensor."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """All alike."""
        return (self.shape,) * len(self.hf_names)

    def to_mcore(self, hf: Sequence[Tensor]) -> Tensor:
        """Stack."""
        rows, columns = self.shape
        return torch.stack(list(hf)).view(-1, self.parts * rows, columns)

    def to_hf(self, mcore: Tensor) -> list[Tensor]:
        """Unstack."""
        return [t.contiguous() for t in mcore.reshape(-1, *self.shape).unbind(0)]


@dataclass(frozen=True, slots=True)
class PadVocab:
    """[V, H] <-> [padded V, H]; rows past the vocabulary are zero in Megatron and absent in Hugging Face."""

    mcore_name: str
    hf_name: str
    shape: tuple[int, int]
    padded_rows: int

    @property
    def hf_names(self) -> tuple[str, ...]:
        """One source."""
        return (self.hf_name,)

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Without padding."""
        return (self.shape,)

    def to_mcore(self, hf: Sequence[Tensor]) -> Tensor:
        """Add zero rows."""
        return torch.nn.functional.pad(hf[0], (0, 0, 0, self.padded_rows - self.shape[0]))

    def to_hf(self, mcore: Tensor) -> list[Tensor]:
        """Drop them."""
        return [mcore[: self.shape[0]].contiguous()]


def check_names_and_shapes(ops: Sequence[Op], found: dict[str, tuple[int, ...]], where: str) -> None:
    """Compare the table with the tensors of a Hugging Face directory before a byte moves.

    Raises:
        ConversionError: lists every missing, surplus and misshapen tensor.
    """
    wanted = {name: shape for op in ops for name, shape in zip(op.hf_names, op.hf_shapes, strict=True)}
    problems = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in found]
    problems += [f"surplus {name} {shape}" for name, shape in found.items() if name not in wanted]
    problems += [
        f"{name} has shape {found[name]}, config.json wants {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    if problems:
        shown = "\n".join(f"  {p}" for p in problems[:20])
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConversionError(f"{where}: {len(problems)} tensor(s) do not fit config.json\n{shown}{more}")
