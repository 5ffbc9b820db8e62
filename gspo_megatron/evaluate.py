"""Held-out evaluation: scored groups of fixed prompts -> pass@1 averaged over samplings, with its 95% interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gspo_megatron.types import Rollout, RolloutGroup

Z_95 = 1.959963984540054
"""97.5% quantile of the standard normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What one evaluation says about a policy."""

    accuracy: float
    """Share of exact responses, in [0, 1]: pass@1, the mean over prompts and samplings."""
    low: float
    """Lower end of the 95% interval of accuracy."""
    high: float
    """Upper end of the 95% interval of accuracy."""
    num_prompts: int
    num_samples: int
    """Responses per prompt."""
    mean_reward: float
    """Mean of the scorer's rewards; above accuracy where the scorer is tolerant."""
    mean_response_tokens: float
    """Sampled tokens per response, EOS included."""
    truncated_fraction: float
    """Share of responses that ended at max_response_tokens."""
    distinct_fraction: float
    """Distinct response texts / responses: near 0 when a policy says the same to everything."""


def summarize(groups: Sequence[RolloutGroup]) -> Evaluation:
    """Reduce scored groups to an Evaluation.

    The interval is Wilson's with one response per prompt and the normal one over per-prompt means with more, since
    responses to one prompt are not independent.

    Args:
        groups: scored, one a prompt, with equally many responses each.

    Raises:
        ValueError: no groups, groups of different or no size, a prompt that comes twice, or an unscored rollout.
    """
    num_samples = _common_group_size(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    exact_by_prompt = [fmean(_is_exact(rollout, group) for rollout in group.rollouts) for group in groups]
    accuracy = fmean(exact_by_prompt)
    if num_samples == 1:
        low, high = wilson_interval(round(sum(exact_by_prompt)), len(groups))
    else:
        low, high = clustered_interval(exact_by_prompt)
    return Evaluation(
        accuracy=accuracy,
        low=low,
        high=high,
        num_prompts=len(groups),
        num_samples=num_samples,
        mean_reward=fmean(_reward(rollout, group) for group in groups for rollout in group.rollouts),
        mean_response_tokens=fmean(rollout.num_sampled_tokens for rollout in rollouts),
        truncated_fraction=fmean(rollout.finish_reason == "length" for rollout in rollouts),
        distinct_fraction=len({rollout.text for rollout in rollouts}) / len(rollouts),
    )


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share p = k / n of independent trials.

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), z = 1.95996. Unlike the normal interval it
    keeps a width at p = 0 and p = 1.

    Raises:
        ValueError: not 0 <= num_successes <= num_trials with num_trials > 0.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(
            f"wilson_interval: got {num_successes} successes of {num_trials} trials, wants 0 <= k <= n, n > 0"
        )
    p, n = num_successes / num_trials, num_trials
    centre = p + Z_95**2 / (2 * n)
    half = Z_95 * math.sqrt(p * (1 - p) / n + Z_95**2 / (4 * n**2))
    scale = 1 + Z_95**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def clustered_interval(means: Sequence[float]) -> tuple[float, float]:
    """Normal 95% interval of the mean of per-prompt means m_1..m_n, clipped to [0, 1].

    mean -+ z s / sqrt(n), with s the sample standard deviation (ddof 1) of the m_i: the prompts are the independent
    units, however many responses each has. One prompt says nothing about the spread: [0, 1].
    """
    if len(means) < 2:
        return 0.0, 1.0
    centre, half = fmean(means), Z_95 * stdev(means) / math.sqrt(len(means))
    return max(0.0, centre - half), min(1.0, centre + half)


def _common_group_size(groups: Sequence[RolloutGroup]) -> int:
    sizes = {len(group.rollouts) for group in groups}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"evaluation got {len(groups)} groups of {sorted(sizes)} responses, wants at least one group, "
            "all with the same number of responses (evaluate.num_samples)"
        )
    if len({group.prompt.prompt_id for group in groups}) != len(groups):
        raise ValueError(f"evaluation got {len(groups)} groups with repeated prompts, wants one group a prompt")
    return sizes.pop()


def _is_exact(rollout: Rollout, group: RolloutGroup) -> bool:
    if rollout.is_exact is None:
        raise ValueError(f"evaluation got an unscored rollout of prompt {group.prompt.text!r}: score the groups first")
    return rollout.is_exact


def _reward(rollout: Rollout, group: RolloutGroup) -> float:
    if rollout.reward is None:
        raise ValueError(f"evaluation got an unscored rollout of prompt {group.prompt.text!r}: score the groups first")
    return rollout.reward
