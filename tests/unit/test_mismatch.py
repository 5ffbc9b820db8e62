"""Mismatch estimators against reference values."""

import math

import pytest
import torch
from torch import Tensor

from gspo_megatron.mismatch import mismatch_per_response
from tests.tolerances import FLOAT32_LOG_RATIO, Tolerance, assert_close
from tests.unit.vectors import CASES

K3_OF_TINY_DIFFERENCE = Tolerance(1e-4, 0.0, "d of 1e-7 is rounded to float32 on the way in (relative 6e-8 of 1 nat)")


def estimate(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, Tensor]:
    rows, width = mask.shape
    return mismatch_per_response(
        old.flatten(),
        rollout.flatten(),
        response_mask_T=mask.flatten(),
        response_index_T=torch.arange(rows).repeat_interleave(width),
        response_length_B=mask.sum(1),
    )


def test_estimators_equal_the_reference_whatever_the_padding_holds() -> None:
    case = CASES["mismatch_metrics"]
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    old, rollout = (torch.tensor(case["inputs"][k], dtype=torch.float32) for k in ("logp_train", "logp_rollout"))
    got = estimate(old.where(mask, math.nan), rollout.where(mask, -math.inf), mask)
    lengths = mask.sum(1)
    count = lengths.sum()
    assert_close(-got["mismatch_sum"].sum() / count, case["k1"], FLOAT32_LOG_RATIO)
    assert_close(got["mismatch_k3_sum"].sum() / count, case["k3"], FLOAT32_LOG_RATIO)
    assert_close(got["mismatch_abs_sum"].sum() / count, case["mean_abs"], FLOAT32_LOG_RATIO)
    assert_close(got["mismatch_abs_max"].max(), case["max_abs"], FLOAT32_LOG_RATIO)
    assert_close((got["mismatch_sum"] / lengths).exp(), case["seq_geo_ratio"], FLOAT32_LOG_RATIO)


def test_each_response_gets_its_own_tokens() -> None:
    old = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    rollout = torch.tensor([[-1.5, -1.75], [-2.0, 9.0]])
    got = estimate(old, rollout, torch.tensor([[True, True], [True, False]]))
    assert got["mismatch_sum"].tolist() == [0.25, -1.0]
    assert got["mismatch_abs_sum"].tolist() == [0.75, 1.0]
    assert got["mismatch_abs_max"].tolist() == [0.5, 1.0]
    k3 = [math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75, math.exp(-1.0)]
    assert_close(got["mismatch_k3_sum"], k3, FLOAT32_LOG_RATIO)


def test_k3_of_float32_noise_is_not_lost_in_rounding() -> None:
    rollout = torch.tensor([[-1.0]])
    old = torch.nextafter(rollout, torch.tensor(0.0))
    d = float(old) - float(rollout)
    got = estimate(old, rollout, torch.tensor([[True]]))
    assert_close(got["mismatch_k3_sum"], [d * d / 2], K3_OF_TINY_DIFFERENCE)


def test_response_without_tokens_reads_zero() -> None:
    got = estimate(torch.full((1, 2), math.nan), torch.zeros(1, 2), torch.tensor([[False, False]]))
    assert {name: value.tolist() for name, value in got.items()} == dict.fromkeys(got, [0.0])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout_logprobs_T has shape \(3,\), wants \(2,\)"):
        mismatch_per_response(
            torch.zeros(2),
            torch.zeros(3),
            response_mask_T=torch.ones(2, dtype=torch.bool),
            response_index_T=torch.zeros(2, dtype=torch.int64),
            response_length_B=torch.tensor([2]),
        )
