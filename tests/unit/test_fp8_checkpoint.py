"""FP8 Hugging Face directories: import, what is refused, export, and what comes back bit for bit."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.fp8_io import Fp8Export, fp8_config, parse_format
from gspo_megatron.convert.hf_io import TensorReader, random_tensors, read_config, write_hf_dir
from gspo_megatron.convert.ops import ConversionError, slices
from gspo_megatron.convert.safetensors_io import TensorSpec
from gspo_megatron.quantize import quantize_blockwise

TINY = Path(__file__).parents[2] / "recipes" / "tiny-moe"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [16, 8],
    "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.o_proj"],
}
Q = "model.layers.0.self_attn.q_proj."


def fp8_model(*, seed: int = 0, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A directory's tensors as DeepSeek and Qwen store them: partial blocks, q_proj and one expert in FP8."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    found = {"model.embed_tokens.weight": draw(10, 20), "model.layers.0.input_layernorm.weight": draw(20)}
    for name, shape in {Q + "weight": (33, 20), "model.layers.0.mlp.experts.3.gate_proj.weight": (7, 20)}.items():
        found[name], found[name + "_scale_inv"] = quantize_blockwise(draw(*shape), (16, 8), scale_dtype=scale_dtype)
    found |= {Q + "bias": draw(33), "model.layers.0.self_attn.o_proj.weight": draw(20, 33)}
    return found | {"model.layers.0.mlp.gate.weight": draw(4, 20), "lm_head.weight": draw(10, 20)}


def save(folder: Path, found: dict[str, Tensor], quantization_config: dict[str, Any] | None = BLOCKS) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "model.safetensors")
    config = {"model_type": "x"} | ({"quantization_config": quantization_config} if quantization_config else {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decode_e4m3(code: int) -> float:
    """By hand: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.nan if code & 0x7F == 0x7F else math.copysign(value, -1.0 if code & 0x80 else 1.0)


