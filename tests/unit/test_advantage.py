"""Group-relative advantages against reference values."""

import math
from dataclasses import replace
from typing import Any

import pytest

from gspo_megatron.advantage import OVERLONG, add_advantages, response_kl
from gspo_megatron.config import AdvantageConfig, KlConfig
from gspo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.tolerances import FLOAT64, assert_close
from tests.unit.vectors import CASES

LIMIT = 8  # max_response_tokens


def rollout(reward: float | None, *, length: int = 1, **fields: Any) -> Rollout:
    """A response of so many tokens, cut at LIMIT."""
    return Rollout(
        response_ids=(3,) * length,
        rollout_logprobs=fields.pop("rollout_logprobs", (0.0,) * length),
        weight_versions=(0,) * length,
        finish_reason="length" if length >= LIMIT else "stop",
        text="",
        sampling_seed=0,
        reward=reward,
        **fields,
    )


def group(rollouts: list[Rollout], prompt_id: str = "p") -> RolloutGroup:
    prompt = Prompt(prompt_id=prompt_id, text="", token_ids=(1,), expected="", entry={})
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def config(**cfg: Any) -> AdvantageConfig:
    return AdvantageConfig(**{"std": True, "ddof": 1, **cfg})


def added(rollouts: list[Rollout], kl: KlConfig | None = None, **cfg: Any) -> tuple[Rollout, ...]:
    (result,) = add_advantages([group(rollouts)], config(**cfg), max_response_tokens=LIMIT, kl=kl)
    return result.rollouts


def advantages(rewards: list[float], lengths: list[int] | None = None, **cfg: Any) -> list[float | None]:
    lengths = lengths or [1] * len(rewards)
    rollouts = [rollout(r, length=n) for r, n in zip(rewards, lengths, strict=True)]
    return [r.advantage for r in added(rollouts, **cfg)]


@pytest.mark.parametrize(
    ("column", "cfg"),
    [
        ("ddof1_eps0", {"std": True, "ddof": 1, "eps": 0.0}),
        ("ddof0_eps0", {"std": True, "ddof": 0, "eps": 0.0}),
        ("ddof1_eps1e6", {"std": True, "ddof": 1, "eps": 1e-6}),
        ("ddof1_eps1e4", {"std": True, "ddof": 1, "eps": 1e-4}),
        ("mean_only", {"std": False, "ddof": 1}),
    ],
)
def test_advantages_equal_the_reference_per_group(column: str, cfg: dict[str, float]) -> None:
    case = CASES["advantages"]
    groups = [
        group([rollout(r) for r, g in zip(case["rewards"], case["group_id"], strict=True) if g == i], prompt_id=str(i))
        for i in range(4)
    ]
    result = add_advantages(groups, AdvantageConfig(**cfg), max_response_tokens=LIMIT)
    assert [g.prompt for g in result] == [g.prompt for g in groups]
    assert_close([r.advantage for g in result for r in g.rollouts], case[column], FLOAT64)


def test_epsilon_defaults_to_1e_6() -> None:
    assert_close(advantages([0.0, 1.0]), [-0.5 / (math.sqrt(0.5) + 1e-6), 0.5 / (math.sqrt(0.5) + 1e-6)], FLOAT64)


