"""The policy with Transformer Engine: against transformers, the CPU's modules, and itself under expert parallel."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import PolicySteps
from tests.tolerances import (
    BITWISE,
    GPU_BFLOAT16_GRADIENT,
    GPU_BFLOAT16_LOGPROBS,
    GPU_EXPERT_PARALLEL,
    GPU_FLOAT32_GRADIENT,
    GPU_FLOAT32_LOGPROBS,
    assert_close,
)

CUDA, CPU = "device=cuda", "device=cpu"
FLOAT32, BFLOAT16 = "model.dtype=float32", "model.dtype=bfloat16"


def assert_equal_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert_close(actual[name], tensor, BITWISE)


def relative_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|actual - expected| / |expected| over all tensors as one vector."""
    assert actual.keys() == expected.keys()
    a, e = (torch.cat([tensors[name].double().flatten() for name in expected]) for tensors in (actual, expected))
    return float((a - e).norm() / e.norm())


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    """transformers in float32 on the same device."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32)
    return model.to(CUDA.partition("=")[2]).eval()


@torch.no_grad()
def reference_logprobs(model: Any, response: dict[str, Any]) -> torch.Tensor:
    """Log-probs of one sequence's response tokens."""
    tokens = torch.tensor(response["tokens"], device=model.device)
    log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[:, 0].cpu()[response["mask"][:-1]]


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(BFLOAT16, GPU_BFLOAT16_LOGPROBS), (FLOAT32, GPU_FLOAT32_LOGPROBS)], ids=["bf16", "fp32"]
)
def test_logprobs_are_those_of_transformers(
    policy_steps: PolicySteps, reference: Any, dtype: str, tolerance: Any
) -> None:
    responses = policy_steps(CUDA, dtype)["responses"]
    assert len(responses) == 24
    expected = torch.cat([reference_logprobs(reference, r) for r in responses])
    actual = torch.cat([r["logprobs"][r["mask"]] for r in responses])
    assert_close((actual - expected).abs().mean(), 0.0, tolerance)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_first_step_has_ratio_exactly_one_and_moves_the_weights(policy_steps: PolicySteps, dtype: str) -> None:
    step = policy_steps(CUDA, dtype)
    assert step["log_ratio"][0].abs().max() == 0.0
    assert step["clipped"] == [0.0]
    assert math.isfinite(step["loss"][0])
    assert 0.0 < step["grad_norm"][0] < math.inf
    still = [name for name, before in step["weights_before"].items() if torch.equal(before, step["weights"][name])]
    norms = [name for name, weight in step["weights"].items() if weight.dim() == 1]
    # A step of 1e-4 is below bfloat16's spacing next to 1.
    assert set(still) <= (set(norms) if dtype == BFLOAT16 else set())


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(BFLOAT16, GPU_BFLOAT16_GRADIENT), (FLOAT32, GPU_FLOAT32_GRADIENT)], ids=["bf16", "fp32"]
)
def test_gradient_is_that_of_the_cpu_modules(policy_steps: PolicySteps, dtype: str, tolerance: Any) -> None:
    actual, expected = policy_steps(CUDA, dtype), policy_steps(CPU, FLOAT32)
    assert_close(relative_error(actual["grad"], expected["grad"]), 0.0, tolerance)
    assert actual["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=tolerance.atol)


@pytest.mark.gpu(1)
def test_rows_with_replayed_routes_give_the_numbers_of_packed_sequences(policy_steps: PolicySteps) -> None:
    packed = policy_steps(CUDA, FLOAT32)
    rows = policy_steps(CUDA, FLOAT32, "batch.mode=padded", "loss.routing_replay=r2")
    assert rows["log_ratio"][0].abs().max() == 0.0
    assert_close(relative_error(rows["grad"], packed["grad"]), 0.0, GPU_FLOAT32_GRADIENT)


@pytest.mark.gpu(1)
def test_replayed_routes_lead_the_second_step(policy_steps: PolicySteps) -> None:
    free = policy_steps(CUDA, BFLOAT16, num_steps=2, lr=1.0e-2)
    replayed = policy_steps(CUDA, BFLOAT16, "loss.routing_replay=r2", num_steps=2, lr=1.0e-2)
    assert_close(replayed["loss"][0], free["loss"][0], BITWISE)
    assert not torch.equal(replayed["log_ratio"][1], free["log_ratio"][1])
    assert replayed["log_ratio"][1].isfinite().all()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("mode", ["packed", "padded"])
def test_routes_that_no_router_chose_give_the_gradient_of_the_cpu_modules(
    policy_steps: PolicySteps, mode: str
) -> None:
    actual, expected = (
        policy_steps(device, FLOAT32, f"batch.mode={mode}", "loss.routing_replay=r3") for device in (CUDA, CPU)
    )
    assert actual["log_ratio"][0].abs().max() == 0.0
    assert_close(relative_error(actual["grad"], expected["grad"]), 0.0, GPU_FLOAT32_GRADIENT)


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("writer", "reader"), [(CUDA, CPU), (CPU, CUDA)], ids=["cuda_to_cpu", "cpu_to_cuda"])
def test_checkpoint_of_one_device_loads_bitwise_on_the_other(
    policy_steps: PolicySteps, tmp_path: Path, writer: str, reader: str
) -> None:
    written = policy_steps(writer, BFLOAT16, save=tmp_path / "checkpoint")
    read = policy_steps(reader, BFLOAT16, num_steps=0, load=tmp_path / "checkpoint")
    assert_equal_weights(read["weights"], written["weights"])


@pytest.mark.gpu(2)
def test_expert_parallel_gives_the_numbers_of_one_process(policy_steps: PolicySteps) -> None:
    expected, actual = policy_steps(CUDA, FLOAT32), policy_steps(CUDA, FLOAT32, ranks=2)
    assert_equal_weights(actual["weights_before"], expected["weights_before"])
    assert actual["log_ratio"][0].abs().max() == 0.0
    assert_close(actual["loss"][0], expected["loss"][0], GPU_EXPERT_PARALLEL)
    assert_close(relative_error(actual["grad"], expected["grad"]), 0.0, GPU_EXPERT_PARALLEL)
