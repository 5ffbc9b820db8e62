"""The optimizer step takes the learning rate it is given; one that is not finite keeps what it was computed from."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo_megatron.batch import pack_batch
from gspo_megatron.loss import policy_loss
from gspo_megatron.types import NonFiniteError
from tests.distributed.policy_worker import build, hf_tensors, tiny_sequences
from tests.distributed.spawn import spawn


def weights_and_broken_step(rank: int, failed_path: str) -> tuple[bool, bool, str]:
    """Whether the weights stay at lr 0, whether they move at 1e-4, and the error of a step with a NaN weight."""
    recipe, policy, optimizer = build(["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"])
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    batch = pack_batch(tiny_sequences(), 2048, policy.parallel.batch_layout, minibatch_index=2)
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute")
    loss_fn = partial(policy_loss, cfg=recipe.loss)
    before = hf_tensors(policy)
    stayed, moved = (
        all(torch.equal(before[n], t) for n, t in hf_tensors(policy).items())
        for lr in (0.0, 1.0e-4)
        if optimizer_step(policy, optimizer, batch, loss_fn, denominator=24, lr=lr, temperature=1.0)
    )
    with torch.no_grad():
        dict(policy.parameters())["output_layer.weight"][3, 5] = torch.nan
    step = partial(optimizer_step, denominator=24, lr=1.0e-4, temperature=1.0, save_failed_to=Path(failed_path))
    try:
        step(policy, optimizer, batch, loss_fn)
    except NonFiniteError as error:
        return stayed, not moved, str(error)
    return stayed, not moved, "no error"


def test_step_takes_its_lr_and_nan_is_an_error_that_names_the_minibatch_and_saves_it(tmp_path: Path) -> None:
    path = tmp_path / "failed_step" / "rank_0.safetensors"
    ((stayed, moved, message),) = spawn(weights_and_broken_step, 1, str(path), timeout_s=120)
    assert stayed, "the optimizer was built with lr 1e-4, and stepped with 0"
    assert moved
    assert message.startswith("minibatch 2: loss=nan")
    assert str(path) in message
    saved = load_file(path)
    assert saved["0.tokens_T"].shape == saved["0.old_logprobs_T"].shape
    assert saved["0.advantages_B"].shape == (24,)
