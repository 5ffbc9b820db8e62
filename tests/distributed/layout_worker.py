"""One layout's part of the parity test: six objectives' optimizer steps, and this rank's shards of what they left."""

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import LossConfig
from gspo_megatron.convert.shards import Shard
from gspo_megatron.loss import denominator, policy_loss
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.types import Microbatch, TrainBatch
from tests.distributed.policy_worker import build, tiny_tensors, with_random_routes

LR = 1.0e-4
ADAM_BETA1 = 0.9
GSPO_BAND = {"clip_low": 3.0e-4, "clip_high": 4.0e-4}
BASE = LossConfig(name="gspo", old_logprobs="rollout", **GSPO_BAND)
ARMS = {
    "gspo": BASE,
    "gspo_token": replace(BASE, name="gspo_token"),
    "grpo": replace(BASE, name="grpo", clip_low=0.2, clip_high=0.27),
    "gspo_r2": BASE,
    "gspo_r3": BASE,
    "gspo_aux": BASE,
}
AUX_KEYS = (
    "model.mcore.moe_router_load_balancing_type=aux_loss",
    "model.mcore.moe_aux_loss_coeff=0.02",
    "model.mcore.moe_z_loss_coeff=0.003",
)

# Mean log-ratios in turn: inside the band, between the two bounds (where swapped bounds decide otherwise), outside.
MEANS = (1.0e-4, 3.5e-4, -3.5e-4, -2.0e-4, 6.0e-4, -8.0e-4, 3.6e-4, -3.4e-4, 2.0e-2, -1.0e-2)
# Deviations of tokens from their response's mean, nats; none comes near GRPO's bounds of log 1.27 and log 0.8.
DEVIATIONS = (0.02, -0.17, 0.31, -0.3, 0.11, -0.06, 0.18, -0.25)


