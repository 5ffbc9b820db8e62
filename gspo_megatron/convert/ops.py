"""Which boxes of Hugging Face tensors are which boxes of a Megatron tensor. Pure torch.

Everything that a conversion does to weights only moves elements: rename, interleave q, k and v, put gate on up, stack
experts, transpose, pad the vocabulary. So a Megatron tensor is described by a list of blocks, each a box of one
Hugging Face tensor and the equal box of the Megatron one. That is read in both directions and for any slice: a file, a
rank's shard, a bucket of a weight push. The constructors below (`rename`, `fuse_qkv`, ...) write the lists.

A Megatron tensor here is the *global* one, as if no parallelism existed, under its Transformer Engine checkpoint name.
Shapes: H = hidden, E = experts, F = expert ffn, d = head size, n = heads, g = query groups, V = vocabulary.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""(start, stop) per axis."""


class ConversionError(ValueError):
    """A checkpoint that cannot be converted; the message names file and tensor, and says what to do."""


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, n) for n in shape)


def extent(box: Box) -> Shape:
    """Its shape."""
    return tuple(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """As an index."""
    return tuple(slice(start, stop) for start, stop in box)


@dataclass(frozen=True, slots=True)
class Block:
    """A box of one Hugging Face tensor, element for element a box of the Megatron tensor.

    The two may differ in rank: axes are matched from the last, and those that only one side has have extent 1.
    """

    hf_name: str
    hf_start: Shape
    mcore_start: Shape
    size: Shape
    """Extents along the Megatron tensor's axes."""
    transposed: bool = False
    """The last two axes are swapped between the two sides."""

    @property
    def mcore_box(self) -> Box:
        """Place in the Megatron tensor."""
        return tuple((start, start + n) for start, n in zip(self.mcore_start, self.size, strict=True))

    @property
    def hf_box(self) -> Box:
        """Place in the Hugging Face tensor."""
        size = self._to_hf_axes(self.size, 1)
        return tuple((start, start + n) for start, n in zip(self.hf_start, size, strict=True))

    def _to_hf_axes(self, values: Shape, fill: int) -> Shape:
        if self.transposed:
            values = (*values[:-2], values[-1], values[-2])
        missing = len(self.hf_start) - len(values)
        return (fill,) * missing + values[-len(self.hf_start) :] if missing >= 0 else values[-missing:]

    def within(self, box: Box) -> Block | None:
        """The part inside a box of the Megatron tensor; None when they do not meet."""
        start = tuple(max(s, b[0]) for s, b in zip(self.mcore_start, box, strict=True))
        stop = tuple(min(s + n, b[1]) for s, n, b in zip(self.mcore_start, self.size, box, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        moved = self._to_hf_axes(tuple(a - s for a, s in zip(start, self.mcore_start, strict=True)), 0)
        return replace(
            self,
            hf_start=tuple(a + b for a, b in zip(self.hf_start, moved, strict=True)),
            mcore_start=start,
            size=tuple(b - a for a, b in zip(start, stop, strict=True)),
        )

    def to_mcore(self, hf: Tensor) -> Tensor:
        """The Hugging Face box in the Megatron box's shape; a view where possible."""
        return (hf.transpose(-1, -2) if self.transposed else hf).reshape(self.size)

    def to_hf(self, mcore: Tensor) -> Tensor:
        """The Megatron box in the Hugging Face box's shape; a view where possible."""
        return (mcore.transpose(-1, -2) if self.transposed else mcore).reshape(extent(self.hf_box))


@dataclass(frozen=True)
class TensorMap:
    """One Megatron tensor and the Hugging Face tensors that make it up."""

    mcore_name: str
    shape: Shape
    """Global, without vocabulary padding."""
    hf_shapes: Mapping[str, Shape]
    """Every Hugging Face tensor that has elements here, in the order of writing."""
    blocks: tuple[Block, ...]
    """Tile the Megatron tensor and all of hf_shapes; in the order of mcore_start."""
    is_vocab: bool = False
    """Megatron may have more rows than the vocabulary (zeros); tensor parallelism needs a multiple."""
    hf_copies: tuple[str, ...] = ()
    """Names under which a Hugging Face directory may hold the same tensor again (a tied head); never written."""

    @cached_property
    def _first_rows(self) -> list[int]:
        return [b.mcore_start[0] for b in self.blocks]

    @cached_property
    def _largest_step(self) -> int:
        return max(b.size[0] for b in self.blocks)

    def blocks_within(self, box: Box) -> list[Block]:
        """Parts of the blocks inside a box of the Megatron tensor."""
        first = bisect_left(self._first_rows, box[0][0] - self._largest_step + 1)
        last = bisect_left(self._first_rows, box[0][1])
        inside = (b.within(box) for b in self.blocks[first:last])
        return [b for b in inside if b is not None]

    @cached_property
    def blocks_of(self) -> Mapping[str, list[Block]]:
        """Blocks by Hugging Face name."""
        by_name: dict[str, list[Block]] = {name: [] for name in self.hf_shapes}
        for block in self.blocks:
            by_name[block.hf_name].append(block)
        return by_name

    def read_mcore(self, box: Box, read_hf: Callable[[str, Box], Tensor]) -> Tensor:
        """A box of the Megatron tensor, from Hugging Face tensors.

        Args:
            box: inside `shape`.
            read_hf: (hf_name, box) -> that box of the Hugging Face tensor.

        Returns:
            In the box's shape; a view of what read_hf gave where one block is enough.
        """
        blocks = self.blocks_within(box)
        if len(blocks) == 1:
            return blocks[0].to_mcore(read_hf(blocks[0].hf_name, blocks[0].hf_box))
        pieces = ((b, b.to_mcore(read_hf(b.hf_name, b.hf_box))) for b in blocks)
        return _join(pieces, extent(box), lambda b: _relative(b.mcore_box, box))

    def load_into(self, out: Tensor, box: Box, read_hf: Callable[[str, Box], Tensor]) -> None:
        """Fill a rank's shard, in place; rows beyond the vocabulary become zero.

        Args:
            out: shard, of the box's shape; any dtype.
            box: its place in the Megatron tensor, which may have padding below `shape`.
            read_hf: (hf_name, box) -> that box of the Hugging Face tensor.
        """
        with torch.no_grad():
            if any(stop > n for (_, stop), n in zip(box, self.shape, strict=True)):
                out.zero_()
            for block in self.blocks_within(box):
                piece = block.to_mcore(read_hf(block.hf_name, block.hf_box))
                out[slices(_relative(block.mcore_box, box))].copy_(piece)

    def read_hf(self, hf_name: str, read_mcore: Callable[[Box], Tensor]) -> Tensor:
        """A whole Hugging Face tensor from boxes of the Megatron tensor.

        Args:
            hf_name: one of hf_shapes.
            read_mcore: box -> that box of the Megatron tensor.

        Returns:
            In the Hugging Face shape; a view of what read_mcore gave where one block is enough.
        """
        blocks = self.blocks_of[hf_name]
        pieces = ((b, b.to_hf(read_mcore(b.mcore_box))) for b in blocks)
        if len(blocks) == 1:
            return next(pieces)[1]
        return _join(pieces, self.hf_shapes[hf_name], lambda b: b.hf_box)


def _join(pieces: Iterable[tuple[Block, Tensor]], shape: Shape, place: Callable[[Block], Box]) -> Tensor:
    out: Tensor | None = None
    for block, piece in pieces:
        if out is None:
            out = piece.new_empty(shape)
        out[slices(place(block))] = piece
    assert out is not None  # a box inside the tensor meets a block
    return out


def _relative(box: Box, to: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, to, strict=True))


def rename(
    mcore_name: str,
    hf_name: str,
    shape: Sequence[int],
    *,
    is_vocab: bool = False,
    hf_copies: tuple[str, ...] = (),
) -> TensorMap:
    """The same tensor under two names; with is_vocab Megatron may pad its rows."""
    shape = tuple(shape)
    zero = (0,) * len(shape)
    blocks = (Block(hf_name, zero, zero, shape),)
    return TensorMap(mcore_name, shape, {hf_name: shape}, blocks, is_vocab, hf_copies)


def transpose(mcore_name: str, hf_name: str, shape: Sequence[int]) -> TensorMap:
    """Hugging Face [..., c, r] <-> Megatron [..., r, c]; shape is Megatron's."""
    shape = tuple(shape)
    zero = (0,) * len(shape)
    hf_shape = (*shape[:-2], shape[-1], shape[-2])
    return TensorMap(mcore_name, shape, {hf_name: hf_shape}, (Block(hf_name, zero, zero, shape, transposed=True),))


def fuse_rows(mcore_name: str, parts: Mapping[str, Sequence[int]]) -> TensorMap:
    """Tensors with equal trailing axes, one under the other: gate [F, H] and up [F, H] <-> [2 F, H]."""
    return fuse_grouped_rows(mcore_name, parts, num_groups=1)


def fuse_qkv(
    mcore_name: str, hf_names: Sequence[str], *, num_heads: int, num_groups: int, head_dim: int, trailing: Shape
) -> TensorMap:
    """q [n d, H], k [g d, H], v [g d, H] <-> [g (n/g + 2) d, H]: per group its queries, its key, its value.

    Args:
        mcore_name: linear_qkv's weight or bias.
        hf_names: of q, k and v.
        num_heads: n.
        num_groups: g.
        head_dim: d.
        trailing: (H,) of a weight, () of a bias.
    """
    rows = (num_heads * head_dim, num_groups * head_dim, num_groups * head_dim)
    parts = {name: (n, *trailing) for name, n in zip(hf_names, rows, strict=True)}
    return fuse_grouped_rows(mcore_name, parts, num_groups=num_groups)


def fuse_grouped_rows(mcore_name: str, parts: Mapping[str, Sequence[int]], *, num_groups: int) -> TensorMap:
    """Tensors cut along their rows into num_groups; group by group, one under the other."""
    blocks: list[Block] = []
    row = 0
    for group in range(num_groups):
        for name, shape in parts.items():
            num_rows, zeros = shape[0] // num_groups, (0,) * (len(shape) - 1)
            blocks.append(Block(name, (group * num_rows, *zeros), (row, *zeros), (num_rows, *shape[1:])))
            row += num_rows
    trailing = tuple(next(iter(parts.values()))[1:])
    return TensorMap(mcore_name, (row, *trailing), {n: tuple(s) for n, s in parts.items()}, tuple(blocks))


def stack(mcore_name: str, members: Sequence[Mapping[str, Sequence[int]]]) -> TensorMap:
    """One or more tensors per expert, fused along their rows, stacked over experts: gate and up <-> [E, 2 F, H]."""
    blocks: list[Block] = []
    hf_shapes: dict[str, Shape] = {}
    shape: Shape = ()
    for index, parts in enumerate(members):
        one = fuse_rows(mcore_name, parts)
        shape = (len(members), *one.shape)
        hf_shapes |= one.hf_shapes
        blocks += [replace(b, mcore_start=(index, *b.mcore_start), size=(1, *b.size)) for b in one.blocks]
    return TensorMap(mcore_name, shape, hf_shapes, tuple(blocks))


def check_table(table: Sequence[TensorMap]) -> None:
    """Every name once, and blocks that have as many elements as both sides: what makes a table invertible.

    That blocks do not overlap is for the families' tests to show; a wrong config cannot make them.

    Raises:
        ConversionError: lists the tensors that break it.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for op in table:
        for name in (op.mcore_name, *op.hf_shapes):
            if name in seen:
                problems.append(f"{name}: occurs twice")
            seen.add(name)
        if sum(prod(b.size) for b in op.blocks) != prod(op.shape):
            problems.append(f"{op.mcore_name}: the blocks do not fill {op.shape}")
        for name, shape in op.hf_shapes.items():
            if sum(prod(b.size) for b in op.blocks_of[name]) != prod(shape):
                problems.append(f"{name}: the blocks do not use all of {shape}")
    raise_problems("the family's table", problems)


def check_names_and_shapes(
    table: Sequence[TensorMap],
    found: Mapping[str, Shape],
    where: str,
    *,
    read_hf: Callable[[str, Box], Tensor] | None = None,
) -> None:
    """Compare the table with the tensors of a Hugging Face directory before a byte moves.

    Args:
        table: the family's.
        found: shape of every tensor of the directory.
        where: for the message.
        read_hf: (hf_name, box) -> that box. With it a copy (lm_head beside tied embeddings) is accepted when it is
            bitwise what it is a copy of; without it a copy is surplus.

    Raises:
        ConversionError: lists every missing, surplus and misshapen tensor.
    """
    wanted = {name: shape for op in table for name, shape in op.hf_shapes.items()}
    copies = {copy: next(iter(op.hf_shapes)) for op in table for copy in op.hf_copies if copy in found}
    problems = [f"missing {name} {shape}" for name, shape in wanted.items() if name not in found]
    if read_hf is not None and not problems:
        equal = [copy for copy, name in copies.items() if _are_equal(copy, name, found, read_hf)]
        copies = {copy: name for copy, name in copies.items() if copy not in equal}
        wanted |= {copy: found[copy] for copy in equal}
    surplus = [name for name in found if name not in wanted]
    problems += [f"surplus {name} {found[name]}{_why_surplus(name, wanted, copies)}" for name in surplus]
    problems += [
        f"{name} has shape {found[name]}, config.json wants {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    raise_problems(f"{where}: tensors do not fit config.json", problems)


def _are_equal(one: str, other: str, found: Mapping[str, Shape], read_hf: Callable[[str, Box], Tensor]) -> bool:
    """Whether two tensors are bitwise the same, read a band of rows at a time."""
    if tuple(found[one]) != tuple(found[other]):
        return False
    num_rows, *rest = found[one]
    for first in range(0, num_rows, 1024):
        box = ((first, min(first + 1024, num_rows)), *whole(rest))
        a, b = read_hf(one, box).contiguous(), read_hf(other, box).contiguous()
        if a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


def _why_surplus(name: str, wanted: Mapping[str, Shape], copies: Mapping[str, str]) -> str:
    if name in copies:
        return (
            f": config.json ties it to {copies[name]} (tie_word_embeddings), of which it is no proven copy; "
            "remove it, or set tie_word_embeddings to false"
        )
    layer = re.match(r"(.*\.)?layers\.\d+\.", name)
    is_beyond = layer is not None and not any(w.startswith(layer.group()) for w in wanted)
    if is_beyond or re.match(r"(model\.)?mtp\.", name):
        return (
            ": a layer beyond num_hidden_layers; multi-token prediction (MTP) layers are not implemented, and not "
            "dropped in silence: remove its tensors to go without"
        )
    return ""


def mcore_problems(
    table: Sequence[TensorMap], found: Mapping[str, Shape], *, is_whole: bool = True, may_be_padded: bool = True
) -> list[str]:
    """What of a model's or checkpoint's Megatron tensors does not fit the table.

    Args:
        table: the family's.
        found: mcore_name -> global shape.
        is_whole: all tensors must be there; one rank has only some.
        may_be_padded: tensors of the vocabulary may have more rows.
    """
    wanted = {op.mcore_name: op for op in table}
    problems = [f"missing {name} {op.shape}" for name, op in wanted.items() if is_whole and name not in found]
    problems += [f"surplus {name} {shape}" for name, shape in found.items() if name not in wanted]
    for name, shape in found.items():
        if name not in wanted or shape == wanted[name].shape:
            continue
        rows, *rest = wanted[name].shape
        is_padded = wanted[name].is_vocab and shape[0] >= rows and shape[1:] == tuple(rest)
        if not (may_be_padded and is_padded):
            problems.append(f"{name} has shape {shape}, config.json wants {wanted[name].shape}")
    return problems


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raise ConversionError with the first twenty; nothing when there are none.

    Raises:
        ConversionError: where, and what.
    """
    if problems:
        shown = "\n".join(f"  {p}" for p in problems[:20])
        more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConversionError(f"{where} ({len(problems)} problem(s))\n{shown}{more}")
