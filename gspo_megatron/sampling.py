"""A run's way to prompts, rollouts, rewards and evaluations: from SGLang, or from the groups that a run saved."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gspo_megatron.config import Recipe
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.evaluate import summarize
from gspo_megatron.prompts import EVALUATION_SEED, PromptStream, evaluation_prompts, load_tokenizer
from gspo_megatron.rewards.reasoning import score_groups
from gspo_megatron.rollout import generate
from gspo_megatron.types import Prompt, RolloutGroup, TrainState, load_groups, save_groups


def step_file(folder: Path, rollout_step: int) -> Path:
    """File of one step's groups."""
    return folder / f"step_{rollout_step:05d}.jsonl"


class Sampler:
    """Every rank holds one: prompts and scores are the same everywhere, the rest is rank 0's."""

    def __init__(self, recipe: Recipe, server_urls: list[str]) -> None:
        self._recipe, self._urls = recipe, server_urls
        self._tokenizer = load_tokenizer(recipe.model.hf_dir)
        self._stream = PromptStream(recipe.data, self._tokenizer, split="train", seed=recipe.seed)
        self._vocab_size = int(read_config(Path(recipe.model.hf_dir))["vocab_size"])
        self._evaluation_prompts = (
            evaluation_prompts(recipe.data, self._tokenizer, num_prompts=recipe.evaluate.num_prompts)
            if server_urls
            else []
        )

    def take_prompts(self) -> list[Prompt]:
        """The next rollout step's prompts."""
        return self._stream.take(self._recipe.rollout.num_prompts)

    def rollout(self, prompts: list[Prompt], rollout_step: int, weight_version: int) -> list[RolloutGroup]:
        """Sample the prompts; without servers, load the groups of this step instead.

        Raises:
            RolloutError: from SGLang.
            ValueError: the saved groups are missing or answer other prompts.
        """
        recipe = self._recipe
        if not self._urls:
            return self._load(prompts, rollout_step)
        return self._generate(
            prompts,
            seed=recipe.seed,
            rollout_step=rollout_step,
            weight_version=weight_version,
            group_size=recipe.rollout.group_size,
            temperature=recipe.rollout.temperature,
        )

    def save(self, groups: list[RolloutGroup], rollout_step: int) -> None:
        """Keep a step's scored groups with the run; those that were loaded lie elsewhere already."""
        if self._urls:
            save_groups(groups, step_file(self._recipe.run_dir / "rollouts", rollout_step))

    def score(self, groups: list[RolloutGroup], rollout_step: int) -> list[RolloutGroup]:
        """Rewards; permuted over the batch in the control arm."""
        permute = self._recipe.reward.permute
        return score_groups(groups, permute_seed=self._recipe.seed * 1_000_003 + rollout_step if permute else None)

    def evaluate(self, state: TrainState) -> dict[str, Any] | None:
        """Held-out evaluation of the current weights; None when it is not due, or without servers.

        Sampling seeds are the same at every evaluation of every run, so differences come from the weights.
        """
        cfg, last = self._recipe.evaluate, self._recipe.train.num_rollout_steps
        is_due = state.rollout_step % cfg.every == 0 or state.rollout_step == last
        if not self._urls or not is_due:
            return None
        groups = self._generate(
            self._evaluation_prompts,
            seed=EVALUATION_SEED,
            rollout_step=0,
            weight_version=state.weight_version,
            group_size=cfg.num_samples,
            temperature=cfg.temperature,
        )
        groups = score_groups(groups, permute_seed=None)
        save_groups(groups, step_file(self._recipe.run_dir / "evaluations", state.rollout_step))
        return asdict(summarize(groups))

    def _generate(self, prompts: list[Prompt], **options: Any) -> list[RolloutGroup]:
        return generate(
            self._urls,
            prompts,
            self._recipe.rollout,
            eos_token_id=int(self._tokenizer.eos_token_id),
            vocab_size=self._vocab_size,
            decode=lambda ids: str(self._tokenizer.decode(ids)),
            **options,
        )

    def _load(self, prompts: list[Prompt], rollout_step: int) -> list[RolloutGroup]:
        if self._recipe.rollout.groups_dir is None:
            raise ValueError("rollout.groups_dir: null; without servers it names the folder of saved groups")
        path = step_file(Path(self._recipe.rollout.groups_dir), rollout_step)
        groups = load_groups(path)
        wanted, found = [p.prompt_id for p in prompts], [g.prompt.prompt_id for g in groups]
        if wanted != found:
            raise ValueError(f"{path}: answers other prompts than seed and data of this recipe give for the step")
        return groups
