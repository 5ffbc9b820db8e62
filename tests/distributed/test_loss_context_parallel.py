"""Losses over context-parallel ranks equal those of one rank, in value and gradient."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.batch import BatchLayout, TrainSequence, pack_batch
from gspo_megatron.config import CorrectionConfig
from gspo_megatron.loss import policy_loss
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_LOG_RATIO, FLOAT64, assert_close
from tests.unit.test_loss import CONFIGS

NUM_SEQUENCES, VOCAB = 9, 400
ARMS = {  # bands that some of these log-ratios leave
    "gspo": replace(CONFIGS["gspo"], clip_low=1e-4, clip_high=2e-4),
    "gspo_token": replace(CONFIGS["gspo_token"], clip_low=1e-4, clip_high=2e-4),
    "grpo": replace(CONFIGS["grpo"], clip_low=5e-4, clip_high=7e-4),
    "gmpo": replace(CONFIGS["gmpo"], clip_low=5e-4, clip_high=7e-4),
    "minirl": replace(CONFIGS["minirl"], clip_low=5e-4, clip_high=7e-4),
}
ARMS |= {
    name: replace(ARMS["gspo"], correction=CorrectionConfig(name=name, low=low, high=1.1))
    for name, low in (("tis", None), ("sequence_tis_mean", None), ("sequence_mis", None), ("geometric_rejection", 0.9))
}


def sequences() -> list[TrainSequence]:
    """Token ids are all different. One response is empty, one a single token."""
    advantages = torch.randn(NUM_SEQUENCES, generator=torch.Generator().manual_seed(1)).tolist()
    return [
        TrainSequence(
            name=f"sequence {i}",
            prompt_ids=tuple(range(40 * i + 1, 40 * i + 3 + i % 3)),
            response_ids=tuple(range(40 * i + 20, 40 * i + 20 + length)),
            advantage=advantages[i],
        )
        for i, length in enumerate([7, 0, 1, 19, 12, 3, 16, 8, 11])
    ]


def loss_and_gradient(
    name: str, layout: BatchLayout, cp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of the rank, its gradient per token id, per_response by first label so that packings compare."""
    generator = torch.Generator().manual_seed(0)
    old = -3.0 * torch.rand(VOCAB, generator=generator, dtype=torch.float64)
    new = (old + 1e-3 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).requires_grad_()
    rollout = old + 0.3 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    batch = pack_batch(sequences(), 160 // layout.cp_size, layout, minibatch_index=0)
    loss, per_response = torch.zeros((), dtype=torch.float64), []
    for m in batch.microbatches:
        m = replace(m, old_logprobs_T=old[m.labels_T], rollout_logprobs_T=rollout[m.labels_T])
        out = policy_loss(new[m.labels_T], new[m.labels_T], m, ARMS[name], cp_group=cp_group)
        loss = loss + out.loss_sum / batch.num_responses
        per_response.append(out.per_response)
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad, {k: torch.cat([p[k] for p in per_response]) for k in per_response[0]}


def on_rank(rank: int, name: str, cp_size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    layout = BatchLayout(dp_rank=0, dp_size=1, cp_rank=rank, cp_size=cp_size, alignment=1)
    return loss_and_gradient(name, layout, dist.group.WORLD)


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("cp_size", [2, 3])
def test_context_parallel_loss_and_gradient_equal_one_rank(name: str, cp_size: int) -> None:
    # The same padding on one rank gives the same packing, so that responses compare in order.
    alone = BatchLayout(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, alignment=2 * cp_size)
    loss, grad, per_response = loss_and_gradient(name, alone, None)
    assert 0 < per_response["clipped_tokens"].count_nonzero() < NUM_SEQUENCES
    ranks = spawn(on_rank, cp_size, name, cp_size)
    assert_close(sum(r[0] for r in ranks), loss, FLOAT64)
    assert_close(sum(r[1] for r in ranks), grad, FLOAT64)
    for _, rank_grad, _ in ranks:
        assert 0 < rank_grad.count_nonzero() < grad.count_nonzero()
    for key, value in per_response.items():
        parts = [r[2][key] for r in ranks]
        assert_close(parts[0] if key in ("advantage", "length") else sum(parts), value, FLOAT32_LOG_RATIO)