def make_sequences() -> list[TrainSequence]:
    """Uneven lengths, an empty response, a group without spread, holes in the mask; advantages per token."""
    rng = random.Random(11)
    sequences = []
    for i, length in enumerate([5, 23, 1, 14, 31, 0, 8, 19, 2, 27, 11, 16, 6, 21]):
        mask = [not (i % 4 == 1 and 3 <= t < 6) for t in range(length)]  # a tool's answer inside the response
        advantage = 0.0 if 8 <= i < 10 else (-1.0) ** (i // 2) * (0.3 + 0.1 * i)  # 8 and 9: equal rewards
        sequences.append(
            TrainSequence(
                name=str(i),
                prompt_ids=tuple(rng.choices(range(2, 47), k=rng.randint(3, 9))),
                response_ids=tuple(rng.choices(range(2, 47), k=length)),
                advantage=advantage,
                response_mask=tuple(mask),
                token_advantages=tuple(advantage * (1.5 if t % 3 else -0.5) for t in range(length)),
            )
        )
    return sequences


def old_logprobs(sequences: list[TrainSequence], current: list[tuple[float, ...]]) -> list[TrainSequence]:
    """The sequences with old log-probs that give each response its mean log-ratio from MEANS."""
    filled = []
    for i, (sequence, logprobs) in enumerate(zip(sequences, current, strict=True)):
        assert sequence.response_mask is not None
        kept = [t for t, is_kept in enumerate(sequence.response_mask) if is_kept]
        noise = [DEVIATIONS[(i + t) % len(DEVIATIONS)] for t in kept]
        centre = sum(noise) / len(noise) if noise else 0.0
        deltas = [0.0] * len(logprobs)
        for t, x in zip(kept, noise, strict=True):
            deltas[t] = MEANS[i % len(MEANS)] + x - centre
        old = tuple(p - d for p, d in zip(logprobs, deltas, strict=True))
        filled.append(replace(sequence, rollout_logprobs=old))
    return filled


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one spawn runs."""

    overrides: tuple[str, ...]
    """Recipe keys: layout, budget, recompute."""
    old: dict[str, list[tuple[float, ...]]] | None = None
    """One process's current log-probs (free, with replayed routes: r2, r3), to make old ones from; None: compute."""
    arms: tuple[str, ...] = tuple(ARMS)
    alike: tuple[int, int] | None = None
    """(padding multiple, microbatches): take those of another layout, so that auxiliary losses, which are a
    microbatch's own, compare."""


def run_case(rank: int, case: Case) -> dict[str, Any]:
    """Every arm's numbers from fresh weights and a fresh optimizer."""
    results: dict[str, Any] = {}
    with_replay = ("gspo", "gspo_token", "grpo", "gspo_r2", "gspo_r3")
    for keys, names in (("loss.routing_replay=r2",), with_replay), (AUX_KEYS, ("gspo_aux",)):
        wanted = [name for name in names if name in case.arms]
        if wanted:
            if results:
                from megatron.core import parallel_state

                parallel_state.destroy_model_parallel()
            recipe, policy, optimizer = build([*case.overrides, *keys, f"optimizer.lr={LR}", *OPTIMIZER_KEYS])
            for name in wanted:
                results[name] = run_arm(name, case, recipe, policy, optimizer)
    return results


OPTIMIZER_KEYS = ("optimizer.clip_grad=1.0e+9", f"optimizer.adam_beta1={ADAM_BETA1}")


def run_arm(name: str, case: Case, recipe: Any, policy: Any, optimizer: Any) -> dict[str, Any]:
    from gspo_megatron.mcore.model import build_optimizer, load_hf_weights
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    weights = tiny_tensors(policy.ops)
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, weights, "tiny_tensors")
    sequences, routes, num_flips = make_sequences(), None, 0
    if name == "gspo_r2":
        routes = record(recipe, policy, sequences, case)
        load_hf_weights(policy, optimizer, with_other_routers(weights), "with_other_routers")
        free = record(recipe, policy, sequences, case)
        pairs = zip(sum(routes, ()), sum(free, ()), strict=True)
        num_flips = sum(int((a != b).sum()) for a, b in pairs)
    kind = name.removeprefix("gspo_") if name in ("gspo_r2", "gspo_r3") else "free"
    if kind == "r3":
        sequences = with_random_routes(sequences, RouteFormat.of(policy.hf_config))
    current = case.old[kind] if case.old is not None else score(recipe, policy, sequences, case, routes)
    batch = pack(recipe, policy, old_logprobs(sequences, current), case)
    replay = "r3" if kind == "r3" else "none"
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="rollout", routing_replay=replay)
    batch = with_routes(batch, routes)
    cfg = ARMS[name]
    step = optimizer_step(
        policy,
        optimizer,
        batch,
        partial(policy_loss, cfg=cfg, cp_group=policy.parallel.shared_cp_group),
        denominator=denominator(batch, cfg, max_response_tokens=32),
        lr=LR,
        temperature=1.0,
    )
    return {
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "per_response": step.per_response,
        "current": current,
        "num_flips": num_flips,
        "num_microbatches": len(batch.microbatches),
        "dp_size": policy.parallel.dp_size,
        "padding_multiple": policy.parallel.batch_layout.padding_multiple,
        "tensors": tensors(policy, optimizer),
    }


def pack(recipe: Any, policy: Any, sequences: list[TrainSequence], case: Case) -> TrainBatch:
    layout = policy.parallel.batch_layout
    if case.alike is not None:
        layout = replace(layout, alignment=case.alike[0], microbatch_multiple=case.alike[1])
    return pack_batch(
        sequences,
        recipe.batch.max_tokens_per_microbatch,
        layout,
        minibatch_index=0,
        mode=recipe.batch.mode,
        routes=None if sequences[0].routed_experts is None else RouteFormat.of(policy.hf_config),
    )


def record(recipe: Any, policy: Any, sequences: list[TrainSequence], case: Case) -> list[tuple[Tensor, ...]]:
    """Routes of each microbatch."""
    from gspo_megatron.optimize import compute_logprobs

    with policy.routing_replay.recording() as routes:
        compute_logprobs(policy, pack(recipe, policy, sequences, case), temperature=1.0)
    return routes


def with_routes(batch: TrainBatch, routes: list[tuple[Tensor, ...]] | None) -> TrainBatch:
    if routes is None:
        return batch
    pairs = zip(batch.microbatches, routes, strict=True)
    return replace(batch, microbatches=[replace(m, routed_experts=r) for m, r in pairs])


