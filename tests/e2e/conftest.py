"""One real SGLang server on a tiny random Qwen3-MoE, shared by the tests of a session."""

import shutil
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine

RECIPES = Path(__file__).parents[2] / "recipes"


def make_model_dir(path, seed, **changes):
    """A Hugging Face directory with the CPU recipe's config and tokenizer and weights wide enough to tell apart.

    changes: keys of config.json with other values.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig.from_pretrained(RECIPES / "tiny-moe", **changes)
    config.initializer_range = 0.15
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.to(torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(RECIPES / "tiny-moe" / name, path / name)
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def recipe(model_dir):
    return load_recipe(
        RECIPES / "gspo-tiny-moe-cpu.yaml",
        [f"model.hf_dir={model_dir}", f"model.load={model_dir}", "cold_start=null"],
    )


@pytest.fixture(scope="session")
def engine(recipe, model_dir, tmp_path_factory):
    """A ready server with weight version 0."""
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=tmp_path_factory.mktemp("log") / "server.log")
    try:
        engine.wait_ready(timeout_s=180)
        yield engine
    finally:
        engine.stop()
