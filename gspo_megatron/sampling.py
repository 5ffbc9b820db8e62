"""A run's way to prompts, rollouts, rewards and evaluations: from SGLang, or from the groups that a run saved."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from gspo_megatron.config import Recipe
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.evaluate import summarize
from gspo_megatron.fleet import Fleet
from gspo_megatron.prompts import EVALUATION_SEED, PromptStream, evaluation_prompts, load_tokenizer, tokenize
from gspo_megatron.rewards.reasoning import score_groups
from gspo_megatron.rollout import Client, Vocabulary, sampling_seed
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.step_sampling import check_totals, choose_groups, end, mark_stale, mark_too_short
from gspo_megatron.types import Prompt, RolloutGroup, RolloutReport, TrainState, load_groups, save_groups

TICK_S = 2.0
"""Ranks wait this long at most for rollouts before they see together whether a server wants weights."""
POLL_S = 0.1
"""Between rank 0's own looks."""
CLOSE_S = 10.0
"""Limit of ending the requests that are open when a run ends."""
PERMUTATION_SEEDS = 1_000_003
"""Stride of the control arm's seeds between runs, so that no two steps of two runs share one."""

DEFAULT_MAX_PROMPTS = 3
"""Times num_prompts: what rollout.max_prompts_per_step 0 stands for."""

T = TypeVar("T")
Step = tuple[list[RolloutGroup], RolloutReport]


class OnRank0(Protocol):
    """Parallel.on_rank_0: runs a function on rank 0 and hands its result to all."""

    def __call__(self, fn: Callable[[], T]) -> T:
        """Collective."""


def step_file(folder: Path, rollout_step: int) -> Path:
    """File of one step's groups."""
    return folder / f"step_{rollout_step:05d}.jsonl"


class SavedGroups:
    """Groups that a run saved, in the place of a Sampler. Every rank reads them."""

    def __init__(self, recipe: Recipe) -> None:
        """Of rollout.groups_dir."""
        if recipe.rollout.groups_dir is None:
            raise ValueError("rollout.groups_dir: null; without servers it names the folder of saved groups")
        self._recipe, self._folder = recipe, Path(recipe.rollout.groups_dir)
        tokenizer = load_tokenizer(recipe.model.hf_dir)
        self._stream = PromptStream(recipe.data, tokenizer, split="train", seed=recipe.seed)

    def collect(self, rollout_step: int) -> tuple[list[RolloutGroup], None]:
        """The step's groups, scored by this recipe. Called for each step in turn.

        Raises:
            ValueError: they are missing or answer other prompts.
        """
        prompts = self._stream.take(_prompts_per_step(self._recipe))
        path = step_file(self._folder, rollout_step)
        groups = load_groups(path)
        found = [group.prompt.prompt_id for group in groups]
        if found != [prompt.prompt_id for prompt in prompts if prompt.prompt_id in found]:
            raise ValueError(f"{path}: answers other prompts than seed and data of this recipe give for the step")
        return score_groups(groups, permute_seed=_permute_seed(self._recipe, rollout_step)), None

    def save(self, groups: list[RolloutGroup], rollout_step: int) -> None:
        """They lie elsewhere already."""

    def evaluate(self, state: TrainState) -> None:
        """There is no server to ask."""

    def close(self) -> None:
        """There is nothing to end."""


