"""Objectives against reference values and gradients in float64, and against the traps of ratio, clip and mean."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import CorrectionConfig, KlConfig, LossConfig
from gspo_megatron.loss import OBJECTIVES, aggregation, denominator, policy_loss, sft_loss
from gspo_megatron.types import Microbatch, TrainBatch
from tests.tolerances import BITWISE, FLOAT32_LOG_RATIO, FLOAT32_LOSS, FLOAT64, assert_close
from tests.unit.vectors import CASES, load_case, loss_config, tensors

PAPER_BAND = LossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4, old_logprobs="recompute")
CONFIGS = {
    "gspo": PAPER_BAND,
    "gspo_token": replace(PAPER_BAND, name="gspo_token"),
    "grpo": replace(PAPER_BAND, name="grpo", clip_low=0.2, clip_high=0.27),
    "dr_grpo": replace(PAPER_BAND, name="dr_grpo", clip_low=0.2, clip_high=0.2),
    "dapo": replace(PAPER_BAND, name="dapo", clip_low=0.2, clip_high=0.28),
    "cispo": replace(PAPER_BAND, name="cispo", clip_low=None, clip_high=0.27),
    "gmpo": replace(PAPER_BAND, name="gmpo", clip_low=0.4, clip_high=0.4),
    "sapo": replace(
        PAPER_BAND, name="sapo", clip_low=None, clip_high=None, tau_positive=1.0, tau_negative=1.05
    ),
    "minirl": replace(PAPER_BAND, name="minirl", clip_low=0.2, clip_high=0.27),
}
MAX_RESPONSE_TOKENS = 8


def run(logprobs_T: Tensor, microbatch: Microbatch, cfg: LossConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of this microbatch as a whole optimizer step, gradient, per_response."""
    entropy_T = torch.full_like(logprobs_T, math.nan) if not cfg.entropy_coef else -logprobs_T
    out = policy_loss(logprobs_T, entropy_T, microbatch, cfg)
    batch = TrainBatch(
        microbatches=[microbatch],
        num_responses=len(microbatch.response_length_B),
        num_tokens=microbatch.num_unpadded_tokens,
        num_response_tokens=int(microbatch.response_length_B.sum()),
        minibatch_index=0,
        packing_efficiency=1.0,
    )
    loss = out.loss_sum / denominator(batch, cfg, max_response_tokens=MAX_RESPONSE_TOKENS)
    assert loss.requires_grad, "a ratio that is detached for good has no gradient"
    (grad_T,) = torch.autograd.grad(loss, logprobs_T)
    assert all(v.dtype == torch.float32 and not v.requires_grad for v in out.per_response.values())
    return loss.detach(), grad_T, out.per_response


