"""Objectives against reference values and gradients in float64, and against the traps of ratio, clip and mean."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import LossConfig
from gspo_megatron.loss import LOSSES, LossOutput, grpo_loss, gspo_loss, sft_loss
from gspo_megatron.types import Microbatch
from tests.tolerances import BITWISE, FLOAT32_LOG_RATIO, FLOAT32_LOSS, FLOAT64, assert_close
from tests.unit.vectors import CASES, load_case, loss_config, tensors

PAPER_BAND = LossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4, old_logprobs="recompute")


def run(
    fn: Callable[..., LossOutput], logprobs_T: Tensor, microbatch: Microbatch, cfg: LossConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """loss over this microbatch's own responses, gradient, per_response."""
    out = fn(logprobs_T, microbatch, cfg)
    loss = out.loss_sum / len(microbatch.response_length_B)
    (grad_T,) = torch.autograd.grad(loss, logprobs_T)
    assert all(v.dtype == torch.float32 and not v.requires_grad for v in out.per_response.values())
    return loss.detach(), grad_T, out.per_response


def assert_equals_reference(
    fn: Callable[..., LossOutput], inputs: dict[str, Any], outputs: dict[str, Any], cfg: LossConfig
) -> dict[str, Tensor]:
    loss, grad_T, per_response = run(fn, *tensors(inputs), cfg)
    assert_close(loss, outputs["loss"], FLOAT64)
    assert_close(grad_T, sum(outputs["grad"], []), FLOAT64)
    clipped = torch.tensor(outputs["clipped"]).sum(1)
    assert per_response["clipped_tokens"].tolist() == clipped.tolist()
    return per_response


def one_token(log_ratio: float, advantage: float) -> tuple[Tensor, Microbatch]:
    return tensors({"logp": [[log_ratio]], "logp_old": [[0.0]], "mask": [[1]], "advantages": [advantage]})


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("base_gspo", gspo_loss),
        ("gspo_with_grpo_range", gspo_loss),
        ("padding_garbage", gspo_loss),
        ("base_grpo", grpo_loss),
        ("grpo_with_gspo_range", grpo_loss),
    ],
)
def test_loss_gradient_and_clip_decisions_equal_the_reference(name: str, fn: Callable[..., LossOutput]) -> None:
    case = load_case(name)
    per_response = assert_equals_reference(fn, case["inputs"], case["outputs"], loss_config(case))
    lengths = per_response["length"]
    clipped = per_response["clipped_tokens"]
    assert_close(clipped.sum() / lengths.sum(), case["outputs"]["clip_frac_token_weighted"], FLOAT32_LOSS)
    assert_close((clipped / lengths).mean(), case["outputs"]["clip_frac_seq_weighted"], FLOAT32_LOSS)
    if fn is gspo_loss:
        assert_close(per_response["log_ratio"], case["outputs"]["log_s"], FLOAT32_LOG_RATIO)
        outside = (per_response["outside_tokens"] / lengths).mean()
        assert_close(outside, case["outputs"]["outside_band_frac_seq"], FLOAT32_LOSS)


def test_float32_decides_and_weighs_as_the_reference() -> None:
    case = load_case("base_gspo")
    loss, grad_T, per_response = run(gspo_loss, *tensors(case["inputs"], torch.float32), loss_config(case))
    assert loss.dtype == torch.float32
    assert_close(loss, case["outputs"]["loss"], FLOAT32_LOSS)
    assert_close(grad_T, sum(case["outputs"]["grad"], []), FLOAT32_LOSS)
    assert_close(per_response["log_ratio"], case["outputs"]["log_s"], FLOAT32_LOG_RATIO)
    assert (per_response["clipped_tokens"] > 0).tolist() == [bool(c) for c in case["outputs"]["clipped_seq"]]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fn", [gspo_loss, grpo_loss])
def test_padding_may_hold_anything(fn: Callable[..., LossOutput], garbage: float) -> None:
    case = load_case("padding_garbage")
    logprobs_T, microbatch = tensors(case["inputs"])
    mask_T = microbatch.response_mask_T
    clean = run(fn, logprobs_T, microbatch, loss_config(case))
    poisoned_T = logprobs_T.detach().where(mask_T, garbage).requires_grad_()
    assert microbatch.old_logprobs_T is not None
    poisoned = replace(microbatch, old_logprobs_T=microbatch.old_logprobs_T.where(mask_T, garbage))
    loss, grad_T, per_response = run(fn, poisoned_T, poisoned, loss_config(case))
    assert_close(loss, clean[0], BITWISE)
    assert_close(grad_T, clean[1], BITWISE)
    for name, value in per_response.items():
        assert_close(value, clean[2][name], BITWISE)


