"""Blocks between tensors on weights whose every value is different, so that a swap shows; and Qwen3-MoE's table."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.convert.families.qwen3_moe import op_list, transformer_config
from gspo_megatron.convert.hf_io import TensorReader, read_config
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
from tests.models import QWEN3_30B_A3B

TINY = Path(__file__).parents[2] / "recipes" / "tiny-moe"
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


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tiny model as transformers writes it (a tensor per expert and projection) and holds it (experts fused)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("transformers")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
    model.save_pretrained(folder)
    files = TensorReader(folder)
    return {name: files(name) for name in files.shapes()}, model.state_dict()


def test_table_has_the_names_and_shapes_that_transformers_writes(
    by_transformers: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> None:
    saved, _ = by_transformers
    ops = op_list(read_config(TINY))
    check_table(ops)
    table = {name: shape for op in ops for name, shape in op.hf_shapes.items()}
    assert table == {name: tuple(tensor.shape) for name, tensor in saved.items()}


def test_table_stacks_experts_as_transformers_holds_them(
    by_transformers: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> None:
    saved, held = by_transformers
    table = {op.mcore_name: op for op in op_list(read_config(TINY))}
    for layer in range(4):
        for mcore_part, hf_part in (("linear_fc1.weight", "gate_up_proj"), ("linear_fc2.weight", "down_proj")):
            op = table[f"decoder.layers.{layer}.mlp.experts.experts.{mcore_part}"]
            assert torch.equal(to_mcore(op, saved), held[f"model.layers.{layer}.mlp.experts.{hf_part}"])


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


def test_published_30b_config_is_understood_in_full() -> None:
    fields, arguments = transformer_config(QWEN3_30B_A3B)
    want = {
        "num_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "num_moe_experts": 128,
        "moe_ffn_hidden_size": 768,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "init_method_std": 0.02,
    }
    assert want.items() <= fields.items()
    assert (arguments.vocab_size, arguments.rotary_base, fields["init_method_std"]) == (151936, 1e6, 0.02)
    assert arguments.share_embeddings_and_output_weights is False


def test_30b_table_has_every_parameter() -> None:
    ops = op_list(QWEN3_30B_A3B)
    check_table(ops)
    assert sum(prod(shape) for op in ops for shape in op.hf_shapes.values()) == 30_532_122_624
    assert sum(prod(op.shape) for op in ops) == 30_532_122_624


def test_both_spellings_of_transformers_give_the_same_arguments() -> None:
    newer = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    newer |= {"num_local_experts": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert transformer_config(newer) == transformer_config(QWEN3_30B_A3B)
    other = newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert transformer_config(other)[1].rotary_base == 5e5


def test_gates_that_are_not_renormalised_come_from_the_full_softmax() -> None:
    fields, _ = transformer_config(QWEN3_30B_A3B | {"norm_topk_prob": False})
    assert fields["moe_router_pre_softmax"] is True


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"n_shared_experts": 1}, "n_shared_experts: not understood"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: not understood"),
        ({"attention_bias": True}, "attention_bias=True: only False is implemented"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: only 0.0 is implemented"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[0]: only [] is implemented"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2: only 1 is implemented"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is implemented"),
        ({"use_sliding_window": True}, "use_sliding_window=True: only False is implemented"),
        ({"model_type": "qwen3"}, "model_type='qwen3': wants 'qwen3_moe'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "only the default RoPE is implemented"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "only the default RoPE is implemented"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "only the default RoPE"),
    ],
)
def test_config_that_means_another_model_is_refused(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError) as error:
        transformer_config(QWEN3_30B_A3B | edit)
    title, *problems = str(error.value).splitlines()
    assert title == "config.json:" and len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize("key", ["head_dim", "norm_topk_prob", "rope_theta", "num_experts", "vocab_size"])
def test_config_without_a_key_that_decides_the_model_is_refused(key: str) -> None:
    with pytest.raises(ConversionError, match=f"  {key}.*: missing"):
        transformer_config({k: v for k, v in QWEN3_30B_A3B.items() if k != key})


def test_rope_without_its_base_is_refused() -> None:
    with pytest.raises(ConversionError, match="rope_theta.*: missing"):
        transformer_config(QWEN3_30B_A3B | {"rope_parameters": {"rope_type": "default"}})


def test_all_problems_of_a_config_come_at_once() -> None:
    config = QWEN3_30B_A3B | {"attention_bias": True, "n_shared_experts": 1}
    del config["head_dim"]
    with pytest.raises(ConversionError) as error:
        transformer_config(config)
    assert len(str(error.value).splitlines()) == 4
