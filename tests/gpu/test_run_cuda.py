"""A short run on two GPUs: the trainer on one, a SGLang server on the other, weights pushed over NCCL."""

from pathlib import Path

import pytest

from gspo_megatron.metrics import load_metrics
from gspo_megatron.types import load_groups
from tests.e2e.launching import launch
from tests.tolerances import GPU_BFLOAT16_LOGPROBS, assert_close

OVERRIDES = [
    "device=cuda",
    "model.dtype=bfloat16",
    "cluster.trainer_ranks=1",
    "parallel.expert_model_parallel_size=1",
    "train.num_rollout_steps=2",
    "evaluate.every=2",
    # No CUDA graphs: capturing them takes longer than this run.
    "rollout.sglang={mem_fraction_static: 0.3, max_total_tokens: 16384, disable_decode_cuda_graph: true, "
    "disable_prefill_cuda_graph: true}",
]


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
def test_two_rollout_steps_push_their_weights_over_nccl(model_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "cuda"
    done = launch(tmp_path, "cuda", f"model.hf_dir={model_dir}", *OVERRIDES).wait(timeout_s=800)
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
        assert first["mismatch_abs_mean"] > 0.0
        assert_close(first["mismatch_abs_mean"], 0.0, GPU_BFLOAT16_LOGPROBS)
    assert (run_dir / "checkpoint" / "train_state.json").is_file()
    assert (run_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
def test_replaying_the_servers_routes_lowers_the_mismatch_in_bfloat16(model_dir: Path, tmp_path: Path) -> None:
    """The server captures CUDA graphs here: routes of a decoding step come out of one."""
    *common, _ = OVERRIDES
    common += [f"model.hf_dir={model_dir}", "train.num_rollout_steps=1", "optimizer.lr=0.0"]
    sglang = "rollout.sglang={mem_fraction_static: 0.3, max_total_tokens: 16384}"
    with_routes = [*common, sglang, "loss.routing_replay=r3"]
    sampled = launch(tmp_path, "sampled", *with_routes, only="rollout").wait(timeout_s=400)
    assert sampled.returncode == 0, sampled.text
    mismatch = {}
    for replay in ("none", "r3"):
        overrides = [f"loss.routing_replay={replay}", f"rollout.groups_dir={tmp_path / 'sampled' / 'rollouts'}"]
        done = launch(tmp_path, f"trained-{replay}", *common, *overrides, only="train").wait(timeout_s=200)
        assert done.returncode == 0, done.text
        first, *_ = load_metrics(tmp_path / f"trained-{replay}" / "metrics.jsonl")[-1]["minibatches"]
        assert first["log_ratio_abs_max"] == 0.0
        mismatch[replay] = first["mismatch_k3"]
    assert mismatch["r3"] < mismatch["none"], mismatch
