"""The reference policy keeps the weights it was made with, on every layout, and gives the policy its own back.

Also: every reader of parameters sees those of the last step, also where the distributed optimizer's gather overlaps.
"""

from functools import cache, partial
from typing import Any

import pytest
import torch

from gspo_megatron.batch import pack_batch
from gspo_megatron.loss import policy_loss
from gspo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.distributed.policy_worker import build, hf_tensors, tiny_sequences
from tests.distributed.spawn import spawn
from tests.tolerances import PARITY_LOGPROBS, assert_close

ONE = ("cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1")
DP2 = ("cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=1")
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
LAYOUTS = {
    "one": ONE,
    "dp2": DP2,
    "dp2_overlap": DP2 + OVERLAP,
    "tp2_cp2": (
        *("cluster.trainer_ranks=4", "parallel.expert_model_parallel_size=2", "parallel.context_parallel_size=2"),
        *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    ),
    "pp2_vpp2_rows": (
        *DP2,
        *("parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"),
        *("batch.mode=padded", "batch.max_tokens_per_microbatch=256"),
    ),
}
RANKS = {"one": 1, "tp2_cp2": 4}


def groups() -> list[RolloutGroup]:
    """One response each; the first is empty."""
    return [
        RolloutGroup(
            prompt=Prompt(prompt_id=s.name, text="", token_ids=s.prompt_ids, expected="", entry={}),
            rollouts=(
                Rollout(
                    response_ids=s.response_ids if i else (),
                    rollout_logprobs=(0.0,) * (len(s.response_ids) if i else 0),
                    weight_versions=(0,) * (len(s.response_ids) if i else 0),
                    finish_reason="stop",
                    text="",
                    sampling_seed=0,
                ),
            ),
        )
        for i, s in enumerate(tiny_sequences())
    ]


def on_rank(rank: int, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Reference log-probs before and after a step, and the policy's weights on both sides of the second pass."""
    recipe, policy, optimizer = build(list(overrides))
    from gspo_megatron.optimize import add_old_logprobs, compute_logprobs, optimizer_step
    from gspo_megatron.reference import ReferencePolicy

    reference = ReferencePolicy(policy)
    add = partial(reference.add_ref_logprobs, groups(), recipe.batch, temperature=0.8)
    first = [g.rollouts[0].ref_logprobs for g in add()]
    batch = pack_batch(
        tiny_sequences(),
        recipe.batch.max_tokens_per_microbatch,
        policy.parallel.batch_layout,
        minibatch_index=0,
        mode=recipe.batch.mode,
    )
    (batch,) = add_old_logprobs(policy, [batch], temperature=0.8, source="recompute")
    loss_fn = partial(policy_loss, cfg=recipe.loss, cp_group=policy.parallel.shared_cp_group)
    step = partial(optimizer_step, denominator=batch.num_responses, lr=1.0e-2, temperature=0.8)
    # A step before each reader, so that none is served by what another one waited for.
    step(policy, optimizer, batch, loss_fn)
    exported = hf_tensors(policy)
    step(policy, optimizer, batch, loss_fn)
    logprobs = torch.cat(compute_logprobs(policy, batch, temperature=0.8))
    old = torch.cat([m.old_logprobs_T for m in batch.microbatches if m.old_logprobs_T is not None])
    mask = torch.cat([m.response_mask_T for m in batch.microbatches])
    drift = float((logprobs - old)[mask].abs().max())
    moved = hf_tensors(policy)
    second = [g.rollouts[0].ref_logprobs for g in add()]
    after = hf_tensors(policy)
    step(policy, optimizer, batch, loss_fn)
    third = [g.rollouts[0].ref_logprobs for g in add()]
    last_logprobs = torch.cat(compute_logprobs(policy, batch, temperature=0.8))
    return {
        "ref_logprobs": [first, second, third],
        "exported": exported,
        "moved": moved,
        "after": after,
        "last": hf_tensors(policy),
        "logprobs": logprobs,
        "last_logprobs": last_logprobs,
        "drift": drift,
    }


@cache
def results(layout: str) -> dict[str, Any]:
    return spawn(on_rank, RANKS.get(layout, 2), LAYOUTS[layout], timeout_s=120)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_stays_and_the_policy_gets_its_weights_back(layout: str) -> None:
    got = results(layout)
    assert got["drift"] > 0.05, "the policy must have moved for the reference to stay behind"
    first, second, third = got["ref_logprobs"]
    assert first == second == third, "bit for bit"
    assert first[0] == ()
    assert all(torch.equal(got["after"][name], tensor) for name, tensor in got["moved"].items())
    for a, b in zip(first, results("one")["ref_logprobs"][0], strict=True):
        assert_close(a, b, PARITY_LOGPROBS)


def test_overlapped_gather_hides_no_step_from_any_reader() -> None:
    plain, overlapped = results("dp2"), results("dp2_overlap")
    assert torch.equal(overlapped["logprobs"], plain["logprobs"])
    assert torch.equal(overlapped["last_logprobs"], plain["last_logprobs"]), "after the reference gave them back"
    for kind in ("exported", "moved", "last"):
        assert all(torch.equal(overlapped[kind][name], tensor) for name, tensor in plain[kind].items()), kind
