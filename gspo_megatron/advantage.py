"""Rewards of one prompt's responses -> group-relative advantages (arXiv:2507.18071v2, section 2). Plain floats."""

from __future__ import annotations

import math
from dataclasses import replace

from gspo_megatron.config import AdvantageConfig, KlConfig
from gspo_megatron.types import MAX_EXPONENT, Rollout, RolloutGroup

OVERLONG = "overlong"
"""Rollout.filtered_because of a response that overlong_filter takes out."""
ROUNDING = 1e-12
"""A spread of shaped rewards below this share of their largest term is the rounding of their sums."""


def add_advantages(
    groups: list[RolloutGroup], cfg: AdvantageConfig, *, max_response_tokens: int, kl: KlConfig | None = None
) -> list[RolloutGroup]:
    """The same groups with A_i = (r_i - mean) / (std + eps) on each rollout, mean and std over its own group.

    The paper divides by the standard deviation alone and states neither ddof nor an epsilon; both are recipe keys.
    With cfg.std False the advantage is r_i - mean. A group without spread, and so one with a single member, gets
    exactly 0.

    r_i is the shaped reward: the task's own, which the record keeps, less DAPO's punishment of length with
    cfg.overlong_buffer_tokens, less kl.coef times response_kl with kl.place `reward`. With cfg.overlong_filter a
    response that ended at max_response_tokens is filtered and gets exactly 0; `before_statistics` also leaves its
    reward out of mean and std. One that was filtered for another reason gets 0 and is left out of them, too.

    Args:
        groups: scored.
        cfg: statistics, filter and shaping.
        max_response_tokens: where sampling stopped, tokens.
        kl: the recipe's penalty; without effect here where its place is `loss`.

    Raises:
        ValueError: a rollout has no reward, a reward or shaped reward that is not finite, or no log-probs of the
            reference although kl needs them.
    """
    return [_add_group_advantages(group, cfg, max_response_tokens, kl) for group in groups]


def response_kl(rollout: Rollout, estimator: str) -> float:
    """KL(mu || ref) of one response, nats: the sum of the estimator over the tokens that were sampled.

    As mismatch.kl_estimate, with SGLang's own log-probs in the place of log pi: they are of the policy that sampled.

    Raises:
        ValueError: there are no log-probs of the reference, or not one for each token.
    """
    num_tokens = len(rollout.response_ids)
    if rollout.ref_logprobs is None or len(rollout.ref_logprobs) != num_tokens:
        got = None if rollout.ref_logprobs is None else f"{len(rollout.ref_logprobs)} values"
        raise ValueError(f"ref_logprobs is {got}, wants {num_tokens} values; add them before advantages")
    mask = (True,) * num_tokens if rollout.response_mask is None else rollout.response_mask
    tokens = zip(rollout.rollout_logprobs, rollout.ref_logprobs, mask, strict=True)
    return math.fsum(_kl_estimate(logprob - ref, estimator) for logprob, ref, sampled in tokens if sampled)


def _kl_estimate(d: float, estimator: str) -> float:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    d = max(d, -MAX_EXPONENT)
    return math.expm1(-d) + d


def _add_group_advantages(
    group: RolloutGroup, cfg: AdvantageConfig, max_response_tokens: int, kl: KlConfig | None
) -> RolloutGroup:
    terms = []
    for member, rollout in enumerate(group.rollouts):
        try:
            terms.append(_reward_terms(rollout, cfg, max_response_tokens, kl))
        except ValueError as error:
            raise ValueError(f"prompt {group.prompt.prompt_id}, member {member}: {error}") from error
    reasons = [_filter_reason(r, cfg) for r in group.rollouts]
    counted_reasons = (None, OVERLONG) if cfg.overlong_filter == "after_statistics" else (None,)
    is_counted = [reason in counted_reasons for reason in reasons]
    advantages = iter(_advantages([t for t, counted in zip(terms, is_counted, strict=True) if counted], cfg))
    rollouts = []
    for rollout, reason, counted in zip(group.rollouts, reasons, is_counted, strict=True):
        advantage = next(advantages) if counted else 0.0
        rollouts.append(replace(rollout, advantage=0.0 if reason else advantage, filtered_because=reason))
    return replace(group, rollouts=tuple(rollouts))


def _filter_reason(rollout: Rollout, cfg: AdvantageConfig) -> str | None:
    """Why it is filtered: for an earlier reason, or as overlong by this recipe."""
    if rollout.filtered_because not in (None, OVERLONG):
        return rollout.filtered_because
    return OVERLONG if cfg.overlong_filter != "off" and rollout.finish_reason == "length" else None


def _reward_terms(
    rollout: Rollout, cfg: AdvantageConfig, max_response_tokens: int, kl: KlConfig | None
) -> tuple[float, float, float]:
    """What adds up to the shaped reward: the task's reward, the punishment of length, the KL penalty."""
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(f"reward is {rollout.reward}, wants a finite number; score every rollout before advantages")
    overlong = _overlong_term(len(rollout.response_ids), cfg.overlong_buffer_tokens, max_response_tokens)
    penalty = 0.0
    if kl is not None and kl.place == "reward":
        penalty = -kl.coef * response_kl(rollout, kl.estimator)
        if not math.isfinite(penalty):
            raise ValueError(f"the KL penalty of its reward is {penalty}, wants a finite number")
    return rollout.reward, overlong, penalty


def _overlong_term(num_tokens: int, buffer_tokens: int, max_tokens: int) -> float:
    """arXiv:2503.14476, Eq. 13: 0 up to max - buffer, falling linearly to -1 at max, -1 beyond; 0 without buffer."""
    if buffer_tokens == 0:
        return 0.0
    return max(-1.0, min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens))


def _advantages(terms: list[tuple[float, float, float]], cfg: AdvantageConfig) -> list[float]:
    rewards = [math.fsum(t) for t in terms]
    # Decided on the rewards: the mean of equal values may round, which eps would blow up to an advantage. Sums of
    # terms that are equal on paper round too.
    largest = max((abs(x) for t in terms for x in t), default=0.0)
    if len(rewards) < 2 or max(rewards) - min(rewards) <= ROUNDING * largest:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    if not cfg.std:
        return [r - mean for r in rewards]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - cfg.ddof))
    return [(r - mean) / (std + cfg.eps) for r in rewards]
