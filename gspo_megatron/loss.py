"""The objectives: GSPO (arXiv:2507.18071v2), its relatives for comparison, and supervised cold start. No Megatron.

A recipe name is a row of OBJECTIVES: a function that gives every token its term, and an aggregation of those terms.
The loss is -(sum of scaled terms) / denominator; the denominator spans data-parallel ranks and microbatches, so the
functions here return sums. Everything is float32 or wider: bfloat16 rounds a band of 3e-4 around 1 away.

A ratio over a whole response is held in the token form of GSPO-token (Eq. 14): its value on each token, its gradient
through that token's log-prob alone. Averaged over the response that is the gradient of the ratio itself. So under
context parallelism (CP) each rank's gradient is that of its own tokens, and one number per response is all-reduced:
the sum of log-ratios (every rank knows the count of tokens).

Shapes: B = responses of the microbatch, T = tokens on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import LossConfig
from gspo_megatron.mismatch import correction_weights, kl_estimate
from gspo_megatron.types import MAX_EXPONENT, Microbatch, TrainBatch

MINIRL_MAX_WEIGHT = 5.0
"""MiniRL's truncation of pi_theta / mu (arXiv:2512.01374, section 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss function hands to the optimizer step."""

    loss_sum: Tensor
    """Scalar with gradient. Not yet divided by the denominator; sums over the CP group count each token once."""
    per_response: dict[str, Tensor]
    """Detached [B] float32. advantage and length (tokens) are the whole response's; the others are of this rank's
    tokens and add up over the CP group: log_ratio (log s, nats per token, not clamped), clipped_tokens (gradient
    stopped by the clip), outside_tokens (ratio outside the band whatever the sign of the advantage), clamped_tokens
    (exponent beyond the overflow guard, gradient 0), corrected_tokens (the correction's bound acted), kl_sum (nats).
    sft: length only. A response without tokens, which a dummy sequence is too, reads 0 except in its advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """What an objective sees: [T] float32 or wider, 0 outside the responses."""

    logprobs_T: Tensor
    """log pi_theta, nats, with gradient."""
    log_ratio_T: Tensor
    """log pi_theta - log pi_old, nats, with gradient."""
    rollout_logprobs_T: Tensor
    """log mu, nats: SGLang's own."""
    advantages_T: Tensor
    """Each token's own."""
    response_advantages_T: Tensor
    """The response's, on each of its tokens."""
    mean: Callable[[Tensor], Tensor]
    """[T] values -> [T] their mean over the response that owns the token, detached. Collective over the CP group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What an objective returns."""

    term_T: Tensor
    """[T] with gradient; to be maximised."""
    clipped_T: Tensor
    """[T] bool. The clip stopped this token's gradient."""
    outside_T: Tensor
    """[T] bool. The ratio is outside the band, whatever the sign of the advantage."""
    clamped_T: Tensor
    """[T] bool. The exponent is beyond +-MAX_EXPONENT."""


def gspo(x: Tokens, cfg: LossConfig) -> Terms:
    """GSPO: min(s_i A_i, clip(s_i) A_i), s_i = exp(mean log-ratio) (Eq. 5 and 7)."""
    return _clipped(x.mean(x.log_ratio_T), x.log_ratio_T, x.response_advantages_T, cfg)


def gspo_token(x: Tokens, cfg: LossConfig) -> Terms:
    """GSPO-token: as GSPO with each token's own advantage, whose sign decides the clip (Eq. 13 and 14)."""
    return _clipped(x.mean(x.log_ratio_T), x.log_ratio_T, x.advantages_T, cfg)


def ppo(x: Tokens, cfg: LossConfig) -> Terms:
    """GRPO, Dr.GRPO and DAPO: ratio and clip per token (arXiv:2507.18071v2, Eq. 2)."""
    return _clipped(x.log_ratio_T.detach(), x.log_ratio_T, x.advantages_T, cfg)


