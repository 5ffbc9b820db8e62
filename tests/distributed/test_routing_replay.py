"""Routing replay: on every layout, under recomputation too, the update's routes are the old-log-prob pass's."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import pack_batch
from gspo_megatron.config import Recipe, load_recipe
from gspo_megatron.loss import LossOutput, policy_loss
from gspo_megatron.types import Microbatch, TrainBatch
from tests.distributed.policy_worker import HF_DIR, RECIPE, hf_tensors, tiny_sequences, tiny_tensors
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_GRADIENT, FLOAT32_LOSS, assert_close

COMMON = [
    f"model.hf_dir={HF_DIR}",
    "loss.routing_replay=r2",
    "optimizer.clip_grad=1.0e+9",
    "parallel.use_distributed_optimizer=false",
    "parallel.expert_model_parallel_size=1",
]
FULL = ["model.mcore.recompute_granularity=full", "model.mcore.recompute_num_layers=1"]
UNIFORM = [*FULL, "model.mcore.recompute_method=uniform"]
BUDGET = "batch.max_tokens_per_microbatch"
TEMPERATURE = 0.8  # not 1: the old pass and the update must both divide by it
VARIANTS = {
    "plain": [],
    "uniform": UNIFORM,
    "block": [*FULL, "model.mcore.recompute_method=block"],
    "selective": ["model.mcore.recompute_granularity=selective", "model.mcore.recompute_modules=[moe]"],
    # A single forward pass, whose routes cannot be another's.
    "one_microbatch": [f"{BUDGET}=2048"],
}
PP = "parallel.pipeline_model_parallel_size"
VPP = "parallel.virtual_pipeline_model_parallel_size"
# Layout -> processes, overrides, microbatches of a rank, variants.
LAYOUTS: dict[str, tuple[int, list[str], int, list[str]]] = {
    "one": (1, [f"{BUDGET}=128"], 4, ["plain", "uniform", "block", "selective"]),
    "tp2_sp": (
        2,
        ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true", f"{BUDGET}=128"],
        4,
        ["plain"],
    ),
    "pp2": (2, [f"{PP}=2", f"{BUDGET}=128"], 4, ["plain", "block"]),  # block: one of each stage's two layers
    "pp4": (4, [f"{PP}=4", f"{BUDGET}=80"], 6, ["plain", "uniform", "block"]),
    "pp2_vpp2": (2, [f"{PP}=2", f"{VPP}=2", f"{BUDGET}=128"], 4, ["plain", "uniform", "block", "selective"]),
    "ep2": (2, ["parallel.expert_model_parallel_size=2", f"{BUDGET}=64"], 4, ["plain", "selective"]),
    "cp2": (2, ["parallel.context_parallel_size=2", f"{BUDGET}=64"], 4, ["plain"]),
}


def other_router_tensors(ops: Any) -> dict[str, Tensor]:
    """tiny_tensors after routers that have moved far, the same on every layout."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: t + 0.04 * torch.randn(t.shape, generator=generator) if name.endswith("mlp.gate.weight") else t
        for name, t in tiny_tensors(ops).items()
    }


def leftovers(policy: Any) -> int:
    """What a pass left in the routers: actions, indices, routes in queues."""
    routers = [router for chunk in policy.routing_replay.routers for router in chunk]
    return sum(
        len(r.replay_backward_list)
        + sum(x is not None for x in (r.router_replay_action, r.target_topk_idx, r.recorded_topk_idx))
        for r in routers
    )


def changed_tokens(a: TrainBatch, b: TrainBatch) -> float:
    """Share of a rank's (layer, token) pairs whose set of experts differs."""
    pairs = [
        (x.sort(dim=-1).values != y.sort(dim=-1).values).any(dim=-1).flatten()
        for m, n in zip(a.microbatches, b.microbatches, strict=True)
        for x, y in zip(m.routed_experts or (), n.routed_experts or (), strict=True)
    ]
    return float(torch.cat(pairs).float().mean())


def hf_view_of_each(policy: Any, values: list[Tensor]) -> dict[str, Tensor]:
    """One value per parameter in Hugging Face names; by place, since the chunks of a rank have the same names."""
    with torch.no_grad():
        for (_, parameter), value in zip(policy.parameters(), values, strict=True):
            parameter.copy_(value.view(parameter.shape))
    return hf_tensors(policy)


def prepare(recipe: Recipe, parallel: Any) -> tuple[Any, Any, TrainBatch]:
    """A policy of its own with tiny_tensors, its optimizer and the batch."""
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_hf_weights

    policy = build_policy(recipe, parallel)
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, tiny_tensors(policy.ops), "tiny_tensors")
    budget = recipe.batch.max_tokens_per_microbatch
    return policy, optimizer, pack_batch(tiny_sequences(), budget, parallel.batch_layout, minibatch_index=0)


