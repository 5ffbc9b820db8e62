"""Group-relative advantages against reference values."""

import math

import pytest

from gspo_megatron.advantage import add_advantages
from gspo_megatron.config import AdvantageConfig
from gspo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.tolerances import FLOAT64, assert_close
from tests.unit.vectors import CASES


def group(rewards: list[float | None], prompt_id: str = "p") -> RolloutGroup:
    prompt = Prompt(prompt_id=prompt_id, text="", token_ids=(1,), expected="", entry={})
    rollouts = tuple(
        Rollout(
            response_ids=(i,),
            rollout_logprobs=(0.0,),
            weight_versions=(0,),
            finish_reason="stop",
            text="",
            sampling_seed=i,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return RolloutGroup(prompt=prompt, rollouts=rollouts)


def advantages(rewards: list[float | None], **cfg: object) -> list[float | None]:
    (result,) = add_advantages([group(rewards)], AdvantageConfig(**{"std": True, "ddof": 1, **cfg}))
    return [r.advantage for r in result.rollouts]


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
        group([r for r, g in zip(case["rewards"], case["group_id"], strict=True) if g == i], prompt_id=str(i))
        for i in range(4)
    ]
    result = add_advantages(groups, AdvantageConfig(**cfg))
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
    with pytest.raises(ValueError, match="prompt 9f3a, member 1: reward is"):
        add_advantages([group([0.0, reward], prompt_id="9f3a")], AdvantageConfig(std=True, ddof=1))


def test_advantage_changes_nothing_else() -> None:
    before = group([0.0, 1.0])
    (after,) = add_advantages([before], AdvantageConfig(std=True, ddof=1))
    assert [r.with_advantage(0.0) for r in after.rollouts] == [r.with_advantage(0.0) for r in before.rollouts]