class Sampler:
    """Prompts in, scored groups out. Every rank holds one; rank 0's samples in a thread of its own.

    While the trainer is at rollout step s, prompts of the steps up to s + max_policy_lag are with the servers. They
    are first sent when the servers have the weights of s - 1, so a token's weights are at most max_policy_lag pushes
    older than those that its step is trained from.
    """

    def __init__(
        self,
        recipe: Recipe,
        fleet: Fleet | None,
        *,
        on_rank_0: OnRank0,
        bring_up: Callable[[], None],
        is_trained: bool = True,
    ) -> None:
        """Open the prompt stream.

        Args:
            recipe: one complete run.
            fleet: rank 0's; None elsewhere.
            on_rank_0: Parallel's.
            bring_up: gives servers that want them the current weights; collective.
            is_trained: False where the weights stay those of version 0, of whatever step a response is.
        """
        self._recipe, self._on_rank_0, self._bring_up = recipe, on_rank_0, bring_up
        self._worker = None if fleet is None else _Worker(recipe, fleet, is_trained=is_trained)

    def collect(self, rollout_step: int) -> Step:
        """The step's groups, scored, and what became of all that was asked for. Collective over all ranks.

        Raises:
            RolloutError: a request failed for good, or the totals do not add up.
            ValueError: a reward is not finite, or the data has too few prompts.
        """
        return self._wait_for(lambda worker: worker.step(rollout_step))

    def evaluate(self, state: TrainState) -> dict[str, Any] | None:
        """Held-out evaluation of the current weights; None when it is not due. Collective over all ranks.

        Sampling seeds are the same at every evaluation of every run, so differences come from the weights.
        """
        cfg, last = self._recipe.evaluate, self._recipe.train.num_rollout_steps
        if state.rollout_step % cfg.every and state.rollout_step != last:
            return None
        return self._wait_for(lambda worker: worker.evaluation(state.rollout_step))

    def save(self, groups: list[RolloutGroup], rollout_step: int) -> None:
        """Keep a step's scored groups with the run; rank 0 writes."""
        if self._worker is not None:
            save_groups(groups, step_file(self._recipe.run_dir / "rollouts", rollout_step))

    def close(self) -> None:
        """End what is still being sampled."""
        if self._worker is not None:
            self._worker.close()

    def _wait_for(self, begin: Callable[[_Worker], Future[T]]) -> T:
        """Wait together, in turns short enough for any collective's limit, and let restarted servers join."""

        def turn() -> tuple[T] | None:
            assert self._worker is not None
            return self._worker.poll(begin(self._worker))

        while (outcome := self._on_rank_0(turn)) is None:
            self._bring_up()
        return outcome[0]


