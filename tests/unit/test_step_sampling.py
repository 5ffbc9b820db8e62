"""Which groups a rollout step takes, what is filtered, and whether the totals add up."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_megatron.config import load_recipe
from gspo_megatron.engine import RolloutError
from gspo_megatron.step_sampling import check_totals, choose_groups, mark_stale, mark_too_short
from gspo_megatron.types import Prompt, Rollout, RolloutGroup, RolloutReport

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes" / "gspo-tiny-moe-cpu.yaml")


def make_config(**keys):
    return replace(RECIPE.rollout, num_prompts=4, **keys)


def make_prompts(count):
    return [Prompt(prompt_id=str(i), text="", token_ids=(3,), expected="", entry={}) for i in range(count)]


def make_rollout(reward=0.0, *, versions=(0, 0), seed=0, **fields):
    return Rollout(
        response_ids=(5,) * len(versions),
        rollout_logprobs=(-1.0,) * len(versions),
        weight_versions=tuple(versions),
        finish_reason="stop",
        text="",
        sampling_seed=seed,
        reward=reward,
        is_exact=False,
        **fields,
    )


def make_group(prompt, rewards):
    return RolloutGroup(prompt=prompt, rollouts=tuple(make_rollout(r, seed=i) for i, r in enumerate(rewards)))


def choose(cfg, good, *, count, delay_s=lambda i: 0.0):
    """Choose among `count` prompts of which those in `good` have spread; also which ones were begun, and aborted."""
    begun, aborted = [], []

    async def sample(prompt):
        try:
            await asyncio.sleep(delay_s(int(prompt.prompt_id)))
        except asyncio.CancelledError:
            aborted.append(int(prompt.prompt_id))
            raise
        return make_group(prompt, [0.0, 1.0] if int(prompt.prompt_id) in good else [1.0, 1.0])

    def begin(prompt):
        begun.append(int(prompt.prompt_id))
        return sample(prompt)

    async def run():
        choice = await choose_groups(make_prompts(count), begin, cfg)
        await asyncio.sleep(0.01)  # aborted ones end
        return choice

    return asyncio.run(run()), begun, aborted


def ids(groups):
    return [int(group.prompt.prompt_id) for group in groups]


def test_without_dynamic_sampling_all_prompts_are_taken_in_order_whatever_their_rewards():
    choice, begun, _ = choose(make_config(), good={1}, count=4, delay_s=lambda i: 0.01 * (4 - i))
    assert (ids(choice.groups), begun) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert (choice.zero_spread, choice.num_surplus, choice.num_prompts) == ([], 0, 4)


def test_groups_with_equal_rewards_are_dropped_and_replaced_by_later_prompts():
    choice, begun, _ = choose(make_config(dynamic_sampling=True), good={0, 2, 3, 5, 7}, count=12)
    assert ids(choice.groups) == [0, 2, 3, 5]
    assert ids(choice.zero_spread) == [1, 4]
    assert len(begun) == choice.num_prompts == 6 + choice.num_surplus


def test_choice_does_not_depend_on_how_fast_groups_come():
    cfg, rng = make_config(dynamic_sampling=True, oversample_prompts=3), random.Random(1)
    for _ in range(20):
        delays = [rng.uniform(0.0, 0.02) for _ in range(12)]
        choice, begun, aborted = choose(cfg, good={1, 2, 5, 6, 8, 9}, count=12, delay_s=delays.__getitem__)
        assert ids(choice.groups) == [1, 2, 5, 6]
        assert ids(choice.zero_spread) == [0, 3, 4]
        assert choice.num_prompts == len(begun) == 7 + choice.num_surplus
        assert set(aborted) <= set(range(7, 12))


def test_oversampled_prompts_are_under_way_at_once_and_aborted_when_they_are_not_needed():
    cfg = make_config(dynamic_sampling=True, oversample_prompts=2)
    choice, begun, aborted = choose(cfg, good=set(range(12)), count=12, delay_s=lambda i: 60.0 if i > 3 else 0.0)
    assert (ids(choice.groups), begun, sorted(aborted)) == ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [4, 5])
    assert choice.num_surplus == 2


def test_groups_with_equal_rewards_fill_up_in_the_order_of_the_prompts_when_prompts_run_out():
    choice, begun, _ = choose(make_config(dynamic_sampling=True), good={3, 6}, count=7)
    assert ids(choice.groups) == [0, 1, 3, 6]
    assert ids(choice.zero_spread) == [2, 4, 5]
    assert (len(begun), choice.num_surplus) == (7, 0)


def test_rewards_of_turns_make_spread():
    def group_of(prompt):
        same = make_group(prompt, [1.0, 1.0])
        if prompt.prompt_id != "1":
            return same
        return replace(same, rollouts=tuple(replace(r, turn_rewards=(float(i),)) for i, r in enumerate(same.rollouts)))

    async def sample(prompt):
        return group_of(prompt)

    cfg = replace(make_config(dynamic_sampling=True), num_prompts=1)
    choice = asyncio.run(choose_groups(make_prompts(3), sample, cfg))
    assert (ids(choice.groups), ids(choice.zero_spread)) == ([1], [0])


def test_filtered_responses_make_no_spread():
    prompt = make_prompts(1)[0]
    group = make_group(prompt, [1.0, 0.0])
    filtered = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], filtered_because="too_short")))

    async def sample(_):
        return filtered

    cfg = replace(make_config(dynamic_sampling=True), num_prompts=1)
    choice = asyncio.run(choose_groups([prompt, prompt], sample, cfg))
    assert (len(choice.groups), len(choice.zero_spread)) == (1, 1), "it only fills up"


def test_failing_prompt_is_the_steps_error_and_ends_the_others():
    ended = []

    async def sample(prompt):
        if prompt.prompt_id == "1":
            raise RolloutError("no server")
        try:
            await asyncio.sleep(60.0)
        finally:
            ended.append(prompt.prompt_id)

    async def run():
        with pytest.raises(RolloutError, match="no server"):
            await choose_groups(make_prompts(4), sample, make_config())
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert sorted(ended) == ["0", "2", "3"]


def test_responses_below_the_least_length_are_filtered_and_others_are_not():
    group = RolloutGroup(
        prompt=make_prompts(1)[0],
        rollouts=(
            make_rollout(versions=(0, 0)),
            make_rollout(versions=(0, 0, 0)),
            make_rollout(versions=(0, 0, 0), response_mask=(True, False, True)),
        ),
    )
    assert [r.filtered_because for r in mark_too_short(group, 3).rollouts] == ["too_short", None, "too_short"]
    assert mark_too_short(group, 0) == group


def test_one_token_that_is_too_old_makes_a_response_stale():
    versions = [(3, 4, 4), (4, 4, 4), (2, 4, 4)]
    group = RolloutGroup(prompt=make_prompts(1)[0], rollouts=tuple(make_rollout(versions=v) for v in versions))
    assert [r.filtered_because for r in mark_stale(group, 3).rollouts] == [None, None, "stale"]


REPORT = RolloutReport(
    num_asked=6, num_zero_spread=2, num_surplus=0, num_retries=0, num_continued=0, num_retracted=0, num_rejected=0
)


def totals(groups, **fields):
    check_totals(groups, replace(REPORT, **fields), lambda prompt: [0, 1])


def test_totals_that_add_up_pass_and_lost_surplus_or_swapped_responses_do_not():
    first, second = (make_group(prompt, [0.0, 1.0]) for prompt in make_prompts(2))
    totals([first, second])
    totals([first, second], num_asked=10, num_surplus=4)
    with pytest.raises(RolloutError, match="6 responses were asked for, 2 are handed on and 2 dropped: 2 are lost"):
        totals([first])
    with pytest.raises(RolloutError, match="-2 are lost"):
        totals([first, second], num_asked=4)
    with pytest.raises(RolloutError, match="1 of 2 groups answer a prompt that another one answers"):
        totals([first, first])
    with pytest.raises(RolloutError, match=r"prompt 1: has responses with the sampling seeds \[1, 0\]"):
        totals([first, replace(second, rollouts=second.rollouts[::-1])])
    with pytest.raises(RolloutError, match=r"prompt 0: has responses with the sampling seeds \[0\], wants \[0, 1\]"):
        totals([replace(first, rollouts=first.rollouts[:1]), second], num_asked=5)
