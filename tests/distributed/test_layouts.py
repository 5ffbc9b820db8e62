"""Layout invariance: the same batch gives the same numbers on a layout as on one process without any."""

from functools import cache
from typing import Any

import pytest
import torch

from tests.distributed.policy_worker import step_results
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_GRADIENT, FLOAT32_LOSS, FLOAT32_WEIGHTS, assert_close

ONE = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]
LOCAL_STATE = ["parallel.use_distributed_optimizer=false"]
EP2 = ["cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2"]
TWO = ["cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=1"]
LAYOUTS = {
    "ep2": EP2,
    "ep2_two_microbatches": [*EP2, "batch.max_tokens_per_microbatch=128"],
    "tp2_sp": [*TWO, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "pp2": [*TWO, "parallel.pipeline_model_parallel_size=2"],
    "cp2": [*TWO, "parallel.context_parallel_size=2"],
}


@cache
def one_process() -> dict[str, Any]:
    return spawn(step_results, 1, ONE + LOCAL_STATE, 3, timeout_s=120)[0]


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(actual[name], tensor, tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_numbers_of_one_process(layout: str) -> None:
    expected = one_process()
    actual = spawn(step_results, 2, LAYOUTS[layout] + LOCAL_STATE, 3, timeout_s=120)[0]
    assert 0.1 < expected["clipped"][-1] < 1.0, "the clip must act for the comparison to cover it"
    assert actual["clipped"] == expected["clipped"]
    assert_close(actual["loss"], expected["loss"], FLOAT32_LOSS)
    assert_close(actual["grad_norm"], expected["grad_norm"], FLOAT32_LOSS)
    for a, e in zip(actual["log_ratio"], expected["log_ratio"], strict=True):
        assert_close(a, e, FLOAT32_LOSS)
    assert_same_tensors(actual["grad"], expected["grad"], FLOAT32_GRADIENT)
    assert_same_tensors(actual["exp_avg"], expected["exp_avg"], FLOAT32_GRADIENT)
    assert_same_tensors(actual["exp_avg_sq"], expected["exp_avg_sq"], FLOAT32_GRADIENT)
    assert_same_tensors(actual["weights"], expected["weights"], FLOAT32_WEIGHTS)


def test_distributed_optimizer_gives_the_weights_of_one_process() -> None:
    actual = spawn(step_results, 2, EP2, 3, timeout_s=120)[0]
    assert_same_tensors(actual["weights"], one_process()["weights"], FLOAT32_WEIGHTS)


def test_first_step_has_ratio_exactly_one() -> None:
    assert one_process()["clipped"][0] == 0.0
    assert one_process()["log_ratio"][0].abs().max() == 0.0
