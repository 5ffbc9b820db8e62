"""Routing replay R3: on every layout each token replays its own routes in its own layers, and others do not matter.

The model has a layer without experts, so that layers and routers are counted differently.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.loss import LossOutput, policy_loss
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.types import Microbatch, TrainBatch
from tests.distributed.policy_worker import HF_DIR, RECIPE, tiny_sequences, tiny_tensors, with_random_routes
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_GRADIENT, FLOAT32_LOGPROB, FLOAT32_LOSS, assert_close

BUDGET = "batch.max_tokens_per_microbatch"
SIZE = "parallel.{}_parallel_size"
PP2 = [f"{SIZE.format('pipeline_model')}=2"]
TP2 = [f"{SIZE.format('tensor_model')}=2", "parallel.sequence_parallel=true"]
# Layout -> processes, overrides.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, [f"{BUDGET}=128"]),
    "padded": (1, [f"{BUDGET}=128", "batch.mode=padded"]),
    "tp2_sp": (2, [*TP2, f"{BUDGET}=128"]),
    "tp2_sp_padded": (2, [*TP2, f"{BUDGET}=128", "batch.mode=padded"]),
    "pp2": (2, [*PP2, f"{BUDGET}=128"]),
    "pp2_vpp2_recompute": (
        2,
        [*PP2, f"{SIZE.format('virtual_pipeline_model')}=2", f"{BUDGET}=128"]
        + ["model.mcore.recompute_granularity=full", "model.mcore.recompute_method=uniform"]
        + ["model.mcore.recompute_num_layers=1"],
    ),
    "cp2": (2, [f"{SIZE.format('context')}=2", f"{BUDGET}=64"]),
    "cp2_padded": (2, [f"{SIZE.format('context')}=2", f"{BUDGET}=64", "batch.mode=padded"]),
}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json with experts in layers 0, 2 and 3."""
    folder = tmp_path_factory.mktemp("mixed")
    config = json.loads((HF_DIR / "config.json").read_text()) | {"mlp_only_layers": [1], "intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(HF_DIR / "tokenizer.json", folder)
    return folder


def prepare(hf_dir: Path, layout: str) -> tuple[Any, Any, Any]:
    """(recipe, policy, optimizer) of this process."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_hf_weights
    from gspo_megatron.mcore.parallel import initialize

    processes, overrides = LAYOUTS[layout]
    common = [f"model.hf_dir={hf_dir}", "loss.routing_replay=r3", f"cluster.trainer_ranks={processes}"]
    common += ["parallel.expert_model_parallel_size=1", "parallel.use_distributed_optimizer=false"]
    recipe = load_recipe(RECIPE, [*common, *overrides])
    policy = build_policy(recipe, initialize(recipe))
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, tiny_tensors(policy.ops), "tiny_tensors")
    return recipe, policy, optimizer


def pack(recipe: Any, policy: Any, sequences: list[TrainSequence]) -> TrainBatch:
    return pack_batch(
        sequences,
        recipe.batch.max_tokens_per_microbatch,
        policy.parallel.batch_layout,
        minibatch_index=0,
        mode=recipe.batch.mode,
        routes=RouteFormat.of(policy.hf_config) if sequences[0].routed_experts is not None else None,
    )


def record_free_routes(rank: int, hf_dir: Path) -> list[bytes]:
    """Of each sequence, the routes that one process chooses, in Rollout's form."""
    from gspo_megatron.optimize import compute_logprobs

    recipe, policy, _ = prepare(hf_dir, "one")
    batch = pack(recipe, policy, tiny_sequences())
    with policy.routing_replay.recording() as recorded:
        compute_logprobs(policy, batch, temperature=1.0)
    found: dict[int, bytes] = {}
    for m, (routes,) in zip(batch.microbatches, recorded, strict=True):
        starts = m.cu_seqlens_padded.tolist()
        numbers, lengths = m.response_number_B.tolist(), m.cu_seqlens.diff().tolist()
        for number, start, length in zip(numbers, starts[:-1], lengths, strict=True):
            own = routes[:, start : start + length - 1].transpose(0, 1)  # the last token has none
            found[number] = own.to(torch.uint8).numpy().tobytes()
    return [found[i] for i in range(len(found))]


@cache
def free_routes(hf_dir: Path) -> list[bytes]:
    (routes,) = spawn(record_free_routes, 1, hf_dir)
    return routes


def log_ratios(rank: int, hf_dir: Path, layout: str, routed_experts: list[bytes]) -> dict[str, Any]:
    """Log-probs with free and with replayed routes, and the update's log-ratios."""
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    recipe, policy, optimizer = prepare(hf_dir, layout)
    pairs = zip(tiny_sequences(), routed_experts, strict=True)
    batch = pack(recipe, policy, [replace(s, routed_experts=routes) for s, routes in pairs])
    (free,), (replayed,) = (
        add_old_logprobs(policy, [batch], temperature=0.8, source="recompute", routing_replay=replay)
        for replay in ("none", "r3")
    )

    def loss_fn(logprobs_T: Tensor, entropy_T: Tensor, microbatch: Microbatch) -> LossOutput:
        return policy_loss(logprobs_T, entropy_T, microbatch, recipe.loss, cp_group=policy.parallel.shared_cp_group)

    step = optimizer_step(policy, optimizer, replayed, loss_fn, denominator=24, lr=0.0, temperature=0.8)
    masks = [m.response_mask_T for m in batch.microbatches]
    return {
        "carried": [m.rollout_routes_T is not None or m.routed_experts is None for m in replayed.microbatches],
        "log_ratio": step.per_response["log_ratio"],
        **{
            name: torch.cat([m.old_logprobs_T[k] for m, k in zip(b.microbatches, masks, strict=True)])
            for name, b in (("free", free), ("replayed", replayed))
        },
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaying_the_routes_that_a_policy_chose_gives_its_own_logprobs(layout: str, hf_dir: Path) -> None:
    for rank in spawn(log_ratios, LAYOUTS[layout][0], hf_dir, layout, free_routes(hf_dir), timeout_s=120):
        assert len(rank["replayed"]) > 20
        assert_close(rank["replayed"], rank["free"], FLOAT32_LOGPROB)
        assert rank["log_ratio"].abs().max() == 0.0, "both passes replay the same routes"
        assert not any(rank["carried"]), "a rank keeps its own part of the routes"


def test_a_token_or_a_layer_further_on_gives_other_logprobs(hf_dir: Path) -> None:
    def per_row(routed_experts: bytes, by: int) -> bytes:
        return routed_experts[-by:] + routed_experts[:-by]

    layer, token = 2, 6  # bytes: 2 experts in each of 3 layers
    for by in (layer, token):
        moved = [per_row(routes, by) for routes in free_routes(hf_dir)]
        (got,) = spawn(log_ratios, 1, hf_dir, "one", moved, timeout_s=120)
        assert (got["replayed"] - got["free"]).abs().median() > 100 * FLOAT32_LOGPROB.atol


def gradients(rank: int, hf_dir: Path, layout: str) -> dict[str, Any]:
    """Log-probs and gradient with the stated routes where SGLang has none, and with others."""
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    recipe, policy, optimizer = prepare(hf_dir, layout)
    routes = RouteFormat.of(policy.hf_config)
    batch = pack(recipe, policy, with_random_routes(tiny_sequences(), routes))
    generator = torch.Generator().manual_seed(2)
    changed, num_changed = [], 0
    for m in batch.microbatches:
        assert m.rollout_routes_T is not None
        has_none_T = (m.labels_T == 0) | m.is_padding_T
        shape = (*m.rollout_routes_T.shape[:2], routes.num_experts)
        others = torch.rand(shape, generator=generator).argsort(-1)[..., : routes.topk].to(torch.int16)
        changed.append(replace(m, rollout_routes_T=torch.where(has_none_T[:, None, None], others, m.rollout_routes_T)))
        num_changed += int(has_none_T.sum())

    def loss_fn(logprobs_T: Tensor, entropy_T: Tensor, microbatch: Microbatch) -> LossOutput:
        return policy_loss(logprobs_T, entropy_T, microbatch, recipe.loss, cp_group=policy.parallel.shared_cp_group)

    results: dict[str, Any] = {"num_changed": num_changed}
    for name, one in (("stated", batch), ("other", replace(batch, microbatches=changed))):
        (old,) = add_old_logprobs(policy, [one], temperature=1.0, source="recompute", routing_replay="r3")
        step = optimizer_step(policy, optimizer, old, loss_fn, denominator=24, lr=0.0, temperature=1.0)
        results[f"{name}_log_ratio"] = float(step.per_response["log_ratio"].abs().max())
        results[name] = (
            torch.cat([m.old_logprobs_T[m.response_mask_T] for m in old.microbatches if m.old_logprobs_T is not None]),
            [p.main_grad.clone() for _, p in policy.parameters()],
        )
    return results


@pytest.mark.parametrize("layout", ["padded", "cp2"])
def test_routes_of_the_last_token_and_of_padding_change_no_logprob_and_no_gradient(
    layout: str, hf_dir: Path
) -> None:
    ranks = spawn(gradients, LAYOUTS[layout][0], hf_dir, layout, timeout_s=120)
    assert sum(rank["num_changed"] for rank in ranks) > len(tiny_sequences())
    for rank in ranks:
        assert rank["stated_log_ratio"] == rank["other_log_ratio"] == 0.0, "the old pass replays them, too"
        (stated, stated_gradients), (other, other_gradients) = rank["stated"], rank["other"]
        assert_close(other, stated, FLOAT32_LOSS)
        assert any(g.abs().max() > 1e-3 for g in stated_gradients)
        for a, b in zip(other_gradients, stated_gradients, strict=True):
            assert_close(a, b, FLOAT32_GRADIENT)


def refusals(rank: int, hf_dir: Path) -> list[str]:
    from gspo_megatron.mcore.model import build_policy
    from gspo_megatron.optimize import add_old_logprobs

    recipe, policy, _ = prepare(hf_dir, "one")
    free_recipe = replace(recipe, loss=replace(recipe.loss, routing_replay="none"))
    free_policy = build_policy(free_recipe, policy.parallel)
    bare = pack(recipe, policy, tiny_sequences())
    routed = pack(recipe, policy, with_random_routes(tiny_sequences(), RouteFormat.of(policy.hf_config)))
    messages = []
    for p, batch in ((policy, bare), (free_policy, routed)):
        with pytest.raises(ValueError) as caught:
            add_old_logprobs(p, [batch], temperature=1.0, source="rollout", routing_replay="r3")
        messages.append(str(caught.value))
    return messages


def test_batch_without_routes_and_policy_without_replay_are_refused(hf_dir: Path) -> None:
    (messages,) = spawn(refusals, 1, hf_dir)
    start = "loss.routing_replay=r3 wants rollout_routes_T in every microbatch and a policy built with it; got"
    assert messages == [f"{start} none, and one", f"{start} them, and one without"]