def test_empty_response_has_term_zero_and_counts_in_n() -> None:
    case = load_case("empty_response")
    per_response = assert_equals_reference(gspo_loss, case["inputs"], case["outputs_N_all"], loss_config(case))
    (empty,) = (per_response["length"] == 0).nonzero().flatten().tolist()
    read = {name: float(value[empty]) for name, value in per_response.items()}
    want = {"log_ratio": 0.0, "length": 0.0, "clipped_tokens": 0.0, "outside_tokens": 0.0}
    assert read == {**want, "advantage": float(torch.tensor(case["inputs"]["advantages"][empty]))}
    loss, grad_T, per_response = run(grpo_loss, *tensors(case["inputs"]), loss_config(case))
    assert loss.isfinite() and grad_T.isfinite().all()
    assert per_response["log_ratio"][empty] == 0.0


def test_on_policy_gradient_is_the_policy_gradient_for_gspo_and_grpo() -> None:
    case = load_case("on_policy")
    for fn, outputs in ((gspo_loss, case["outputs"]), (grpo_loss, case["outputs_grpo"])):
        per_response = assert_equals_reference(fn, case["inputs"], outputs, loss_config(case))
        assert per_response["log_ratio"].tolist() == [0.0] * 6
        assert per_response["outside_tokens"].tolist() == [0.0] * 6


def test_clip_is_strict_at_the_band_edges() -> None:
    case = load_case("band_edges")
    loss, grad_T, per_response = run(gspo_loss, *tensors(case["inputs"]), loss_config(case))
    # Rows 0 and 3 lie on the edge to float64 rounding: either decision is right, and the loss is the same.
    sure = [1, 2, 4, 5]
    assert per_response["clipped_tokens"][sure].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert_close(grad_T[sure], [case["outputs"]["grad"][i][0] for i in sure], FLOAT64)
    assert_close(loss, case["outputs"]["loss"], FLOAT64)


@pytest.mark.parametrize(("log_ratio", "advantage"), [(0.25, 1.0), (-0.25, -1.0)])
def test_ratio_exactly_on_the_bound_keeps_its_gradient(log_ratio: float, advantage: float) -> None:
    ratio = float(torch.tensor(log_ratio, dtype=torch.float64).exp())
    # Both differences are exact in float64, so that the bound is the ratio bit for bit.
    cfg = replace(PAPER_BAND, clip_high=abs(ratio - 1.0), clip_low=abs(1.0 - ratio))
    _, grad_T, per_response = run(gspo_loss, *one_token(log_ratio, advantage), cfg)
    assert grad_T.tolist() == [-ratio * advantage]
    assert per_response["clipped_tokens"].tolist() == per_response["outside_tokens"].tolist() == [0.0]


@pytest.mark.parametrize("fn", [gspo_loss, grpo_loss])
@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped", "is_outside"),
    [
        (1.00035, 1.0, False, False),  # between the bounds: swapped bounds clip it
        (1.00045, 1.0, True, True),
        (1.00045, -1.0, False, True),
        (0.99965, -1.0, True, True),  # swapped bounds keep it
        (0.99965, 1.0, False, True),
        (0.99975, -1.0, False, False),
        (1.00045, 0.0, False, True),
    ],
)
def test_clip_follows_the_sign_and_its_own_bound(
    fn: Callable[..., LossOutput], ratio: float, advantage: float, is_clipped: bool, is_outside: bool
) -> None:
    loss, grad_T, per_response = run(fn, *one_token(math.log(ratio), advantage), PAPER_BAND)
    value = (1.0004 if advantage > 0 else 0.9997) if is_clipped else ratio
    assert_close(loss, -value * advantage, FLOAT64)
    assert_close(grad_T, [0.0 if is_clipped else -ratio * advantage], FLOAT64)
    assert per_response["clipped_tokens"].tolist() == [float(is_clipped)]
    assert per_response["outside_tokens"].tolist() == [float(is_outside)]


