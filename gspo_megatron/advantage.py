"""Rewards of one prompt's responses -> group-relative advantages (arXiv:2507.18071v2, section 2). Plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

from gspo_megatron.config import AdvantageConfig
from gspo_megatron.types import RolloutGroup


def add_advantages(groups: list[RolloutGroup], cfg: AdvantageConfig) -> list[RolloutGroup]:
    """The same groups with A_i = (r_i - mean) / (std + eps) on each rollout, mean and std over its own group.

    The paper divides by the standard deviation alone and states neither ddof nor an epsilon; both are recipe keys.
    With cfg.std False the advantage is r_i - mean. A group without spread, and so one with a single member, gets
    exactly 0.

    Raises:
        ValueError: a rollout has no reward, or one that is not finite.
    """
    return [_add_group_advantages(group, cfg) for group in groups]


def _add_group_advantages(group: RolloutGroup, cfg: AdvantageConfig) -> RolloutGroup:
    rewards = []
    for member, rollout in enumerate(group.rollouts):
        if rollout.reward is None or not math.isfinite(rollout.reward):
            raise ValueError(
                f"prompt {group.prompt.prompt_id}, member {member}: reward is {rollout.reward}, "
                "wants a finite number; score every rollout before advantages"
            )
        rewards.append(rollout.reward)
    advantages = _advantages(rewards, cfg)
    rollouts = tuple(r.with_advantage(a) for r, a in zip(group.rollouts, advantages, strict=True))
    return replace(group, rollouts=rollouts)


def _advantages(rewards: list[float], cfg: AdvantageConfig) -> list[float]:
    # Decided on the rewards: the mean of equal values may round, which eps would blow up to an advantage.
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    if not cfg.std:
        return [r - mean for r in rewards]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - cfg.ddof))
    return [(r - mean) / (std + cfg.eps) for r in rewards]
