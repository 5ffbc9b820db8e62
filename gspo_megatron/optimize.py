"""One optimizer step through megatron-core's schedule; and forward-only log-probs with the same packing.

Normalisation: with `calculate_per_token_loss` megatron-core sums the returned token counts over data and
context parallel and divides the gradients by that total T. Each microbatch returns loss_sum * T / N, so the terms end
up over the global N while auxiliary losses keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.loss import LossOutput, sum_per_response
from gspo_megatron.mcore.model import Policy
from gspo_megatron.mcore.schedule import broadcast_from_last_stage, run_schedule
from gspo_megatron.mismatch import MISMATCH_REDUCTIONS, mismatch_per_response
from gspo_megatron.types import Microbatch, NonFiniteError, TrainBatch

LossFn = Callable[[Tensor, Tensor, Microbatch], LossOutput]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step reports; equal on all ranks."""

    loss: float
    """Sum of terms / denominator, over all ranks."""
    grad_norm: float
    """Global, before clipping."""
    lr: float
    per_response: dict[str, Tensor]
    """[B] of all data-parallel ranks and microbatches, in the order of the step's sequences: float32, the mismatch
    sums float64."""


def optimizer_step(
    policy: Policy,
    optimizer: Any,
    batch: TrainBatch,
    loss_fn: LossFn,
    *,
    denominator: int,
    lr: float,
    temperature: float,
    old_is_rollout: bool = False,
    entropy_has_gradient: bool = False,
    save_failed_to: Path | None = None,
) -> StepResult:
    """Forward, backward, reduce, clip, update. Collective over all ranks.

    Args:
        policy: the model.
        optimizer: megatron-core's.
        batch: this rank's microbatches and the global counts.
        loss_fn: (logprobs_T, entropy_T, microbatch) -> LossOutput with the sum of terms.
        denominator: of the whole optimizer step: N responses for GSPO (loss.py), response tokens for supervised
            training.
        lr: learning rate of this step.
        temperature: divides the logits.
        old_is_rollout: old log-probs are SGLang's own: the mismatch is then taken of the current policy, so that
            minibatch 1 shows it at equal weights.
        entropy_has_gradient: loss_fn differentiates the entropy (a bonus), which costs passes over the logits.
        save_failed_to: file for this rank's microbatches when the step is not finite.

    Raises:
        NonFiniteError: the loss or the gradient norm; raised on every rank.
    """
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    scale = batch.num_tokens / denominator

    def loss_func(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        logprobs_T, entropy_T = output.unbind(-1)
        result = loss_fn(logprobs_T, entropy_T, microbatch)
        tokens = torch.tensor(microbatch.num_unpadded_tokens, dtype=torch.int, device=output.device)
        report = {"loss_sum": result.loss_sum.detach(), **result.per_response}
        report["number"] = microbatch.response_number_B
        kept_T = torch.where(microbatch.response_mask_T, entropy_T.detach(), 0.0)
        report["entropy_sum"] = sum_per_response(kept_T, microbatch.response_index_T, microbatch.response_length_B)
        if microbatch.old_logprobs_T is not None:
            report |= mismatch_per_response(
                logprobs_T.detach() if old_is_rollout else microbatch.old_logprobs_T,
                microbatch.rollout_logprobs_T,
                response_mask_T=microbatch.response_mask_T,
                response_index_T=microbatch.response_index_T,
                response_length_B=microbatch.response_length_B,
            )
        return result.loss_sum * scale, tokens, report

    reports = run_schedule(
        policy,
        batch.microbatches,
        loss_func,
        temperature=temperature,
        forward_only=False,
        entropy_has_gradient=entropy_has_gradient,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    updated, grad_norm, _ = optimizer.step()
    loss, per_response = _gather(policy, reports)
    loss /= denominator
    if not (updated and math.isfinite(loss) and math.isfinite(grad_norm)):
        where = f"minibatch {batch.minibatch_index}: loss={loss}, grad_norm={float(grad_norm)}"
        if save_failed_to is not None:
            save_microbatches(batch, save_failed_to)
            where += f"; this rank's microbatches are in {save_failed_to}"
        raise NonFiniteError(where)
    return StepResult(loss=loss, grad_norm=float(grad_norm), lr=lr, per_response=per_response)


@torch.no_grad()
def compute_logprobs(policy: Policy, batch: TrainBatch, *, temperature: float) -> list[Tensor]:
    """Log-probs of each microbatch, [T] float32, with the very packing that training will use.

    Collective over all ranks.
    """

    def collect(microbatch: Microbatch, output: Tensor) -> Tensor:
        return output[..., 0].detach()

    results = run_schedule(policy, batch.microbatches, collect, temperature=temperature, forward_only=True)
    return broadcast_from_last_stage(policy, results, [len(m.tokens_T) for m in batch.microbatches])


def add_old_logprobs(
    policy: Policy,
    batches: list[TrainBatch],
    *,
    temperature: float,
    source: str,
    routing_replay: Literal["none", "r2", "r3"] = "none",
) -> list[TrainBatch]:
    """Fill old_logprobs_T of every microbatch before the first update, and routed_experts where routes are replayed.

    Args:
        policy: the model whose current weights define pi_old.
        batches: one per optimizer step.
        temperature: divides the logits.
        source: `recompute` (by this trainer) or `rollout` (SGLang's own).
        routing_replay: which experts the update replays: r2, those that this pass chooses; r3, SGLang's, which this
            pass replays, too, where it computes.

    Raises:
        ValueError: r2 with SGLang's log-probs; r3 and microbatches without its routes; a policy built without replay.
    """
    if routing_replay == "r2" and source != "recompute":
        raise ValueError(f"routing_replay=r2, source={source!r}: only the trainer's pass has routes; wants recompute")
    filled = []
    for batch in batches:
        if routing_replay == "r3":
            own = [policy.routing_replay.with_rollout_routes(m) for m in batch.microbatches]
            batch = replace(batch, microbatches=own)
        routes: Sequence[tuple[Tensor, ...] | None] = [m.routed_experts for m in batch.microbatches]
        if source == "rollout":
            logprobs = [m.rollout_logprobs_T for m in batch.microbatches]
        elif routing_replay == "r2":
            with policy.routing_replay.recording() as routes:
                logprobs = compute_logprobs(policy, batch, temperature=temperature)
        else:
            logprobs = compute_logprobs(policy, batch, temperature=temperature)
        microbatches = [
            replace(m, old_logprobs_T=old, routed_experts=experts)
            for m, old, experts in zip(batch.microbatches, logprobs, routes, strict=True)
        ]
        filled.append(replace(batch, microbatches=microbatches))
    return filled


def save_microbatches(batch: TrainBatch, path: Path) -> None:
    """Write this rank's microbatches as safetensors, names `<microbatch>.<field>`; to look into a failed step."""
    tensors = {
        f"{i}.{f.name}": value.contiguous().cpu()
        for i, microbatch in enumerate(batch.microbatches)
        for f in fields(microbatch)
        if isinstance(value := getattr(microbatch, f.name), Tensor)
    }
    for i, microbatch in enumerate(batch.microbatches):
        routes = microbatch.routed_experts or ()
        tensors |= {f"{i}.routed_experts.{chunk}": experts for chunk, experts in enumerate(routes)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def _gather(policy: Policy, reports: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """(sum of terms over all ranks, per-response tensors of all responses). Collective over the default group."""
    p = policy.parallel
    mine = None
    if p.is_last_stage and p.tp_rank == 0:
        loss_sum = float(torch.stack([r.pop("loss_sum") for r in reports]).sum())
        values = {name: torch.cat([r[name] for r in reports]).cpu() for name in reports[0]}
        mine = (p.dp_rank, loss_sum, values)
    everyone: list[Any] = [None] * p.world_size
    dist.all_gather_object(everyone, mine)
    present = [item for item in everyone if item is not None]
    by_dp_rank = [[v for rank, _, v in present if rank == dp_rank] for dp_rank in range(p.dp_size)]
    per_response = {
        name: torch.cat([_over_context_parallel(name, [v[name] for v in ranks]) for ranks in by_dp_rank])
        for name in by_dp_rank[0][0]
    }
    number = per_response.pop("number")
    order = number.argsort()[int((number < 0).sum()) :]  # -1: the dummy sequence of a rank without a response
    per_response = {name: values[order] for name, values in per_response.items()}
    return sum(loss_sum for _, loss_sum, _ in present), per_response


def _over_context_parallel(name: str, values: list[Tensor]) -> Tensor:
    """[B] of whole responses from what each context-parallel rank has for its own tokens."""
    if name in ("advantage", "length", "number"):
        return values[0]
    return MISMATCH_REDUCTIONS.get(name, torch.sum)(torch.stack(values), dim=0)
