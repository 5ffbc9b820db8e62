"""The families' tables against what transformers writes and holds."""

import json
from collections.abc import Callable
from copy import deepcopy
from math import prod
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.ops import (
    Box,
    ConversionError,
    TensorMap,
    check_names_and_shapes,
    check_table,
    slices,
    whole,
)
from tests.models import PUBLISHED, QWEN3_30B_A3B, QWEN3_235B_A22B, TINY_CONFIGS

Saved = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]


def table_of(config: dict[str, Any], *, fused_experts: bool = False) -> list[TensorMap]:
    return family_of(config).op_list(config, fused_experts=fused_experts)


def reader(tensors: dict[str, Tensor]) -> Callable[[str, Box], Tensor]:
    return lambda name, box: tensors[name][slices(box)]


def hf_shapes(table: list[TensorMap]) -> dict[str, tuple[int, ...]]:
    return {name: shape for op in table for name, shape in op.hf_shapes.items()}


@pytest.fixture(scope="module")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A tiny model as transformers writes it, config.json and a tensor per expert, and holds it, experts fused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    done: dict[str, Saved] = {}

    def save(name: str) -> Saved:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(TINY_CONFIGS[name])))
            model.save_pretrained(folder)
            config = json.loads((folder / "config.json").read_text())
            done[name] = config, load_file(folder / "model.safetensors"), model.state_dict()
        return done[name]

    return save


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_table_has_the_names_and_shapes_that_transformers_writes(
    by_transformers: Callable[[str], Saved], name: str
) -> None:
    config, saved, _ = by_transformers(name)
    for spelling in (config, TINY_CONFIGS[name]):
        assert hf_shapes(table_of(spelling)) == {n: tuple(t.shape) for n, t in saved.items()}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_fused_table_makes_the_same_megatron_tensors_of_what_transformers_holds(
    by_transformers: Callable[[str], Saved], name: str
) -> None:
    config, saved, held = by_transformers(name)
    published, fused = table_of(config), table_of(config, fused_experts=True)
    check_names_and_shapes(fused, {n: tuple(t.shape) for n, t in held.items()}, name, read_hf=reader(held))
    assert [(op.mcore_name, op.shape) for op in published] == [(op.mcore_name, op.shape) for op in fused]
    for one, other in zip(published, fused, strict=True):
        tensors = op_mcore(one, saved), op_mcore(other, held)
        assert torch.equal(*tensors), one.mcore_name


def op_mcore(op: TensorMap, tensors: dict[str, Tensor]) -> Tensor:
    return op.read_mcore(whole(op.shape), reader(tensors))


@pytest.mark.parametrize("fused_experts", [False, True])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_blocks_tile_both_sides(name: str, fused_experts: bool) -> None:
    table = table_of(TINY_CONFIGS[name], fused_experts=fused_experts)
    check_table(table)
    for op in table:
        mcore = torch.zeros(op.shape, dtype=torch.int)
        hf = {n: torch.zeros(shape, dtype=torch.int) for n, shape in op.hf_shapes.items()}
        for block in op.blocks:
            mcore[slices(block.mcore_box)] += 1
            hf[block.hf_name][slices(block.hf_box)] += 1
        assert all(bool((t == 1).all()) for t in (mcore, *hf.values())), op.mcore_name


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_there_and_back_is_bitwise(name: str) -> None:
    table = table_of(TINY_CONFIGS[name])
    first, tensors = 1, {}
    for hf_name, shape in hf_shapes(table).items():
        tensors[hf_name] = torch.arange(first, first + prod(shape), dtype=torch.float32).view(shape)
        first += prod(shape)
    assert first < 2**24, "distinct in float32"
    for op in table:
        mcore = op_mcore(op, tensors)
        assert mcore.unique().numel() == mcore.numel()
        for hf_name in op.hf_shapes:
            back = op.read_hf(hf_name, lambda box, mcore=mcore: mcore[slices(box)])
            want = tensors.pop(hf_name)
            assert back.shape == want.shape and torch.equal(back, want), hf_name
    assert tensors == {}


