"""Rewards of number_sorting and chain_sum: compact spelling, the package's scorer, the control arm's permutation."""

import json
import math

import pytest
import reasoning_gym

from gspo_megatron.rewards import reasoning
from gspo_megatron.types import Prompt, Rollout, RolloutGroup

SORTING = {"source_dataset": "number_sorting", "direction": "ascending"}


def make_prompt(numbers: list[int], *, direction: str = "ascending") -> Prompt:
    ordered = sorted(numbers, reverse=direction == "descending")
    item = {
        "metadata": {
            **SORTING,
            "direction": direction,
            "original_numbers": [f"{n}.0" for n in numbers],
            "sorted_numbers": [f"{n}.0" for n in ordered],
        }
    }
    text = reasoning.render_prompt(item)
    return Prompt(
        prompt_id=text,
        text=text,
        token_ids=(),
        expected=reasoning.render_expected(item),
        entry=reasoning.scorer_entry(item),
    )


def make_group(prompt: Prompt, texts: list[str]) -> RolloutGroup:
    rollouts = [
        Rollout(
            response_ids=(1,),
            rollout_logprobs=(0.0,),
            weight_versions=(0,),
            finish_reason="stop",
            text=text,
            sampling_seed=0,
        )
        for text in texts
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))


def test_item_renders_as_direction_numbers_and_arrow():
    up = make_prompt([25, 79, 83, 64])
    assert (up.text, up.expected) == ("a25,79,83,64>", "25,64,79,83")
    down = make_prompt([25, 79, -3], direction="descending")
    assert (down.text, down.expected) == ("d25,79,-3>", "79,25,-3")
    assert reasoning.prompt_numbers(down.text) == ["25", "79", "-3"]


def test_negative_zero_renders_as_zero():
    item = {"metadata": {**SORTING, "original_numbers": ["-0.0", "3.0"]}}
    assert reasoning.render_prompt(item) == "a0,3>"


def test_number_with_decimals_is_refused_naming_the_recipe_key():
    item = {"metadata": {**SORTING, "original_numbers": ["2.5", "3.0"]}}
    with pytest.raises(ValueError, match="data.params.max_decimals"):
        reasoning.render_prompt(item)


@pytest.mark.parametrize(
    ("response", "reward", "is_exact"),
    [
        ("25,64,79", 1.0, True),
        ("24,64,79", 1.0, False),  # the scorer tolerates one per value
        ("26,65,78", 1.0, False),
        ("25,64,81", 0.0, False),
        ("23,64,79", 0.0, False),
        ("25,79,64", 0.0, False),
        ("79,64,25", 0.0, False),
        ("25,64", 0.0, False),
        ("25,64,79,79", 0.0, False),
    ],
)
def test_score_is_the_packages_and_exact_is_the_text(response, reward, is_exact):
    assert reasoning.score(make_prompt([64, 79, 25]), response) == (reward, is_exact)


def test_descending_order_is_asked_for_by_the_direction():
    prompt = make_prompt([64, 79, 25], direction="descending")
    assert reasoning.score(prompt, "79,64,25") == (1.0, True)
    assert reasoning.score(prompt, "25,64,79") == (0.0, False)


@pytest.mark.parametrize(
    "response",
    ["", ",", "7,", ",7", "7,,25", "7, 25", "7,25>", "7;25", "7.0,25.0", "1e1,25", "nan,nan", "inf", "7,25\n"]
    + ["['7','25']", "\u0667,25", "7,2_5", "--7,25", '7","25', "9" * 5000, "9" * 5000 + ",1"],
)
def test_malformed_response_scores_zero_without_an_error(response):
    assert reasoning.score(make_prompt([25, 7]), response) == (0.0, False)


def test_score_agrees_with_the_package_on_its_own_items():
    dataset = reasoning_gym.create_dataset(
        "number_sorting", seed=3, size=200, min_numbers=2, max_numbers=4, max_decimals=0, min_value=0.0, max_value=9.0
    )
    rewards = []
    for item in dataset:
        prompt = Prompt(
            prompt_id="",
            text=reasoning.render_prompt(item),
            token_ids=(),
            expected=reasoning.render_expected(item),
            entry=json.loads(json.dumps(reasoning.scorer_entry(item))),
        )
        response = reasoning.prompt_numbers(prompt.text)
        reward, _ = reasoning.score(prompt, ",".join(response))
        assert reward == dataset.score_answer(str(response), item)
        assert reasoning.score(prompt, prompt.expected) == (1.0, True)
        rewards.append(reward)
    assert 0.1 < sum(rewards) / len(rewards) < 0.6