class _Worker:
    """Rank 0's prompts, client and scorer. The trainer's thread begins futures, the worker's own fills them."""

    def __init__(self, recipe: Recipe, fleet: Fleet, *, is_trained: bool) -> None:
        self._recipe, self._fleet, self._is_trained = recipe, fleet, is_trained
        tokenizer = load_tokenizer(recipe.model.hf_dir)
        self._stream = PromptStream(recipe.data, tokenizer, split="train", seed=recipe.seed)
        self._evaluation_prompts = evaluation_prompts(
            recipe.data, tokenizer, num_prompts=recipe.evaluate.num_prompts
        )
        hf_config = read_config(Path(recipe.model.hf_dir))
        self._routes = RouteFormat.of(hf_config) if recipe.loss.routing_replay == "r3" else None
        vocabulary = Vocabulary(
            size=int(hf_config["vocab_size"]),
            stop_token_ids=stop_token_ids(recipe, int(tokenizer.eos_token_id)),
            decode=lambda ids: str(tokenizer.decode(list(ids))),
            encode=lambda text: tokenize(tokenizer, text),
        )
        self._client = Client(fleet, recipe, vocabulary)
        self._futures: dict[str, Future[Any]] = {}
        self._last_begun = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._client.__aenter__(), self._loop).result()

    def step(self, rollout_step: int) -> Future[Step]:
        """One step's groups; begins all steps up to the one that may be sampled by now."""
        look_ahead = self._recipe.cluster.max_policy_lag if self._is_trained else 0
        last = min(rollout_step + look_ahead, self._recipe.train.num_rollout_steps)
        for step in range(self._last_begun + 1, last + 1):
            prompts = self._stream.take(_prompts_per_step(self._recipe))
            self._begin(f"step {step}", self._sample_step(step, prompts))
            self._last_begun = step
        return self._futures[f"step {rollout_step}"]

    def evaluation(self, rollout_step: int) -> Future[dict[str, Any]]:
        """The held-out evaluation of the weights after a step."""
        name = f"evaluation {rollout_step}"
        if name not in self._futures:
            self._begin(name, self._evaluate(rollout_step))
        return self._futures[name]

    def _begin(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        self._futures[name] = asyncio.run_coroutine_threadsafe(work, self._loop)

    def poll(self, future: Future[T]) -> tuple[T] | None:
        """Its result, boxed; None after TICK_S, or sooner when a server wants weights."""
        deadline = time.monotonic() + TICK_S
        self._client.may_wait = True
        while not future.done() and time.monotonic() < deadline and not self._fleet.wanting():
            wait([future], timeout=POLL_S)
        self._client.may_wait = False  # nobody makes a server ready until the trainer is back
        if not future.done():
            return None
        self._futures = {name: other for name, other in self._futures.items() if other is not future}
        return (future.result(),)

    async def _sample_step(self, rollout_step: int, prompts: list[Prompt]) -> Step:
        cfg = self._recipe.rollout
        asked: list[Prompt] = []

        def seeds_of(prompt: Prompt) -> list[int]:
            members = range(cfg.group_size)
            return [sampling_seed(self._recipe.seed, rollout_step, prompt.prompt_id, member) for member in members]

        def ask(prompt: Prompt) -> Coroutine[Any, Any, RolloutGroup]:
            asked.append(prompt)
            return self._sample_group(prompt, seeds_of(prompt))

        choice = await choose_groups(prompts, ask, cfg)
        events = self._client.take_events()
        report = RolloutReport(
            num_asked=cfg.group_size * len(asked),
            num_zero_spread=sum(len(group.rollouts) for group in choice.zero_spread),
            num_surplus=cfg.group_size * choice.num_surplus,
            num_retries=events["retries"],
            num_continued=events["continued"],
            num_retracted=events["retracted"],
            num_rejected=events["rejected"],
        )
        check_totals(choice.groups, report, seeds_of)
        groups = choice.groups
        if self._is_trained:
            oldest_version = rollout_step - 1 - self._recipe.cluster.max_policy_lag
            groups = [mark_stale(group, oldest_version) for group in groups]
        if self._recipe.reward.permute:
            groups = score_groups(groups, permute_seed=_permute_seed(self._recipe, rollout_step))
        return groups, report

    async def _sample_group(self, prompt: Prompt, seeds: list[int]) -> RolloutGroup:
        cfg = self._recipe.rollout
        group = await self._client.sample_group(
            prompt, seeds, temperature=cfg.temperature, routes=self._routes
        )
        group = mark_too_short(group, cfg.min_response_tokens)
        return (await _scored([group]))[0]

    async def _evaluate(self, rollout_step: int) -> dict[str, Any]:
        cfg = self._recipe.evaluate

        def sample(prompt: Prompt) -> Coroutine[Any, Any, RolloutGroup]:
            seeds = [sampling_seed(EVALUATION_SEED, 0, prompt.prompt_id, member) for member in range(cfg.num_samples)]
            return self._client.sample_group(prompt, seeds, temperature=cfg.temperature)

        tasks = [asyncio.ensure_future(sample(prompt)) for prompt in self._evaluation_prompts]
        try:
            groups = await _scored(await asyncio.gather(*tasks))
        finally:
            await end(tasks)
        save_groups(groups, step_file(self._recipe.run_dir / "evaluations", rollout_step))
        return asdict(summarize(groups))

    def close(self) -> None:
        """Cancel what runs, close connections, end the thread."""

        async def end_all() -> None:
            await end([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])
            await self._client.__aexit__(None, None, None)

        asyncio.run_coroutine_threadsafe(end_all(), self._loop).result(timeout=CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _scored(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Scored in another thread: a scorer may take its time, and requests must not wait for it."""
    return await asyncio.to_thread(score_groups, groups, permute_seed=None)


def _permute_seed(recipe: Recipe, rollout_step: int) -> int | None:
    """Of the control arm, whose rewards are permuted over the step's groups."""
    return recipe.seed * PERMUTATION_SEEDS + rollout_step if recipe.reward.permute else None


def _prompts_per_step(recipe: Recipe) -> int:
    """Prompts of the stream that belong to one rollout step, used or not: so steps do not wait for each other, and
    which prompts a step gets does not depend on how the ones before went."""
    cfg = recipe.rollout
    if not cfg.dynamic_sampling:
        return cfg.num_prompts
    least = cfg.num_prompts + cfg.oversample_prompts
    return cfg.max_prompts_per_step or max(DEFAULT_MAX_PROMPTS * cfg.num_prompts, least)


def stop_token_ids(recipe: Recipe, eos_token_id: int) -> frozenset[int]:
    """Tokens that end a response: the tokenizer's, the recipe's, and what SGLang reads from the model's files."""
    ids = {eos_token_id, *recipe.rollout.stop_token_ids}
    for name in ("config.json", "generation_config.json"):
        path = Path(recipe.model.hf_dir) / name
        eos = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