def replayed_update(recipe: Recipe, parallel: Any) -> dict[str, Any]:
    """Record at one set of weights; replay at it and at another, and route freely there before and after."""
    from gspo_megatron.mcore.model import load_hf_weights
    from gspo_megatron.optimize import StepResult, add_old_logprobs, optimizer_step

    policy, optimizer, batch = prepare(recipe, parallel)
    record = partial(
        add_old_logprobs, policy, temperature=TEMPERATURE, source="recompute", routing_replay="r2"
    )
    # A band so wide that the gradient of nearly every response stays.
    loss_cfg = replace(recipe.loss, clip_low=0.9, clip_high=0.9)
    left, queued = [], []

    def loss_fn(logprobs_T: Tensor, entropy_T: Tensor, microbatch: Microbatch) -> LossOutput:
        queued.append(max(len(r.replay_backward_list) for routers in policy.routing_replay.routers for r in routers))
        return policy_loss(logprobs_T, entropy_T, microbatch, loss_cfg, cp_group=parallel.shared_cp_group)

    def step(b: TrainBatch) -> StepResult:
        result = optimizer_step(
            policy, optimizer, b, loss_fn, denominator=b.num_responses, lr=0.0, temperature=TEMPERATURE
        )
        left.append(leftovers(policy))
        return result

    def log_ratio(result: StepResult) -> Tensor:
        """Of each response, in the order of their advantages, which no two share."""
        return result.per_response["log_ratio"][result.per_response["advantage"].argsort()]

    (recorded,) = record([batch])
    left.append(leftovers(policy))
    free_batch = replace(recorded, microbatches=[replace(m, routed_experts=None) for m in recorded.microbatches])
    same_weights = step(recorded)
    load_hf_weights(policy, optimizer, other_router_tensors(policy.ops), "other_router_tensors")
    (recorded_after,) = record([batch])
    free = step(free_batch)
    replayed = step(recorded)
    gradients = [p.main_grad.clone() for _, p in policy.parameters()]
    free_again = step(free_batch)
    return {
        "num_microbatches": len(batch.microbatches),
        "left": left,
        "queued": max(queued, default=None),
        "changed_tokens": changed_tokens(recorded, recorded_after),
        "same_weights": log_ratio(same_weights),
        "free": log_ratio(free),
        "free_again": log_ratio(free_again),
        "log_ratio": log_ratio(replayed),
        "loss": replayed.loss,
        "grad_norm": replayed.grad_norm,
        "free_grad_norm": free.grad_norm,
        "gradients": hf_view_of_each(policy, gradients),
    }


