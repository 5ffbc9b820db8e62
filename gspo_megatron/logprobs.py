"""Log-probs and entropy of sampled tokens from hidden states and the vocabulary-parallel output layer.

The [tokens, vocabulary] logits never exist: the vocabulary passes in blocks of columns, forward with a running maximum
and sum (online softmax, arXiv:1805.02867), backward with the block's logits computed again. Blocks of columns rather
than of tokens, since each block of the weight's gradient is then one product over all tokens, and what accumulates
over blocks is the small hidden gradient, in float32.

Shapes: T = tokens, H = hidden size, V = vocabulary columns on this rank (padded vocabulary / tensor-parallel size),
C = columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 2**26
"""Of one block's float32 logits. Larger blocks are no faster; a block takes up to three times this."""
_NOTHING = -1.0e30
"""Running maximum before the first column: finite, so that 0 times its difference to another maximum is 0."""


def linear_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    fp32_matmul: bool,
    tp_group: Any = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution softmax(hidden @ weight.T / temperature).

    Collective over tp_group when it has more than one rank: two all-reduces of [T] forward; backward an all-reduce of
    the hidden gradient, or under sequence parallelism an all-gather and a reduce-scatter as in Megatron's own layer.
    Rows of the weight at or past vocab_size are padding: probability and gradient zero.

    Args:
        hidden_TH: [T, H] float32 or bfloat16; under sequence parallelism this rank's [T / tp, H] slice.
        weight_VH: [V, H], same type. Rank r has rows r*V .. (r+1)*V of the padded vocabulary.
        labels_T: [T] int64 in [0, vocab_size). Global token ids.
        temperature: divides the logits, as in sampling.
        vocab_size: rows of the unpadded vocabulary.
        fp32_matmul: multiply in float32 whatever the type; logits are float32 from there on in any case.
        tp_group: tensor-parallel group, or None.
        sequence_parallel: hidden_TH is a slice.

    Returns:
        (logprobs_T, entropy_T), [T] float32, nats; both carry gradients.

    Raises:
        ValueError: temperature is not positive, or shapes do not fit.
    """
    tp_size = tp_group.size() if tp_group is not None else 1
    rows = hidden_TH.shape[0] * (tp_size if sequence_parallel else 1)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: wants a positive number")
    if hidden_TH.shape[1] != weight_VH.shape[1] or rows != labels_T.shape[0]:
        raise ValueError(
            f"hidden_TH {tuple(hidden_TH.shape)} x {tp_size if sequence_parallel else 1} ranks, weight_VH "
            f"{tuple(weight_VH.shape)}, labels_T {tuple(labels_T.shape)}: want equal H, and a label for each row"
        )
    group = tp_group if tp_size > 1 else None
    head = _Head(labels_T, temperature, vocab_size, fp32_matmul, group, sequence_parallel and tp_size > 1)
    out = _LinearLogprobs.apply(hidden_TH, weight_VH, head)
    return out[0], out[1]


class _Head:
    """What forward and backward share besides the tensors with gradient."""

    def __init__(
        self,
        labels_T: Tensor,
        temperature: float,
        vocab_size: int,
        fp32_matmul: bool,
        group: Any,
        sequence_parallel: bool,
    ) -> None:
        self.labels_T, self.temperature, self.vocab_size = labels_T, temperature, vocab_size
        self.fp32_matmul, self.group, self.sequence_parallel = fp32_matmul, group, sequence_parallel

    def whole(self, hidden_TH: Tensor) -> Tensor:
        """[T, H], in the type of the product."""
        if self.sequence_parallel:
            slices = hidden_TH.contiguous()
            hidden_TH = slices.new_empty(len(self.labels_T), slices.shape[1])
            dist.all_gather_into_tensor(hidden_TH, slices, group=self.group)
        return hidden_TH.float() if self.fp32_matmul else hidden_TH

    def blocks(self, weight_VH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """(rows, weight [C, H] in the product's type, label's column in the block [T], is it in the block [T])."""
        first = len(weight_VH) * (self.group.rank() if self.group is not None else 0)
        real = min(max(self.vocab_size - first, 0), len(weight_VH))
        size = max(1, BLOCK_BYTES // (4 * max(1, len(self.labels_T))))
        for start in range(0, real, size):
            rows = slice(start, min(start + size, real))
            weight_CH = weight_VH[rows].float() if self.fp32_matmul else weight_VH[rows]
            column_T = self.labels_T - (first + start)
            is_here_T = (column_T >= 0) & (column_T < len(weight_CH))
            yield rows, weight_CH, column_T.clamp(0, len(weight_CH) - 1), is_here_T

    def logits(self, hidden_TH: Tensor, weight_CH: Tensor) -> Tensor:
        """[T, C] float32, a tensor of its own, over the temperature."""
        logits_TC = (hidden_TH @ weight_CH.t()).float()
        return logits_TC if self.temperature == 1.0 else logits_TC.div_(self.temperature)

    def all_reduce(self, x: Tensor, op: Any) -> Tensor:
        """In place."""
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x


class _LinearLogprobs(torch.autograd.Function):
    """Value and gradient, with z = logits / temperature and p its softmax.

    d logprob / dz_v = 1[v = label] - p_v;  d entropy / dz_v = -p_v (log p_v + entropy).
    """

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
        whole_TH = head.whole(hidden_TH)
        label_T, sum_T, weighted_T = whole_TH.new_zeros((3, len(head.labels_T)), dtype=torch.float32)
        max_T = torch.full_like(sum_T, _NOTHING)
        for _, weight_CH, column_T, is_here_T in head.blocks(weight_VH):
            z_TC = head.logits(whole_TH, weight_CH)
            label_T = torch.where(is_here_T, z_TC.gather(1, column_T[:, None])[:, 0], label_T)
            new_max_T = torch.maximum(max_T, z_TC.amax(dim=1))
            sum_T, weighted_T, max_T = *_rescaled(sum_T, weighted_T, max_T - new_max_T), new_max_T
            z_TC -= max_T[:, None]
            p_TC = z_TC.exp()
            sum_T += p_TC.sum(dim=1)
            weighted_T += z_TC.mul_(p_TC).sum(dim=1)
        own_max_T = max_T.clone()
        max_T = head.all_reduce(max_T, dist.ReduceOp.MAX)
        sum_T, weighted_T = _rescaled(sum_T, weighted_T, own_max_T - max_T)
        label_T, sum_T, weighted_T = head.all_reduce(torch.stack([label_T, sum_T, weighted_T]), dist.ReduceOp.SUM)
        log_sum_T = sum_T.log()
        entropy_T = log_sum_T - weighted_T / sum_T
        ctx.save_for_backward(hidden_TH, weight_VH, max_T, log_sum_T, entropy_T)
        ctx.head = head
        ctx.set_materialize_grads(False)
        # Not label - (max + log sum): at large logits that sum rounds more than the result may.
        return label_T - max_T - log_sum_T, entropy_T

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_TH, weight_VH, max_T, log_sum_T, entropy_T = ctx.saved_tensors
        head: _Head = ctx.head
        whole_TH = head.whole(hidden_TH)
        grad_T = torch.zeros_like(log_sum_T) if grad_logprobs_T is None else grad_logprobs_T / head.temperature
        grad_whole_TH = torch.zeros_like(whole_TH, dtype=torch.float32)
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for rows, weight_CH, column_T, is_here_T in head.blocks(weight_VH):
            z_TC = head.logits(whole_TH, weight_CH).sub_(max_T[:, None]).sub_(log_sum_T[:, None])  # log p
            if grad_entropy_T is None:
                z_TC.exp_().mul_(-grad_T[:, None])
            else:
                p_TC = z_TC.exp()
                z_TC.add_(entropy_T[:, None]).mul_(grad_entropy_T[:, None] / head.temperature)
                z_TC.add_(grad_T[:, None]).mul_(p_TC).neg_()
                del p_TC
            z_TC.scatter_add_(1, column_T[:, None], torch.where(is_here_T, grad_T, 0.0)[:, None])
            grad_TC = z_TC.to(whole_TH.dtype)
            del z_TC
            if grad_weight_VH is not None:
                grad_weight_VH[rows] = grad_TC.t() @ whole_TH
            _accumulate(grad_whole_TH, grad_TC, weight_CH)
        return _own_rows(head, grad_whole_TH, hidden_TH), grad_weight_VH, None


def _rescaled(sum_T: Tensor, weighted_T: Tensor, shift_T: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp(z - m) and of exp(z - m) (z - m) for a maximum that is higher by -shift."""
    scale_T = shift_T.exp()
    return sum_T * scale_T, scale_T * (weighted_T + shift_T * sum_T)


def _accumulate(total_TH: Tensor, grad_TC: Tensor, weight_CH: Tensor) -> None:
    """total += grad @ weight in float32."""
    if grad_TC.dtype == torch.float32:
        total_TH.addmm_(grad_TC, weight_CH)
    elif grad_TC.is_cuda:
        total_TH += torch.mm(grad_TC, weight_CH, out_dtype=torch.float32)
    else:  # the CPU's product rounds to its inputs' type
        total_TH += grad_TC @ weight_CH


def _own_rows(head: _Head, grad_TH: Tensor, hidden_TH: Tensor) -> Tensor:
    """The hidden gradient, summed over tensor-parallel ranks, of this rank's rows."""
    if head.sequence_parallel:
        whole_TH = grad_TH
        grad_TH = torch.empty_like(hidden_TH, dtype=torch.float32)
        dist.reduce_scatter_tensor(grad_TH, whole_TH, group=head.group)
    else:
        head.all_reduce(grad_TH, dist.ReduceOp.SUM)
    return grad_TH.to(hidden_TH.dtype)
