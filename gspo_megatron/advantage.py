"""Rewards of one prompt's responses -> group-relative advantages (arXiv:2507.18071v2, section 2). Plain floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    With cfg.turn_rewards the rewards of turns (rollout.multi_turn) give each turn an advantage of its own, which its
    tokens have beside A_i: with R_ik = r_ik + r_i,k+1 + ... to the response's last turn,

        token_advantages = A_i + A_ik,    A_ik = (R_ik - mean) / (std + eps),

    mean and std over the R_jk of the members j that have a turn k and count above. A turn that no other member has, or
    in which all R_jk are equal, has A_ik = 0 exactly; where that is so everywhere GSPO-token equals GSPO. A group
    without rewards of turns is left alone.

    Args:
        groups: scored.
        cfg: statistics, filter and shaping.
        max_response_tokens: where sampling stopped, tokens.
        kl: the recipe's penalty; without effect here where its place is `loss`.

    Raises:
        ValueError: a rollout has no reward, a reward or shaped reward that is not finite, no log-probs of the
            reference although kl needs them, rewards of turns without cfg.turn_rewards, or turns that are not those
            of its tokens.
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
            _check_turns(rollout, cfg)
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
    if any(rollout.turn_rewards is not None for rollout in rollouts):
        rollouts = _add_turn_advantages(rollouts, is_counted, cfg)
    return replace(group, rollouts=tuple(rollouts))


def _check_turns(rollout: Rollout, cfg: AdvantageConfig) -> None:
    if rollout.turn_rewards is None:
        return
    if not cfg.turn_rewards:
        raise ValueError(
            f"turn_rewards are {rollout.turn_rewards}; set advantage.turn_rewards to true, or let the function of "
            "rollout.multi_turn give none"
        )
    lengths, num_tokens = rollout.turn_lengths, rollout.num_sampled_tokens
    if lengths is None or len(lengths) != len(rollout.turn_rewards) or sum(lengths) != num_tokens:
        raise ValueError(
            f"turn_lengths are {lengths}, want {len(rollout.turn_rewards)} as turn_rewards that add up to the "
            f"{num_tokens} sampled tokens"
        )
    if not all(math.isfinite(reward) for reward in rollout.turn_rewards):
        raise ValueError(f"turn_rewards are {rollout.turn_rewards}, want finite numbers")


def _add_turn_advantages(rollouts: list[Rollout], is_counted: list[bool], cfg: AdvantageConfig) -> list[Rollout]:
    """The group's rollouts, filtered ones apart, with token_advantages."""
    lengths = [r.turn_lengths or (r.num_sampled_tokens,) for r in rollouts]
    rewards = [r.turn_rewards or (0.0,) * len(n) for r, n in zip(rollouts, lengths, strict=True)]
    advantages = [[0.0] * len(n) for n in lengths]
    for turn in range(max(map(len, lengths))):
        members = [i for i, counted in enumerate(is_counted) if counted and turn < len(lengths[i])]
        # Its terms add up to the return, as those of a shaped reward do.
        for i, advantage in zip(members, _advantages([rewards[i][turn:] for i in members], cfg), strict=True):
            advantages[i][turn] = advantage
    return [
        r if r.is_filtered else replace(r, token_advantages=_token_advantages(r, n, of_turns))
        for r, n, of_turns in zip(rollouts, lengths, advantages, strict=True)
    ]


def _token_advantages(rollout: Rollout, lengths: tuple[int, ...], of_turns: list[float]) -> tuple[float, ...]:
    """One per response token: the response's plus its turn's; 0 on tokens that were not sampled."""
    outcome = rollout.advantage or 0.0
    sampled = iter([outcome + a for a, length in zip(of_turns, lengths, strict=True) for _ in range(length)])
    mask = rollout.response_mask or (True,) * len(rollout.response_ids)
    return tuple(next(sampled) if is_sampled else 0.0 for is_sampled in mask)


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


def _advantages(terms: Sequence[tuple[float, ...]], cfg: AdvantageConfig) -> list[float]:
    """Relative to each other; what is compared is the sum of each one's terms."""
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