def test_microbatch_sums_over_global_n_equal_one_batch() -> None:
    case, total = CASES["microbatch"], 0.0
    base = load_case("microbatch")["inputs"]
    for part, want in zip(case["parts"], case["sum_per_part"], strict=True):
        inputs = {k: [base[k][i] for i in part] for k in ("logp", "logp_old", "mask", "advantages")}
        loss_sum = gspo_loss(*tensors(inputs), loss_config(case)).loss_sum
        assert_close(loss_sum, want, FLOAT64)
        total += float(loss_sum.detach())
    assert_close(total / case["global_N"], case["correct"], FLOAT64)
    assert_close(total / case["global_N"], CASES["aggregation"]["seq_mean_token_mean"], FLOAT64)


@pytest.mark.parametrize("fn", [gspo_loss, grpo_loss])
def test_loss_does_not_depend_on_response_order(fn: Callable[..., LossOutput]) -> None:
    case = load_case("base_gspo")
    order = [4, 0, 5, 2, 1, 3]
    shuffled = {k: [case["inputs"][k][i] for i in order] for k in ("logp", "logp_old", "mask", "advantages")}
    loss, grad_T, per_response = run(fn, *tensors(case["inputs"]), loss_config(case))
    got_loss, got_grad_T, got = run(fn, *tensors(shuffled), loss_config(case))
    assert_close(got_loss, loss, FLOAT64)
    assert_close(got_grad_T.view(6, -1), grad_T.view(6, -1)[order], FLOAT64)
    for name, value in per_response.items():
        assert_close(got[name], value[order], FLOAT64)


def test_mean_is_clamped_before_exp_and_reported_unclamped() -> None:
    # Tokens of +40 and -39 nats: a clamp per token would give a mean of 0.
    inputs = {"logp": [[40.0, -39.0]], "logp_old": [[0.0, 0.0]], "mask": [[1, 1]], "advantages": [-1.0]}
    loss, grad_T, per_response = run(gspo_loss, *tensors(inputs), PAPER_BAND)
    assert_close(loss, math.exp(0.5), FLOAT64)
    assert_close(grad_T, [math.exp(0.5) / 2] * 2, FLOAT64)
    loss, grad_T, per_response = run(gspo_loss, *one_token(100.0, -1.0), PAPER_BAND)
    assert_close(loss, math.exp(20.0), FLOAT64)
    assert per_response["log_ratio"].tolist() == [100.0]
    assert grad_T.isfinite().all()


def test_nan_in_a_response_is_not_hidden() -> None:
    logprobs_T, microbatch = one_token(math.nan, 1.0)
    for fn in LOSSES.values():
        assert fn(logprobs_T, microbatch, PAPER_BAND).loss_sum.isnan()


def test_sft_loss_is_the_summed_nll_of_response_tokens() -> None:
    inputs = {"logp": [[-1.0, -2.0, 7.0], [-4.0, 7.0, 7.0]], "mask": [[1, 1, 0], [1, 0, 0]]}
    inputs |= {"logp_old": [[0.0] * 3] * 2, "advantages": [0.0, 0.0]}
    logprobs_T, microbatch = tensors(inputs)
    out = sft_loss(logprobs_T, replace(microbatch, old_logprobs_T=None))
    (grad_T,) = torch.autograd.grad(out.loss_sum, logprobs_T)
    assert out.loss_sum.item() == 7.0
    assert grad_T.tolist() == [-1.0, -1.0, 0.0, -1.0, 0.0, 0.0]
    assert out.per_response["length"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("fn", [gspo_loss, grpo_loss])
def test_broken_contracts_are_refused(fn: Callable[..., LossOutput]) -> None:
    logprobs_T, microbatch = one_token(0.0, 1.0)
    with pytest.raises(ValueError, match="old_logprobs_T is None.*add_old_logprobs"):
        fn(logprobs_T, replace(microbatch, old_logprobs_T=None), PAPER_BAND)
    with pytest.raises(ValueError, match=r"old_logprobs_T has shape \(2,\), wants \(1,\)"):
        fn(logprobs_T, replace(microbatch, old_logprobs_T=torch.zeros(2)), PAPER_BAND)
    with pytest.raises(ValueError, match="logprobs_T has type torch.bfloat16, wants float32"):
        fn(logprobs_T.bfloat16(), microbatch, PAPER_BAND)


def test_recipe_names_map_to_the_losses() -> None:
    assert LOSSES == {"gspo": gspo_loss, "grpo": grpo_loss}
