"""Trainer/engine mismatch at equal weights: how far old_logprobs are from rollout_logprobs. Pure estimators.

Shapes: B = responses of the microbatch, T = packed tokens on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mismatch_per_response(
    old_logprobs_T: Tensor,
    rollout_logprobs_T: Tensor,
    *,
    response_mask_T: Tensor,
    response_index_T: Tensor,
    response_length_B: Tensor,
) -> dict[str, Tensor]:
    """Sums and the maximum of d = old - rollout over the tokens of each response.

    Divided by a count of tokens the sums are estimators over the tokens that SGLang sampled: mismatch_abs of |d|,
    mismatch_sum of -KL(rollout || old) (k1, negated), mismatch_k3 of KL(rollout || old) by exp(d) - 1 - d, which is
    never negative. Computed in float64: at float32 equality d is 1e-7 and k3 is 1e-14, below the rounding of exp(d).

    Args:
        old_logprobs_T: [T] float32, nats. The trainer's.
        rollout_logprobs_T: [T] float32, nats. SGLang's.
        response_mask_T: [T] bool. True on response tokens.
        response_index_T: [T] int64 in [0, B). Response that owns the token.
        response_length_B: [B] int64, tokens. Gives B only.

    Returns:
        mismatch_sum, mismatch_abs_sum, mismatch_abs_max, mismatch_k3_sum: [B] float32, nats; 0 for a response
        without tokens here. Of this rank's tokens: under context parallel sums add and maxima combine.

    Raises:
        ValueError: the tensors of tokens differ in shape.
    """
    for name, tensor in (("rollout_logprobs_T", rollout_logprobs_T), ("response_mask_T", response_mask_T)):
        if tensor.shape != old_logprobs_T.shape:
            got, want = tuple(tensor.shape), tuple(old_logprobs_T.shape)
            raise ValueError(f"{name} has shape {got}, wants {want} as old_logprobs_T")
    difference_T = old_logprobs_T.detach().double() - rollout_logprobs_T.double()
    difference_T = torch.where(response_mask_T, difference_T, 0.0)
    zeros_B = difference_T.new_zeros(response_length_B.shape)

    def total(values_T: Tensor) -> Tensor:
        return zeros_B.index_add(0, response_index_T, values_T).float()

    return {
        "mismatch_sum": total(difference_T),
        "mismatch_abs_sum": total(difference_T.abs()),
        "mismatch_abs_max": zeros_B.scatter_reduce(0, response_index_T, difference_T.abs(), "amax").float(),
        "mismatch_k3_sum": total(torch.expm1(difference_T) - difference_T),
    }