def with_other_routers(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Routers moved far enough that many tokens choose other experts."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: t + 0.1 * torch.randn(t.shape, generator=generator) if name.endswith("mlp.gate.weight") else t
        for name, t in sorted(weights.items())
    }


def score(
    recipe: Any, policy: Any, sequences: list[TrainSequence], case: Case, routes: list[tuple[Tensor, ...]] | None
) -> list[tuple[float, ...]]:
    """Each sequence's response log-probs, on one process."""
    from gspo_megatron.optimize import compute_logprobs

    plain = [replace(s, response_mask=None) for s in sequences]
    batch = with_routes(pack(recipe, policy, plain, case), routes)
    if sequences[0].routed_experts is not None:
        batch = replace(batch, microbatches=[policy.routing_replay.with_rollout_routes(m) for m in batch.microbatches])
    logprobs = compute_logprobs(policy, batch, temperature=1.0)
    found: dict[int, tuple[float, ...]] = {}
    for m, logprobs_T in zip(batch.microbatches, logprobs, strict=True):
        found |= _by_response(m, logprobs_T)
    return [found[i] for i in range(len(sequences))]


def _by_response(m: Microbatch, logprobs_T: Tensor) -> dict[int, tuple[float, ...]]:
    return {
        number: tuple(logprobs_T[m.response_mask_T & (m.response_index_T == place)].tolist())
        for place, number in enumerate(m.response_number_B.tolist())
    }


def tensors(policy: Any, optimizer: Any) -> dict[str, list[Shard]]:
    """weights, grad, exp_avg and exp_avg_sq as this rank's shards of the global tensors."""
    found = {"weights": copies(policy)}
    if policy.chunks[0].ddp_config.use_distributed_optimizer:
        moments = distributed_moments(optimizer)
        grads = {p: m["exp_avg"] / (1.0 - ADAM_BETA1) for p, m in moments.items()}
    else:
        moments = {p: s for o in inner_optimizers(optimizer) for p, s in o.state.items()}
        grads = {p: p.main_grad for p in all_parameters(policy)}
    with torch.no_grad():
        for kind, values in (
            ("grad", grads),
            ("exp_avg", {p: m["exp_avg"] for p, m in moments.items()}),
            ("exp_avg_sq", {p: m["exp_avg_sq"] for p, m in moments.items()}),
        ):
            # Through the weights' own way out, so that no layout needs code of its own here.
            for parameter in all_parameters(policy):
                parameter.copy_(values[parameter].view(parameter.shape))
            found[kind] = copies(policy)
    return found


def all_parameters(policy: Any) -> list[Any]:
    return [p for _, p in policy.parameters()]


def copies(policy: Any) -> list[Shard]:
    return [replace(s, data=s.data.detach().clone()) for s in policy.shards()]


def distributed_moments(optimizer: Any) -> dict[Any, dict[str, Tensor]]:
    """Adam's moments of whole parameters from the ranks that hold their parts. Collective."""
    whole: dict[Any, dict[str, Tensor]] = {}
    for o in optimizer.chained_optimizers if hasattr(optimizer, "chained_optimizers") else [optimizer]:
        parameters = [p for buffer in o.buffers for p in buffer.params]
        sizes = [p.numel() for p in parameters]
        for key in ("exp_avg", "exp_avg_sq"):
            flat = torch.zeros(sum(sizes))
            for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
                whole.setdefault(parameter, {})[key] = piece
                if parameter in o.model_param_group_index_map:
                    group, order = o.model_param_group_index_map[parameter]
                    part = o._get_model_param_range_map(parameter)["param"]
                    state = o.optimizer.state[o.optimizer.param_groups[group]["params"][order]]
                    piece[part.start : part.end] = state[key].flatten()
            dist.all_reduce(flat, group=o.data_parallel_group)
    return whole


def inner_optimizers(optimizer: Any) -> list[Any]:
    """torch's optimizers under megatron-core's chain (dense and expert parameters apart)."""
    if hasattr(optimizer, "chained_optimizers"):
        return [o.optimizer for o in optimizer.chained_optimizers]
    return [optimizer.optimizer]
