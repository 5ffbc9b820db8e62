"""The records that stages hand to each other: their file keeps every bit and names what it cannot read."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest

from gspo_megatron.types import Prompt, Rollout, RolloutGroup, load_groups, save_groups


def make_groups() -> list[RolloutGroup]:
    """Floats that no short decimal holds; one rollout is empty, one has no score yet."""
    rng = random.Random(0)
    prompts = [
        Prompt(prompt_id=f"{i:064x}", text="a7>\u2028\u00e9\n", token_ids=(10, 2, i), expected="7", entry={"x": [i]})
        for i in range(3)
    ]
    rollouts = [
        Rollout(
            response_ids=tuple(range(n)),
            rollout_logprobs=tuple(-math.exp(rng.gauss(0.0, 8.0)) for _ in range(n)),
            weight_versions=tuple(rng.randrange(3) for _ in range(n)),
            finish_reason="stop",
            text="7,25",
            sampling_seed=rng.getrandbits(31),
            reward=rng.random() / 3.0,
            is_exact=False,
            advantage=-rng.random() / 7.0,
        )
        for n in (0, 1, 7)
    ]
    rollouts.append(dataclasses.replace(rollouts[1], reward=None, is_exact=None, advantage=None))
    turns = {"response_mask": (True, True, False, True, True, True, True), "turn_lengths": (2, 4)}
    rollouts.append(dataclasses.replace(rollouts[2], **turns, turn_rewards=(0.1, 1 / 3)))
    return [RolloutGroup(prompt=p, rollouts=tuple(rollouts)) for p in prompts]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "rollouts" / "step_00001.jsonl"
    save_groups(make_groups(), path)
    return path


def test_groups_come_back_bit_for_bit(saved: Path) -> None:
    groups = load_groups(saved)
    assert groups == make_groups()  # floats by ==, so every bit but the sign of zero
    assert [f.name for f in saved.parent.iterdir()] == [saved.name], "no temporary file stays"


def test_saving_again_replaces_the_file(saved: Path) -> None:
    save_groups(make_groups()[:1], saved)
    assert load_groups(saved) == make_groups()[:1]


def test_scores_are_added_to_a_copy() -> None:
    rollout = make_groups()[0].rollouts[3]
    scored = dataclasses.replace(rollout.with_reward(0.25, True), advantage=-1.5)
    assert (scored.reward, scored.is_exact, scored.advantage) == (0.25, True, -1.5)
    assert (rollout.reward, rollout.is_exact, rollout.advantage) == (None, None, None)
    assert dataclasses.replace(scored, reward=None, is_exact=None, advantage=None) == rollout


def test_sampled_tokens_are_those_of_the_mask() -> None:
    plain, turns = make_groups()[0].rollouts[2], make_groups()[0].rollouts[4]
    assert (plain.num_sampled_tokens, turns.num_sampled_tokens) == (7, 6)


def without_rollouts(record: dict) -> dict:
    return {"prompt": record["prompt"]}


def with_surplus_key(record: dict) -> dict:
    return {**record, "prompt": {**record["prompt"], "colour": "red"}}


def with_rollout_as_text(record: dict) -> dict:
    return {**record, "rollouts": ["7,25"]}


@pytest.mark.parametrize("edit", [without_rollouts, with_surplus_key, with_rollout_as_text])
def test_line_that_is_not_a_group_is_named(saved: Path, edit) -> None:
    lines = saved.read_text().splitlines()
    lines[1] = json.dumps(edit(json.loads(lines[1])))
    saved.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"step_00001\.jsonl:2: not a rollout group"):
        load_groups(saved)


@pytest.mark.parametrize("line", ["[1, 2]", "3", "null", '"text"', '{"prompt": {"prompt_i'])
def test_line_of_another_kind_is_named(saved: Path, line: str) -> None:
    with saved.open("a") as f:
        f.write(line)
    with pytest.raises(ValueError, match=r"step_00001\.jsonl:4: not a rollout group"):
        load_groups(saved)


def test_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent.jsonl: no such file of rollout groups"):
        load_groups(tmp_path / "absent.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x81\x82")
    with pytest.raises(ValueError, match="binary.jsonl"):
        load_groups(tmp_path / "binary.jsonl")
