"""Blocks between tensors on weights whose every value is different, so that a swap shows."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.convert.ops import (
    Box,
    ConversionError,
    TensorMap,
    check_names_and_shapes,
    check_table,
    extent,
    fuse_qkv,
    fuse_rows,
    rename,
    slices,
    stack,
    transpose,
    whole,
)

TINY = Path(__file__).parents[2] / "recipes" / "tiny-moe"


def op_list(hf: dict[str, Any]) -> list[TensorMap]:
    return family_of(hf).op_list(hf)


HEADS = {"num_heads": 6, "num_groups": 2, "head_dim": 3}
OPS: dict[str, TensorMap] = {
    "rename": rename("m", "h", (3, 5)),
    "rename_vector": rename("m", "h", (7,)),
    "transpose": transpose("m", "h", (2, 3, 5)),
    "qkv": fuse_qkv("m", ("q", "k", "v"), **HEADS, trailing=(5,)),
    "qkv_bias": fuse_qkv("m", ("q", "k", "v"), **HEADS, trailing=()),
    "qkv_without_groups": fuse_qkv("m", ("q", "k", "v"), num_heads=4, num_groups=4, head_dim=2, trailing=(5,)),
    "gate_up": fuse_rows("m", {"gate": (4, 5), "up": (4, 5)}),
    "experts_gate_up": stack("m", [{f"{e}.gate": (4, 5), f"{e}.up": (4, 5)} for e in range(3)]),
    "experts_down": stack("m", [{f"{e}.down": (5, 4)} for e in range(3)]),
    "fused_experts": rename("m", "h", (3, 8, 5)),
}


def arange_tensors(ops: list[TensorMap]) -> dict[str, Tensor]:
    """One running number over all tensors, exact in float32."""
    tensors, first = {}, 1
    for op in ops:
        for name, shape in op.hf_shapes.items():
            tensors[name] = torch.arange(first, first + prod(shape), dtype=torch.float32).view(shape)
            first += prod(shape)
    assert first < 2**24
    return tensors


def reader(tensors: dict[str, Tensor]) -> Callable[[str, Box], Tensor]:
    return lambda name, box: tensors[name][slices(box)]


def to_mcore(op: TensorMap, tensors: dict[str, Tensor]) -> Tensor:
    return op.read_mcore(whole(op.shape), reader(tensors))


def to_hf(op: TensorMap, mcore: Tensor) -> dict[str, Tensor]:
    return {name: op.read_hf(name, lambda box: mcore[slices(box)]) for name in op.hf_shapes}


@pytest.mark.parametrize("name", OPS)
def test_there_and_back_is_bitwise(name: str) -> None:
    op = OPS[name]
    check_table([op])
    tensors = arange_tensors([op])
    mcore = to_mcore(op, tensors)
    assert mcore.shape == op.shape
    assert mcore.unique().numel() == mcore.numel() == sum(t.numel() for t in tensors.values()), "each element once"
    back = to_hf(op, mcore)
    assert back.keys() == tensors.keys()
    for n, tensor in back.items():
        assert tensor.shape == tensors[n].shape and torch.equal(tensor, tensors[n]), n


@pytest.mark.parametrize("name", OPS)
def test_any_box_is_that_part_of_the_whole(name: str) -> None:
    op = OPS[name]
    tensors = arange_tensors([op])
    mcore = to_mcore(op, tensors)
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        ends = [sorted((torch.randperm(n + 1, generator=generator)[:2]).tolist()) for n in op.shape]
        box = tuple((a, b) for a, b in ends)
        assert torch.equal(op.read_mcore(box, reader(tensors)), mcore[slices(box)]), box
        out = torch.full(extent(box), torch.nan)
        op.load_into(out, box, reader(tensors))
        assert torch.equal(out, mcore[slices(box)]), box


def test_box_reads_only_what_it_holds() -> None:
    op, asked = OPS["experts_gate_up"], []
    tensors = arange_tensors([op])

    def read(name: str, box: Box) -> Tensor:
        asked.append((name, box))
        return tensors[name][slices(box)]

    op.read_mcore(((1, 2), (2, 6), (0, 3)), read)
    assert asked == [("1.gate", ((2, 4), (0, 3))), ("1.up", ((0, 2), (0, 3)))]


def test_qkv_holds_per_group_its_queries_then_its_key_then_its_value() -> None:
    heads, groups, head_dim = 6, 2, 3
    op = OPS["qkv"]
    tensors = arange_tensors([op])
    q, k, v = tensors.values()
    rows = []
    for group in range(groups):
        for head in range(heads):
            if head // (heads // groups) == group:  # query heads of one group are neighbours in Hugging Face
                rows += [q[head * head_dim + i] for i in range(head_dim)]
        rows += [k[group * head_dim + i] for i in range(head_dim)]
        rows += [v[group * head_dim + i] for i in range(head_dim)]
    assert torch.equal(to_mcore(op, tensors), torch.stack(rows))


def test_experts_are_stacked_in_order_with_gate_before_up() -> None:
    op = OPS["experts_gate_up"]
    tensors = arange_tensors([op])
    stacked = to_mcore(op, tensors)
    assert stacked.shape == (3, 8, 5)
    for expert in range(3):
        assert torch.equal(stacked[expert, :4], tensors[f"{expert}.gate"])
        assert torch.equal(stacked[expert, 4:], tensors[f"{expert}.up"])


def test_transposed_tensor_has_its_last_axes_swapped() -> None:
    op = OPS["transpose"]
    tensors = arange_tensors([op])
    assert tensors["h"].shape == (2, 5, 3)
    assert torch.equal(to_mcore(op, tensors), tensors["h"].mT)


def test_vocabulary_padding_of_a_shard_is_zero() -> None:
    op = rename("m", "h", (7, 5), is_vocab=True)
    tensors = arange_tensors([op])
    for box, rows in ((((4, 8), (0, 5)), 3), (((8, 12), (0, 5)), 0)):  # a part of it, and nothing else
        out = torch.full((4, 5), torch.nan)
        op.load_into(out, box, reader(tensors))
        assert torch.equal(out[:rows], tensors["h"][4 : 4 + rows]) and out[rows:].count_nonzero() == 0


def test_table_that_is_not_invertible_is_refused() -> None:
    twice = [rename("m1", "h", (3,)), rename("m2", "h", (3,))]
    with pytest.raises(ConversionError, match="h: occurs twice"):
        check_table(twice)
    uneven = fuse_qkv("m", ("q", "k", "v"), num_heads=5, num_groups=2, head_dim=3, trailing=(4,))
    with pytest.raises(ConversionError, match="q: the blocks do not use all of"):
        check_table([uneven])


def test_whole_model_there_and_back_is_bitwise() -> None:
    ops = op_list(read_config(TINY))
    tensors = arange_tensors(ops)
    for op in ops:
        for name, tensor in to_hf(op, to_mcore(op, tensors)).items():
            assert torch.equal(tensor, tensors.pop(name)), name
    assert tensors == {}


def test_tied_embeddings_leave_out_the_head() -> None:
    untied = {op.mcore_name for op in op_list(read_config(TINY))}
    tied = {op.mcore_name for op in op_list(read_config(TINY) | {"tie_word_embeddings": True})}
    assert untied - tied == {"output_layer.weight"}


def test_check_lists_what_is_missing_surplus_and_misshapen() -> None:
    qkv = fuse_qkv("m2", ("q", "k", "v"), num_heads=4, num_groups=2, head_dim=3, trailing=(5,))
    ops = [rename("m1", "one", (2, 3)), qkv, rename("m3", "two", (4,))]
    found = {name: tuple(tensor.shape) for name, tensor in arange_tensors(ops).items()}
    check_names_and_shapes(ops, found, "here")
    del found["one"]
    found |= {"k": (5, 6), "extra.bias": (9,)}
    with pytest.raises(ConversionError) as error:
        check_names_and_shapes(ops, found, "some/folder")
    assert str(error.value).splitlines() == [
        "some/folder: tensors do not fit config.json (3 problem(s))",
        "  missing one (2, 3)",
        "  surplus extra.bias (9,)",
        "  k has shape (5, 6), config.json wants (6, 5)",
    ]


def test_check_of_a_wholly_other_model_stays_readable() -> None:
    ops = op_list(read_config(TINY))
    with pytest.raises(ConversionError) as error:
        check_names_and_shapes(ops, {}, "here")
    lines = str(error.value).splitlines()
    assert len(lines) == 22 and "(135 problem(s))" in lines[0] and lines[-1] == "  ... and 115 more"