def reference(payload: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each element's exact product in float64, then rounded to float32."""
    codes = payload.view(torch.uint8).tolist()
    values = [
        [decode_e4m3(code) * scales[i // block[0], j // block[1]].item() for j, code in enumerate(row)]
        for i, row in enumerate(codes)
    ]
    return torch.tensor(values, dtype=torch.float64).float()


def test_blocks_are_read_as_weights_and_scales_are_gone(tmp_path: Path) -> None:
    stored = fp8_model()
    save(tmp_path, stored)
    for dtype in (torch.bfloat16, torch.float32):
        reader = TensorReader(tmp_path, dtype=dtype)
        assert reader.shapes() == {n: tuple(t.shape) for n, t in stored.items() if not n.endswith("_scale_inv")}
        for name, tensor in stored.items():
            if tensor.dtype == E4M3:
                want = reference(tensor, stored[name + "_scale_inv"], (16, 8)).to(dtype)
                assert reader.tensors()[name] == (dtype, tuple(tensor.shape))
                assert reader.read(name).dtype == dtype and torch.equal(reader.read(name), want)
            elif name in reader.tensors():
                assert reader.tensors()[name] == (torch.bfloat16, tuple(tensor.shape)), "as stored"
                assert torch.equal(reader.read(name), tensor)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, E8M0])
def test_scales_of_other_dtypes_are_read(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    stored = fp8_model()
    scales = (stored[Q + "weight_scale_inv"] * 64).to(scale_dtype)  # float16 has few bits for small numbers
    save(tmp_path, {**stored, Q + "weight_scale_inv": scales})
    want = reference(stored[Q + "weight"], scales.float(), (16, 8)).bfloat16()
    assert torch.equal(TensorReader(tmp_path).read(Q + "weight"), want)


@pytest.mark.parametrize("box", [((0, 33), (0, 20)), ((15, 17), (7, 9)), ((17, 33), (9, 20)), ((20, 20), (3, 4))])
def test_box_of_an_fp8_weight_is_that_part_of_it(box: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    reader = TensorReader(save(tmp_path, fp8_model()))
    assert torch.equal(reader.read_box(Q + "weight", box), reader.read(Q + "weight")[slices(box)])


PER_TENSOR = {key: BLOCKS[key] for key in ("activation_scheme", "quant_method", "modules_to_not_convert")}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax"}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": {"num_bits": 8, "dynamic": True}}


def compressed_tensors(strategy: str, **changes: Any) -> dict[str, Any]:
    block = {"block_structure": [16, 8]} if strategy == "block" else {}
    group = {**GROUP, "weights": {**WEIGHTS, "strategy": strategy, **block}, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group | changes.pop("group", {})},
        "ignore": ["lm_head", r"re:.*\.mlp\.gate$", "model.layers.0.self_attn.o_proj"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
    } | changes


def with_scales(suffix: str, scale: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """The FP8 weights with scales made from their number of rows, under another name."""
    found = {name: tensor for name, tensor in fp8_model().items() if not name.endswith("_scale_inv")}
    fp8 = [name for name, tensor in found.items() if tensor.dtype == E4M3]
    return found | {name.removesuffix(".weight") + suffix: scale(len(found[name])) for name in fp8}


@pytest.mark.parametrize(("config", "suffix", "scale"), [
    (PER_TENSOR, ".weight_scale", lambda rows: torch.tensor(0.25)),
    (PER_TENSOR, ".weight_scale_inv", lambda rows: torch.tensor([0.25])),
    (PER_TENSOR | {"weight_block_size": None}, ".weight_scale", lambda rows: torch.arange(1.0, rows + 1)[:, None]),
    (compressed_tensors("tensor"), ".weight_scale", lambda rows: torch.tensor([0.25])),
    (compressed_tensors("channel"), ".weight_scale", lambda rows: torch.arange(1.0, rows + 1)[:, None].bfloat16()),
    (compressed_tensors("block"), ".weight_scale", lambda rows: torch.rand(-(-rows // 16), 3) + 0.5),
])  # fmt: skip
def test_other_forms_are_read(
    config: dict[str, Any], suffix: str, scale: Callable[[int], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stored = with_scales(suffix, scale)
    reader = TensorReader(save(tmp_path, stored, config), dtype=torch.float32)
    assert len(reader.shapes()) == len(stored) - 2
    scales = stored[Q + suffix.removeprefix(".")].float()
    block = (16, 8) if scales.dim() == 2 and scales.shape[1] == 3 else (1, 20) if scales.numel() > 1 else (33, 20)
    want = reference(stored[Q + "weight"], scales.reshape(-1, 3 if block == (16, 8) else 1), block)
    assert torch.equal(reader.read(Q + "weight"), want)
    assert torch.equal(reader.read_box(Q + "weight", ((5, 20), (3, 9))), want[5:20, 3:9])


def changed(**entries: Tensor | None) -> dict[str, Tensor]:
    """fp8_model with q_proj's tensors replaced, or taken away."""
    found = fp8_model() | {Q + name: tensor for name, tensor in entries.items() if tensor is not None}
    return {name: tensor for name, tensor in found.items() if entries.get(name.removeprefix(Q), tensor) is not None}


@pytest.mark.parametrize(("stored", "config", "messages"), [
    (changed(weight_scale_inv=None), BLOCKS, [f"{Q}weight: has no scale, wants {Q}weight_scale_inv"]),
    (changed(weight=None), BLOCKS, [f"{Q}weight_scale_inv: a scale without FP8 weight"]),
    (changed(weight=torch.zeros(33, 20)), BLOCKS,
     [f"{Q}weight_scale_inv: a scale without FP8 weight", f"{Q}weight is torch.float32; wants FP8, or its module in"]),
    (changed(weight_scale=torch.ones(3, 3)), BLOCKS, [f"{Q}weight: has {Q}weight_scale_inv and {Q}weight_scale,"]),
    (changed(weight_scale_inv=None, weight_scale=torch.ones(3, 3)), BLOCKS, [f"has {Q}weight_scale, wants"]),
    (changed(weight_scale_inv=torch.ones(3, 2)), BLOCKS,
     [rf"{Q}weight: {Q}weight_scale_inv has shape (3, 2), wants (3, 3) for (33, 20)"]),
    (changed(weight_scale_inv=torch.ones(3, 3, dtype=torch.uint8)), BLOCKS, [f"{Q}weight_scale_inv is torch.uint8"]),
    (changed(weight=torch.zeros(33, 20).to(torch.float8_e5m2)), BLOCKS, [f"{Q}weight: is torch.float8_e5m2, wants"]),
    (changed(weight=torch.zeros(2, 33, 20).to(E4M3)), BLOCKS, [f"{Q}weight: is FP8 of shape (2, 33, 20), wants a "]),
    (changed(bias=torch.zeros(33).to(E4M3)), BLOCKS, [f"{Q}bias: is FP8 of shape (33,), wants a matrix that is"]),
    (changed(input_scale=torch.ones(1)), BLOCKS, [f"{Q}input_scale: a static activation scale would be lost"]),
    (fp8_model(), None, [f"{Q}weight is torch.float8_e4m3fn, and config.json has no quantization_config",
                         f"{Q}weight_scale_inv: a scale, and config.json has no quantization_config"]),
    ({"x": torch.ones(1)}, BLOCKS, ["config.json has a quantization_config, and no tensor is FP8"]),
    (fp8_model(), BLOCKS | {"modules_to_not_convert": ["model.layers.0.self_attn"]},
     [f"{Q}weight: is FP8, and its module is one that is not converted"]),
    (fp8_model(), BLOCKS | {"modules_to_not_convert": ["q_proj", "o_proj"]}, [f"{Q}weight: is FP8, and its module"]),
    (fp8_model(), BLOCKS | {"modules_to_not_convert": []},
     ["model.layers.0.self_attn.o_proj.weight is torch.bfloat16; wants FP8, or its module in modules_to_not_convert"]),
    (fp8_model(), BLOCKS | {"modules_to_not_convert": ["self_attn.o"]}, ["o_proj.weight is torch.bfloat16; wants"]),
    (with_scales(".weight_scale", lambda rows: torch.ones(2)), PER_TENSOR,
     [f"{Q}weight: {Q}weight_scale has shape (2,), wants () or (1,) or (1, 1) or (33,) or (33, 1)"]),
    (fp8_model(), compressed_tensors("block"), [f"{Q}weight: has {Q}weight_scale_inv, wants {Q}weight_scale"]),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    stored: dict[str, Tensor], config: dict[str, Any] | None, messages: list[str], tmp_path: Path
) -> None:
    save(tmp_path, stored, config)
    with pytest.raises(ConversionError) as error:
        TensorReader(tmp_path)
    assert str(tmp_path) in str(error.value)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "awq"}, "quant_method='awq': wants fp8 or compressed-tensors"),
    ({"bits": 8}, "quant_method=None: wants fp8"),
    ({"quant_method": ["fp8"]}, r"quant_method=\['fp8'\]: wants fp8"),
    ("fp8", "quantization_config='fp8': wants an object"),
    (BLOCKS | {"modules_to_not_convert": ["re:("]}, r"'re:\(': missing \), unterminated subpattern"),
    (compressed_tensors("channel", group={"input_activations": "int8"}), "input_activations: not dynamic"),
    (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2': wants 'e4m3'"),
    (BLOCKS | {"activation_scheme": "static"}, "activation_scheme='static': its input scales would be lost"),
    (BLOCKS | {"scale_fmt": "e5m3"}, "scale_fmt='e5m3': wants 'float' or 'ue8m0'"),
    (BLOCKS | {"weight_block_size": [128]}, r"weight_block_size=\[128\]: wants two whole numbers"),
    (BLOCKS | {"weight_block_size": [128, 0]}, r"weight_block_size=\[128, 0\]: wants two whole"),
    (BLOCKS | {"modules_to_not_convert": "lm_head"}, "'lm_head': wants a list of names"),
    (BLOCKS | {"ignored_layers": ["x"]}, "more than one of modules_to_not_convert, ignored_layers, ignore, and they"),
    (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype='fp4': not understood"),
    (compressed_tensors("group"), "weights.strategy='group': wants 'tensor', 'channel' or 'block'"),
    (compressed_tensors("channel", format="pack-quantized"), "format='pack-quantized': wants 'float-quantized'"),
    (compressed_tensors("channel", config_groups={"a": GROUP, "b": GROUP}), "config_groups=.*: wants one group"),
    (compressed_tensors("channel", group={"targets": ["re:.*q_proj"]}), r"targets=.*: wants \['Linear'\]"),
    (compressed_tensors("channel", group={"weights": WEIGHTS | {"type": "int", "strategy": "channel"}}), "type='int'"),
    (compressed_tensors("channel", group={"input_activations": {"dynamic": False}}), "input_activations: not dynamic"),
    (compressed_tensors("channel", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme=.*: not understood"),
])  # fmt: skip
def test_config_that_is_not_understood_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        parse_format(config, "x")


def test_names_of_modules_are_matched_whole() -> None:
    fp8_format = parse_format(BLOCKS | {"modules_to_not_convert": ["mlp.gate", "layers.1", r"re:.*\.up_proj$"]}, "x")
    kept = ("0.mlp.gate", "0.mlp.up_proj", "1.mlp.down_proj", "0.mlp.shared_expert_gate", "0.block_sparse_moe.gate",
            "0.self_attn.q_norm", "0.mlp.router", "61.eh_proj", "61.shared_head.head", "61.embed_tokens")  # fmt: skip
    converted = ("0.mlp.gate_proj", "0.mlp.down_proj", "11.mlp.down_proj", "0.mlp.shared_expert.gate_proj")
    for name in (*kept, *converted):
        assert fp8_format.converts(f"model.layers.{name}.weight", (8, 8)) == (name in converted), name
    assert not fp8_format.converts("lm_head.weight", (8, 8)) and not fp8_format.converts("embed_tokens.weight", (8, 8))
    assert not fp8_format.converts("x.bias", (8, 8)) and not fp8_format.converts("x.weight", (8,))


@pytest.mark.parametrize(("value", "config", "message"), [
    (math.nan, BLOCKS, r"scale \[1, 2\] is nan, wants a finite value"),
    (-1.0, BLOCKS, r"scale \[1, 2\] is -1.0, wants a finite value >= 0"),
    (0.75, BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt is ue8m0 and a scale is no power of two"),
])  # fmt: skip
def test_value_that_is_no_scale_is_named_when_it_is_read(
    value: float, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    scales = torch.ones(3, 3)
    scales[1, 2] = value
    stored = changed(weight_scale_inv=scales)
    stored["model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv"].fill_(2.0**-126)
    reader = TensorReader(save(tmp_path, stored, config))
    reader.read("model.layers.0.mlp.experts.3.gate_proj.weight")
    with pytest.raises(ConversionError, match=rf"model.safetensors: {Q}weight_scale_inv: {message}"):
        reader.read(Q + "weight")


def test_only_bfloat16_and_float32_are_given(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="dtype=torch.float16: wants bfloat16 or float32"):
        TensorReader(save(tmp_path, fp8_model()), dtype=torch.float16)


# Export.


def specs_of(found: dict[str, Tensor]) -> list[TensorSpec]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tiny model."""
    config = read_config(TINY)
    return {n: t.to(dtype) for n, t in random_tensors(family_of(config).op_list(config), std=0.05, seed=1)}


def export(
    out_dir: Path, found: dict[str, Tensor], config: dict[str, Any], *, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    plan = Fp8Export(specs_of(found), config, scale_dtype=scale_dtype)
    stream = plan.tensors(found.items())
    write_hf_dir(out_dir, plan.specs, stream, companions_from=TINY, quantization_config=config)
    return load_file(out_dir / "model.safetensors")


def test_config_has_the_form_of_published_ones() -> None:
    config = fp8_config(specs_of(weights()))
    kept = config.pop("modules_to_not_convert")
    assert config == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }  # fmt: skip
    in_layer = ("input_layernorm", "post_attention_layernorm", "mlp.gate", "self_attn.q_norm", "self_attn.k_norm")
    layers = [f"model.layers.{i}.{name}" for i in range(4) for name in in_layer]
    assert kept == sorted(["lm_head", "model.embed_tokens", "model.norm", *layers])
    tied = fp8_config([spec for spec in specs_of(weights()) if spec[0] != "lm_head.weight"])
    assert "lm_head" in tied["modules_to_not_convert"]
    assert fp8_config(specs_of(weights()), power_of_two_scale=True)["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize("options", [
    {}, {"block": (64, 40)}, {"power_of_two_scale": True}, {"power_of_two_scale": True, "scale_dtype": E8M0},
    {"scale_dtype": torch.bfloat16},
])  # fmt: skip
def test_export_holds_what_the_quantiser_gives_and_is_read_again(options: dict[str, Any], tmp_path: Path) -> None:
    scale_dtype = options.get("scale_dtype", torch.float32)
    found = weights()
    config = fp8_config(specs_of(found), **{k: v for k, v in options.items() if k != "scale_dtype"})
    written = export(tmp_path / "out", found, config, scale_dtype=scale_dtype)
    assert read_config(tmp_path / "out") == read_config(TINY) | {"quantization_config": config}
    linear = [n for n, t in found.items() if n.endswith("_proj.weight")]
    assert len(linear) == 4 * (4 + 8 * 3)
    assert written.keys() == found.keys() | {name + "_scale_inv" for name in linear}
    for name in linear:
        payload, scale_inv = quantize_blockwise(found[name], options.get("block", (128, 128)),
            power_of_two_scale="power_of_two_scale" in options, scale_dtype=scale_dtype)  # fmt: skip
        assert written[name].dtype == E4M3 and torch.equal(written[name].view(torch.uint8), payload.view(torch.uint8))
        got = written[name + "_scale_inv"]
        assert got.dtype == scale_dtype and torch.equal(got.float(), scale_inv.float())
    reader = TensorReader(tmp_path / "out")
    for name, tensor in found.items():
        error = (reader.read(name).float() - tensor.float()).abs().max() / tensor.float().abs().max()
        assert error < (2.0**-4 + 2.0**-8 if name in linear else 1e-30), name


def export_again(first: Path, second: Path, *, dtype: torch.dtype, scale_dtype: torch.dtype) -> bool:
    """Import the first directory, export it as the second with its own config; whether the bytes are the same."""
    reader = TensorReader(first, dtype=dtype)
    imported = {name: reader.read(name) for name in weights()}
    export(second, imported, read_config(first)["quantization_config"], scale_dtype=scale_dtype)
    again = TensorReader(second, dtype=dtype)
    assert all(torch.equal(again.read(name), tensor) for name, tensor in imported.items())
    return (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_of_an_import_is_the_same_bytes(dtype: torch.dtype, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    found = weights()
    export(tmp_path / "first", found, fp8_config(specs_of(found), block=(16, 24)), scale_dtype=scale_dtype)
    assert export_again(tmp_path / "first", tmp_path / "second", dtype=dtype, scale_dtype=scale_dtype)


@pytest.mark.parametrize("scale_dtype", [torch.float32, E8M0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_of_an_e8m0_import_has_the_same_values_and_then_the_same_bytes(
    dtype: torch.dtype, scale_dtype: torch.dtype, tmp_path: Path
) -> None:
    found = weights()
    config = fp8_config(specs_of(found), block=(16, 24), power_of_two_scale=True)
    export(tmp_path / "first", found, config, scale_dtype=scale_dtype)
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    same = export_again(first, second, dtype=dtype, scale_dtype=scale_dtype)
    assert not same, "some blocks have a maximum of 224"
    assert export_again(second, third, dtype=dtype, scale_dtype=scale_dtype)


def test_export_of_a_bfloat16_import_keeps_payloads_where_scales_came_from_float32_weights(tmp_path: Path) -> None:
    found = weights(torch.float32)
    config = fp8_config(specs_of(found))
    first = export(tmp_path / "first", found, config)
    reader = TensorReader(tmp_path / "first")
    second = export(tmp_path / "second", {name: reader.read(name) for name in found}, config)
    moved = 0
    for name, tensor in first.items():
        if name.endswith("_scale_inv"):
            assert (second[name] - tensor).abs().max() <= 2.0**-8 * tensor.abs().max()
            moved += int((second[name] != tensor).sum())
        elif tensor.dtype == E4M3:
            assert torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert moved > 0


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    found = weights()
    specs, config = specs_of(found), fp8_config(specs_of(found))
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    found[name][3, 4] = math.nan
    with pytest.raises(ConversionError, match=f"{name}: 1 block.s. of .128, 128. hold a NaN or infinity"):
        export(tmp_path / "out", found, config)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConversionError, match="no weight of this model would be FP8"):
        Fp8Export(specs, config | {"modules_to_not_convert": ["model"]})
    with pytest.raises(ConversionError, match="wants quant_method 'fp8' with weight_block_size"):
        Fp8Export(specs, config | {"weight_block_size": None})
    with pytest.raises(ConversionError, match="wants quant_method 'fp8' with weight_block_size"):
        Fp8Export(specs, compressed_tensors("block"))
    with pytest.raises(ConversionError, match="scales in float8_e8m0fnu want scale_fmt 'ue8m0'"):
        Fp8Export(specs, config, scale_dtype=E8M0)
    with pytest.raises(ConversionError, match="scale_fmt='x'"):
        Fp8Export(specs, config | {"scale_fmt": "x"})


def test_transformers_understands_the_config_and_decodes_the_same(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.quantizers.quantizers_utils import should_convert_module
    from transformers.utils.quantization_config import FineGrainedFP8Config

    found = weights()
    config = fp8_config(specs_of(found), block=(48, 32))  # it guesses blocks from the shapes, so that they must divide
    written = export(tmp_path / "out", found, config)
    parsed = AutoQuantizationConfig.from_dict(AutoConfig.from_pretrained(tmp_path / "out").quantization_config)
    assert isinstance(parsed, FineGrainedFP8Config)
    assert list(parsed.weight_block_size) == [48, 32] and parsed.activation_scheme == "dynamic"
    reader = TensorReader(tmp_path / "out")
    for name in found:
        module = name.removesuffix(".weight")
        assert should_convert_module(module, parsed.modules_to_not_convert) == (name + "_scale_inv" in written), name
        if name + "_scale_inv" in written:
            theirs = Fp8Dequantize(None)._dequantize_one(written[name], written[name + "_scale_inv"], torch.bfloat16)
            assert torch.equal(reader.read(name), theirs), name


ASK_SGLANG = """
import json, sys
import gspo_megatron.sglang_cpu
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
config, modules = json.load(sys.stdin)
parsed = Fp8Config.from_config(config)
skipped = [module for module in modules if is_layer_skipped(module, parsed.ignored_layers)]
print(json.dumps([parsed.is_checkpoint_fp8_serialized, parsed.weight_block_size, parsed.activation_scheme, skipped]))
"""


def test_sglang_understands_the_config() -> None:
    found = weights()
    config = fp8_config(specs_of(found))
    modules = [name.removesuffix(".weight") for name in found]
    environment = {**os.environ, "GSPO_MEGATRON_DEVICE": "cpu"}
    done = subprocess.run([sys.executable, "-c", ASK_SGLANG], input=json.dumps([config, modules]), env=environment,
                          capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = [module for module in modules if not module.endswith("_proj")]
    assert json.loads(done.stdout.splitlines()[-1]) == [True, [128, 128], "dynamic", kept]
