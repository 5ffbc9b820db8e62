"""The groups of one rollout step: which prompts are sampled, which groups are taken, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_megatron.config import RolloutConfig
from gspo_megatron.engine import RolloutError
from gspo_megatron.types import STALE, TOO_SHORT, Prompt, Rollout, RolloutGroup, RolloutReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What came of a rollout step's prompts."""

    groups: list[RolloutGroup]
    """Taken, in the order of the prompts."""
    num_prompts: int
    """Sampled or begun."""
    zero_spread: list[RolloutGroup]
    """Dropped by dynamic sampling."""
    num_surplus: int
    """Prompts, finished or aborted, that were sampled ahead and not needed."""


async def choose_groups(
    prompts: Sequence[Prompt], sample: Callable[[Prompt], Awaitable[RolloutGroup]], cfg: RolloutConfig
) -> Choice:
    """Sample prompts until cfg.num_prompts groups are found.

    With cfg.dynamic_sampling these are the first ones, in the order of the prompts, whose rewards are not all equal;
    when the prompts do not suffice, the first ones with equal rewards fill up. How fast a group came plays no part.
    cfg.oversample_prompts more than are needed are under way at any time.

    Args:
        prompts: as many as may be used, in order.
        sample: gives a prompt's scored group.
        cfg: num_prompts, oversample_prompts and dynamic_sampling are used.
    """
    finished: asyncio.Queue[asyncio.Task[RolloutGroup]] = asyncio.Queue()
    tasks: list[asyncio.Task[RolloutGroup]] = []
    taken: list[int] = []
    flat: list[int] = []
    num_flat = num_decided = 0
    try:
        while len(taken) < cfg.num_prompts and num_decided < len(prompts):
            wanted = min(len(prompts), cfg.num_prompts + cfg.oversample_prompts + num_flat)
            for prompt in prompts[len(tasks) : wanted]:
                task = asyncio.ensure_future(sample(prompt))
                task.add_done_callback(finished.put_nowait)
                tasks.append(task)
            group = (await finished.get()).result()
            num_flat += not _is_wanted(group, cfg)
            while num_decided < len(tasks) and tasks[num_decided].done() and len(taken) < cfg.num_prompts:
                (taken if _is_wanted(tasks[num_decided].result(), cfg) else flat).append(num_decided)
                num_decided += 1
    finally:
        await end(tasks)
    num_filled = cfg.num_prompts - len(taken)
    return Choice(
        groups=[tasks[i].result() for i in sorted(taken + flat[:num_filled])],
        num_prompts=len(tasks),
        zero_spread=[tasks[i].result() for i in flat[num_filled:]],
        num_surplus=len(tasks) - num_decided,
    )


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel those that still run; what becomes of them is nobody's concern any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_wanted(group: RolloutGroup, cfg: RolloutConfig) -> bool:
    """Whether dynamic sampling takes it; rewards are the task's own and those of turns, of responses not filtered."""
    rewards = {(rollout.reward, rollout.turn_rewards) for rollout in group.rollouts if not rollout.is_filtered}
    return not cfg.dynamic_sampling or len(rewards) > 1


def mark_too_short(group: RolloutGroup, min_response_tokens: int) -> RolloutGroup:
    """Filter responses of fewer sampled tokens, EOS counted."""

    def marked(rollout: Rollout) -> Rollout:
        is_short = rollout.num_sampled_tokens < min_response_tokens
        return replace(rollout, filtered_because=TOO_SHORT) if is_short else rollout

    return replace(group, rollouts=tuple(marked(rollout) for rollout in group.rollouts))


def mark_stale(group: RolloutGroup, oldest_version: int) -> RolloutGroup:
    """Filter responses with a token of an older weight_version."""
    return replace(
        group,
        rollouts=tuple(
            replace(rollout, filtered_because=STALE) if min(rollout.weight_versions) < oldest_version else rollout
            for rollout in group.rollouts
        ),
    )


def check_totals(
    groups: Sequence[RolloutGroup], report: RolloutReport, seeds_of: Callable[[Prompt], Sequence[int]]
) -> None:
    """Hold the responses that are handed on against those that were asked for.

    Raises:
        RolloutError: a response is missing, surplus or another one's.
    """
    for group in groups:
        seeds, wanted = [rollout.sampling_seed for rollout in group.rollouts], list(seeds_of(group.prompt))
        if seeds != wanted:
            raise RolloutError(
                f"prompt {group.prompt.prompt_id}: has responses with the sampling seeds {seeds}, wants {wanted}"
            )
    num_handed_on = sum(len(group.rollouts) for group in groups)
    num_dropped = report.num_zero_spread + report.num_surplus
    if num_handed_on + num_dropped != report.num_asked:
        raise RolloutError(
            f"{report.num_asked} responses were asked for, {num_handed_on} are handed on and {num_dropped} dropped: "
            f"{report.num_asked - num_handed_on - num_dropped} are lost"
        )
    repeated = len(groups) - len({group.prompt.prompt_id for group in groups})
    if repeated:
        raise RolloutError(f"{repeated} of {len(groups)} groups answer a prompt that another one answers")
