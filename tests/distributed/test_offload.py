"""Offloading: all memory of the trainer is given up, and training goes on as if it had never left, bit for bit."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import pack_batch
from gspo_megatron.config import BatchConfig
from gspo_megatron.loss import policy_loss
from tests.distributed.policy_worker import build, hf_tensors, tiny_sequences
from tests.distributed.spawn import spawn
from tests.distributed.test_reference import groups

DP2 = ("cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=1")
EP2 = ("cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2")
PLAIN, BF16 = "parallel.use_distributed_optimizer=false", "model.dtype=bfloat16"
LAYOUTS = {
    "dp2_overlap": (*DP2, "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"),
    "ep2_bf16": (*EP2, BF16),
    "ep2_plain": (*EP2, PLAIN),
    "pp2_vpp2_bf16_plain": (
        *("parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"),
        *(*DP2, BF16, PLAIN),
    ),
}


def gradients(policy: Any) -> Iterator[Tensor]:
    """Of the parameters, and the buffers that these are views of."""
    yield from (p.main_grad for _, p in policy.parameters())
    yield from (b.grad_data for c in policy.chunks for b in c.buffers + c.expert_parallel_buffers)


def kept_tensors(policy: Any, optimizer: Any) -> Iterator[Tensor]:
    """Weights, their buffers, and what the optimizer holds, found without the code under test."""
    yield from (p for _, p in policy.parameters())
    buffers = [b for c in policy.chunks for b in c.buffers + c.expert_parallel_buffers]
    yield from (b.param_data for b in buffers if b.param_data is not None)
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (state["exp_avg"], state["exp_avg_sq"])


def on_rank(rank: int, overrides: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What training gives when the trainer never leaves, and when it leaves between any two of its passes."""
    stayed = train(overrides, is_leaving=False)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    return stayed, train(overrides, is_leaving=True)


def train(overrides: tuple[str, ...], *, is_leaving: bool) -> dict[str, Any]:
    """Numbers of three steps, a log-prob pass and a reference pass."""
    recipe, policy, optimizer = build([*overrides, "optimizer.lr=1.0e-3"])
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from gspo_megatron.convert.shards import Gatherer
    from gspo_megatron.mcore.offload import Offload
    from gspo_megatron.optimize import add_old_logprobs, compute_logprobs, optimizer_step
    from gspo_megatron.reference import ReferencePolicy

    offload = Offload(policy, optimizer)
    host_shards = [replace(s, data=offload.on_host(s.data)) for s in policy.shards()]
    gatherer = Gatherer(host_shards, policy.ops, device=policy.parallel.device)
    found: dict[str, Any] = {"away": []}

    def all_tensors() -> list[Tensor]:
        return [*gradients(policy), *kept_tensors(policy, optimizer)]

    def leave_and_return() -> None:
        if not is_leaving:
            return
        offload.to_host()
        found["away"].append(sum(t.untyped_storage().nbytes() for t in all_tensors()))
        modules = [m for chunk in policy.chunks for m in chunk.modules() if isinstance(m, MoELayer)]
        found["routes"] = [m.token_dispatcher.probs for m in modules]
        from_host = {name: tensor.clone() for bucket in gatherer.buckets(100_000) for name, tensor in bucket}
        offload.to_device()
        live = hf_tensors(policy)
        assert live.keys() == from_host.keys()
        assert all(torch.equal(live[name], tensor) for name, tensor in from_host.items())

    cfg = BatchConfig(num_minibatches=1, max_tokens_per_microbatch=256)
    batch = pack_batch(tiny_sequences(), 256, policy.parallel.batch_layout, minibatch_index=0)
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute")
    reference = ReferencePolicy(policy)
    step = partial(
        optimizer_step,
        policy,
        optimizer,
        batch,
        partial(policy_loss, cfg=recipe.loss),
        denominator=batch.num_responses,
        lr=1.0e-3,
        temperature=1.0,
    )
    results = []
    for _ in range(3):
        leave_and_return()
        results.append(step())
        found["grads"] = [p.main_grad.clone() for _, p in policy.parameters()]
        leave_and_return()
    found["logprobs"] = compute_logprobs(policy, batch, temperature=1.0)
    leave_and_return()
    with_ref = reference.add_ref_logprobs(groups(), cfg, temperature=1.0)
    found["ref_logprobs"] = [r.ref_logprobs for g in with_ref for r in g.rollouts]
    found["numbers"] = [(r.loss, r.grad_norm, r.per_response["log_ratio"]) for r in results]
    policy.finish_param_sync()
    found["tensors"] = [t.detach().clone() for t in kept_tensors(policy, optimizer)]
    return found


def assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_equal(a, e)
    else:
        assert actual == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_bit_for_bit_after_all_memory_was_given_up(layout: str) -> None:
    for stayed, left in spawn(on_rank, 2, LAYOUTS[layout], timeout_s=120):
        assert left["away"] == [0] * 7
        assert left["routes"] and all(p is None for p in left["routes"])
        for kind in ("numbers", "grads", "logprobs", "ref_logprobs", "tensors"):
            assert_equal(left[kind], stayed[kind])
        (_, _, first), (_, _, last) = stayed["numbers"][0], stayed["numbers"][-1]
        assert not first.any() and last.all(), "the steps must change the policy"


def twice(rank: int) -> list[str]:
    _, policy, optimizer = build(["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"])
    from gspo_megatron.mcore.offload import Offload

    offload = Offload(policy, optimizer)
    messages = []
    for call in (offload.to_device, offload.to_host, offload.to_host):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_leaving_or_returning_twice_is_refused() -> None:
    (messages,) = spawn(twice, 1)
    assert messages == [
        "the trainer's memory is on the device already",
        "the trainer's memory is on the host already",
    ]
