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