def test_entry_survives_json_and_carries_no_code():
    (item,) = reasoning_gym.create_dataset("number_sorting", seed=3, size=1, max_decimals=0)
    entry = reasoning.scorer_entry(item)
    assert json.loads(json.dumps(entry)) == entry
    assert json.loads(entry["answer"]) == item["metadata"]["sorted_numbers"]


def make_sum(**params):
    """The package's own items of chain_sum with their prompts."""
    dataset = reasoning_gym.create_dataset("chain_sum", seed=3, size=100, min_terms=2, max_terms=3, **params)
    for item in dataset:
        yield (
            item,
            Prompt(
                prompt_id="",
                text=reasoning.render_prompt(item),
                token_ids=(),
                expected=reasoning.render_expected(item),
                entry=json.loads(json.dumps(reasoning.scorer_entry(item))),
            ),
        )


def test_sum_renders_as_its_terms_and_arrow():
    for item, prompt in make_sum(max_digits=2):
        assert prompt.text == item["metadata"]["expression"].replace(" ", "") + ">"
        assert sum(reasoning.prompt_terms(prompt.text)) == int(prompt.expected)
    assert reasoning.prompt_terms("12+45-7>") == [12, 45, -7]


def test_answer_of_a_sum_is_what_follows_the_last_comma():
    (_, prompt), *_ = make_sum(max_digits=2)
    right = prompt.expected
    for before in ("", "1+1=2,", "1+1=2,5,"):
        assert reasoning.score(prompt, before + right) == (1.0, True)
    for response in ("", f"{right},", f"{right}=", f"1+1={right}", f"{right},1+1", f" {right}", "nan", "9" * 5000):
        assert reasoning.score(prompt, f"3,{response}") == (0.0, False), response


def test_sum_that_is_not_exact_can_have_a_part_of_the_reward_by_the_package():
    item, prompt = next((i, p) for i, p in make_sum(max_digits=2) if int(p.expected) > 9)
    near = prompt.expected + "0"
    assert reasoning.score(prompt, near)[0] == reasoning_gym.get_score_answer_fn("chain_sum")(near, item) > 0.5
    assert reasoning.score(prompt, near)[1] is False
    assert reasoning.score(prompt, f"0{prompt.expected}") == (1.0, False)  # a leading zero is tolerated


def test_sum_with_negative_terms_is_refused_naming_the_recipe_key():
    with pytest.raises(ValueError, match="data.params.allow_negation"):
        list(make_sum(max_digits=2, allow_negation=True))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_an_error_naming_prompt_and_response(reward):
    with pytest.raises(ValueError, match="'7,25' to prompt 'a25,7>'"):
        reasoning._finite(reward, "a25,7>", "7,25")


def test_groups_are_scored_in_place_order():
    groups = [
        make_group(make_prompt([25, 7]), ["7,25", "25,7", "8,25"]),
        make_group(make_prompt([3, 9], direction="descending"), ["3,9", "9,3"]),
    ]
    scored = reasoning.score_groups(groups, permute_seed=None)
    assert [[(r.reward, r.is_exact) for r in g.rollouts] for g in scored] == [
        [(1.0, True), (0.0, False), (1.0, False)],
        [(0.0, False), (1.0, True)],
    ]
    assert [[r.text for r in g.rollouts] for g in scored] == [[r.text for r in g.rollouts] for g in groups]
    assert [g.prompt for g in scored] == [g.prompt for g in groups]


def test_permuted_rewards_keep_multiset_and_exactness_and_follow_the_seed():
    groups = [
        make_group(make_prompt([i + 50, i]), [f"{i},{i + 50}"] * (i % 4) + ["1"] * (4 - i % 4)) for i in range(16)
    ]
    plain = [r for g in reasoning.score_groups(groups, permute_seed=None) for r in g.rollouts]
    arms = [
        [r for g in reasoning.score_groups(groups, permute_seed=seed) for r in g.rollouts] for seed in (5, 5, 6)
    ]
    rewards = [[r.reward for r in arm] for arm in arms]
    assert rewards[0] == rewards[1]
    assert rewards[0] != rewards[2]
    assert rewards[0] != [r.reward for r in plain]
    assert sorted(rewards[0]) == sorted(r.reward for r in plain)
    assert [r.is_exact for r in arms[0]] == [r.is_exact for r in plain]


def test_permutation_crosses_groups():
    groups = [make_group(make_prompt([25, 7]), ["7,25"] * 8), make_group(make_prompt([26, 7]), ["1"] * 8)]
    sums = [sum(r.reward for r in g.rollouts) for g in reasoning.score_groups(groups, permute_seed=0)]
    assert sum(sums) == 8.0
    assert 0.0 < sums[0] < 8.0
