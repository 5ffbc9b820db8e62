"""The objectives: GSPO (arXiv:2507.18071v2), GRPO for comparison, and supervised cold start. Never imports Megatron.

Every loss returns a sum over responses; the caller divides by the global count N (it spans data-parallel ranks
and microbatches). Everything is float32 or wider: bfloat16 rounds a band of 3e-4 around 1 away.

Context parallel (CP): a response's tokens lie on several ranks, each of which holds its own tokens' gradient; added
up over the group, gradients are those of the whole response and loss_sum counts each response once.

Shapes: B = responses of the microbatch, T = packed tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import LossConfig
from gspo_megatron.types import Microbatch

MAX_LOG_RATIO = 20.0
"""Overflow guard of the exponent, nats. Not in the paper; a ratio this far out is outside every band."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """What a loss function hands to the optimizer step."""

    loss_sum: Tensor
    """Scalar with gradient. Minus the sum of this rank's terms, not yet divided by N; its sum over the CP group
    counts each response once."""
    per_response: dict[str, Tensor]
    """Detached [B] float32 tensors of whole responses, equal on all CP ranks. gspo and grpo: log_ratio (log s, nats
    per token, not clamped), advantage, length (tokens), clipped_tokens (gradient stopped), outside_tokens (ratio
    outside the band whatever the sign of the advantage); sft: length. A response without tokens, which a dummy
    sequence is too, reads 0 in all of them except its own advantage."""


def sequence_log_ratio(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    *,
    response_mask_T: Tensor,
    response_index_T: Tensor,
    response_length_B: Tensor,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Length-normalised log-ratio of each response, log s_i (Eq. 7). Collective over cp_group.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta; carries the gradient.
        old_logprobs_T: [T] float32, nats. log pi_old; no gradient.
        response_mask_T: [T] bool. True on response tokens.
        response_index_T: [T] int64 in [0, B). Response that owns the token.
        response_length_B: [B] int64, tokens. |y_i| over the whole CP group; 0 gives a log-ratio of 0.
        cp_group: the ranks that share these responses; None where each rank holds whole responses.

    Returns:
        [B] float32, nats per token. Under CP the value is the whole response's and the gradient reaches this rank's
        tokens only.

    Raises:
        ValueError: the two log-prob tensors differ in shape, or logprobs_T is narrower than float32.
    """
    log_ratio_T = _token_log_ratio(logprobs_T, old_logprobs_T, response_mask_T)
    sum_B = sum_per_response(log_ratio_T, response_index_T, response_length_B)
    if cp_group is not None:
        # A differentiable all-reduce would multiply gradients by the group's size.
        sum_B = _all_reduced(sum_B, cp_group) + (sum_B - sum_B.detach())
    return sum_B / response_length_B.clamp(min=1)


