"""The example of a function for rollout.multi_turn: what it evaluates, what it refuses, what it rewards."""

import pytest

from gspo_megatron.multi_turn import Reply, Turn
from gspo_megatron.types import Prompt
from recipes.calculator import answer, evaluate

PROMPT = Prompt(prompt_id="p", text="12+45-7>", token_ids=(1,), expected="50", entry={})


def turn(text: str, stop: str = "=") -> Turn:
    return Turn(token_ids=(1,), text=text, stop=stop)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12+45", 57), ("-33-7", -40), ("1+2-3+4", 4), ("50,57-7", 50), ("x,,0+0", 0), ("007+1", 8)]
    + [(text, None) for text in ("", "12", "-12", "12+", "+1+2", "1--2", "1*2", "1+2,", "a1+2", "1 + 2")]
    + [("9" * 10 + "+1", None)],
)
def test_sums_of_integers_have_a_value_and_nothing_else_has(text: str, value: int | None) -> None:
    assert evaluate(text) == value


def test_calls_are_answered_and_the_end_is_not() -> None:
    assert answer(PROMPT, [turn("12+45")]) == Reply(text="57,", reward=1.0)
    assert answer(PROMPT, [turn("50", stop="<|eos|>")]) is None
    assert answer(PROMPT, [turn("12+")]) == Reply(text="-,", reward=0.0)


def test_a_call_is_rewarded_for_the_partial_sum_of_its_place_once() -> None:
    calls = [turn("12+45"), turn("57-7"), turn("50+0")]
    assert [answer(PROMPT, calls[: n + 1]).reward for n in range(3)] == [1.0, 1.0, 0.0]
    assert answer(PROMPT, [calls[0], calls[0]]).reward == 0.0
    assert answer(PROMPT, [turn("12-45")]).reward == 0.0
