"""A calculator for `rollout.multi_turn: recipes.calculator:answer`: the model writes `12+45=`, it gets `57,`.

Such a function gets the prompt and all turns of one response so far, and answers the last of them: with a Reply, whose
text is put in before the policy goes on, or with None when the response is over. It is called for many responses at
once, each call in a thread, so it keeps no state. What it raises ends the run; what the policy gets wrong is no error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

from gspo_megatron.multi_turn import Reply, Turn
from gspo_megatron.rewards.reasoning import prompt_terms
from gspo_megatron.types import Prompt

CALL = re.compile(r"(?:.*,)?(-?[0-9]{1,9}(?:[+-][0-9]{1,9})+)")
"""What follows the last comma: integers with + and - between them."""


def answer(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
    """The sum that the last turn asks for; `-,` for what is no sum; None after EOS.

    The turn's reward is 1 for the k-th call of a response if it gives the sum of the prompt's first k + 1 terms.
    """
    if turns[-1].stop != "=":
        return None
    value = evaluate(turns[-1].text)
    if value is None:
        return Reply(text="-,", reward=0.0)
    sums = list(accumulate(prompt_terms(prompt.text)))
    is_right = len(turns) < len(sums) and value == sums[len(turns)]
    return Reply(text=f"{value},", reward=float(is_right))


def evaluate(text: str) -> int | None:
    """The value of integers with + and - between them; None for other text."""
    call = CALL.fullmatch(text)
    return None if call is None else sum(int(term) for term in re.findall(r"[+-]?[0-9]+", call[1]))
