"""What servers boot from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import load_recipe
from gspo_megatron.convert.families import table_for
from gspo_megatron.convert.hf_io import TensorReader, random_tensors, read_config, write_hf_dir
from gspo_megatron.quantize import dequantize_blockwise, quantize_blockwise
from gspo_megatron.serving import serving_dir

RECIPES = Path(__file__).parents[2] / "recipes"
QUANTISED = "model.layers.0.mlp.experts.3.down_proj.weight"


@pytest.fixture
def weights_dir(tmp_path):
    """The tiny model with random weights."""
    hf_dir = RECIPES / "tiny-moe"
    tensors = list(random_tensors(table_for(read_config(hf_dir), ()), std=0.1, seed=1))
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    write_hf_dir(tmp_path / "weights", specs, tensors, companions_from=hf_dir)
    return tmp_path / "weights"


def recipe_of(tmp_path, *, serve_fp8):
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [f"model.hf_dir={RECIPES / 'tiny-moe'}"])
    rollout = replace(recipe.rollout, serve_fp8=serve_fp8)  # refused with device: cpu
    return replace(recipe, output_dir=str(tmp_path), rollout=rollout)


def test_without_fp8_servers_boot_from_what_the_run_starts_from(tmp_path, weights_dir):
    recipe = recipe_of(tmp_path, serve_fp8=False)
    assert serving_dir(recipe, weights_dir, has_weights=True) == weights_dir
    assert serving_dir(recipe, tmp_path / "megatron", has_weights=False) == RECIPES / "tiny-moe"
    assert not recipe.run_dir.exists()


@pytest.mark.parametrize("has_weights", [True, False])
def test_fp8_directory_says_which_modules_are_quantised(tmp_path, weights_dir, has_weights):
    folder = serving_dir(recipe_of(tmp_path, serve_fp8=True), weights_dir, has_weights=has_weights)
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["weight_block_size"]) == ("fp8", [128, 128])
    assert "model.layers.0.mlp.gate" in quantization["modules_to_not_convert"]
    assert QUANTISED.removesuffix(".weight") not in quantization["modules_to_not_convert"]
    assert (folder / "tokenizer.json").is_file()
    assert any(folder.glob("*.safetensors")) is has_weights
    assert "quantization_config" not in read_config(RECIPES / "tiny-moe")


def test_fp8_directory_with_weights_holds_them_quantised(tmp_path, weights_dir):
    folder = serving_dir(recipe_of(tmp_path, serve_fp8=True), weights_dir, has_weights=True)
    source, served = TensorReader(weights_dir), TensorReader(folder, dtype=torch.float32)
    assert set(served.shapes()) == set(source.shapes())
    payload, scale = quantize_blockwise(source.read(QUANTISED))
    assert torch.equal(served.read(QUANTISED), dequantize_blockwise(payload, scale, (128, 128), dtype=torch.float32))
    norm = "model.norm.weight"
    assert torch.equal(served.read(norm), source.read(norm))


def test_directory_for_pushes_is_made_anew(tmp_path, weights_dir):
    recipe = recipe_of(tmp_path, serve_fp8=True)
    folder = serving_dir(recipe, weights_dir, has_weights=False)
    shutil.copy(weights_dir / "model.safetensors", folder)
    assert not any(serving_dir(recipe, weights_dir, has_weights=False).glob("*.safetensors"))
