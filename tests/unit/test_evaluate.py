"""Evaluation statistics: averages, and intervals worked by hand."""

import pytest

from gspo_megatron.evaluate import clustered_interval, summarize, wilson_interval
from gspo_megatron.types import Prompt, Rollout, RolloutGroup


def make_group(name: str, exact: list[bool], **fields) -> RolloutGroup:
    prompt = Prompt(prompt_id=name, text=name, token_ids=(), expected="1", entry={})
    record = {
        "response_ids": (3, 1),
        "rollout_logprobs": (0.0, 0.0),
        "weight_versions": (0, 0),
        "finish_reason": "stop",
        "text": "1",
        "sampling_seed": 0,
    }
    rollouts = [Rollout(**{**record, "reward": float(e), "is_exact": e, **fields}) for e in exact]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def single(num_exact: int, num_prompts: int) -> list[RolloutGroup]:
    return [make_group(str(i), [i < num_exact]) for i in range(num_prompts)]


# With z^2 = 3.841459: 0 of 10 ends at z^2 / (10 + z^2); 5 of 10 is .5 -+ z sqrt(.025 + z^2 / 400) / (1 + z^2 / 10).
@pytest.mark.parametrize(
    ("successes", "low", "high"), [(0, 0.0, 0.277533), (5, 0.236593, 0.763407), (10, 0.722467, 1.0)]
)
def test_wilson_interval_has_known_values(successes, low, high):
    assert wilson_interval(successes, 10) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses_impossible_counts(successes, trials):
    with pytest.raises(ValueError, match="wants 0 <= k <= n"):
        wilson_interval(successes, trials)


def test_single_sample_uses_wilson():
    result = summarize(single(5, 10))
    assert (result.accuracy, result.num_prompts, result.num_samples) == (0.5, 10, 1)
    assert (result.low, result.high) == wilson_interval(5, 10)


def test_clustered_interval_is_normal_over_prompt_means():
    # s = sqrt(0.125 / 3) = 0.204124, half = 1.959964 * 0.204124 / 2 = 0.200038
    assert clustered_interval([0.25, 0.5, 0.75, 0.5]) == pytest.approx((0.299962, 0.700038), abs=1e-6)


def test_clustered_interval_stays_in_the_unit_interval():
    # s = 0.5, half = 1.959964 * 0.5 / 2 = 0.489991
    assert clustered_interval([1.0, 1.0, 1.0, 0.0]) == pytest.approx((0.260009, 1.0), abs=1e-6)
    assert clustered_interval([0.0, 0.0, 0.0, 1.0]) == pytest.approx((0.0, 0.739991), abs=1e-6)
    assert clustered_interval([0.5]) == (0.0, 1.0)


def test_repeated_samples_of_a_prompt_do_not_narrow_the_interval():
    # Every prompt answers all its samples alike: 4 samples carry no more than 1.
    few = summarize([make_group(str(i), [i % 2 == 0] * 2) for i in range(40)])
    many = summarize([make_group(str(i), [i % 2 == 0] * 8) for i in range(40)])
    assert (few.accuracy, many.accuracy, many.num_samples) == (0.5, 0.5, 8)
    assert (many.low, many.high) == (few.low, few.high)
    assert many.high - many.low == pytest.approx(2 * 1.959964 * (10 / 39) ** 0.5 / 40**0.5, abs=1e-6)


def test_accuracy_averages_over_samplings():
    result = summarize([make_group("p", [True, False, False, False]), make_group("q", [True, True, False, False])])
    assert result.accuracy == pytest.approx(0.375)
    assert (result.num_prompts, result.num_samples) == (2, 4)


def test_other_averages_count_responses():
    groups = [
        make_group("p", [True], reward=1.0, text="7,25", response_ids=(1, 2, 3, 4, 5)),
        make_group("q", [False], reward=1.0, text="8", response_ids=(1, 2)),
        make_group("r", [False], reward=0.0, text="8", response_ids=(1,) * 16, finish_reason="length"),
        make_group("s", [False], reward=0.0, text="8", response_ids=(1,)),
    ]
    result = summarize(groups)
    assert result.accuracy == 0.25
    assert result.mean_reward == 0.5
    assert result.mean_response_tokens == 6.0
    assert result.truncated_fraction == 0.25
    assert result.distinct_fraction == 0.5


def test_groups_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="at least one group"):
        summarize([])
    with pytest.raises(ValueError, match=r"\[1, 2\] responses"):
        summarize([make_group("p", [True]), make_group("q", [True, False])])
    with pytest.raises(ValueError, match="repeated prompts"):
        summarize([make_group("p", [True]), make_group("p", [False])])
    for missing in ("is_exact", "reward"):
        with pytest.raises(ValueError, match="unscored rollout of prompt 'p'"):
            summarize([make_group("p", [True], **{missing: None})])