def cispo(x: Tokens, cfg: LossConfig) -> Terms:
    """CISPO (arXiv:2506.13585, Eq. 4): sg[min(w_t, 1 + clip_high)] A log pi; no token loses its gradient."""
    ratio_T, clamped_T = _ratio(x.log_ratio_T.detach(), x.log_ratio_T.detach())
    upper = 1.0 + _bound(cfg.clip_high)
    return Terms(
        term_T=ratio_T.clamp(max=upper) * x.advantages_T * x.logprobs_T,
        clipped_T=torch.zeros_like(clamped_T),
        outside_T=ratio_T > upper,
        clamped_T=clamped_T,
    )


def gmpo(x: Tokens, cfg: LossConfig) -> Terms:
    """GMPO (arXiv:2507.20673): geometric mean of token ratios, each clipped in log space on its advantage's side."""
    log_T, advantages_T = x.log_ratio_T, x.response_advantages_T
    above_T, below_T = log_T > _bound(cfg.clip_high), log_T < -_bound(cfg.clip_low)
    clipped_T = (above_T & (advantages_T > 0)) | (below_T & (advantages_T < 0))
    bounded_T = log_T.detach().clamp(-_bound(cfg.clip_low), _bound(cfg.clip_high))
    log_T = torch.where(clipped_T, bounded_T, log_T)
    ratio_T, clamped_T = _ratio(x.mean(log_T), log_T)
    return Terms(
        term_T=ratio_T * advantages_T, clipped_T=clipped_T, outside_T=above_T | below_T, clamped_T=clamped_T
    )


def sapo(x: Tokens, cfg: LossConfig) -> Terms:
    """SAPO (arXiv:2511.20347): a soft gate (4 / tau) sigmoid(tau (w_t - 1)) in place of ratio and clip."""
    ratio_T, clamped_T = _ratio(x.log_ratio_T.detach(), x.log_ratio_T)
    tau_T = torch.full_like(ratio_T, _bound(cfg.tau_negative))
    tau_T = tau_T.masked_fill(x.advantages_T > 0, _bound(cfg.tau_positive))
    none_T = torch.zeros_like(clamped_T)
    gate_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    return Terms(term_T=gate_T * x.advantages_T, clipped_T=none_T, outside_T=none_T, clamped_T=clamped_T)


def minirl(x: Tokens, cfg: LossConfig) -> Terms:
    """MiniRL (arXiv:2512.01374): sg[min(pi_theta / mu, 5)] A log pi, masked by the clip on pi_theta / pi_old.

    The value is that weight times A; log pi enters by its gradient alone.
    """
    decision = _clipped(x.log_ratio_T.detach(), x.log_ratio_T.detach(), x.advantages_T, cfg)
    log_weight_T = (x.logprobs_T - x.rollout_logprobs_T).detach().clamp(max=math.log(MINIRL_MAX_WEIGHT))
    weight_T, clamped_T = _ratio(log_weight_T, x.logprobs_T)
    return Terms(
        term_T=torch.where(decision.clipped_T, 0.0, weight_T * x.advantages_T),
        clipped_T=decision.clipped_T,
        outside_T=decision.outside_T,
        clamped_T=clamped_T | decision.clamped_T,
    )


@dataclass(frozen=True, slots=True)
class Objective:
    """One row of the table."""

    terms: Callable[[Tokens, LossConfig], Terms]
    aggregation: str
    """sequence_mean: mean over a response's tokens, then over responses. token_mean: mean over all response tokens.
    token_sum: sum over a response's tokens, mean over responses. token_sum_over_limit: that, over
    max_response_tokens."""


OBJECTIVES: dict[str, Objective] = {
    "gspo": Objective(gspo, "sequence_mean"),
    "gspo_token": Objective(gspo_token, "sequence_mean"),
    "grpo": Objective(ppo, "sequence_mean"),
    "dr_grpo": Objective(ppo, "token_sum_over_limit"),
    "dapo": Objective(ppo, "token_mean"),
    "cispo": Objective(cispo, "token_mean"),
    "gmpo": Objective(gmpo, "sequence_mean"),
    "sapo": Objective(sapo, "sequence_mean"),
    "minirl": Objective(minirl, "token_sum"),
}
"""loss.name of the recipe -> objective."""