def test_megatron_names_are_those_of_transformer_engine() -> None:
    shapes = {op.mcore_name: op.shape for op in table_of(TINY_CONFIGS["qwen2_moe_sparse"] | {"qkv_bias": True})}
    dense, moe = "decoder.layers.0.", "decoder.layers.1."
    assert {name: shape for name, shape in shapes.items() if name.startswith((dense, moe))} == {
        **{f"{layer}self_attention.linear_qkv.layer_norm_weight": (72,) for layer in (dense, moe)},
        **{f"{layer}self_attention.linear_qkv.weight": (120, 72) for layer in (dense, moe)},
        **{f"{layer}self_attention.linear_qkv.bias": (120,) for layer in (dense, moe)},
        **{f"{layer}self_attention.linear_proj.weight": (72, 72) for layer in (dense, moe)},
        f"{dense}mlp.linear_fc1.layer_norm_weight": (72,),
        f"{dense}mlp.linear_fc1.weight": (104, 72),
        f"{dense}mlp.linear_fc2.weight": (72, 52),
        f"{moe}pre_mlp_layernorm.weight": (72,),
        f"{moe}mlp.router.weight": (6, 72),
        f"{moe}mlp.experts.experts.linear_fc1.weight": (6, 40, 72),
        f"{moe}mlp.experts.experts.linear_fc2.weight": (6, 72, 20),
        f"{moe}mlp.shared_experts.linear_fc1.weight": (56, 72),
        f"{moe}mlp.shared_experts.linear_fc2.weight": (72, 28),
        f"{moe}mlp.shared_experts.gate_weight": (1, 72),
    }
    llama = {op.mcore_name: op.shape for op in table_of(TINY_CONFIGS["llama_biases"])}
    assert {name: shape for name, shape in llama.items() if name.startswith(dense) and name.endswith("bias")} == {
        f"{dense}self_attention.linear_qkv.bias": (160,),
        f"{dense}self_attention.linear_proj.bias": (60,),
        f"{dense}mlp.linear_fc1.bias": (104,),
        f"{dense}mlp.linear_fc2.bias": (60,),
    }
    qwen3 = {op.mcore_name: op.shape for op in table_of(TINY_CONFIGS["qwen3"])}
    assert qwen3[f"{dense}self_attention.q_layernorm.weight"] == (8,)
    assert qwen3[f"{dense}self_attention.k_layernorm.weight"] == (8,)
    ends = {name: shape for name, shape in qwen3.items() if not name.startswith("decoder.layers.")}
    assert ends == {
        "embedding.word_embeddings.weight": (71, 60),
        "decoder.final_layernorm.weight": (60,),
        "output_layer.weight": (71, 60),
    }


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_gate_is_above_up_and_the_order_is_query_key_value(name: str) -> None:
    order = {"linear_fc1.weight": "gate up", "linear_fc1.bias": "gate up", "linear_qkv.weight": "q k v"}
    order |= {"linear_qkv.bias": "q k v", "q_layernorm.weight": "q", "k_layernorm.weight": "k"}
    num_checked = 0
    for op in table_of(TINY_CONFIGS[name]):
        for end, parts in order.items():
            if op.mcore_name.endswith(end):
                first = [b.hf_name.rsplit(".", 2)[1] for b in op.blocks][: len(parts.split())]
                first = [{"w1": "gate_proj", "w3": "up_proj"}.get(part, part) for part in first]
                assert [part.split("_")[0] for part in first] == parts.split(), op.mcore_name
                num_checked += 1
    assert num_checked >= 8


def test_experts_beyond_nine_are_stacked_by_number() -> None:
    table = {op.mcore_name: op for op in table_of(TINY_CONFIGS["qwen3_moe"] | {"num_experts": 12})}
    for name, parts in (("linear_fc1", ("gate_proj", "up_proj")), ("linear_fc2", ("down_proj",))):
        blocks = table[f"decoder.layers.0.mlp.experts.experts.{name}.weight"].blocks
        want = [(e, f"model.layers.0.mlp.experts.{e}.{part}.weight") for e in range(12) for part in parts]
        assert [(b.mcore_start[0], b.hf_name) for b in blocks] == want


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    table = table_of(config)
    check_table(table)
    assert sum(prod(shape) for shape in hf_shapes(table).values()) == num_parameters
    assert sum(prod(op.shape) for op in table) == num_parameters


def test_published_qwen3_moe_models_have_their_published_number_of_tensors() -> None:
    assert len(hf_shapes(table_of(QWEN3_30B_A3B))) == 18_867
    assert len(hf_shapes(table_of(QWEN3_235B_A22B))) == 36_945


def test_head_beside_tied_embeddings_is_accepted_when_it_is_the_embedding() -> None:
    table = table_of(TINY_CONFIGS["llama_tied"] | {"vocab_size": 2100})  # more rows than are compared at once
    tensors = {name: torch.randn(shape) for name, shape in hf_shapes(table).items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()} | {"lm_head.weight": (2100, 96)}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    check_names_and_shapes(table, found, "here", read_hf=reader(tensors))
    message = r"surplus lm_head.weight \(2100, 96\): config.json ties it to model.embed_tokens.weight"
    with pytest.raises(ConversionError, match=message):
        check_names_and_shapes(table, found, "here")
    tensors["lm_head.weight"][2099, 95] += 1e-6
    with pytest.raises(ConversionError, match=message):
        check_names_and_shapes(table, found, "here", read_hf=reader(tensors))
    same_bits = torch.zeros(2100, 96, dtype=torch.bfloat16)
    tensors |= {"model.embed_tokens.weight": same_bits, "lm_head.weight": same_bits.view(torch.float16)}
    with pytest.raises(ConversionError, match=message):
        check_names_and_shapes(table, found, "here", read_hf=reader(tensors))


@pytest.mark.parametrize("surplus", ["model.layers.4.eh_proj.weight", "mtp.layers.0.norm.weight", "mtp.fc.weight"])
def test_multi_token_prediction_layers_are_refused_by_name(surplus: str) -> None:
    table = table_of(TINY_CONFIGS["qwen3"])
    with pytest.raises(ConversionError) as error:
        check_names_and_shapes(table, hf_shapes(table) | {surplus: (3,)}, "here")
    _, line = str(error.value).splitlines()
    assert line.startswith(f"  surplus {surplus} (3,): a layer beyond num_hidden_layers; multi-token prediction")
    with pytest.raises(ConversionError) as error:
        check_names_and_shapes(table, hf_shapes(table) | {"model.layers.3.mlp.extra": (3,)}, "here")
    assert str(error.value).splitlines()[1] == "  surplus model.layers.3.mlp.extra (3,)"
