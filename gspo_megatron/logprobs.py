"""Log-probs and entropy of sampled tokens from vocabulary-parallel logits, in float32, with their gradient.

Shapes: T = packed tokens, V = vocabulary columns on this rank (padded vocabulary / tensor-parallel size).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution.

    Collective over tp_group (three all-reduces of [T]) when it has more than one rank. Columns at or past vocab_size
    are padding and get probability zero.

    Args:
        logits_TV: [T, V] any float dtype. This rank's columns; rank r holds columns r*V .. (r+1)*V.
        labels_T: [T] int64 in [0, vocab_size). Global token ids.
        temperature: divides the logits, as in sampling.
        vocab_size: columns of the unpadded vocabulary.
        tp_group: tensor-parallel group, or None.

    Returns:
        (logprobs_T, entropy_T), [T] float32, nats; both carry gradients.

    Raises:
        ValueError: temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: wants a positive number")
    out = _VocabParallelLogprobs.apply(logits_TV, labels_T, temperature, vocab_size, tp_group)
    return out[0], out[1]


def _all_reduce(x: Tensor, op: Any, group: Any) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _VocabParallelLogprobs(torch.autograd.Function):
    """Value and gradient, with z = logits / temperature and p its softmax.

    d logprob / dz_v = 1[v = label] - p_v;  d entropy / dz_v = -p_v (log p_v + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, temperature: float, vocab_size: int, group: Any
    ) -> tuple[Tensor, Tensor]:
        columns = logits_TV.shape[1]
        first = columns * (group.rank() if group is not None else 0)
        z_TV = logits_TV.float() / temperature
        if first + columns > vocab_size:
            z_TV[:, max(vocab_size - first, 0) :] = -torch.inf
        max_T = _all_reduce(z_TV.amax(dim=1), dist.ReduceOp.MAX, group)
        z_TV = z_TV - max_T[:, None]
        p_TV = z_TV.exp()
        local_T = labels_T - first
        is_here_T = (local_T >= 0) & (local_T < columns)
        local_T = local_T.clamp(0, columns - 1)
        label_z_T = torch.where(is_here_T, z_TV.gather(1, local_T[:, None])[:, 0], 0.0)
        # where, not a product: 0 * -inf of a padding column is NaN
        weighted_T = torch.where(p_TV > 0, p_TV * z_TV, 0.0).sum(dim=1)
        sums = _all_reduce(torch.stack([p_TV.sum(dim=1), label_z_T, weighted_T]), dist.ReduceOp.SUM, group)
        log_sum_T = sums[0].log()
        p_TV /= sums[0][:, None]
        logprobs_T = sums[1] - log_sum_T
        entropy_T = log_sum_T - sums[2] / sums[0]
        ctx.save_for_backward(p_TV, z_TV - log_sum_T[:, None], entropy_T, local_T, is_here_T)
        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, grad_logprobs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        p_TV, log_p_TV, entropy_T, local_T, is_here_T = ctx.saved_tensors
        grad_TV = -p_TV * grad_logprobs_T[:, None]
        grad_TV -= torch.where(p_TV > 0, p_TV * (log_p_TV + entropy_T[:, None]), 0.0) * grad_entropy_T[:, None]
        here_T = torch.where(is_here_T, grad_logprobs_T, 0.0)
        grad_TV.scatter_add_(1, local_T[:, None], here_T[:, None])
        return (grad_TV / ctx.temperature).to(ctx.dtype), None, None, None, None
