"""The objectives once more, response by response in plain Python floats, from the published equations alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_megatron.config import LossConfig


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response's unmasked tokens; log-probs in nats."""

    logprobs: Sequence[float]
    old_logprobs: Sequence[float]
    rollout_logprobs: Sequence[float]
    advantages: Sequence[float]

    @property
    def advantage(self) -> float:
        """Of the whole response."""
        return self.advantages[0]

    @property
    def log_ratios(self) -> list[float]:
        """Per token."""
        return [new - old for new, old in zip(self.logprobs, self.old_logprobs, strict=True)]


def _exp(x: float) -> float:
    return math.exp(max(-20.0, min(20.0, x)))


def _clip_term(ratio: float, advantage: float, cfg: LossConfig) -> float:
    assert cfg.clip_low is not None and cfg.clip_high is not None
    bounded = max(1.0 - cfg.clip_low, min(1.0 + cfg.clip_high, ratio))
    return min(ratio * advantage, bounded * advantage)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))


def terms(r: Response, cfg: LossConfig, frozen: Response) -> list[float]:
    """Each token's term as a function of r.logprobs.

    Args:
        r: the response.
        cfg: name and band.
        frozen: the same response where the equation has a stop-gradient; equal to r for values.
    """
    length, deltas, frozen_deltas = len(r.logprobs), r.log_ratios, frozen.log_ratios
    match cfg.name:
        case "gspo":
            return [_clip_term(_exp(math.fsum(deltas) / length), r.advantage, cfg)] * length
        case "gspo_token":
            s = _exp(math.fsum(frozen_deltas) / length)
            pairs = zip(deltas, frozen_deltas, r.advantages, strict=True)
            return [_clip_term(s * math.exp(d - f), a, cfg) for d, f, a in pairs]
        case "grpo" | "dr_grpo" | "dapo":
            return [_clip_term(_exp(d), a, cfg) for d, a in zip(deltas, r.advantages, strict=True)]
        case "cispo":
            assert cfg.clip_high is not None
            rows = zip(frozen_deltas, r.advantages, r.logprobs, strict=True)
            return [min(_exp(f), 1.0 + cfg.clip_high) * a * logprob for f, a, logprob in rows]
        case "gmpo":
            assert cfg.clip_low is not None and cfg.clip_high is not None
            a = r.advantage
            low, high = (-cfg.clip_low if a < 0 else -math.inf), (cfg.clip_high if a > 0 else math.inf)
            return [_exp(math.fsum(max(low, min(high, d)) for d in deltas) / length) * a] * length
        case "sapo":
            assert cfg.tau_positive is not None and cfg.tau_negative is not None
            taus = [cfg.tau_positive if a > 0 else cfg.tau_negative for a in r.advantages]
            rows = zip(deltas, r.advantages, taus, strict=True)
            return [4.0 / tau * _sigmoid(tau * (_exp(d) - 1.0)) * a for d, a, tau in rows]
        case _:  # minirl
            values = []
            rows = zip(r.logprobs, frozen.logprobs, r.rollout_logprobs, r.advantages, frozen_deltas, strict=True)
            for new, old_new, mu, a, f in rows:
                assert cfg.clip_low is not None and cfg.clip_high is not None
                kept = not ((a > 0 and _exp(f) > 1.0 + cfg.clip_high) or (a < 0 and _exp(f) < 1.0 - cfg.clip_low))
                values.append(min(_exp(old_new - mu), 5.0) * a * (1.0 + new - old_new) if kept else 0.0)
            return values


_LENGTH_MEAN = ("gspo", "gspo_token", "grpo", "gmpo", "sapo")


def loss_sum(responses: Sequence[Response], cfg: LossConfig, frozen: Sequence[Response] | None = None) -> float:
    """Minus the sum over responses, before division by the batch's count."""
    total = []
    for r, f in zip(responses, frozen or responses, strict=True):
        if r.logprobs:
            total.append(math.fsum(terms(r, cfg, f)) / (len(r.logprobs) if cfg.name in _LENGTH_MEAN else 1))
    return -math.fsum(total)
