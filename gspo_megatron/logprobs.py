"""Log-probs and entropy of sampled tokens from hidden states and the vocabulary-parallel output layer.

[tokens, vocabulary] logits never exist: both passes walk over blocks of vocabulary rows, and the backward pass
multiplies each block again. Blocks of the vocabulary and not of tokens, because then each row of the weight's gradient
is one product over all tokens: written once, in the weight's own type, with no float32 copy of the whole weight or its
gradient. What is summed over blocks is three numbers per token forward, and the hidden states' gradient backward.

Shapes: T = packed tokens, H = hidden size, V = vocabulary rows on this rank (padded vocabulary / tensor-parallel
size), C = rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 128 * 2**20
"""Float32 logits of one block, [T, C]. Two to three such tensors live at once: small beside the weight, yet thousands
of rows at usual T, so that each product is as fast as one over the whole vocabulary (RESULTS.md)."""
MIN_BLOCK_ROWS = 128
"""Blocks are multiples of this: narrower products are slow, and odd widths are misaligned for tensor cores."""


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
    """Log-probability of each label and entropy of each distribution softmax(hidden weight^T / temperature).

    The logits are taken to float32 before anything else happens to them. Rows at or past vocab_size are padding:
    probability zero, gradient zero, whatever they hold.

    Collective over tp_group when it has more than one rank. Forward: two all-reduces of a few [T]; backward: one of
    [T, H]. With sequence_parallel also an all-gather of the hidden states in both, and backward a reduce-scatter
    instead of the all-reduce.

    Args:
        hidden_TH: [T, H] any float dtype, the same on all tensor-parallel ranks; with sequence_parallel this rank's
            rows, [T / tp_size, H].
        weight_VH: [V, H], dtype of hidden_TH. This rank's rows; rank r holds ids r*V .. (r+1)*V.
        labels_T: [T] int64 in [0, vocab_size). Global token ids of all T tokens.
        temperature: divides the logits, as in sampling.
        vocab_size: rows of the unpadded vocabulary.
        fp32_matmul: float32 logits from the product itself, whatever the dtype; else rounded to hidden_TH's. CUDA's
            tensor cores do that with bfloat16 inputs, whose products float32 holds exactly, and take bfloat16
            gradients of the logits; the CPU casts both inputs, and the gradient stays float32.
        tp_group: tensor-parallel group, or None.
        sequence_parallel: the ranks of tp_group hold slices of the tokens.

    Returns:
        (logprobs_T, entropy_T), [T] float32, nats; both carry gradients to hidden_TH and weight_VH.

    Raises:
        ValueError: temperature is not positive, the dtypes differ, or rows and labels do.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature}: wants a positive number")
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden_TH is {hidden_TH.dtype}, wants {weight_VH.dtype} as weight_VH")
    rows = len(hidden_TH) * (tp_group.size() if sequence_parallel and tp_group is not None else 1)
    if rows != len(labels_T):
        raise ValueError(f"hidden_TH has {rows} rows over its ranks, wants {len(labels_T)}, one per label")
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    keeps_dtype = not fp32_matmul or hidden_TH.is_cuda
    head = _Head(
        temperature=temperature,
        first_id=weight_VH.shape[0] * (group.rank() if group is not None else 0),
        vocab_size=vocab_size,
        dtype=hidden_TH.dtype if keeps_dtype else torch.float32,
        is_widening=fp32_matmul and keeps_dtype and hidden_TH.dtype != torch.float32,
        group=group,
        is_split=sequence_parallel and group is not None,
    )
    out = _LinearLogprobs.apply(hidden_TH, weight_VH, labels_T, head)
    return out[0], out[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    temperature: float
    first_id: int
    vocab_size: int
    dtype: torch.dtype
    """Of the inputs of the matrix products."""
    is_widening: bool
    """The logits' product hands out float32 (CUDA)."""
    group: Any
    is_split: bool
    """Each rank of the group holds a slice of the tokens."""

    def gather(self, hidden_TH: Tensor) -> Tensor:
        """All T hidden states in the type of the products."""
        if self.is_split:
            parts = hidden_TH
            hidden_TH = parts.new_empty(parts.shape[0] * self.group.size(), parts.shape[1])
            dist.all_gather_into_tensor(hidden_TH, parts.contiguous(), group=self.group)
        return hidden_TH.to(self.dtype)

    def blocks(self, weight_VH: Tensor, labels_T: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Slices of the rows that are not padding, with weight_CH and the labels' columns [T, 1] in the block: index
        and whether the label is there at all."""
        num_tokens, num_rows = labels_T.shape[0], self.num_valid_rows(weight_VH)
        size = BLOCK_BYTES // (4 * max(num_tokens, 1)) // MIN_BLOCK_ROWS * MIN_BLOCK_ROWS
        size = max(size, MIN_BLOCK_ROWS)
        for start in range(0, num_rows, size):
            rows = slice(start, min(start + size, num_rows))
            column_T1 = labels_T[:, None] - (self.first_id + start)
            is_here_T1 = (column_T1 >= 0) & (column_T1 < rows.stop - start)
            yield rows, weight_VH[rows].to(self.dtype), column_T1.clamp_(0, rows.stop - start - 1), is_here_T1

    def num_valid_rows(self, weight_VH: Tensor) -> int:
        return max(0, min(weight_VH.shape[0], self.vocab_size - self.first_id))

    def scaled_logits(self, hidden_TH: Tensor, weight_CH: Tensor) -> Tensor:
        """[T, C] float32, fresh: logits / temperature."""
        if self.is_widening:
            z_TC = torch.mm(hidden_TH, weight_CH.t(), out_dtype=torch.float32)
        else:
            z_TC = (hidden_TH @ weight_CH.t()).float()
        return z_TC if self.temperature == 1.0 else z_TC.div_(self.temperature)


class _LinearLogprobs(torch.autograd.Function):
    """Value and gradient, with z = logits / temperature and p its softmax.

    d logprob / dz_v = 1[v = label] - p_v;  d entropy / dz_v = -p_v (log p_v + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        gathered_TH = head.gather(hidden_TH)
        # Finite, so that a rank without valid rows has 0 and not NaN in its sums.
        max_T1 = hidden_TH.new_full((len(labels_T), 1), torch.finfo(torch.float32).min, dtype=torch.float32)
        exp_T1, label_z_T1, exp_z_T1 = torch.zeros_like(max_T1), torch.zeros_like(max_T1), torch.zeros_like(max_T1)

        def move_max(new_max_T1: Tensor) -> None:
            """sum e^(z - max) and sum e^(z - max) (z - max), relative to another maximum."""
            nonlocal max_T1
            shift_T1 = max_T1 - new_max_T1
            exp_z_T1.addcmul_(shift_T1, exp_T1).mul_(shift_T1.exp())
            exp_T1.mul_(shift_T1.exp())
            max_T1 = new_max_T1

        for _, weight_CH, column_T1, is_here_T1 in head.blocks(weight_VH, labels_T):
            z_TC = head.scaled_logits(gathered_TH, weight_CH)
            label_z_T1 += torch.where(is_here_T1, z_TC.gather(1, column_T1), 0.0)
            move_max(torch.maximum(max_T1, z_TC.amax(dim=1, keepdim=True)))
            e_TC = z_TC.sub_(max_T1).exp()
            exp_T1 += e_TC.sum(dim=1, keepdim=True)
            exp_z_T1 += e_TC.mul_(z_TC).sum(dim=1, keepdim=True)
            del z_TC, e_TC  # before the next block allocates its own
        if head.group is not None:
            global_max_T1 = max_T1.clone()
            dist.all_reduce(global_max_T1, op=dist.ReduceOp.MAX, group=head.group)
            move_max(global_max_T1)
            sums = torch.stack([exp_T1, label_z_T1, exp_z_T1])
            dist.all_reduce(sums, group=head.group)
            exp_T1, label_z_T1, exp_z_T1 = sums
        log_sum_T1 = exp_T1.log()
        logprobs_T1 = label_z_T1 - max_T1 - log_sum_T1
        entropy_T1 = log_sum_T1 - exp_z_T1 / exp_T1
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T, max_T1, exp_T1, entropy_T1)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprobs_T1[:, 0], entropy_T1[:, 0]

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_TH, weight_VH, labels_T, max_T1, exp_T1, entropy_T1 = ctx.saved_tensors
        head: _Head = ctx.head
        # grad logits = label_T1 at the label + e^(z - max) (a_T1 + b_T1 (z - max)); 1 / sum e^(z - max) is in a and b.
        label_T1 = torch.zeros_like(max_T1) if grad_logprobs_T is None else grad_logprobs_T[:, None] / head.temperature
        a_T1, b_T1 = -label_T1 / exp_T1, None
        if grad_entropy_T is not None:
            b_T1 = -grad_entropy_T[:, None] / (head.temperature * exp_T1)
            a_T1 = a_T1 + b_T1 * (entropy_T1 - exp_T1.log())
        gathered_TH = head.gather(hidden_TH)
        grad_TH = torch.zeros_like(gathered_TH, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_VH = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        for rows, weight_CH, column_T1, is_here_T1 in head.blocks(weight_VH, labels_T):
            z_TC = head.scaled_logits(gathered_TH, weight_CH).sub_(max_T1)
            if b_T1 is None:
                z_TC.exp_().mul_(a_T1)
            else:
                e_TC = z_TC.exp()
                z_TC.mul_(b_T1).add_(a_T1).mul_(e_TC)
                del e_TC
            z_TC.scatter_add_(1, column_T1, torch.where(is_here_T1, label_T1, 0.0))
            grad_TC = z_TC.to(head.dtype)
            del z_TC
            if grad_VH is not None:
                grad_VH[rows] = (grad_TC.t() @ gathered_TH).to(grad_VH.dtype)
            if grad_TH is not None:
                _add_product(grad_TH, grad_TC, weight_CH)
            del grad_TC  # before the next block allocates its own
        if grad_VH is not None:
            grad_VH[head.num_valid_rows(weight_VH) :].zero_()
        if grad_TH is not None:
            grad_TH = _sum_over_ranks(grad_TH, head).to(hidden_TH.dtype)
        return grad_TH, grad_VH, None, None


def _add_product(total_TH: Tensor, grad_TC: Tensor, weight_CH: Tensor) -> None:
    """total += grad @ weight, summed in float32."""
    if grad_TC.dtype == torch.float32:
        total_TH.addmm_(grad_TC, weight_CH)
    elif grad_TC.is_cuda:
        total_TH += torch.mm(grad_TC, weight_CH, out_dtype=torch.float32)
    else:  # the CPU's product rounds to the type of its inputs
        total_TH += grad_TC @ weight_CH


def _sum_over_ranks(grad_TH: Tensor, head: _Head) -> Tensor:
    """The ranks' gradients summed: all rows, or this rank's where they are split."""
    if head.is_split:
        part = grad_TH.new_empty(grad_TH.shape[0] // head.group.size(), grad_TH.shape[1])
        dist.reduce_scatter_tensor(part, grad_TH, group=head.group)
        return part
    if head.group is not None:
        dist.all_reduce(grad_TH, group=head.group)
    return grad_TH
