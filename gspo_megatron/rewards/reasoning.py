"""Rewards from the package reasoning-gym, and the compact text form of its number_sorting task.

An item that asks for 25, 79, 83, 64 in ascending order becomes the prompt `a25,79,83,64>` and the response
`25,64,79,83`; `d` asks for descending order. The package generates the items and scores the responses; only the
spelling is ours, so that a model with a character vocabulary can read it.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable
from typing import Any

from gspo_megatron.types import Prompt, RolloutGroup

DIRECTION_LETTERS = {"ascending": "a", "descending": "d"}
COMPACT_NUMBERS = re.compile(r"-?[0-9]+(,-?[0-9]+)*")


def render_prompt(item: dict[str, Any]) -> str:
    """The compact prompt of a number_sorting item, for example `a25,79,83,64>`.

    Args:
        item: as reasoning-gym generates it.

    Raises:
        ValueError: a number is not an integer.
    """
    metadata = item["metadata"]
    return f"{DIRECTION_LETTERS[metadata['direction']]}{_join_integers(metadata['original_numbers'])}>"


def render_expected(item: dict[str, Any]) -> str:
    """The compact form of the item's own solution, for example `25,64,79,83`.

    Raises:
        ValueError: a number is not an integer.
    """
    return _join_integers(item["metadata"]["sorted_numbers"])


def prompt_numbers(prompt_text: str) -> list[str]:
    """The numbers of a compact prompt in the order it states them: `a25,7>` -> ["25", "7"]."""
    return prompt_text[1:-1].split(",")


def scorer_entry(item: dict[str, Any]) -> dict[str, Any]:
    """What the package's scorer reads of an item, as JSON holds it: tuples as lists, the answer as a JSON list.

    The package writes the answer as a Python literal and would evaluate it as code at scoring; a JSON list it parses.
    """
    metadata = json.loads(json.dumps(item["metadata"]))
    return {"answer": json.dumps(metadata["sorted_numbers"]), "metadata": metadata}


def score(prompt: Prompt, response_text: str) -> tuple[float, bool]:
    """Score one response with the package's own scorer.

    The scorer accepts a sorted list whose values are each within 1 of the solution's, so the reward of a response
    that is not exact can be 1.

    Args:
        prompt: carries the scorer's entry and the one exact response.
        response_text: decoded without EOS. Text that is no list of integers scores 0.

    Returns:
        (reward, is_exact): the reward, and whether the text equals prompt.expected.

    Raises:
        ValueError: the reward is not finite.
    """
    answer = None
    if COMPACT_NUMBERS.fullmatch(response_text):
        answer = json.dumps(response_text.split(","))
    reward = _finite(_score_answer()(answer, prompt.entry), prompt.text, response_text)
    return reward, response_text == prompt.expected


def score_groups(groups: list[RolloutGroup], *, permute_seed: int | None) -> list[RolloutGroup]:
    """Fill reward and is_exact of every rollout.

    Args:
        groups: one rollout batch.
        permute_seed: None keeps every reward with its response. An integer permutes the rewards, not is_exact, over
            the whole batch with a generator of that seed: the control arm, whose rewards carry no signal.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [[score(group.prompt, rollout.text) for rollout in group.rollouts] for group in groups]
    rewards = [reward for scores in scored for reward, _ in scores]
    if permute_seed is not None:
        random.Random(permute_seed).shuffle(rewards)
    next_reward = iter(rewards)
    return [
        RolloutGroup(
            prompt=group.prompt,
            rollouts=tuple(
                rollout.with_reward(next(next_reward), is_exact)
                for rollout, (_, is_exact) in zip(group.rollouts, scores, strict=True)
            ),
        )
        for group, scores in zip(groups, scored, strict=True)
    ]


@functools.cache
def _score_answer() -> Callable[[str | None, dict[str, Any]], float]:
    # Imported here: the package takes two seconds, which a reader of records need not pay.
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn("number_sorting")


def _finite(reward: float, prompt_text: str, response_text: str) -> float:
    if not math.isfinite(reward):
        raise ValueError(
            f"reward of response {response_text!r} to prompt {prompt_text!r} is {reward}, wants a finite number; "
            "one such reward would make every advantage of its group NaN, so correct the scorer"
        )
    return float(reward)


def _join_integers(numbers: list[str]) -> str:
    values = [float(number) for number in numbers]
    if not all(value.is_integer() for value in values):
        raise ValueError(
            f"number_sorting item has numbers {numbers}, wants integers: set data.params.max_decimals to 0"
        )
    return ",".join(str(int(value)) for value in values)
