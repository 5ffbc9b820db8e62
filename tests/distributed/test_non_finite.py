"""A step that is not finite stops the run and keeps what it was computed from."""

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from gspo_megatron.batch import pack_batch
from gspo_megatron.loss import gspo_loss
from gspo_megatron.types import NonFiniteError
from tests.distributed.policy_worker import build, tiny_sequences
from tests.distributed.spawn import spawn


def step_on_broken_weights(rank: int, failed_path: str) -> str:
    recipe, policy, optimizer = build(["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"])
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    batch = pack_batch(tiny_sequences(), 2048, policy.parallel.batch_layout, minibatch_index=2)
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute")
    with torch.no_grad():
        dict(policy.parameters())["output_layer.weight"][3, 5] = torch.nan
    step = partial(optimizer_step, denominator=24, lr=1.0e-4, temperature=1.0, save_failed_to=Path(failed_path))
    try:
        step(policy, optimizer, batch, partial(gspo_loss, cfg=recipe.loss))
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_nan_is_an_error_that_names_the_minibatch_and_saves_it(tmp_path: Path) -> None:
    path = tmp_path / "failed_step" / "rank_0.safetensors"
    (message,) = spawn(step_on_broken_weights, 1, str(path), timeout_s=120)
    assert message.startswith("minibatch 2: loss=nan")
    assert str(path) in message
    saved = load_file(path)
    assert saved["0.tokens_T"].shape == saved["0.old_logprobs_T"].shape
    assert saved["0.advantages_B"].shape == (24,)
