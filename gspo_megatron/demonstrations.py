"""Demonstrations of the cold start: correct responses mixed with ones that are wrong on purpose.

A policy that is right a quarter of the time, and in more ways than one wrong, is what RL can improve; a clean cold
start cut short gives too few right samples, one run to its end leaves nothing to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from gspo_megatron.prompts import tokenize
from gspo_megatron.rewards.reasoning import prompt_numbers
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _copied(prompt: Prompt, rng: random.Random) -> list[str]:
    return prompt_numbers(prompt.text)


def _opposite(prompt: Prompt, rng: random.Random) -> list[str]:
    return prompt.expected.split(",")[::-1]


def _swapped(prompt: Prompt, rng: random.Random) -> list[str]:
    numbers = prompt.expected.split(",")
    i = rng.randrange(len(numbers) - 1)
    numbers[i], numbers[i + 1] = numbers[i + 1], numbers[i]
    return numbers


def _missing(prompt: Prompt, rng: random.Random) -> list[str]:
    numbers = prompt.expected.split(",")
    del numbers[rng.randrange(len(numbers))]
    return numbers


FLAWS: dict[Callable[[Prompt, random.Random], list[str]], float] = {
    _copied: 0.40,
    _opposite: 0.30,
    _swapped: 0.15,
    _missing: 0.15,
}
"""Share of each flaw among flawed demonstrations: the numbers unsorted, in the opposite direction, with two neighbours
swapped, with one missing."""


def demonstration(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, rng: random.Random, *, flawed_fraction: float
) -> list[int]:
    """Token ids of one supervised response, EOS included.

    Correct with probability 1 - flawed_fraction, else with one of FLAWS. A flawed response may be right by chance: a
    prompt can state its numbers in order.

    Raises:
        ValueError: a flaw was drawn for a prompt of a single number, which has no order to break.
    """
    numbers = prompt.expected.split(",")
    if rng.random() < flawed_fraction:
        if len(numbers) < 2:
            raise ValueError(
                f"prompt {prompt.text!r}: has one number, a flawed demonstration wants two; "
                "set data.params.min_numbers to 2 or cold_start.flawed_fraction to 0"
            )
        (flaw,) = rng.choices(list(FLAWS), weights=list(FLAWS.values()))
        numbers = flaw(prompt, rng)
    return [*tokenize(tokenizer, ",".join(numbers)), tokenizer.eos_token_id]
