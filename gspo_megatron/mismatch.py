"""How far old_logprobs are from rollout_logprobs at equal weights, what corrects for it, and KL to a reference.

Three families of pure functions, of rho_t = exp(d_t), d_t = old - rollout log-prob of a token that SGLang sampled:
estimators of the mismatch, in two stages so that ranks and microbatches add up; weights against it (CORRECTIONS);
and, of the current policy and a reference instead, estimates of KL (KL_ESTIMATORS).

Shapes: B = responses of the microbatch, T = packed tokens on this rank, M = responses of the minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import CorrectionConfig
from gspo_megatron.types import MAX_EXPONENT

_SHARES = {"1_05": 1.05, "1_2": 1.2, "1_5": 1.5, "2": 2.0}
"""tau of F(tau), the share of tokens with max(rho, 1 / rho) > tau, as names spell it."""

MISMATCH_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mismatch_sum": torch.sum,
    "mismatch_square_sum": torch.sum,
    "mismatch_abs_sum": torch.sum,
    "mismatch_abs_max": torch.amax,
    "mismatch_k3_sum": torch.sum,
    "mismatch_prob_error_sum": torch.sum,
    "mismatch_ratio_sum": torch.sum,
    "mismatch_ratio_square_sum": torch.sum,
    **{f"mismatch_above_{tau}_tokens": torch.sum for tau in _SHARES},
    "mismatch_old_sum": torch.sum,
    "mismatch_old_square_sum": torch.sum,
    "mismatch_rollout_sum": torch.sum,
    "mismatch_rollout_square_sum": torch.sum,
    "mismatch_product_sum": torch.sum,
}
"""Keys of mismatch_per_response -> how the values of ranks that share a response combine, by (stacked, dim=0)."""


def mismatch_per_response(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    *,
    response_mask_T: Tensor,
    response_index_T: Tensor,
    response_length_B: Tensor,
) -> dict[str, Tensor]:
    """Sums and the maximum of d = old - rollout over the tokens of each response: summarize_mismatch's input.

    mismatch_sum, _square_sum, _abs_sum, _abs_max: of d, d^2, |d|, nats. Then, with d clamped at +-MAX_EXPONENT inside
    the exponentials, _k3_sum: exp(d) - 1 - d; _prob_error_sum: exp(|d|); _ratio_sum and _ratio_square_sum: of rho.
    _above_TAU_tokens: tokens with |d| > log TAU. _old_, _rollout_ and _product_: sums, squares and products of 1 - p
    for both probabilities p, whose correlation is that of p; it keeps digits where p is near 1, as most are.
    In float64: at float32 equality d is 1e-7 and k3 is 1e-14, below the rounding of exp(d).

    Args:
        old_logprobs_T: [T] float32, nats. The trainer's.
        rollout_logprobs_T: [T] float32, nats. SGLang's.
        response_mask_T: [T] bool. True on response tokens.
        response_index_T: [T] int64 in [0, B). Response that owns the token.
        response_length_B: [B] int64, tokens. Gives B only.

    Returns:
        The keys of MISMATCH_REDUCTIONS, each [B] float64; 0 for a response without tokens here. Of this rank's tokens:
        under context parallel sums add and the maximum combines.

    Raises:
        ValueError: the tensors of tokens differ in shape.
    """
    d_T = _masked_difference(old_logprobs_T, rollout_logprobs_T, response_mask_T)
    exponent_T = d_T.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    ratio_T = exponent_T.exp()
    old_T, rollout_T = (-torch.expm1(x_T.detach().double()) for x_T in (old_logprobs_T, rollout_logprobs_T))
    values = {
        "mismatch_sum": d_T,
        "mismatch_square_sum": d_T.square(),
        "mismatch_abs_sum": d_T.abs(),
        "mismatch_k3_sum": torch.expm1(exponent_T) - d_T,
        "mismatch_prob_error_sum": exponent_T.abs().exp(),
        "mismatch_ratio_sum": ratio_T,
        "mismatch_ratio_square_sum": ratio_T.square(),
        **{f"mismatch_above_{name}_tokens": (d_T.abs() > math.log(tau)).double() for name, tau in _SHARES.items()},
        "mismatch_old_sum": old_T,
        "mismatch_old_square_sum": old_T.square(),
        "mismatch_rollout_sum": rollout_T,
        "mismatch_rollout_square_sum": rollout_T.square(),
        "mismatch_product_sum": old_T * rollout_T,
    }
    values_KT = torch.where(response_mask_T, torch.stack(list(values.values())), 0.0)
    sums = d_T.new_zeros((len(values), *response_length_B.shape)).index_add(1, response_index_T, values_KT)
    maximum_B = d_T.new_zeros(response_length_B.shape).scatter_reduce(0, response_index_T, d_T.abs(), "amax")
    return {**dict(zip(values, sums, strict=True)), "mismatch_abs_max": maximum_B}


def summarize_mismatch(per_response: Mapping[str, Tensor]) -> dict[str, float]:
    """Estimators over the tokens and responses of one minibatch; without any token as of one where d is 0.

    Over tokens: k1 (mean of -d), k2 (mean of d^2 / 2) and k3 (mean of exp(d) - 1 - d) of KL(rollout || old), abs_mean
    and abs_max (of |d|), prob_error (mean of exp(|d|)), share_above_TAU (F(TAU)), chi2_token (mean of rho^2, less 1),
    ess_token ((sum of rho)^2 / (n sum of rho^2)), pearson (correlation of the two probabilities; 0 where one of them
    is the same for all tokens).
    Over responses with a token, each the same weight: chi2_sequence and ess_sequence of the product of rho, whose log
    is clamped at +-MAX_EXPONENT; of m = the response's mean of d: log_ppl_diff (mean of -m), log_ppl_abs_diff (mean of
    |m|), ppl_ratio (mean of exp(-m), old perplexity over SGLang's), geo_ratio_mean (mean of exp(m)) and
    log_ratio_abs_max (max of |m|).

    Args:
        per_response: the keys of MISMATCH_REDUCTIONS, each [M] float64, of whole responses; and length: [M], tokens.

    Returns:
        name with `mismatch_` in front -> value; nats where it is one of d, else without unit.
    """
    has_tokens = per_response["length"] > 0
    length_M = per_response["length"][has_tokens].double()
    rows = {name: per_response[name][has_tokens].double() for name in MISMATCH_REDUCTIONS}
    if len(length_M) == 0:
        # One token with d = 0 stands in, so that the reductions below are defined.
        length_M, zeros = length_M.new_ones(1), length_M.new_zeros(1)
        rows = mismatch_per_response(
            zeros,
            zeros,
            response_mask_T=zeros == 0.0,
            response_index_T=zeros.long(),
            response_length_B=length_M,
        )
    num_tokens = float(length_M.sum())
    total = {name: float(value_M.sum()) for name, value_M in rows.items()}
    mean = {name: value / num_tokens for name, value in total.items()}
    sum_M = rows["mismatch_sum"]
    product_M = sum_M.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    mean_M = sum_M / length_M
    exponent_M = mean_M.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    product, product_square = float(product_M.mean()), float(product_M.square().mean())
    return {
        "mismatch_abs_mean": mean["mismatch_abs_sum"],
        "mismatch_abs_max": float(rows["mismatch_abs_max"].max()),
        "mismatch_k1": -mean["mismatch_sum"],
        "mismatch_k2": mean["mismatch_square_sum"] / 2.0,
        "mismatch_k3": mean["mismatch_k3_sum"],
        "mismatch_prob_error": mean["mismatch_prob_error_sum"],
        **{f"mismatch_share_above_{tau}": mean[f"mismatch_above_{tau}_tokens"] for tau in _SHARES},
        "mismatch_ess_token": mean["mismatch_ratio_sum"] ** 2 / mean["mismatch_ratio_square_sum"],
        "mismatch_chi2_token": mean["mismatch_ratio_square_sum"] - 1.0,
        "mismatch_pearson": _pearson(total, num_tokens),
        "mismatch_ess_sequence": product**2 / product_square,
        "mismatch_chi2_sequence": product_square - 1.0,
        "mismatch_log_ppl_diff": -float(mean_M.mean()),
        "mismatch_log_ppl_abs_diff": float(mean_M.abs().mean()),
        "mismatch_ppl_ratio": float((-exponent_M).exp().mean()),
        "mismatch_geo_ratio_mean": float(exponent_M.exp().mean()),
        "mismatch_log_ratio_abs_max": float(mean_M.abs().max()),
    }


def _pearson(total: Mapping[str, float], num_tokens: float) -> float:
    old, rollout = total["mismatch_old_sum"], total["mismatch_rollout_sum"]
    old_spread = total["mismatch_old_square_sum"] - old * old / num_tokens
    rollout_spread = total["mismatch_rollout_square_sum"] - rollout * rollout / num_tokens
    # Below this a spread is the rounding of its two terms.
    rounding = 1e-14
    if (
        old_spread <= rounding * total["mismatch_old_square_sum"]
        or rollout_spread <= rounding * total["mismatch_rollout_square_sum"]
    ):
        return 0.0
    common = total["mismatch_product_sum"] - old * rollout / num_tokens
    return max(-1.0, min(1.0, common / math.sqrt(old_spread * rollout_spread)))


def correction_weights(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    cfg: CorrectionConfig,
    *,
    response_mask_T: Tensor,
    response_index_T: Tensor,
    response_length_B: Tensor,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights that multiply each token's term, against sampling from mu instead of pi_old: rho = pi_old / mu.

    Computed in float64; exponents are clamped at +-MAX_EXPONENT. Collective over cp_group for the names of CORRECTIONS
    that take a response's mean or sum (one all-reduce of [B]); none else.

    Args:
        old_logprobs_T: [T] float32, nats. log pi_old.
        rollout_logprobs_T: [T] float32, nats. log mu, SGLang's.
        cfg: name and bounds.
        response_mask_T: [T] bool. True on response tokens.
        response_index_T: [T] int64 in [0, B). Response that owns the token.
        response_length_B: [B] int64, tokens. |y_i| over the whole CP group.
        cp_group: the ranks that share these responses; None where each rank holds whole responses.

    Returns:
        weights_T: [T] in old_logprobs_T's type, detached; 1 outside the mask.
        changed_T: [T] bool. True where the bound acted: the ratio was cut, or the token left out.

    Raises:
        ValueError: the tensors of tokens differ in shape, a log-prob is narrower than float32, or the name needs a
            lower bound and cfg.low is None.
    """
    for name, tensor in (("old_logprobs_T", old_logprobs_T), ("rollout_logprobs_T", rollout_logprobs_T)):
        if torch.finfo(tensor.dtype).bits < 32:
            raise ValueError(f"{name} has type {tensor.dtype}, wants float32; cast logits before log-softmax")
    over, bound = CORRECTIONS[cfg.name]
    log_ratio_T = _masked_difference(old_logprobs_T, rollout_logprobs_T, response_mask_T)
    if over != "token":
        log_ratio_B = log_ratio_T.new_zeros(response_length_B.shape).index_add(0, response_index_T, log_ratio_T)
        if cp_group is not None:
            dist.all_reduce(log_ratio_B, group=cp_group)
        if over == "mean":
            log_ratio_B = log_ratio_B / response_length_B.clamp(min=1)
        log_ratio_T = log_ratio_B[response_index_T]
    weights_T, changed_T = bound(log_ratio_T.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp(), cfg)
    weights_T = torch.where(response_mask_T, weights_T, 1.0).to(old_logprobs_T.dtype)
    return weights_T, changed_T & response_mask_T


def _cut_above(ratio: Tensor, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """min(ratio, high)."""
    return ratio.clamp(max=cfg.high), ratio > cfg.high


def _drop_above(ratio: Tensor, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The ratio up to high, else 0."""
    above = ratio > cfg.high
    return torch.where(above, 0.0, ratio), above


def _drop_outside(ratio: Tensor, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The ratio inside [low, high], else 0."""
    if cfg.low is None:
        raise ValueError(f"loss.correction.low is null, wants a number below 1 for {cfg.name}")
    outside = (ratio < cfg.low) | (ratio > cfg.high)
    return torch.where(outside, 0.0, ratio), outside


def _accept_inside(ratio: Tensor, cfg: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """1 where the ratio is inside [low, high], else 0."""
    _, outside = _drop_outside(ratio, cfg)
    return (~outside).to(ratio.dtype), outside


class Correction(NamedTuple):
    """Which ratio a correction looks at, and what its bounds make of it."""

    over: Literal["token", "mean", "sum"]
    """token: rho_t. mean, sum: exp of the mean or sum of log rho_t over the response, for all its tokens."""
    bound: Callable[[Tensor, CorrectionConfig], tuple[Tensor, Tensor]]
    """(ratio, cfg) -> (weight, whether the bound acted)."""


CORRECTIONS: dict[str, Correction] = {
    "tis": Correction("token", _cut_above),
    "icepop": Correction("token", _drop_outside),
    "mis": Correction("token", _drop_above),
    "sequence_tis_mean": Correction("mean", _cut_above),
    "sequence_tis_sum": Correction("sum", _cut_above),
    "sequence_mis": Correction("sum", _drop_above),
    "geometric_rejection": Correction("mean", _accept_inside),
}
"""loss.correction.name of the recipe -> what it does."""


def kl_estimate(logprobs_T: Tensor, ref_logprobs_T: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(pi || ref) at each token that pi sampled, d = log pi - log ref; gradient to logprobs_T.

    k1 = d, with gradient 1 for every token: in expectation no gradient at all. k2 = d^2 / 2, with gradient d: that of
    KL(pi || ref). k3 = exp(-d) - 1 + d, with gradient 1 - exp(-d): that of KL(ref || pi). Each is so for tokens of pi
    itself. Below -MAX_EXPONENT k3 takes d as that, and has no gradient.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta; carries the gradient.
        ref_logprobs_T: [T] float32, nats. The reference policy's; no gradient.
        estimator: k1, k2 or k3.

    Returns:
        [T] nats, token by token: where the inputs hold padding, so does the result.

    Raises:
        ValueError: the two tensors differ in shape.
    """
    if ref_logprobs_T.shape != logprobs_T.shape:
        got, want = tuple(ref_logprobs_T.shape), tuple(logprobs_T.shape)
        raise ValueError(f"ref_logprobs_T has shape {got}, wants {want} as logprobs_T")
    return KL_ESTIMATORS[estimator](logprobs_T - ref_logprobs_T.detach())


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return d.square() / 2.0


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(min=-MAX_EXPONENT)
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""loss.kl.estimator of the recipe -> function of d."""


def _masked_difference(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, response_mask_T: Tensor) -> Tensor:
    """[T] float64 old - rollout, nats, detached; 0 outside the mask."""
    for name, tensor in (("rollout_logprobs_T", rollout_logprobs_T), ("response_mask_T", response_mask_T)):
        if tensor.shape != old_logprobs_T.shape:
            got, want = tuple(tensor.shape), tuple(old_logprobs_T.shape)
            raise ValueError(f"{name} has shape {got}, wants {want} as old_logprobs_T")
    difference_T = old_logprobs_T.detach().double() - rollout_logprobs_T.detach().double()
    return torch.where(response_mask_T, difference_T, 0.0)
