"""megatron-core's forward-backward schedule over microbatches, packed or in rows.

Source: megatron-core 0.19.2, pipeline_parallel/schedules.py; GPTModel's output_processor hook.
Shapes: T = tokens on this rank, V = vocabulary columns on this rank, b = rows (1 when packed), s = T / b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_pipeline_model_parallel_group, get_pipeline_model_parallel_last_rank
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from gspo_megatron.logprobs import linear_logprobs
from gspo_megatron.mcore.model import Policy, head_weight
from gspo_megatron.types import Microbatch


def run_schedule(
    policy: Policy,
    microbatches: list[Microbatch],
    loss_func: Callable[..., Any],
    *,
    temperature: float,
    forward_only: bool,
    entropy_has_gradient: bool = False,
) -> list[Any]:
    """megatron-core's forward-backward over the microbatches; returns what loss_func reports on the last stage.

    loss_func gets [T, 2] log-probs and entropy; the entropy carries a gradient where asked for.
    Routes that the microbatches carry are replayed (routing_replay.py); without them the router is free.
    """

    def processor(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, labels: Tensor, **_: Any) -> Tensor:
        # Megatron's hidden states are [s, b, H]; the microbatch's [T] fields are row after row.
        logprobs_T, entropy_T = linear_logprobs(
            hidden_states.flatten(0, 1),
            head_weight(output_layer, output_weight),
            labels.t().flatten(),
            temperature=temperature,
            vocab_size=policy.vocab_size,
            fp32_matmul=policy.fp32_lm_head,
            tp_group=policy.parallel.tp_group,
            sequence_parallel=policy.config.sequence_parallel,
        )
        pair_T2 = torch.stack([logprobs_T, entropy_T if entropy_has_gradient else entropy_T.detach()], dim=-1)
        return pair_T2.unflatten(0, labels.t().shape).transpose(0, 1).flatten(0, 1)

    return run_processed(policy, microbatches, processor, loss_func, forward_only=forward_only)


def run_processed(
    policy: Policy,
    microbatches: list[Microbatch],
    processor: Callable[..., Tensor],
    loss_func: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """run_schedule with any output_processor of GPTModel's: loss_func gets the microbatch and what it returned."""

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
        m: Microbatch = next(iterator)
        with routing.forward(chunks.index(model), m):
            output = model(
                m.tokens_T.view(m.num_rows, -1),
                m.position_ids_T.view(m.num_rows, -1),
                None,
                labels=m.labels_T.view(m.num_rows, -1),
                packed_seq_params=_packed(m, may_pad) if m.row_length is None else None,
                padding_mask=_padding_mask(m, policy, model),
                output_processor=processor,
            )
        if forward_only:
            return output, lambda out, non_loss_data: loss_func(m, out)
        return output, lambda out: loss_func(m, out)

    chunks, routing = policy.chunks, policy.routing_replay
    may_pad = policy.parallel.batch_layout.microbatch_padding_multiple > 1
    microbatches = [_on_device(m, policy.parallel.device) for m in microbatches]
    iterators = [iter(microbatches) for _ in chunks]
    with routing.whole_pass(microbatches):
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=max(len(m.tokens_T) // m.num_rows for m in microbatches) * policy.parallel.cp_size,
            micro_batch_size=microbatches[0].num_rows,  # of all
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return reports


def _on_device(m: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch with its tensors on device."""
    values: dict[str, Any] = {f.name: getattr(m, f.name) for f in fields(m)}
    moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
    if m.routed_experts is not None:
        moved["routed_experts"] = tuple(routes.to(device) for routes in m.routed_experts)
    return replace(m, **moved)


def _padding_mask(m: Microbatch, policy: Policy, model: Any) -> Tensor:
    """[b, s] bool, True on padding: the router's auxiliary losses leave it out.

    With sequence parallel a chunk that starts with the embedding cuts the mask as it cuts the tokens; the other chunks
    take it as it comes and want this rank's slice (megatron-core 0.19.2, GPTModel._preprocess).
    """
    mask = m.is_padding_T.view(m.num_rows, -1)
    if policy.config.sequence_parallel and not unwrap_model(model).pre_process:
        return mask.chunk(policy.parallel.tp_size, dim=1)[policy.parallel.tp_rank]
    return mask


def _packed(m: Microbatch, may_pad: bool) -> PackedSeqParams:
    """Where sequences start; may_pad: padding may lie behind them.

    Told nothing, Transformer Engine compares the starts on the device in every layer, and overlooks padding behind the
    last sequence, whose output flash attention leaves unwritten.
    """
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=m.cu_seqlens,
        cu_seqlens_kv=m.cu_seqlens,
        cu_seqlens_q_padded=m.cu_seqlens_padded,
        cu_seqlens_kv_padded=m.cu_seqlens_padded,
        max_seqlen_q=m.max_seqlen,
        max_seqlen_kv=m.max_seqlen,
        pad_between_seqs=may_pad,
    )


def broadcast_from_last_stage(policy: Policy, results: list[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Hand the last pipeline stage's [T] float32 tensors to all stages. Collective over the pipeline group.

    Args:
        policy: gives the layout.
        results: one tensor per microbatch on the last stage, empty on the others.
        lengths: T of each microbatch.
    """
    if policy.parallel.pp_size == 1:
        return results
    everywhere = []
    for i, length in enumerate(lengths):
        tensor = results[i].contiguous() if results else torch.empty(length, device=policy.parallel.device)
        dist.broadcast(
            tensor, src=get_pipeline_model_parallel_last_rank(), group=get_pipeline_model_parallel_group()
        )
        everywhere.append(tensor)
    return everywhere
