"""Mismatch estimators, rollout corrections and KL estimates against reference values and by hand."""

import math
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from gspo_megatron.config import CorrectionConfig, KlConfig
from gspo_megatron.mismatch import (
    CORRECTIONS,
    KL_ESTIMATORS,
    MISMATCH_REDUCTIONS,
    correction_weights,
    kl_estimate,
    mismatch_per_response,
    summarize_mismatch,
)
from gspo_megatron.types import MAX_EXPONENT
from tests.tolerances import FLOAT32_LOG_RATIO, FLOAT64, Tolerance, assert_close
from tests.unit.vectors import CASES

K3_OF_TINY_DIFFERENCE = Tolerance(1e-5, 0.0, "d of 1e-9 against expm1(d) in float64, both rounded by 1e-25")


def rows(mask: Tensor) -> dict[str, Tensor]:
    """Where the tokens of a [B, width] case lie when its rows are laid end to end; padding belongs to response 0."""
    num_rows, width = mask.shape
    index = torch.arange(num_rows).repeat_interleave(width)
    return {
        "response_mask_T": mask.flatten(),
        "response_index_T": index.where(mask.flatten(), 0),
        "response_length_B": mask.sum(1),
    }


def estimate(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return mismatch_per_response(old.flatten(), rollout.flatten(), **rows(mask))


def summarize(old: list[list[float]], rollout: list[list[float]], mask: list[list[bool]] | None = None) -> Any:
    old_BT = torch.tensor(old, dtype=torch.float64)
    mask_BT = torch.ones_like(old_BT, dtype=torch.bool) if mask is None else torch.tensor(mask)
    got = estimate(old_BT, torch.tensor(rollout, dtype=torch.float64), mask_BT)
    return summarize_mismatch({**got, "length": mask_BT.sum(1).float()})


def of_case(name: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
    """The case, its mask and its log-probs by name, with garbage in the padding."""
    case = CASES[name]
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    garbage = iter((math.nan, -math.inf, 55.5, math.inf))
    logprobs = {
        key: torch.tensor(value, dtype=dtype).where(mask, next(garbage))
        for key, value in case["inputs"].items()
        if key.startswith("logp")
    }
    return case, mask, logprobs


OF_THE_REFERENCE = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "abs_mean": "mean_abs",
    "abs_max": "max_abs",
    "prob_error": "mult_prob_error",
    "ess_token": "ess_token",
    "ess_sequence": "ess_seq_product",
    "chi2_token": "chi2_token",
    "chi2_sequence": "chi2_seq",
    "pearson": "pearson_prob",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "ppl_ratio": "ppl_ratio",
}


def test_estimators_equal_the_reference_whatever_the_padding_holds() -> None:
    case, mask, logprobs = of_case("mismatch_metrics")
    per_response = estimate(logprobs["logp_train"], logprobs["logp_rollout"], mask)
    assert set(per_response) == set(MISMATCH_REDUCTIONS)
    got = summarize_mismatch({**per_response, "length": mask.sum(1)})
    for ours, reference in OF_THE_REFERENCE.items():
        assert_close(got.pop(f"mismatch_{ours}"), case[reference], FLOAT64)
    for tau, share in case["F_tau"].items():
        assert_close(got.pop(f"mismatch_share_above_{tau.replace('.', '_')}"), share, FLOAT64)
    geo_ratio = case["seq_geo_ratio"]
    assert_close((per_response["mismatch_sum"] / mask.sum(1)).exp(), geo_ratio, FLOAT64)
    assert_close(got.pop("mismatch_geo_ratio_mean"), math.fsum(geo_ratio) / 6, FLOAT64)
    assert_close(got.pop("mismatch_log_ratio_abs_max"), max(abs(math.log(r)) for r in geo_ratio), FLOAT64)
    # No token of the case is beyond a factor of 2.
    assert got == {"mismatch_share_above_2": 0.0}


def test_estimators_of_float32_log_probs_agree_too() -> None:
    case, mask, logprobs = of_case("mismatch_metrics", torch.float32)
    per_response = estimate(logprobs["logp_train"], logprobs["logp_rollout"], mask)
    assert {value.dtype for value in per_response.values()} == {torch.float64}
    got = summarize_mismatch({**per_response, "length": mask.sum(1)})
    for ours, reference in OF_THE_REFERENCE.items():
        assert_close(got[f"mismatch_{ours}"], case[reference], FLOAT32_LOG_RATIO)


def test_share_above_counts_both_directions_and_each_threshold() -> None:
    got = summarize([[math.log(2.1), -math.log(2.1), -math.log(1.9), math.log(1.4), math.log(1.1), 0.01]], [[0.0] * 6])
    shares = {name: value for name, value in got.items() if "share" in name}
    assert shares == {
        "mismatch_share_above_1_05": 5 / 6,
        "mismatch_share_above_1_2": 4 / 6,
        "mismatch_share_above_1_5": 3 / 6,
        "mismatch_share_above_2": 2 / 6,
    }


def test_each_response_gets_its_own_tokens() -> None:
    old = torch.tensor([[-1.0, -2.0], [-3.0, -1.0]])
    rollout = torch.tensor([[-1.5, -1.75], [-2.0, 9.0]])
    got = estimate(old, rollout, torch.tensor([[True, True], [True, False]]))
    assert got["mismatch_sum"].tolist() == [0.25, -1.0]
    assert got["mismatch_square_sum"].tolist() == [0.3125, 1.0]
    assert got["mismatch_abs_sum"].tolist() == [0.75, 1.0]
    assert got["mismatch_abs_max"].tolist() == [0.5, 1.0]
    assert got["mismatch_above_1_5_tokens"].tolist() == [1.0, 1.0]
    assert_close(
        got["mismatch_k3_sum"], [math.exp(0.5) - 1.5 + math.exp(-0.25) - 0.75, math.exp(-1.0)], FLOAT64
    )
    assert_close(got["mismatch_prob_error_sum"], [math.exp(0.5) + math.exp(0.25), math.e], FLOAT64)
    assert_close(got["mismatch_ratio_sum"], [math.exp(0.5) + math.exp(-0.25), math.exp(-1.0)], FLOAT64)
    assert_close(got["mismatch_ratio_square_sum"], [math.exp(1.0) + math.exp(-0.5), math.exp(-2.0)], FLOAT64)


def test_parts_of_a_response_on_two_ranks_combine_to_the_whole() -> None:
    _, mask, logprobs = of_case("mismatch_metrics")
    old, rollout = logprobs["logp_train"].flatten(), logprobs["logp_rollout"].flatten()
    layout = rows(mask)
    length = {"response_length_B": layout.pop("response_length_B")}
    whole = mismatch_per_response(old, rollout, **layout, **length)
    # Every other token, so that each rank has a part of nearly every response.
    parts = [
        mismatch_per_response(old[k::2], rollout[k::2], **{n: v[k::2] for n, v in layout.items()}, **length)
        for k in (0, 1)
    ]
    for name, combine in MISMATCH_REDUCTIONS.items():
        assert_close(combine(torch.stack([part[name] for part in parts]), dim=0), whole[name], FLOAT64)


def test_estimators_are_over_tokens_or_responses_as_they_say() -> None:
    # Response 1 has three tokens with d = 0, response 2 one with d = log 3; a response without tokens is left out.
    got = summarize(
        [[-1.0] * 3, [-1.0 + math.log(3.0), 0.0, 0.0], [0.0] * 3],
        [[-1.0] * 3, [-1.0, 0.0, 0.0], [0.0] * 3],
        [[True] * 3, [True, False, False], [False] * 3],
    )
    assert_close(got["mismatch_chi2_token"], (3 + 9) / 4 - 1, FLOAT64)
    assert_close(got["mismatch_ess_token"], (3 + 3) ** 2 / (4 * (3 + 9)), FLOAT64)
    assert_close(got["mismatch_chi2_sequence"], (1 + 9) / 2 - 1, FLOAT64)
    assert_close(got["mismatch_ess_sequence"], (1 + 3) ** 2 / (2 * (1 + 9)), FLOAT64)
    assert_close(got["mismatch_log_ppl_diff"], -math.log(3.0) / 2, FLOAT64)
    assert_close(got["mismatch_log_ppl_abs_diff"], math.log(3.0) / 2, FLOAT64)
    assert_close(got["mismatch_ppl_ratio"], (1 + 1 / 3) / 2, FLOAT64)
    assert_close(got["mismatch_geo_ratio_mean"], (1 + 3) / 2, FLOAT64)


def test_k3_of_float32_noise_is_not_lost_in_rounding() -> None:
    rollout = torch.tensor([[-0.01]])
    old = torch.nextafter(rollout, torch.tensor(0.0))
    d = float(old) - float(rollout)
    got = estimate(old, rollout, torch.tensor([[True]]))
    assert_close(got["mismatch_k3_sum"], [d * d / 2], K3_OF_TINY_DIFFERENCE)


def test_correlation_of_probabilities_near_1_keeps_its_digits() -> None:
    small = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64) * 1e-9
    other = small[[0, 2, 1]]
    got = summarize([torch.log1p(-small).tolist()], [torch.log1p(-other).tolist()])
    expected = float(torch.corrcoef(torch.stack([small, other]) * 1e9)[0, 1])
    assert_close(got["mismatch_pearson"], expected, Tolerance(1e-6, 0.0, "log-probs of 1e-9 in float64 carry 1e-7"))


