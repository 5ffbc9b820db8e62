"""Rewards from the package reasoning-gym, and the compact text form of two of its tasks.

number_sorting: an item that asks for 25, 79, 83, 64 in ascending order becomes the prompt `a25,79,83,64>` and the
response `25,64,79,83`; `d` asks for descending order. chain_sum: 12 + 45 - 7 becomes `12+45-7>`, and what follows the
last comma of a response is its answer, here `50`; what comes before are calls of a calculator (rollout.multi_turn).
The package generates the items and scores the responses; only the spelling is ours, so that a model with a character
vocabulary can read it.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo_megatron.types import Prompt, RolloutGroup

DIRECTION_LETTERS = {"ascending": "a", "descending": "d"}
COMPACT_NUMBERS = re.compile(r"-?[0-9]+(,-?[0-9]+)*")
INTEGER = re.compile(r"-?[0-9]+")
SUM = re.compile(r"[0-9]+([+-][0-9]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The compact form of one generator; an item is as the package generates it."""

    prompt: Callable[[dict[str, Any]], str]
    """Item -> text of the prompt."""
    expected: Callable[[dict[str, Any]], str]
    """Item -> the one exact answer."""
    solution: Callable[[dict[str, Any]], str]
    """Item -> what the package's scorer compares with. It evaluates some of its own as code; this holds none."""
    final: Callable[[str], str]
    """Text of a response -> the part that is its answer."""
    answer: Callable[[str], str | None]
    """That part -> as the scorer reads it; None where it is no answer."""


def _sorting_prompt(item: dict[str, Any]) -> str:
    metadata = item["metadata"]
    return f"{DIRECTION_LETTERS[metadata['direction']]}{_join_integers(metadata['original_numbers'])}>"


def _sorting_answer(text: str) -> str | None:
    return json.dumps(text.split(",")) if COMPACT_NUMBERS.fullmatch(text) else None


def _sum_prompt(item: dict[str, Any]) -> str:
    text = item["metadata"]["expression"].replace(" ", "")
    if not SUM.fullmatch(text):
        raise ValueError(
            f"chain_sum item has the expression {text}, wants terms without a sign of their own: set "
            "data.params.allow_negation to false"
        )
    return f"{text}>"


TASKS = {
    "number_sorting": Task(
        prompt=_sorting_prompt,
        expected=lambda item: _join_integers(item["metadata"]["sorted_numbers"]),
        solution=lambda item: json.dumps(item["metadata"]["sorted_numbers"]),
        final=lambda text: text,
        answer=_sorting_answer,
    ),
    "chain_sum": Task(
        prompt=_sum_prompt,
        expected=lambda item: item["answer"],
        solution=lambda item: item["answer"],
        final=lambda text: text.rpartition(",")[2],
        answer=lambda text: text if INTEGER.fullmatch(text) else None,
    ),
}
"""By the package's name of the generator, which every item states."""


def render_prompt(item: dict[str, Any]) -> str:
    """The compact prompt of an item, for example `a25,79,83,64>`.

    Raises:
        ValueError: it has numbers that the compact form does not spell.
    """
    return _task(item).prompt(item)


def render_expected(item: dict[str, Any]) -> str:
    """The compact form of the item's own solution, for example `25,64,79,83`.

    Raises:
        ValueError: as render_prompt.
    """
    return _task(item).expected(item)


def prompt_numbers(prompt_text: str) -> list[str]:
    """The numbers of a number_sorting prompt in the order it states them: `a25,7>` -> ["25", "7"]."""
    return prompt_text[1:-1].split(",")


def prompt_terms(prompt_text: str) -> list[int]:
    """The terms of a chain_sum prompt: `12+45-7>` -> [12, 45, -7]."""
    return [int(term) for term in re.findall(r"[+-]?[0-9]+", prompt_text)]


def scorer_entry(item: dict[str, Any]) -> dict[str, Any]:
    """What the package's scorer reads of an item, as JSON holds it: tuples as lists."""
    return {"answer": _task(item).solution(item), "metadata": json.loads(json.dumps(item["metadata"]))}


def source_of(entry: dict[str, Any]) -> str:
    """The generator of an item or of a prompt's entry, as the package names it."""
    return str(entry["metadata"]["source_dataset"])


def _task(entry: dict[str, Any]) -> Task:
    return TASKS[source_of(entry)]


def score(prompt: Prompt, response_text: str) -> tuple[float, bool]:
    """Score one response with the package's own scorer.

    The scorer of number_sorting accepts a sorted list whose values are each within 1 of the solution's, so the reward
    of a response that is not exact can be 1; that of chain_sum gives a number that contains the solution a part.

    Args:
        prompt: carries the scorer's entry and the one exact answer.
        response_text: decoded without EOS. Text without an answer of the task's form scores 0.

    Returns:
        (reward, is_exact): the reward, and whether the answer equals prompt.expected.

    Raises:
        ValueError: the reward is not finite.
    """
    task = _task(prompt.entry)
    final = task.final(response_text)
    reward = _score_answer(source_of(prompt.entry))(task.answer(final), prompt.entry)
    return _finite(reward, prompt.text, response_text), final == prompt.expected


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
def _score_answer(name: str) -> Callable[[str | None, dict[str, Any]], float]:
    # Imported here: the package takes two seconds, which a reader of records need not pay.
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


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