def policy_loss(
    logprobs_T: Tensor,
    entropy_T: Tensor,
    microbatch: Microbatch,
    cfg: LossConfig,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> LossOutput:
    """Minus the sum of an objective's terms, with the recipe's correction, KL penalty and entropy bonus.

    Every token contributes scale x (weight x term - kl.coef x KL + entropy_coef x entropy), scale being 1 / |y_i| for
    sequence_mean and 1 otherwise. Collective over cp_group.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta of labels_T; carries the gradient.
        entropy_T: [T] float32, nats. Of the distribution that labels_T came from; carries the gradient.
        microbatch: with old_logprobs_T; with ref_logprobs_T for a KL penalty in the loss.
        cfg: the recipe's section.
        cp_group: the ranks that share these responses; None where each rank holds whole responses.

    Raises:
        ValueError: log-probs are missing, differ in shape, or are narrower than float32.
    """
    objective = OBJECTIVES[cfg.name]
    mask_T, index_T, length_B = microbatch.response_mask_T, microbatch.response_index_T, microbatch.response_length_B
    tokens_B = length_B.clamp(min=1)
    old_T = _required(microbatch.old_logprobs_T, "old_logprobs_T", "call add_old_logprobs before the loss")
    logprobs_T, old_T, rollout_T = (
        _masked(value_T, mask_T, name)
        for name, value_T in (
            ("logprobs_T", logprobs_T),
            ("old_logprobs_T", old_T.detach()),
            ("rollout_logprobs_T", microbatch.rollout_logprobs_T.detach()),
        )
    )

    def mean(values_T: Tensor) -> Tensor:
        sum_B = sum_per_response(values_T.detach(), index_T, length_B)
        if cp_group is not None:
            dist.all_reduce(sum_B, group=cp_group)
        return torch.where(mask_T, (sum_B / tokens_B)[index_T], 0.0)

    log_ratio_T = logprobs_T - old_T
    terms = objective.terms(
        Tokens(
            logprobs_T=logprobs_T,
            log_ratio_T=log_ratio_T,
            rollout_logprobs_T=rollout_T,
            advantages_T=torch.where(mask_T, microbatch.advantages_T, 0.0),
            response_advantages_T=torch.where(mask_T, microbatch.advantages_B[index_T], 0.0),
            mean=mean,
        ),
        cfg,
    )
    value_T, corrected_T, kl_T = terms.term_T, torch.zeros_like(mask_T), torch.zeros_like(old_T)
    if cfg.correction is not None:
        weights_T, corrected_T = correction_weights(
            old_T,
            rollout_T,
            cfg.correction,
            response_mask_T=mask_T,
            response_index_T=index_T,
            response_length_B=length_B,
            cp_group=cp_group,
        )
        value_T = value_T * weights_T
    if cfg.kl is not None:
        ref_T = _required(microbatch.ref_logprobs_T, "ref_logprobs_T", "call add_ref_logprobs before make_batches")
        kl_T = kl_estimate(logprobs_T, _masked(ref_T.detach(), mask_T, "ref_logprobs_T"), cfg.kl.estimator)
        if cfg.kl.place == "loss":
            value_T = value_T - cfg.kl.coef * kl_T
    if cfg.entropy_coef:
        value_T = value_T + cfg.entropy_coef * entropy_T
    if aggregation(cfg) == "sequence_mean":
        value_T = value_T / tokens_B[index_T]
    counts = {
        "log_ratio": log_ratio_T / tokens_B[index_T],
        "clipped_tokens": terms.clipped_T,
        "outside_tokens": terms.outside_T,
        "clamped_tokens": terms.clamped_T,
        "corrected_tokens": corrected_T,
        "kl_sum": kl_T,
    }
    return LossOutput(
        loss_sum=-torch.where(mask_T, value_T, 0.0).sum(),
        per_response={"advantage": microbatch.advantages_B.detach().float(), "length": length_B.float()}
        | {
            name: sum_per_response(torch.where(mask_T, v_T.detach().float(), 0.0), index_T, length_B)
            for name, v_T in counts.items()
        },
    )


def aggregation(cfg: LossConfig) -> str:
    """The recipe's, or the objective's own."""
    return cfg.aggregation or OBJECTIVES[cfg.name].aggregation


def denominator(batch: TrainBatch, cfg: LossConfig, *, max_response_tokens: int) -> int:
    """What the whole optimizer step's sum is divided by.

    N, which counts all responses, also empty ones and those whose advantage is 0; response tokens for token_mean;
    N times max_response_tokens for token_sum_over_limit.
    """
    match aggregation(cfg):
        case "token_mean":
            return max(1, batch.num_response_tokens)
        case "token_sum_over_limit":
            return batch.num_responses * max_response_tokens
        case _:
            return batch.num_responses


def sft_loss(logprobs_T: Tensor, entropy_T: Tensor, microbatch: Microbatch) -> LossOutput:
    """Negative log-likelihood of this rank's response tokens, summed, nats. For the cold start.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta of labels_T; carries the gradient.
        entropy_T: not read.
        microbatch: demonstrations; advantages and old log-probs are not read.

    Raises:
        ValueError: logprobs_T does not have the microbatch's shape, or is narrower than float32.
    """
    nll_T = -_masked(logprobs_T, microbatch.response_mask_T, "logprobs_T")
    return LossOutput(loss_sum=nll_T.sum(), per_response={"length": microbatch.response_length_B.float()})


def sum_per_response(values_T: Tensor, response_index_T: Tensor, response_length_B: Tensor) -> Tensor:
    """[B] sums of values_T over the positions of each response; values outside responses must be 0."""
    return values_T.new_zeros(response_length_B.shape).index_add(0, response_index_T, values_T)


def _clipped(log_value_T: Tensor, log_T: Tensor, advantages_T: Tensor, cfg: LossConfig) -> Terms:
    """min(r A, clip(r) A) with the min written out, since only strictly outside the band the gradient stops."""
    lower, upper = 1.0 - _bound(cfg.clip_low), 1.0 + _bound(cfg.clip_high)
    ratio_T, clamped_T = _ratio(log_value_T, log_T)
    above_T, below_T = ratio_T > upper, ratio_T < lower
    clipped_T = (above_T & (advantages_T > 0)) | (below_T & (advantages_T < 0))
    return Terms(
        term_T=torch.where(clipped_T, ratio_T.detach().clamp(lower, upper), ratio_T) * advantages_T,
        clipped_T=clipped_T,
        outside_T=above_T | below_T,
        clamped_T=clamped_T,
    )


def _ratio(log_value_T: Tensor, log_T: Tensor) -> tuple[Tensor, Tensor]:
    """exp of a detached log_value_T with gradient exp(log_value_T) d log_T (Eq. 14); and where it was clamped."""
    clamped_T = log_value_T.abs() > MAX_EXPONENT
    own_T = torch.where(clamped_T, 0.0, log_T - log_T.detach())
    return log_value_T.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp() * (1.0 + own_T), clamped_T


def _masked(values_T: Tensor, mask_T: Tensor, name: str) -> Tensor:
    """values_T, 0 outside the mask."""
    if values_T.shape != mask_T.shape:
        got, want = tuple(values_T.shape), tuple(mask_T.shape)
        raise ValueError(f"{name} has shape {got}, wants {want} as response_mask_T")
    if torch.finfo(values_T.dtype).bits < 32:
        raise ValueError(f"{name} has type {values_T.dtype}, wants float32; cast logits before log-softmax")
    # where on the inputs: padding may hold -inf or NaN, which a product keeps and a where on the difference alone
    # lets back in through the gradient.
    return torch.where(mask_T, values_T, 0.0)


def _required(values_T: Tensor | None, name: str, fix: str) -> Tensor:
    if values_T is None:
        raise ValueError(f"microbatch.{name} is None, wants [T] float32; {fix}")
    return values_T


def _bound(value: float | None) -> float:
    """A bound that checks.py requires of this objective."""
    assert value is not None
    return value