def test_equal_log_probs_show_no_mismatch() -> None:
    got = summarize([[-0.5, -1.0], [-2.0, -3.0]], [[-0.5, -1.0], [-2.0, -3.0]])
    ones = ("prob_error", "ess_token", "ess_sequence", "ppl_ratio", "geo_ratio_mean", "pearson")
    assert_close(got["mismatch_pearson"], 1.0, FLOAT64)
    assert {**got, "mismatch_pearson": 1.0} == {name: float(name[9:] in ones) for name in got}


@pytest.mark.parametrize("logprob", [-1.0, -0.1, -1.3])
def test_correlation_without_spread_is_0_though_its_sums_round(logprob: float) -> None:
    assert summarize([[-0.5, -1.0, -2.0]], [[logprob] * 3])["mismatch_pearson"] == 0.0
    assert summarize([[logprob] * 3], [[-0.5, -1.0, -2.0]])["mismatch_pearson"] == 0.0


@pytest.mark.parametrize("size", [30.0, 600.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_exponents_are_bounded_and_sums_are_not(sign: float, size: float) -> None:
    # One token beyond the guard, then a response whose product alone is beyond it.
    got = summarize([[sign * size, 0.0, 0.0]], [[0.0] * 3])
    assert got["mismatch_k1"] == -sign * size / 3
    assert_close(got["mismatch_k3"], (math.expm1(sign * MAX_EXPONENT) - sign * size) / 3, FLOAT64)
    ratio = math.exp(sign * MAX_EXPONENT)
    assert_close(got["mismatch_prob_error"], (2 + math.exp(MAX_EXPONENT)) / 3, FLOAT64)
    assert_close(got["mismatch_chi2_token"], (ratio**2 - 1) / 3, FLOAT64)
    assert_close(got["mismatch_ess_token"], (2 + ratio) ** 2 / (3 * (2 + ratio**2)), FLOAT64)
    got = summarize([[sign * 15.0] * int(size)], [[0.0] * int(size)])
    assert_close(got["mismatch_chi2_sequence"], ratio**2 - 1, FLOAT64)
    assert_close(got["mismatch_ess_sequence"], 1.0, FLOAT64)
    assert_close(got["mismatch_geo_ratio_mean"], math.exp(sign * 15.0), FLOAT64)
    got = summarize([[sign * size]], [[0.0]])
    assert_close(got["mismatch_geo_ratio_mean"], math.exp(sign * MAX_EXPONENT), FLOAT64)
    assert_close(got["mismatch_ppl_ratio"], math.exp(-sign * MAX_EXPONENT), FLOAT64)
    assert got["mismatch_log_ratio_abs_max"] == size


def test_response_without_tokens_reads_zero_and_a_minibatch_of_them_no_mismatch() -> None:
    got = estimate(torch.full((1, 2), math.nan), torch.zeros(1, 2), torch.tensor([[False, False]]))
    assert {name: value.tolist() for name, value in got.items()} == dict.fromkeys(got, [0.0])
    summary = summarize_mismatch({**got, "length": torch.zeros(1)})
    ones = ("prob_error", "ess_token", "ess_sequence", "ppl_ratio", "geo_ratio_mean")
    assert summary == {name: float(name[9:] in ones) for name in summary}


def test_shapes_that_differ_are_refused() -> None:
    layout = rows(torch.ones(1, 2, dtype=torch.bool))
    cfg = CorrectionConfig(name="tis", high=2.0)
    with pytest.raises(ValueError, match=r"rollout_logprobs_T has shape \(3,\), wants \(2,\)"):
        mismatch_per_response(torch.zeros(2), torch.zeros(3), **layout)
    with pytest.raises(ValueError, match=r"rollout_logprobs_T has shape \(3,\), wants \(2,\)"):
        correction_weights(torch.zeros(2), torch.zeros(3), cfg, **layout)
    with pytest.raises(ValueError, match=r"response_mask_T has shape \(2,\), wants \(3,\)"):
        correction_weights(torch.zeros(3), torch.zeros(3), cfg, **layout)
    with pytest.raises(ValueError, match=r"ref_logprobs_T has shape \(3,\), wants \(2,\)"):
        kl_estimate(torch.zeros(2), torch.zeros(3), "k1")


def corrected(old: Tensor, rollout: Tensor, mask: Tensor, **cfg: Any) -> tuple[Tensor, Tensor]:
    """[B, width] weights and where the bound acted."""
    weights, changed = correction_weights(
        old.flatten(), rollout.flatten(), CorrectionConfig(**cfg), **rows(mask)
    )
    return weights.reshape(mask.shape), changed.reshape(mask.shape)


@pytest.mark.parametrize(
    ("reference", "cfg"),
    [
        ("token_TIS_loss", {"name": "tis", "high": 1.1}),
        ("token_IcePop_loss_0p9_1p1", {"name": "icepop", "low": 0.9, "high": 1.1}),
        ("seq_TIS_loss", {"name": "sequence_tis_sum", "high": 1.1}),
        ("seq_MIS_loss", {"name": "sequence_mis", "high": 1.1}),
        ("geo_RS_loss_N_all", {"name": "geometric_rejection", "low": 0.98, "high": 1.02}),
    ],
)
def test_corrected_gspo_loss_equals_the_reference_whatever_the_padding_holds(
    reference: str, cfg: dict[str, Any]
) -> None:
    case, mask, logprobs = of_case("rollout_correction")
    length = mask.sum(1)
    log_ratio = torch.where(mask, logprobs["logp"] - logprobs["logp_old"], 0.0).sum(1) / length
    ratio, advantage = log_ratio.exp(), torch.tensor(case["inputs"]["advantages"], dtype=torch.float64)
    clipped = ratio.clamp(1 - case["eps_low"], 1 + case["eps_high"])
    term = torch.minimum(ratio * advantage, clipped * advantage)
    weights, changed = corrected(logprobs["logp_old"], logprobs["logp_rollout"], mask, **cfg)
    loss = -(torch.where(mask, weights, 0.0).sum(1) / length * term).mean()
    assert_close(loss, case[reference], FLOAT64)
    assert (weights[~mask] == 1.0).all() and not changed[~mask].any()


# Two responses: log rho of log 4, 0, -log 2 (product 2, geometric mean 2^(1/3)) and of -log 4 alone.
HAND_RATIOS = [[4.0, 1.0, 0.5], [0.25, 1.0, 1.0]]
HAND_MASK = [[True, True, True], [True, False, False]]
CUBE = 2.0 ** (1 / 3)


@pytest.mark.parametrize(
    ("cfg", "weights", "changed"),
    [
        ({"name": "tis", "high": 2.0}, [2.0, 1.0, 0.5, 0.25], [1, 0, 0, 0]),
        ({"name": "icepop", "low": 0.4, "high": 2.0}, [0.0, 1.0, 0.5, 0.0], [1, 0, 0, 1]),
        ({"name": "icepop", "low": 0.4, "high": 5.0}, [4.0, 1.0, 0.5, 0.0], [0, 0, 0, 1]),
        ({"name": "mis", "high": 2.0}, [0.0, 1.0, 0.5, 0.25], [1, 0, 0, 0]),
        ({"name": "sequence_tis_mean", "high": 1.25}, [1.25, 1.25, 1.25, 0.25], [1, 1, 1, 0]),
        ({"name": "sequence_tis_mean", "high": 1.5}, [CUBE, CUBE, CUBE, 0.25], [0, 0, 0, 0]),
        ({"name": "sequence_tis_sum", "high": 1.5}, [1.5, 1.5, 1.5, 0.25], [1, 1, 1, 0]),
        ({"name": "sequence_tis_sum", "high": 2.5}, [2.0, 2.0, 2.0, 0.25], [0, 0, 0, 0]),
        ({"name": "sequence_mis", "high": 1.5}, [0.0, 0.0, 0.0, 0.25], [1, 1, 1, 0]),
        ({"name": "sequence_mis", "high": 2.5}, [2.0, 2.0, 2.0, 0.25], [0, 0, 0, 0]),
        ({"name": "geometric_rejection", "low": 0.2, "high": 1.25}, [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]),
        ({"name": "geometric_rejection", "low": 0.3, "high": 1.5}, [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1]),
    ],
)
def test_weights_by_hand(cfg: dict[str, Any], weights: list[float], changed: list[int]) -> None:
    mask = torch.tensor(HAND_MASK)
    rollout = torch.full((2, 3), -1.5, dtype=torch.float64)
    old = (rollout + torch.tensor(HAND_RATIOS, dtype=torch.float64).log()).where(mask, math.nan)
    got_weights, got_changed = corrected(old, rollout.where(mask, 55.5), mask, **cfg)
    assert_close(got_weights[mask], weights, FLOAT64)
    assert got_changed[mask].tolist() == [bool(c) for c in changed]
    assert got_weights[~mask].tolist() == [1.0, 1.0] and not got_changed[~mask].any()


def test_every_name_of_the_recipe_has_its_function() -> None:
    assert set(CORRECTIONS) == set(get_args(get_type_hints(CorrectionConfig)["name"]))
    assert set(KL_ESTIMATORS) == set(get_args(get_type_hints(KlConfig)["estimator"]))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_equal_log_probs_and_empty_responses_get_weight_1_without_gradient(name: str) -> None:
    mask = torch.tensor([[True, True], [False, False]])
    logprobs = torch.tensor([[-1.0, -2.0], [math.nan, -math.inf]], requires_grad=True)
    weights, changed = corrected(logprobs, logprobs, mask, name=name, low=0.999, high=1.001)
    assert weights.tolist() == [[1.0, 1.0], [1.0, 1.0]] and not changed.any()
    assert weights.dtype == torch.float32 and not weights.requires_grad


@pytest.mark.parametrize(("name", "weight"), [("sequence_tis_sum", math.exp(20.0)), ("mis", math.exp(20.0))])
def test_weight_beyond_the_guard_is_a_number(name: str, weight: float) -> None:
    weights, _ = corrected(
        torch.full((1, 2), 900.0, dtype=torch.float64),
        torch.zeros(1, 2, dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
        name=name,
        high=math.inf,
    )
    assert_close(weights, [[weight, weight]], FLOAT64)


@pytest.mark.parametrize("name", ["icepop", "geometric_rejection"])
def test_missing_lower_bound_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"loss.correction.low is null, wants a number below 1 for {name}"):
        corrected(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), name=name, high=2.0)


@pytest.mark.parametrize("narrow", ["old_logprobs_T", "rollout_logprobs_T"])
def test_bfloat16_log_probs_are_refused(narrow: str) -> None:
    logprobs = {"old_logprobs_T": torch.zeros(1), "rollout_logprobs_T": torch.zeros(1)}
    logprobs[narrow] = logprobs[narrow].bfloat16()
    layout = rows(torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"{narrow} has type torch.bfloat16"):
        correction_weights(**logprobs, cfg=CorrectionConfig(name="tis", high=2.0), **layout)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_estimates_and_their_gradients_equal_the_reference(estimator: str) -> None:
    case = CASES["kl_estimators"]
    mask = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    logprobs, ref = (
        torch.tensor(case["inputs"][k], dtype=torch.float64)[mask].requires_grad_() for k in ("logp", "logp_ref")
    )
    value = kl_estimate(logprobs, ref, estimator)
    assert_close(value, torch.tensor(case["value"][estimator], dtype=torch.float64)[mask], FLOAT64)
    value.sum().backward()
    expected = torch.tensor(case["dvalue_dlogp"][estimator], dtype=torch.float64)[mask]
    assert_close(logprobs.grad, expected, FLOAT64)
    assert ref.grad is None


def test_gradients_over_a_whole_distribution_are_those_that_the_estimators_name() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-0.5, 0.2, 0.4, 0.0], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    probs = logprobs.exp()

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = {
        "k1": torch.zeros(4),
        "k2": gradient((probs * (logprobs - ref)).sum()),
        "k3": gradient((ref.exp() * (ref - logprobs)).sum()),
    }
    for estimator, wanted in expected.items():
        sampled = (probs.detach() * kl_estimate(logprobs, ref, estimator)).sum()
        assert_close(gradient(sampled), wanted, FLOAT64)


def test_k3_keeps_float32_noise_and_is_bounded_where_its_exponent_would_overflow() -> None:
    d = torch.tensor([1e-4, -20.5, -900.0, 900.0], requires_grad=True)
    value = kl_estimate(d, torch.zeros(4), "k3")
    bound = math.expm1(MAX_EXPONENT) - MAX_EXPONENT
    expected = [math.expm1(-1e-4) + 1e-4, bound, bound, 899.0]
    assert_close(value, expected, Tolerance(1e-3, 0.0, "expm1(-d) + d of 5e-9 by float32 terms of 1e-4"))
    value.sum().backward()
    assert d.grad[1:].tolist() == [0.0, 0.0, 1.0]
