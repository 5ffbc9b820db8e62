"""Trainer and SGLang on the same GPUs: what each gives up, and a run in which they take turns."""

import os
from pathlib import Path

import pytest
import torch

from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine
from gspo_megatron.metrics import load_metrics
from gspo_megatron.types import load_groups
from tests.distributed.policy_worker import RECIPE
from tests.e2e.launching import launch
from tests.gpu.conftest import PolicySteps
from tests.gpu.test_policy_step import assert_equal_weights
from tests.tolerances import GPU_BFLOAT16_LOGPROBS, assert_close

COLOCATED = ("device=cuda", "model.dtype=bfloat16", "cluster.placement=colocated", "cluster.weight_transport=ipc")
# No CUDA graphs: capturing them takes longer than the tests.
NO_GRAPHS = "disable_decode_cuda_graph: true, disable_prefill_cuda_graph: true"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("is_distributed", ["true", "false"])
def test_steps_are_the_same_bit_for_bit_when_the_trainer_leaves_its_gpu_between_them(
    policy_steps: PolicySteps, is_distributed: str
) -> None:
    keys = (*COLOCATED[:2], f"parallel.use_distributed_optimizer={is_distributed}")
    stayed, left = policy_steps(*keys, num_steps=3), policy_steps(*keys, num_steps=3, leaves=True)
    assert_equal_weights(left["weights"], stayed["weights"])
    assert left["loss"] == stayed["loss"] and left["grad_norm"] == stayed["grad_norm"]
    # A bfloat16 weight has a float32 gradient and master copy, and two moments from the first step on.
    first, _, last = left["given_up_bytes"]
    assert first >= 5 * left["weight_bytes"]
    assert last >= 9 * left["weight_bytes"]


@pytest.mark.gpu(1)
@pytest.mark.timeout(600)
def test_server_that_sleeps_gives_its_memory_back_and_wakes(model_dir: Path, tmp_path: Path) -> None:
    overrides = [f"model.hf_dir={model_dir}", f"model.load={model_dir}", "cold_start=null", *COLOCATED]
    overrides += ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]
    recipe = load_recipe(RECIPE, [*overrides, f"rollout.sglang={{mem_fraction_static: 0.3, {NO_GRAPHS}}}"])
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=tmp_path / "server.log", cuda_devices=device)
    try:
        engine.wait_ready(400)
        before, total = torch.cuda.mem_get_info(0)
        engine.sleep(60)
        asleep, _ = torch.cuda.mem_get_info(0)
        assert asleep - before > 0.2 * total
    finally:
        engine.stop()


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
def test_two_rollout_steps_on_one_gpu(model_dir: Path, tmp_path: Path) -> None:
    check_run(model_dir, tmp_path, count=1)


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
def test_two_rollout_steps_of_two_ranks_and_two_servers(model_dir: Path, tmp_path: Path) -> None:
    check_run(model_dir, tmp_path, count=2)


def check_run(model_dir: Path, tmp_path: Path, *, count: int) -> None:
    run_dir = tmp_path / "colocated"
    overrides = [
        *COLOCATED,
        f"model.hf_dir={model_dir}",
        f"cluster.trainer_ranks={count}",
        f"cluster.rollout_servers={count}",
        f"parallel.expert_model_parallel_size={count}",
        "train.num_rollout_steps=2",
        "evaluate.every=2",
        "loss.kl={coef: 1.0e-3, estimator: k3, place: loss}",
        f"rollout.sglang={{mem_fraction_static: 0.3, max_total_tokens: 16384, {NO_GRAPHS}}}",
    ]
    done = launch(tmp_path, "colocated", *overrides).wait(timeout_s=800)
    assert done.returncode == 0, done.text
    rows = load_metrics(run_dir / "metrics.jsonl")
    assert [row["weight_version"] for row in rows] == [0, 1, 2]
    for step in (1, 2):
        groups = load_groups(run_dir / "rollouts" / f"step_{step:05d}.jsonl")
        assert {v for g in groups for r in g.rollouts for v in r.weight_versions} == {step - 1}
    for row in rows[1:]:
        first, *later = row["minibatches"]
        assert first["log_ratio_abs_max"] == 0.0
        assert min(m["log_ratio_abs_max"] for m in later) > 0.0
        assert_close(first["mismatch_abs_mean"], 0.0, GPU_BFLOAT16_LOGPROBS)
        assert row["stage_s"]["take_devices"] > 0.0
    assert (run_dir / "checkpoint" / "train_state.json").is_file()
    assert (run_dir / "hf" / "model.safetensors").is_file()