def assert_equals_reference(
    inputs: dict[str, Any], outputs: dict[str, Any], cfg: LossConfig, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Loss, gradient, clip decisions, both clip fractions, and of a sequence ratio log s and the share outside."""
    tolerance = FLOAT64 if dtype == torch.float64 else FLOAT32_LOSS
    loss, grad_T, per_response = run(*tensors(inputs, dtype), cfg)
    assert loss.dtype == dtype
    assert_close(loss, outputs["loss"], tolerance)
    assert_close(grad_T, sum(outputs["grad"], []), tolerance)
    lengths, clipped = per_response["length"], per_response["clipped_tokens"]
    has_tokens = lengths > 0
    assert clipped.tolist() == torch.tensor(outputs["clipped"]).sum(1).tolist()
    assert_close(clipped.sum() / lengths.sum(), outputs["clip_frac_token_weighted"], FLOAT32_LOSS)
    shares = (clipped / lengths)[has_tokens]
    assert_close(shares.mean(), outputs["clip_frac_seq_weighted"], FLOAT32_LOSS)
    if "log_s" in outputs:
        log_s = [0.0 if x is None else x for x in outputs["log_s"]]
        assert_close(per_response["log_ratio"], log_s, FLOAT32_LOG_RATIO)
        outside = (per_response["outside_tokens"] / lengths)[has_tokens].mean()
        assert_close(outside, outputs["outside_band_frac_seq"], FLOAT32_LOSS)
    return per_response


def one_token(log_ratio: float, advantage: float, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Microbatch]:
    return tensors({"logp": [[log_ratio]], "logp_old": [[0.0]], "mask": [[1]], "advantages": [advantage]}, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("case_name", "name", "outputs"),
    [
        ("base_gspo", "gspo", "outputs"),
        ("base_gspo", "gspo_token", "outputs"),
        ("base_gspo_token", "gspo_token", "outputs"),
        ("base_gspo_token", "gspo", "outputs"),
        ("gspo_token_mixed_adv", "gspo_token", "outputs"),
        ("gspo_with_grpo_range", "gspo", "outputs"),
        ("padding_garbage", "gspo", "outputs"),
        ("empty_response", "gspo", "outputs_N_all"),
        ("on_policy", "gspo", "outputs"),
        ("on_policy", "grpo", "outputs_grpo"),
        ("base_grpo", "grpo", "outputs"),
        ("grpo_with_gspo_range", "grpo", "outputs"),
    ],
)
def test_loss_gradient_clip_decisions_and_fractions_equal_the_reference(
    case_name: str, name: str, outputs: str, dtype: torch.dtype
) -> None:
    case = load_case(case_name)
    assert_equals_reference(case["inputs"], case[outputs], loss_config(case, name), dtype)


def test_responses_without_tokens_left_out_of_n_give_the_other_convention() -> None:
    case = load_case("empty_response")
    keep = [i for i, row in enumerate(case["inputs"]["mask"]) if any(row)]
    inputs = {k: [case["inputs"][k][i] for i in keep] for k in ("logp", "logp_old", "mask", "advantages")}
    outputs = case["outputs_N_valid"]
    rows = {k: [outputs[k][i] for i in keep] for k in ("grad", "clipped", "log_s")}
    assert_equals_reference(inputs, {**outputs, **rows}, loss_config(case))


@pytest.mark.parametrize("name", ["sapo", "cispo", "gmpo", "dapo"])
def test_relatives_equal_the_reference(name: str) -> None:
    case = CASES["relatives"][name]
    loss, grad_T, _ = run(*tensors(load_case("relatives")["inputs"]), CONFIGS[name])
    assert_close(loss, case["loss"], FLOAT64)
    if "grad" in case:
        assert_close(grad_T, sum(case["grad"], []), FLOAT64)


def test_minirl_equals_the_reference() -> None:
    inputs = load_case("relatives")["inputs"]
    groups, rewards = torch.tensor(inputs["group_id"]), torch.tensor(inputs["rewards"], dtype=torch.float64)
    centred = [float(r - rewards[groups == g].mean()) for r, g in zip(rewards, groups, strict=True)]
    rollout = load_case("rollout_correction")["inputs"]["logp_rollout"]
    inputs = inputs | {"advantages": centred, "logp_rollout": rollout}
    _, grad_T, _ = run(*tensors(inputs), CONFIGS["minirl"])
    assert_close(grad_T, sum(CASES["relatives"]["minirl"]["grad"], []), FLOAT64)


def test_minirl_truncates_its_weight_at_five() -> None:
    inputs = {"logp": [[-0.1]], "logp_old": [[-0.1]], "logp_rollout": [[-3.1]], "mask": [[1]], "advantages": [2.0]}
    loss, grad_T, _ = run(*tensors(inputs), CONFIGS["minirl"])
    assert_close(loss, -10.0, FLOAT64)
    assert_close(grad_T, [-10.0], FLOAT64)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "kept"), [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)]
)
def test_gmpo_clips_a_token_in_log_space_on_its_advantage_side(log_ratio: float, advantage: float, kept: bool) -> None:
    inputs = {"logp": [[log_ratio, 0.1]], "logp_old": [[0.0, 0.0]], "mask": [[1, 1]], "advantages": [advantage]}
    loss, grad_T, per_response = run(*tensors(inputs), CONFIGS["gmpo"])
    bounded = log_ratio if kept else math.copysign(0.4, log_ratio)
    ratio = math.exp((bounded + 0.1) / 2)
    assert_close(loss, -ratio * advantage, FLOAT64)
    assert_close(grad_T, [-ratio * advantage / 2 if kept else 0.0, -ratio * advantage / 2], FLOAT64)
    assert per_response["clipped_tokens"].tolist() == [0.0 if kept else 1.0]
    assert per_response["outside_tokens"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("key", "mode"),
    [
        ("seq_mean_token_mean", "sequence_mean"),
        ("token_mean_WRONG_for_gspo", "token_mean"),
        ("seq_mean_token_sum_LUSPO", "token_sum"),
        ("token_sum_over_constant_DrGRPO_style", "token_sum_over_limit"),
    ],
)
def test_aggregations_equal_the_reference(key: str, mode: Any) -> None:
    case = load_case("aggregation")
    assert case["constant"] == MAX_RESPONSE_TOKENS
    loss, _, _ = run(*tensors(case["inputs"]), loss_config(case, aggregation=mode))
    assert_close(loss, case[key], FLOAT64)


def test_dr_grpo_is_grpo_without_the_division_by_length() -> None:
    case = load_case("base_grpo")
    _, grad_T, _ = run(*tensors(case["inputs"]), CONFIGS["dr_grpo"])
    _, grpo_T, _ = run(*tensors(case["inputs"]), replace(CONFIGS["dr_grpo"], name="grpo"))
    lengths = torch.tensor(case["inputs"]["mask"]).sum(1, keepdim=True)
    assert_close(grad_T.view(6, -1), grpo_T.view(6, -1) * lengths / MAX_RESPONSE_TOKENS, FLOAT64)


@pytest.mark.parametrize(
    ("name", "low", "high", "key"),
    [
        ("tis", None, "C", "token_TIS_loss"),
        ("icepop", 0.9, 1.1, "token_IcePop_loss_0p9_1p1"),
        ("sequence_tis_sum", None, "C", "seq_TIS_loss"),
        ("sequence_mis", None, "C", "seq_MIS_loss"),
        ("geometric_rejection", 0.98, 1.02, "geo_RS_loss_N_all"),
    ],
)
def test_rollout_correction_weighs_the_clipped_term(name: Any, low: float | None, high: Any, key: str) -> None:
    case = load_case("rollout_correction")
    correction = CorrectionConfig(name=name, low=low, high=case[high] if high == "C" else high)
    loss, grad_T, per_response = run(*tensors(case["inputs"]), loss_config(case, correction=correction))
    assert_close(loss, case[key], FLOAT64)
    assert per_response["corrected_tokens"].sum() > 0
    # The weight multiplies the gradient as well: it is a constant.
    logprobs_T, microbatch = tensors(case["inputs"])
    plain = run(logprobs_T, microbatch, loss_config(case))[1]
    assert ((grad_T != 0) <= (plain != 0)).all()
    ratio_T = (grad_T / plain)[plain != 0]
    assert ratio_T.min() >= 0.0 and ratio_T.max() <= correction.high + 1e-12


def test_old_logprobs_of_the_rollout_are_the_bypass() -> None:
    case = load_case("rollout_correction")
    inputs = case["inputs"] | {"logp_old": case["inputs"]["logp_rollout"]}
    assert_equals_reference(inputs, case["bypass_gspo"], loss_config(case))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_joins_each_token_with_the_estimators_gradient(estimator: Any) -> None:
    case, base = CASES["kl_estimators"], load_case("base_gspo")
    logprobs_T, microbatch = tensors(base["inputs"])
    mask_T = microbatch.response_mask_T
    ref_T = torch.tensor(case["inputs"]["logp_ref"], dtype=torch.float64).flatten().where(mask_T, math.nan)
    microbatch = replace(microbatch, ref_logprobs_T=ref_T)
    assert_close(logprobs_T.detach().where(mask_T, 0.0), sum(case["inputs"]["logp"], []), FLOAT64)
    kl = KlConfig(coef=0.1, estimator=estimator, place="loss")
    loss, grad_T, per_response = run(logprobs_T, microbatch, loss_config(base, kl=kl))
    plain_loss, plain_T, _ = run(*tensors(base["inputs"]), loss_config(base))
    lengths = microbatch.response_length_B[:, None].double()
    value = torch.tensor(case["value"][estimator], dtype=torch.float64)
    slope = torch.tensor(case["dvalue_dlogp"][estimator], dtype=torch.float64)
    assert_close(loss - plain_loss, 0.1 * (value / lengths).sum() / 6, FLOAT64)
    assert_close((grad_T - plain_T).view(6, -1), 0.1 * slope / lengths / 6, FLOAT64)
    assert_close(per_response["kl_sum"], value.sum(1), FLOAT32_LOSS)
    reward = replace(kl, place="reward")
    assert_close(run(logprobs_T, microbatch, loss_config(base, kl=reward))[1], plain_T, BITWISE)


def test_entropy_bonus_joins_each_token() -> None:
    case = load_case("base_gspo")
    logprobs_T, microbatch = tensors(case["inputs"])
    loss, grad_T, _ = run(logprobs_T, microbatch, loss_config(case, entropy_coef=0.01))  # entropy_T = -logprobs_T
    plain_loss, plain_T, _ = run(*tensors(case["inputs"]), loss_config(case))
    length_T = microbatch.response_length_B[microbatch.response_index_T].double()
    per_token_T = torch.where(microbatch.response_mask_T, 1.0 / length_T, 0.0)
    assert_close(loss - plain_loss, 0.01 / 6 * (per_token_T * logprobs_T).sum(), FLOAT64)
    assert_close(grad_T - plain_T, 0.01 / 6 * per_token_T, FLOAT64)


def test_narrow_types_round_the_band_away_and_float32_does_not() -> None:
    case = CASES["rounding"]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert_close(torch.tensor(case["values"], dtype=torch.float64).to(dtype), case[name], BITWISE)
    base = load_case("base_gspo")
    _, _, per_response = run(*tensors(base["inputs"], torch.float32), loss_config(base))
    assert (per_response["clipped_tokens"] > 0).tolist() == [bool(c) for c in case["clipped_seq_float64"]]
    assert_close(per_response["log_ratio"], case["log_s_float64"], FLOAT32_LOG_RATIO)
    stored = {
        k: torch.tensor(base["inputs"][k]).bfloat16().double().tolist() for k in ("logp", "logp_old")
    }
    _, _, per_response = run(*tensors(base["inputs"] | stored), loss_config(base))
    flipped = case["clipped_seq_if_logprobs_stored_in_bf16"]
    assert (per_response["clipped_tokens"] > 0).tolist() == [bool(c) for c in flipped]
    assert flipped != case["clipped_seq_float64"]
    assert_close(per_response["log_ratio"], case["log_s_if_logprobs_stored_in_bf16"], FLOAT32_LOG_RATIO)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 55.5])
@pytest.mark.parametrize("name", CONFIGS)
def test_padding_may_hold_anything(name: str, garbage: float) -> None:
    case = load_case("padding_garbage")
    logprobs_T, microbatch = tensors(case["inputs"])
    mask_T = microbatch.response_mask_T
    clean = run(logprobs_T, microbatch, CONFIGS[name])

    def poisoned(x_T: Tensor | None) -> Tensor:
        assert x_T is not None
        return x_T.detach().where(mask_T, garbage)

    poisoned_microbatch = replace(
        microbatch,
        old_logprobs_T=poisoned(microbatch.old_logprobs_T),
        rollout_logprobs_T=poisoned(microbatch.rollout_logprobs_T),
        advantages_T=poisoned(microbatch.advantages_T),
    )
    loss, grad_T, per_response = run(poisoned(logprobs_T).requires_grad_(), poisoned_microbatch, CONFIGS[name])
    assert_close(loss, clean[0], BITWISE)
    assert_close(grad_T, clean[1], BITWISE)
    for key, value in per_response.items():
        assert_close(value, clean[2][key], BITWISE)


def test_empty_response_reads_zero_in_everything_but_its_advantage() -> None:
    case = load_case("empty_response")
    for cfg in CONFIGS.values():
        loss, grad_T, per_response = run(*tensors(case["inputs"]), cfg)
        assert loss.isfinite() and grad_T.isfinite().all()
        (empty,) = (per_response["length"] == 0).nonzero().flatten().tolist()
        read = {name: float(value[empty]) for name, value in per_response.items()}
        assert read.pop("advantage") == float(torch.tensor(case["inputs"]["advantages"][empty]))
        assert set(read.values()) == {0.0}


def test_ratio_is_exactly_one_on_policy() -> None:
    case = load_case("on_policy")
    for cfg in CONFIGS.values():
        _, _, per_response = run(*tensors(case["inputs"], torch.float32), cfg)
        assert per_response["log_ratio"].tolist() == [0.0] * 6
        assert per_response["outside_tokens"].tolist() == [0.0] * 6


def test_clip_is_strict_at_the_band_edges() -> None:
    case = load_case("band_edges")
    loss, grad_T, per_response = run(*tensors(case["inputs"]), loss_config(case))
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
    _, grad_T, per_response = run(*one_token(log_ratio, advantage), cfg)
    assert grad_T.tolist() == [-ratio * advantage]
    assert per_response["clipped_tokens"].tolist() == per_response["outside_tokens"].tolist() == [0.0]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
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
    name: Any, ratio: float, advantage: float, is_clipped: bool, is_outside: bool
) -> None:
    loss, grad_T, per_response = run(*one_token(math.log(ratio), advantage), replace(PAPER_BAND, name=name))
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
        logprobs_T, microbatch = tensors(inputs)
        loss_sum = policy_loss(logprobs_T, logprobs_T, microbatch, loss_config(case)).loss_sum
        assert_close(loss_sum, want, FLOAT64)
        total += float(loss_sum.detach())
    assert_close(total / case["global_N"], case["correct"], FLOAT64)


def test_denominator_counts_what_the_aggregation_averages_over() -> None:
    logprobs_T, microbatch = one_token(0.0, 1.0)
    batch = TrainBatch(
        microbatches=[microbatch],
        num_responses=7,
        num_tokens=100,
        num_response_tokens=40,
        minibatch_index=0,
        packing_efficiency=1.0,
    )
    counts = {name: denominator(batch, cfg, max_response_tokens=16) for name, cfg in CONFIGS.items()}
    assert counts == {
        **dict.fromkeys(("gspo", "gspo_token", "grpo", "gmpo", "sapo", "minirl"), 7),
        **dict.fromkeys(("dapo", "cispo"), 40),
        "dr_grpo": 7 * 16,
    }
    assert denominator(replace(batch, num_response_tokens=0), CONFIGS["dapo"], max_response_tokens=16) == 1


def test_mean_is_clamped_before_exp_and_reported_unclamped() -> None:
    # Tokens of +40 and -39 nats: a clamp per token would give a mean of 0.
    inputs = {"logp": [[40.0, -39.0]], "logp_old": [[0.0, 0.0]], "mask": [[1, 1]], "advantages": [-1.0]}
    loss, grad_T, per_response = run(*tensors(inputs), PAPER_BAND)
    assert_close(loss, math.exp(0.5), FLOAT64)
    assert_close(grad_T, [math.exp(0.5) / 2] * 2, FLOAT64)
    assert per_response["clamped_tokens"].tolist() == [0.0]


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo", "gmpo", "sapo"])
def test_beyond_the_guard_the_value_is_clamped_the_gradient_zero_and_the_token_counted(name: str) -> None:
    cfg = replace(CONFIGS[name], clip_low=CONFIGS[name].clip_low and 0.9)
    _, at_guard_T, per_response = run(*one_token(19.0, -1.0), cfg)
    assert name == "sapo" or at_guard_T.abs().min() > 0  # sapo's gate is flat there
    assert per_response["clamped_tokens"].tolist() == [0.0]
    loss, grad_T, per_response = run(*one_token(100.0, -1.0), cfg)
    assert_close(loss, run(*one_token(20.0, -1.0), cfg)[0], FLOAT64)
    assert grad_T.tolist() == [0.0]
    assert per_response["log_ratio"].tolist() == [100.0]
    assert per_response["clamped_tokens"].tolist() == [1.0]


def test_nan_in_a_response_is_not_hidden() -> None:
    logprobs_T, microbatch = one_token(math.nan, 1.0)
    for cfg in CONFIGS.values():
        assert policy_loss(logprobs_T, logprobs_T, microbatch, cfg).loss_sum.isnan()


def test_sft_loss_is_the_summed_nll_of_response_tokens() -> None:
    inputs = {"logp": [[-1.0, -2.0, 7.0], [-4.0, 7.0, 7.0]], "mask": [[1, 1, 0], [1, 0, 0]]}
    inputs |= {"logp_old": [[0.0] * 3] * 2, "advantages": [0.0, 0.0]}
    logprobs_T, microbatch = tensors(inputs)
    out = sft_loss(logprobs_T, logprobs_T, replace(microbatch, old_logprobs_T=None))
    (grad_T,) = torch.autograd.grad(out.loss_sum, logprobs_T)
    assert out.loss_sum.item() == 7.0
    assert grad_T.tolist() == [-1.0, -1.0, 0.0, -1.0, 0.0, 0.0]
    assert out.per_response["length"].tolist() == [2.0, 1.0]


def test_broken_contracts_are_refused() -> None:
    logprobs_T, microbatch = one_token(0.0, 1.0)
    for cfg in CONFIGS.values():
        with pytest.raises(ValueError, match="old_logprobs_T is None.*add_old_logprobs"):
            policy_loss(logprobs_T, logprobs_T, replace(microbatch, old_logprobs_T=None), cfg)
        with pytest.raises(ValueError, match=r"old_logprobs_T has shape \(2,\), wants \(1,\)"):
            policy_loss(logprobs_T, logprobs_T, replace(microbatch, old_logprobs_T=torch.zeros(2)), cfg)
        with pytest.raises(ValueError, match="logprobs_T has type torch.bfloat16, wants float32"):
            policy_loss(logprobs_T.bfloat16(), logprobs_T, microbatch, cfg)
    kl = replace(PAPER_BAND, kl=KlConfig(coef=0.1, estimator="k3", place="loss"))
    with pytest.raises(ValueError, match="ref_logprobs_T is None.*add_ref_logprobs"):
        policy_loss(logprobs_T, logprobs_T, microbatch, kl)


def test_every_recipe_name_has_its_objective_and_aggregation() -> None:
    assert OBJECTIVES.keys() == CONFIGS.keys()
    assert {name: aggregation(cfg) for name, cfg in CONFIGS.items()} == {
        **dict.fromkeys(("gspo", "gspo_token", "grpo", "gmpo", "sapo"), "sequence_mean"),
        **dict.fromkeys(("dapo", "cispo"), "token_mean"),
        "dr_grpo": "token_sum_over_limit",
        "minirl": "token_sum",
    }
    assert aggregation(replace(CONFIGS["grpo"], aggregation="token_mean")) == "token_mean"