def initialized(overrides: list[str]) -> tuple[Recipe, Any]:
    """The recipe and this process's groups."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.mcore.parallel import initialize

    recipe = load_recipe(RECIPE, overrides)
    return recipe, initialize(recipe)


def on_rank(rank: int, overrides: list[str], variants: list[str]) -> dict[str, dict[str, Any]]:
    """replayed_update with each variant, on one layout."""
    _, parallel = initialized(overrides)
    return {name: replayed_update(load_recipe(RECIPE, [*overrides, *VARIANTS[name]]), parallel) for name in variants}


@cache
def results_of(layout: str) -> list[dict[str, dict[str, Any]]]:
    """Of every rank."""
    processes, overrides, _, variants = LAYOUTS[layout]
    if layout == "one":
        variants = ["one_microbatch", *variants]
    return spawn(
        on_rank, processes, [*COMMON, f"cluster.trainer_ranks={processes}", *overrides], variants, timeout_s=120
    )


def reference() -> dict[str, Any]:
    """One process, one microbatch, nothing recomputed."""
    return results_of("one")[0]["one_microbatch"]


def test_replay_differs_from_free_routing_for_many_tokens() -> None:
    expected = reference()
    assert expected["num_microbatches"] == 1
    assert expected["changed_tokens"] > 0.2
    assert (expected["log_ratio"] - expected["free"]).abs().median() > 100 * FLOAT32_LOSS.atol
    assert abs(expected["grad_norm"] / expected["free_grad_norm"] - 1) > 100 * FLOAT32_LOSS.rtol


@pytest.mark.parametrize(("layout", "variant"), [(name, r) for name, v in LAYOUTS.items() for r in v[-1]])
def test_update_replays_the_old_routes_on_layout_and_recomputation(layout: str, variant: str) -> None:
    expected = reference()
    ranks = [rank[variant] for rank in results_of(layout)]
    actual = ranks[0]
    assert all(rank["num_microbatches"] == LAYOUTS[layout][2] for rank in ranks)
    assert [rank["left"] for rank in ranks] == [[0] * len(actual["left"])] * len(ranks)
    # Queued for the backward pass only where something takes them out again; the loss is the last stage's.
    assert (ranks[-1]["queued"] > 0) == (variant != "plain")
    assert actual["same_weights"].abs().max() == 0.0
    assert torch.equal(actual["free_again"], actual["free"])
    assert_close(actual["free"], expected["free"], FLOAT32_LOSS)
    assert_close(actual["log_ratio"], expected["log_ratio"], FLOAT32_LOSS)
    assert_close(actual["loss"], expected["loss"], FLOAT32_LOSS)
    assert_close(actual["grad_norm"], expected["grad_norm"], FLOAT32_LOSS)
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert_close(actual["gradients"][name], gradient, FLOAT32_GRADIENT)


def message(fn: Any, error: type[Exception]) -> str:
    """What fn raises."""
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


def broken_passes(rank: int) -> dict[str, Any]:
    """Messages of what cannot be replayed, and what a failed pass leaves behind."""
    recipe, parallel = initialized([*COMMON, "cluster.trainer_ranks=1", f"{BUDGET}=128", *UNIFORM])
    from gspo_megatron.optimize import add_old_logprobs, compute_logprobs, optimizer_step

    policy, optimizer, batch = prepare(recipe, parallel)
    record = partial(add_old_logprobs, temperature=1.0, routing_replay="r2")
    (recorded,) = record(policy, [batch], source="recompute")
    first, second, *rest = recorded.microbatches
    last = rest[-1]
    no_replay_recipe = replace(recipe, loss=replace(recipe.loss, routing_replay="none"))
    no_replay, _, _ = prepare(no_replay_recipe, parallel)

    def run(microbatches: list[Microbatch], target: Any = policy) -> None:
        compute_logprobs(target, replace(recorded, microbatches=microbatches), temperature=1.0)

    def failing_loss(logprobs_T: Tensor, entropy_T: Tensor, microbatch: Microbatch) -> LossOutput:
        if microbatch.response_number_B[0] == second.response_number_B[0]:
            raise OSError(f"the pass held {leftovers(policy)} when it failed")
        return policy_loss(logprobs_T, entropy_T, microbatch, recipe.loss)

    def step() -> None:
        optimizer_step(policy, optimizer, recorded, failing_loss, denominator=1, lr=0.0, temperature=1.0)

    def recompute_for_one_of_two() -> None:
        with policy.routing_replay.whole_pass([first, second]):
            policy.routing_replay.routers[0][3].set_target_indices(torch.zeros(1, 2, dtype=torch.int64))

    routes = first.routed_experts
    assert routes is not None
    return {
        "types": {(r.dtype, r.device.type) for m in recorded.microbatches for r in m.routed_experts or ()},
        "missing": message(lambda: run([first, replace(second, routed_experts=None)]), ValueError),
        "tokens": message(lambda: run([first, replace(last, routed_experts=routes)]), ValueError),
        "layers": message(lambda: run([replace(first, routed_experts=(routes[0][1:],))]), ValueError),
        "chunks": message(lambda: run([replace(first, routed_experts=routes * 2)]), ValueError),
        "built_without": message(lambda: run([first], no_replay), ValueError),
        "recorded_without": message(lambda: record(no_replay, [batch], source="recompute"), ValueError),
        "rollout": message(lambda: record(policy, [batch], source="rollout"), ValueError),
        "half_recomputed": message(recompute_for_one_of_two, RuntimeError),
        "failed": message(step, OSError),
        "left": leftovers(policy),
        "lengths": (len(first.tokens_T), len(last.tokens_T)),
    }


def test_routes_that_do_not_fit_are_refused_and_a_failed_pass_leaves_nothing() -> None:
    (got,) = spawn(broken_passes, 1)
    had, wants = got["lengths"]
    assert had != wants
    assert got["types"] == {(torch.int16, "cpu")}
    assert got["missing"].startswith("microbatches [1] have no routed_experts and the others have")
    start = "microbatch 1: routed_experts has [MoE layers, tokens, topk] ="
    assert got["tokens"].startswith(f"{start} [(4, {had}, 2)], wants [(4, {wants}, 2)]")
    start = start.replace("1", "0")
    assert got["layers"].startswith(f"{start} [(3, {had}, 2)], wants [(4, {had}, 2)]")
    assert got["chunks"].startswith(f"{start} [(4, {had}, 2), (4, {had}, 2)], wants [(4, {had}, 2)]")
    for key in ("built_without", "recorded_without"):
        assert "the policy was built with loss.routing_replay=none" in got[key]
    assert got["rollout"].startswith("routing_replay=r2, source='rollout'")
    start = "routing replay, chunk 0, MoE layer 3: the backward pass left the routes of 1 of 2 microbatches"
    assert got["half_recomputed"].startswith(start)
    # Per layer an action, a target and the routes of this microbatch, in its 4 layers; the first one's are used up.
    assert got["failed"] == "the pass held 12 when it failed"
    assert got["left"] == 0