@pytest.mark.parametrize("std", [True, False])
def test_group_without_spread_gets_exactly_zero_though_its_mean_rounds(std: bool) -> None:
    rewards = [0.1] * 3
    assert sum(rewards) / 3 != 0.1
    assert advantages(rewards, std=std, eps=0.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("ddof", [0, 1])
def test_single_member_gets_exactly_zero(ddof: int) -> None:
    assert advantages([0.7], ddof=ddof, eps=0.0) == [0.0]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_missing_or_non_finite_reward_is_refused_with_its_place(reward: float | None) -> None:
    bad = group([rollout(0.0), rollout(reward)], prompt_id="9f3a")
    with pytest.raises(ValueError, match="prompt 9f3a, member 1: reward is"):
        add_advantages([bad], config(), max_response_tokens=LIMIT)


def test_advantage_changes_nothing_else() -> None:
    before = [rollout(0.0, token_advantages=(0.5,), response_mask=(True,)), rollout(1.0)]
    after = added(before)
    assert [replace(r, advantage=0.0) for r in after] == [replace(r, advantage=0.0) for r in before]


def test_soft_overlong_punishment_by_hand() -> None:
    # Buffer 4 of limit 8: nothing up to 4 tokens, then a quarter a token, 1 from 8 tokens on.
    lengths = [1, 4, 5, 6, 8, 9]
    shaped = [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    mean = 3.25 / 6
    got = advantages([1.0] * 6, lengths, std=False, overlong_buffer_tokens=4)
    assert_close(got, [r - mean for r in shaped], FLOAT64)


def test_shaping_joins_the_statistics_and_leaves_the_recorded_reward() -> None:
    got = added([rollout(1.0, length=6), rollout(0.25)], overlong_buffer_tokens=4, eps=0.0)
    # 1 - 0.5 against 0.25: the sample standard deviation of two is their distance over sqrt(2).
    assert_close([r.advantage for r in got], [math.sqrt(0.5), -math.sqrt(0.5)], FLOAT64)
    assert [r.reward for r in got] == [1.0, 0.25]
    assert not any(r.is_filtered for r in got)


def test_long_responses_are_not_punished_without_a_buffer() -> None:
    assert advantages([1.0, 1.0], [1, 8]) == [0.0, 0.0]


@pytest.mark.parametrize("std", [True, False])
def test_shaped_rewards_that_are_equal_up_to_rounding_get_exactly_zero(std: bool) -> None:
    assert 0.3 - 0.1 != 0.2
    kl = KlConfig(coef=0.1, estimator="k1", place="reward")
    cut = rollout(0.3, rollout_logprobs=(-1.0,), ref_logprobs=(-2.0,))
    plain = rollout(0.2, rollout_logprobs=(-1.0,), ref_logprobs=(-1.0,))
    assert [r.advantage for r in added([cut, plain], kl=kl, std=std, eps=0.0)] == [0.0, 0.0]


def test_small_rewards_keep_their_spread() -> None:
    assert_close(advantages([1e-14, 2e-14], eps=0.0), [-math.sqrt(0.5), math.sqrt(0.5)], FLOAT64)


@pytest.mark.parametrize(
    ("overlong_filter", "expected"),
    [
        # Of 1, 0, 0, 0 the mean is 1/4; of the first three 1/3.
        ("off", [0.75, -0.25, -0.25, -0.25]),
        ("after_statistics", [0.75, -0.25, -0.25, 0.0]),
        ("before_statistics", [2 / 3, -1 / 3, -1 / 3, 0.0]),
    ],
)
def test_overlong_filter_takes_truncated_responses_out_before_or_after_the_mean(
    overlong_filter: str, expected: list[float]
) -> None:
    rollouts = [rollout(1.0), rollout(0.0), rollout(0.0), rollout(0.0, length=8)]
    got = added(rollouts, std=False, overlong_filter=overlong_filter)
    assert_close([r.advantage for r in got], expected, FLOAT64)
    assert [r.is_filtered for r in got] == [False, False, False, overlong_filter != "off"]
    assert got[3].advantage == 0.0 or overlong_filter == "off"


def test_overlong_filter_before_statistics_leaves_the_others_deviation() -> None:
    got = advantages([0.0, 1.0, 100.0], [1, 1, 8], eps=0.0, overlong_filter="before_statistics")
    assert_close(got, [-math.sqrt(0.5), math.sqrt(0.5), 0.0], FLOAT64)


@pytest.mark.parametrize("overlong_filter", ["before_statistics", "after_statistics"])
def test_group_of_truncated_responses_is_all_filtered(overlong_filter: str) -> None:
    got = added([rollout(0.0, length=8), rollout(1.0, length=8)], overlong_filter=overlong_filter)
    assert [(r.advantage, r.is_filtered) for r in got] == [(0.0, True), (0.0, True)]


def test_one_response_left_by_the_filter_gets_exactly_zero() -> None:
    assert advantages([0.7, 0.1], [1, 8], eps=0.0, overlong_filter="before_statistics") == [0.0, 0.0]
    # Counted after all, the truncated one gives it something to beat.
    assert advantages([0.7, 0.1], [1, 8], std=False, overlong_filter="after_statistics")[0] == pytest.approx(0.3)


def test_response_filtered_for_another_reason_stays_so_and_does_not_count() -> None:
    got = added([rollout(0.0), rollout(9.0, filtered_because="stale"), rollout(1.0)], std=False)
    assert [(r.advantage, r.filtered_because) for r in got] == [(-0.5, None), (0.0, "stale"), (0.5, None)]


def test_filter_of_another_recipe_is_not_kept() -> None:
    assert not any(r.is_filtered for r in added([rollout(0.0, filtered_because=OVERLONG), rollout(1.0)]))


LOGPROBS = {"rollout_logprobs": (-1.0, -2.0, -0.5), "ref_logprobs": (-1.5, -1.75, 9.0), "response_mask": (1, 1, 0)}
# d of 0.5 and -0.25; the third token was not sampled.
SUMS = {
    "k1": 0.25,
    "k2": (0.25 + 0.0625) / 2,
    "k3": (math.exp(-0.5) - 1 + 0.5) + (math.exp(0.25) - 1 - 0.25),
}


@pytest.mark.parametrize("estimator", SUMS)
def test_response_kl_sums_the_sampled_tokens(estimator: str) -> None:
    assert_close(response_kl(rollout(0.0, length=3, **LOGPROBS), estimator), SUMS[estimator], FLOAT64)


@pytest.mark.parametrize("estimator", SUMS)
def test_response_kl_is_the_sum_of_the_reference_values(estimator: str) -> None:
    case = CASES["kl_estimators"]
    inputs = case["inputs"]
    for i, mask in enumerate(inputs["mask"]):
        fields = {"rollout_logprobs": inputs["logp"][i], "ref_logprobs": inputs["logp_ref"][i]}
        got = response_kl(rollout(0.0, length=len(mask), response_mask=mask, **fields), estimator)
        assert_close(got, math.fsum(case["value"][estimator][i]), FLOAT64)


def test_response_kl_counts_every_token_without_a_mask_and_bounds_the_exponent() -> None:
    fields = {"rollout_logprobs": (-1000.0, -1.0), "ref_logprobs": (-0.0, -1.5)}
    assert response_kl(rollout(0.0, length=2, **fields), "k1") == -999.5
    expected = math.expm1(20.0) - 20.0 + math.expm1(-0.5) + 0.5
    assert_close(response_kl(rollout(0.0, length=2, **fields), "k3"), expected, FLOAT64)


def test_kl_in_the_reward_is_taken_off_before_the_statistics() -> None:
    rollouts = [rollout(1.0, length=3, **LOGPROBS), rollout(1.0, rollout_logprobs=(-1.0,), ref_logprobs=(-1.0,))]
    kl = KlConfig(coef=2.0, estimator="k1", place="reward")
    got = added(rollouts, kl=kl, std=False)
    # 1 - 2 x 0.25 against 1.
    assert_close([r.advantage for r in got], [-0.25, 0.25], FLOAT64)
    assert [r.reward for r in got] == [1.0, 1.0]


def test_kl_in_the_loss_leaves_rewards_alone() -> None:
    kl = KlConfig(coef=2.0, estimator="k1", place="loss")
    assert [r.advantage for r in added([rollout(1.0, length=3, **LOGPROBS), rollout(1.0)], kl=kl)] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ref_logprobs", "message"),
    [
        (None, "prompt p, member 1: ref_logprobs is None, wants 1 values"),
        ((0.0, 0.0), "prompt p, member 1: ref_logprobs is 2 values, wants 1 values"),
        ((-math.inf,), "prompt p, member 1: the KL penalty of its reward is -inf"),
    ],
)
def test_missing_or_unusable_reference_is_refused_with_its_place(ref_logprobs: Any, message: str) -> None:
    kl = KlConfig(coef=0.1, estimator="k3", place="reward")
    with pytest.raises(ValueError, match=message):
        added([rollout(0.0, ref_logprobs=(0.0,)), rollout(1.0, ref_logprobs=ref_logprobs)], kl=kl)


def with_turns(reward: float, turn_rewards: list[float] | None, lengths: list[int], **fields: Any) -> Rollout:
    """A response whose turns have those lengths, with one token between each two that was not sampled."""
    mask = [True] * lengths[0] + [is_sampled for n in lengths[1:] for is_sampled in [False] + [True] * n]
    return rollout(
        reward,
        length=len(mask),
        response_mask=tuple(mask),
        turn_lengths=tuple(lengths),
        turn_rewards=None if turn_rewards is None else tuple(turn_rewards),
        **fields,
    )


def test_turn_advantages_are_relative_to_the_same_turn_of_the_others_by_hand() -> None:
    # Returns to go: 3, 1 / 0, 0 / 6, 4, 4. Turn 1 is compared over three members (mean 3), turn 2 over all three
    # (mean 5/3), turn 3 has one member. Outcomes 1, 0, 0.
    rollouts = [
        with_turns(1.0, [2.0, 1.0], [2, 1]),
        with_turns(0.0, [0.0, 0.0], [1, 1]),
        with_turns(0.0, [2.0, 0.0, 4.0], [1, 2, 1]),
    ]
    first, second, third = (r.token_advantages for r in added(rollouts, std=False, turn_rewards=True))
    won, lost = 2 / 3, -1 / 3
    assert_close(first, [won, won, 0.0, won - 2 / 3], FLOAT64)
    assert_close(second, [lost - 3, 0.0, lost - 5 / 3], FLOAT64)
    assert_close(third, [lost + 3, 0.0, lost + 7 / 3, lost + 7 / 3, 0.0, lost], FLOAT64)


def test_turn_advantages_are_divided_by_the_deviation_of_their_turn() -> None:
    rollouts = [with_turns(0.0, [1.0, 0.0], [1, 1]), with_turns(0.0, [0.25, 0.0], [1, 1])]
    first, second = added(rollouts, turn_rewards=True, eps=0.0)
    assert_close(first.token_advantages, [math.sqrt(0.5), 0.0, 0.0], FLOAT64)
    assert_close(second.token_advantages, [-math.sqrt(0.5), 0.0, 0.0], FLOAT64)


@pytest.mark.parametrize("std", [True, False])
def test_turns_without_spread_leave_exactly_the_responses_advantage(std: bool) -> None:
    assert 0.1 + 0.2 != 0.3  # returns of turn 1 that are equal on paper only
    rollouts = [with_turns(1.0, [0.1, 0.2], [1, 1]), with_turns(0.0, [0.3, 0.0], [1, 1])]
    for got in added(rollouts, turn_rewards=True, std=std):
        assert got.token_advantages is not None and got.token_advantages[0] == got.advantage
        assert got.token_advantages[2] != got.advantage
    for got in added([with_turns(1.0, [5.0], [2]), with_turns(0.0, [5.0], [1])], turn_rewards=True, std=std):
        assert set(got.token_advantages) == {got.advantage}


def test_a_member_without_rewards_of_turns_counts_as_nothing_in_its_turns() -> None:
    rollouts = [with_turns(0.0, [1.0, 0.0], [1, 1]), with_turns(0.0, None, [1, 1])]
    got = added(rollouts, std=False, turn_rewards=True)
    assert [r.token_advantages for r in got] == [(0.5, 0.0, 0.0), (-0.5, 0.0, 0.0)]


def test_groups_without_rewards_of_turns_have_no_token_advantages() -> None:
    got = added([with_turns(1.0, None, [1, 1]), with_turns(0.0, None, [2])], turn_rewards=True)
    assert [r.token_advantages for r in got] == [None, None]


def test_filtered_responses_neither_count_in_turns_nor_get_token_advantages() -> None:
    stale = with_turns(0.0, [9.0], [1], filtered_because="stale")
    rollouts = [stale, with_turns(0.0, [1.0], [1]), with_turns(0.0, [0.0], [1])]
    got = added(rollouts, std=False, turn_rewards=True)
    assert [r.token_advantages for r in got] == [None, (0.5,), (-0.5,)]


@pytest.mark.parametrize(
    ("turn_rewards", "lengths", "problem"),
    [
        ([1.0], [1, 1], r"turn_lengths are \(1, 1\), want 1 as turn_rewards"),
        ([1.0, math.nan], [1, 1], "want finite numbers"),
    ],
)
def test_turns_that_cannot_be_right_are_refused_with_their_place(
    turn_rewards: list[float], lengths: list[int], problem: str
) -> None:
    bad = group([rollout(0.0), with_turns(0.0, turn_rewards, lengths)], prompt_id="9f3a")
    with pytest.raises(ValueError, match=f"prompt 9f3a, member 1: .*{problem}"):
        add_advantages([bad], config(turn_rewards=True), max_response_tokens=LIMIT)


def test_rewards_of_turns_are_refused_where_the_recipe_does_not_want_them() -> None:
    with pytest.raises(ValueError, match="set advantage.turn_rewards to true"):
        added([rollout(0.0), with_turns(0.0, [1.0], [1])])
    short = replace(with_turns(0.0, [1.0, 0.0], [1, 1]), turn_lengths=(1, 2))
    with pytest.raises(ValueError, match="add up to the 2 sampled tokens"):
        added([rollout(0.0), short], turn_rewards=True)