def gspo_loss(
    logprobs_T: Tensor,
    microbatch: Microbatch,
    cfg: LossConfig,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> LossOutput:
    """Minus the sum of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) (Eq. 5). Collective over cp_group.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta of labels_T; carries the gradient.
        microbatch: with old_logprobs_T.
        cfg: the band.
        cp_group: as in sequence_log_ratio.

    Raises:
        ValueError: no old log-probs, or shapes or types that sequence_log_ratio refuses.
    """
    length_B, advantages_B = microbatch.response_length_B, microbatch.advantages_B
    log_ratio_B = sequence_log_ratio(
        logprobs_T,
        _old_logprobs(microbatch),
        response_mask_T=microbatch.response_mask_T,
        response_index_T=microbatch.response_index_T,
        response_length_B=length_B,
        cp_group=cp_group,
    )
    term_B, clipped_B, outside_B = _clipped_terms(log_ratio_B, advantages_B, cfg)
    # An empty response has ratio 1 and no token that could earn its advantage: its term is 0.
    loss_sum = -torch.where(length_B > 0, term_B, 0.0).sum()
    if cp_group is not None:
        # Every rank has the whole value: report a share of it, and keep the gradient of the local tokens whole.
        loss_sum = loss_sum.detach() / cp_group.size() + (loss_sum - loss_sum.detach())
    return LossOutput(
        loss_sum=loss_sum,
        per_response=_detached(
            log_ratio=log_ratio_B,
            advantage=advantages_B,
            length=length_B,
            clipped_tokens=clipped_B * length_B,
            outside_tokens=outside_B * length_B,
        ),
    )


def grpo_loss(
    logprobs_T: Tensor,
    microbatch: Microbatch,
    cfg: LossConfig,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> LossOutput:
    """As gspo_loss with ratio and clip per token, averaged over each response (Eq. 2). Collective over cp_group.

    Raises:
        ValueError: as gspo_loss.
    """
    index_T, length_B = microbatch.response_index_T, microbatch.response_length_B
    log_ratio_T = _token_log_ratio(logprobs_T, _old_logprobs(microbatch), microbatch.response_mask_T)
    term_T, clipped_T, outside_T = _clipped_terms(log_ratio_T, microbatch.advantages_B[index_T], cfg)
    masked_T = torch.stack(
        [torch.where(microbatch.response_mask_T, x, 0.0) for x in (term_T, log_ratio_T, clipped_T, outside_T)]
    )
    term_B, *counts = (sum_per_response(x_T, index_T, length_B) for x_T in masked_T)
    counts_3B = torch.stack(counts).detach()
    if cp_group is not None:
        counts_3B = _all_reduced(counts_3B, cp_group)
    log_ratio_B, clipped_B, outside_B = counts_3B
    return LossOutput(
        loss_sum=-(term_B / length_B.clamp(min=1)).sum(),
        per_response=_detached(
            log_ratio=log_ratio_B / length_B.clamp(min=1),
            advantage=microbatch.advantages_B,
            length=length_B,
            clipped_tokens=clipped_B,
            outside_tokens=outside_B,
        ),
    )


def sft_loss(logprobs_T: Tensor, microbatch: Microbatch) -> LossOutput:
    """Negative log-likelihood of this rank's response tokens, summed, nats. For the cold start.

    Args:
        logprobs_T: [T] float32, nats. log pi_theta of labels_T; carries the gradient.
        microbatch: demonstrations; advantages and old log-probs are not read.

    Raises:
        ValueError: logprobs_T does not have the microbatch's shape, or is narrower than float32.
    """
    nll_T = -_token_log_ratio(logprobs_T, torch.zeros_like(microbatch.rollout_logprobs_T), microbatch.response_mask_T)
    return LossOutput(loss_sum=nll_T.sum(), per_response=_detached(length=microbatch.response_length_B))


LOSSES: dict[str, Callable[..., LossOutput]] = {"gspo": gspo_loss, "grpo": grpo_loss}
"""loss.name of the recipe -> function."""


def _old_logprobs(microbatch: Microbatch) -> Tensor:
    if microbatch.old_logprobs_T is None:
        raise ValueError("microbatch.old_logprobs_T is None, wants [T] float32; call add_old_logprobs before the loss")
    return microbatch.old_logprobs_T


def _token_log_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, response_mask_T: Tensor) -> Tensor:
    """[T] log of the token ratio, nats; 0 outside the responses."""
    for name, tensor in (("old_logprobs_T", old_logprobs_T), ("response_mask_T", response_mask_T)):
        if tensor.shape != logprobs_T.shape:
            got, want = tuple(tensor.shape), tuple(logprobs_T.shape)
            raise ValueError(f"{name} has shape {got}, wants {want} as logprobs_T")
    for name, tensor in (("logprobs_T", logprobs_T), ("old_logprobs_T", old_logprobs_T)):
        if torch.finfo(tensor.dtype).bits < 32:
            raise ValueError(f"{name} has type {tensor.dtype}, wants float32; cast logits before log-softmax")
    # where on the inputs: padding may hold -inf or NaN, which a product keeps and a where on the difference alone
    # lets back in through the gradient.
    logprobs_T = torch.where(response_mask_T, logprobs_T, 0.0)
    return logprobs_T - torch.where(response_mask_T, old_logprobs_T.detach(), 0.0)


def sum_per_response(values_T: Tensor, response_index_T: Tensor, response_length_B: Tensor) -> Tensor:
    """[B] sums of values_T over the positions of each response; values outside responses must be 0."""
    return values_T.new_zeros(response_length_B.shape).index_add(0, response_index_T, values_T)


def _all_reduced(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def _clipped_terms(log_ratio: Tensor, advantages: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """min(r A, clip(r) A) with the min written out, since only strictly outside the band the gradient stops.

    Returns:
        term, clipped (bool), outside the band (bool); each of log_ratio's shape.
    """
    lower, upper = 1.0 - cfg.clip_low, 1.0 + cfg.clip_high
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    above, below = ratio > upper, ratio < lower
    clipped = (above & (advantages > 0)) | (below & (advantages < 0))
    term = torch.where(clipped, ratio.detach().clamp(lower, upper), ratio) * advantages
    return term, clipped, above | below


def _detached(**values: Tensor) -> dict[str, Tensor]:
    return {name: value.detach().float() for name, value in values.items()}
