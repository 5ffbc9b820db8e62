"""The supervised stage: its learning rate, what names its folder, and what it trains on."""

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo_megatron.cold_start import cold_start_dir, learning_rate, take_demonstrations
from gspo_megatron.config import ColdStartConfig, Recipe, load_recipe
from gspo_megatron.multi_turn import load_function
from gspo_megatron.prompts import PromptStream, load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe(Path("recipes/gspo-tiny-moe-cpu.yaml"), overrides)


def schedule(**changes: float) -> list[float]:
    numbers = {"num_steps": 10, "warmup_steps": 4, "decay_fraction": 0.5, **changes}
    cfg = ColdStartConfig(batch_size=1, lr=2.0, flawed_fraction=0.0, **numbers)
    return [learning_rate(cfg, step) for step in range(cfg.num_steps)]


def test_learning_rate_rises_stays_and_falls() -> None:
    assert schedule() == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4]


def test_learning_rate_without_warmup_or_decay_is_flat() -> None:
    assert schedule(warmup_steps=0, decay_fraction=0.0) == [2.0] * 10


def test_learning_rate_decays_over_all_steps_when_asked() -> None:
    assert schedule(warmup_steps=0, decay_fraction=1.0)[:3] == [2.0, 1.8, 1.6]


SAME_WEIGHTS = [
    "name=other", "rollout.group_size=4", "optimizer.lr=0.0", "loss.clip_low=0.1", "evaluate.every=1",
    "train.num_rollout_steps=1", "reward.permute=true", "cluster.server_port=30000",
]  # fmt: skip
OTHER_WEIGHTS = [
    "seed=2", "cold_start.num_steps=451", "cold_start.flawed_fraction=0.6", "data.params.max_numbers=3",
    "optimizer.adam_beta2=0.95", "batch.max_tokens_per_microbatch=1024", "model.dtype=bfloat16",
    "parallel.expert_model_parallel_size=1",
]  # fmt: skip


@pytest.mark.parametrize("override", SAME_WEIGHTS)
def test_folder_is_shared_by_recipes_with_an_equal_cold_start(override: str) -> None:
    assert cold_start_dir(recipe_with(override)) == cold_start_dir(recipe_with())


@pytest.mark.parametrize("override", OTHER_WEIGHTS)
def test_folder_changes_with_all_that_decides_the_weights(override: str) -> None:
    assert cold_start_dir(recipe_with(override)) != cold_start_dir(recipe_with())


def test_folder_lies_in_the_output_folder() -> None:
    assert cold_start_dir(recipe_with("output_dir=elsewhere")).parent == Path("elsewhere")


def test_folder_changes_with_the_files_of_the_model(tmp_path: Path) -> None:
    hf_dir = tmp_path / "model"
    shutil.copytree("recipes/tiny-moe", hf_dir)
    folders = [cold_start_dir(recipe_with(f"model.hf_dir={hf_dir}"))]
    for name in ("config.json", "tokenizer.json"):
        (hf_dir / name).write_text((hf_dir / name).read_text() + "\n")
        folders.append(cold_start_dir(recipe_with(f"model.hf_dir={hf_dir}")))
    for value in (0.0, 1.0):  # equal size: only the content differs
        save_file({"x": torch.full((4,), value)}, hf_dir / "model.safetensors")
        folders.append(cold_start_dir(recipe_with(f"model.hf_dir={hf_dir}", f"model.load={hf_dir}")))
    assert len(set(folders)) == len(folders)


def test_ranks_draw_equal_demonstrations() -> None:
    recipe = recipe_with("cold_start.batch_size=16")
    assert recipe.cold_start is not None
    tokenizer = load_tokenizer(recipe.model.hf_dir)

    def draw(seed: int) -> list:
        stream = PromptStream(recipe.data, tokenizer, split="cold_start", seed=seed)
        return take_demonstrations(stream, tokenizer, random.Random(seed), recipe.cold_start)

    first = draw(1)
    assert len(first) == 16 and first == draw(1) != draw(2)
    assert all(s.response_ids[-1] == tokenizer.eos_token_id for s in first)
    assert all(s.rollout_logprobs is None for s in first)
    assert f"demonstration for {tokenizer.decode(first[0].prompt_ids)}" == first[0].name


CALCULATOR = Path("recipes/gspo-tiny-moe-calculator-cpu.yaml")


def test_ranks_draw_equal_demonstrations_with_replies_out_of_the_loss() -> None:
    recipe = load_recipe(CALCULATOR, ["cold_start.batch_size=16", "cold_start.flawed_fraction=0.0"])
    assert recipe.cold_start is not None and recipe.rollout.multi_turn is not None
    tokenizer, function = load_tokenizer(recipe.model.hf_dir), load_function(recipe.rollout.multi_turn)

    def draw() -> list:
        stream = PromptStream(recipe.data, tokenizer, split="cold_start", seed=1)
        return take_demonstrations(stream, tokenizer, random.Random(1), recipe.cold_start, function)

    first = draw()
    assert first == draw()
    for sequence in first:
        assert sequence.response_mask is not None and sequence.response_length < len(sequence.response_ids)
        pairs = zip(sequence.response_ids, sequence.response_mask, strict=True)
        sampled = tokenizer.decode([i for i, is_sampled in pairs if is_sampled])
        assert sampled.count("=") >= 1 and "," not in sampled


def test_folder_changes_with_the_function_that_answers_in_the_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    text = Path("recipes/calculator.py").read_text()
    folders = [cold_start_dir(load_recipe(CALCULATOR))]
    for name, end in (("tool_a", ""), ("tool_b", ""), ("tool_b", "# edited\n")):
        (tmp_path / f"{name}.py").write_text(text + end)
        folders.append(cold_start_dir(load_recipe(CALCULATOR, [f"rollout.multi_turn={name}:answer"])))
    assert len(set(folders)) == len(folders)
