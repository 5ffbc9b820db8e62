"""Demonstrations of the cold start: correct responses mixed with ones that are wrong on purpose.

A policy that is right a quarter of the time, and in more ways than one wrong, is what RL can improve; a clean cold
start cut short gives too few right samples, one run to its end leaves nothing to learn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gspo_megatron.multi_turn import Turn, TurnFunction
from gspo_megatron.prompts import tokenize
from gspo_megatron.rewards.reasoning import prompt_numbers, prompt_terms, source_of
from gspo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One supervised response."""

    response_ids: tuple[int, ...]
    """EOS included."""
    response_mask: tuple[bool, ...] | None = None
    """False on the tokens of replies, which are not to be learned; None: there are none."""


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


FLAWS: Mapping[Callable[[Prompt, random.Random], list[str]], float] = {
    _copied: 0.40,
    _opposite: 0.30,
    _swapped: 0.15,
    _missing: 0.15,
}
"""Share of each flaw among flawed demonstrations of number_sorting: the numbers unsorted, in the opposite direction,
with two neighbours swapped, with one missing."""


def _wrong_sign(terms: list[int], rng: random.Random) -> list[int]:
    i = rng.randrange(1, len(terms))
    return [*terms[:i], -terms[i], *terms[i + 1 :]]


def _left_out(terms: list[int], rng: random.Random) -> list[int]:
    i = rng.randrange(1, len(terms))
    return [*terms[:i], *terms[i + 1 :]]


def _only_first(terms: list[int], rng: random.Random) -> list[int]:
    return terms[:1]


SUM_FLAWS: Mapping[Callable[[list[int], random.Random], list[int]], float] = {
    _wrong_sign: 0.40,
    _left_out: 0.30,
    _only_first: 0.30,
}
"""Share of each flaw among flawed demonstrations of chain_sum: a term with the wrong sign, one left out, the first
term for an answer."""


def demonstration(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    *,
    flawed_fraction: float,
    function: TurnFunction | None = None,
) -> Demonstration:
    """One supervised response.

    Correct with probability 1 - flawed_fraction, else with one of FLAWS or SUM_FLAWS. A flawed response may be right
    by chance: a prompt can state its numbers in order, or a term can be 0.

    Args:
        prompt: of number_sorting or chain_sum.
        tokenizer: the model's.
        rng: draws the flaws.
        flawed_fraction: in [0, 1].
        function: of rollout.multi_turn; answers the calls of a calculator that solve a chain_sum.

    Raises:
        ValueError: a flaw was drawn for a prompt of a single number, which leaves nothing to get wrong; or there is no
            function to answer a call, or it does not.
    """
    is_flawed = rng.random() < flawed_fraction
    if source_of(prompt.entry) == "chain_sum":
        terms = prompt_terms(prompt.text)
        if is_flawed:
            _check_flaw(prompt, terms, "data.params.min_terms")
            (flaw,) = rng.choices(list(SUM_FLAWS), weights=list(SUM_FLAWS.values()))
            terms = flaw(terms, rng)
        return _calculation(prompt, terms, tokenizer, function)
    numbers = prompt.expected.split(",")
    if is_flawed:
        _check_flaw(prompt, numbers, "data.params.min_numbers")
        (sorting_flaw,) = rng.choices(list(FLAWS), weights=list(FLAWS.values()))
        numbers = sorting_flaw(prompt, rng)
    return Demonstration(response_ids=(*tokenize(tokenizer, ",".join(numbers)), int(tokenizer.eos_token_id)))


def _check_flaw(prompt: Prompt, numbers: Sequence[object], key: str) -> None:
    if len(numbers) < 2:
        raise ValueError(
            f"prompt {prompt.text!r}: has one number, a flawed demonstration wants two; set {key} to 2 or "
            "cold_start.flawed_fraction to 0"
        )


def _calculation(
    prompt: Prompt, terms: list[int], tokenizer: PreTrainedTokenizerBase, function: TurnFunction | None
) -> Demonstration:
    """The terms added up one by one, each by a call that ends with `=`; then the last reply without its comma, EOS."""
    if function is None:
        raise ValueError(f"prompt {prompt.text!r}: a demonstration calls a calculator; set rollout.multi_turn")
    ids, mask, turns, value = list[int](), list[bool](), list[Turn](), str(terms[0])
    for term in terms[1:]:
        call = tokenize(tokenizer, f"{value}{term:+d}=")
        turns.append(Turn(token_ids=call, text=f"{value}{term:+d}", stop="="))
        reply = function(prompt, turns)
        if reply is None or reply.text is None:
            raise ValueError(f"prompt {prompt.text!r}: rollout.multi_turn does not answer the call {turns[-1].text!r}")
        turns[-1] = replace(turns[-1], reply=reply)
        answer = tokenize(tokenizer, reply.text)
        ids += call + answer
        mask += [True] * len(call) + [False] * len(answer)
        value = reply.text.removesuffix(",")
    last = (*tokenize(tokenizer, value), int(tokenizer.eos_token_id))
    return Demonstration(response_ids=(*ids, *last), response_mask=(*mask, *[True] * len(last)))
