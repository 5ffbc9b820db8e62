"""Turns of a response: what is recorded of them, how they end, and what a function may do wrong."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gspo_megatron.config import ConfigError, RolloutConfig, load_recipe
from gspo_megatron.engine import RolloutError
from gspo_megatron.multi_turn import Reply, Turn, TurnTaker, function_file, load_function
from gspo_megatron.responses import Segment
from gspo_megatron.rollout import Vocabulary
from gspo_megatron.types import Prompt, Rollout

ROOT = Path(__file__).parents[2]
PROMPT = Prompt(prompt_id="9f3a", text="7", token_ids=(7,), expected="", entry={})
STOP, EOS = 90, 91
"""Stop tokens; every other id is read as its number."""

Function = Callable[[Prompt, Sequence[Turn]], Reply | None]


def segment(*ids: int, version: int = 0) -> Segment:
    """What was sampled: each token's log-prob tells it from the others."""
    return Segment(
        token_ids=ids,
        logprobs=tuple(-i / 100 for i in ids),
        weight_versions=(version,) * len(ids),
        finish_reason="stop" if ids[-1] in (STOP, EOS) else "length",
        routed_experts=b"of turn %d" % ids[0],
    )


def decode(ids: Sequence[int]) -> str:
    """Of 8 it makes the text of two other tokens, as tokenizers of subwords do."""
    return " ".join("4 4" if i == 8 else str(i) for i in ids)


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]


VOCABULARY = Vocabulary(size=100, stop_token_ids=frozenset({STOP, EOS}), decode=decode, encode=encode)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RolloutConfig:
    """Of a response of up to 16 tokens, whose function the test gives."""
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(Path("recipes/gspo-tiny-moe-cpu.yaml"), ["rollout.max_response_tokens=16"])
    return replace(recipe.rollout, multi_turn="functions_of_a_test:function", turn_timeout_s=5.0)


@pytest.fixture
def play(config: RolloutConfig, monkeypatch: pytest.MonkeyPatch):
    """Lets the segments be sampled one after the other; returns the rollout and what was asked for."""

    def run(function: Function, *segments: Segment, **limits: float) -> tuple[Rollout, list]:
        module = type(sys)("functions_of_a_test")
        module.function = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        asked, left = [], iter(segments)

        async def sample(ids: tuple[int, ...], max_tokens: int) -> Segment:
            asked.append((ids, max_tokens))
            return next(left)

        taker = TurnTaker(replace(config, **limits), VOCABULARY)
        return asyncio.run(taker.sample(PROMPT, sample, sampling_seed=5)), asked

    return run


def until_eos(text: str, reward: float | None = None) -> Function:
    return lambda prompt, turns: None if turns[-1].stop == str(EOS) else Reply(text=text, reward=reward)


def test_turns_and_replies_are_recorded_token_for_token(play) -> None:
    segments = segment(1, STOP), segment(2, 3, STOP, version=1), segment(4, EOS, version=1)
    rollout, asked = play(until_eos("50 51"), *segments)
    # Each request holds the sampled and inserted ids as they were; the limit counts both.
    assert asked == [
        ((7,), 16),
        ((7, 1, STOP, 50, 51), 12),
        ((7, 1, STOP, 50, 51, 2, 3, STOP, 50, 51), 7),
    ]
    sampled, put_in = (True,) * 2, (False,) * 2
    assert rollout == Rollout(
        response_ids=(1, STOP, 50, 51, 2, 3, STOP, 50, 51, 4, EOS),
        rollout_logprobs=(-0.01, -0.9, 0.0, 0.0, -0.02, -0.03, -0.9, 0.0, 0.0, -0.04, -0.91),
        weight_versions=(0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1),
        response_mask=(*sampled, *put_in, *sampled, True, *put_in, *sampled),
        turn_lengths=(2, 3, 2),
        turn_rewards=None,
        routed_experts=b"of turn 4",  # which covers all before
        finish_reason="stop",
        text=f"1 {STOP} 50 51 2 3 {STOP} 50 51 4",
        sampling_seed=5,
    )


def test_sampled_ids_never_become_text_and_ids_again(play) -> None:
    rollout, asked = play(until_eos("50"), segment(8, STOP), segment(8, EOS))
    assert encode(decode([8])) == [4, 4]
    assert asked[1][0] == (7, 8, STOP, 50)
    assert rollout.response_ids == (8, STOP, 50, 8, EOS)
    assert rollout.text == f"4 4 {STOP} 50 4 4"


def test_the_function_sees_the_turns_before_with_their_replies(play) -> None:
    seen = []

    def function(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        seen.append((prompt, turns))
        return Reply(text="50") if len(turns) == 1 else None

    play(function, segment(1, STOP), segment(2, 3, EOS))
    first = Turn(token_ids=(1, STOP), text="1", stop=str(STOP))
    second = Turn(token_ids=(2, 3, EOS), text="2 3", stop=str(EOS))
    assert seen == [(PROMPT, (first,)), (PROMPT, (replace(first, reply=Reply(text="50")), second))]


def test_an_empty_reply_lets_the_policy_go_on_and_keeps_the_turns_apart(play) -> None:
    rollout, asked = play(until_eos(""), segment(1, STOP), segment(2, EOS))
    assert asked[1] == ((7, 1, STOP), 14)
    assert rollout.response_mask == (True,) * 4
    assert rollout.turn_lengths == (2, 2)


def test_rewards_of_turns_are_kept_with_0_where_there_is_none(play) -> None:
    def function(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        return [Reply(text=""), Reply(text="", reward=0.5), Reply(text=None, reward=-1)][len(turns) - 1]

    rollout, _ = play(function, segment(1, STOP), segment(2, STOP), segment(3, STOP))
    assert rollout.turn_rewards == (0.0, 0.5, -1.0)
    assert rollout.finish_reason == "stop"
    cut, _ = play(until_eos("", reward=0.0), segment(1, STOP), segment(*range(14)))
    assert cut.turn_rewards == (0.0, 0.0)
    assert play(until_eos(""), segment(1, EOS))[0].turn_rewards is None


@pytest.mark.parametrize(
    ("first", "reply", "limits", "length"),
    [
        (segment(*range(16)), "50", {}, 16),  # cut: the function is not asked
        (segment(*range(13), STOP), "50 51", {}, 14),  # would leave no room for a token
        (segment(*range(13), STOP), "50 51 52", {}, 14),
        (segment(1, STOP), "50", {"max_turns": 1}, 2),
    ],
)
def test_a_response_without_room_for_another_turn_ends_as_truncated(play, first, reply, limits, length) -> None:
    rollout, asked = play(until_eos(reply), first, **limits)
    assert rollout.finish_reason == "length"
    assert rollout.response_ids == first.token_ids and len(rollout.response_ids) == length
    assert all(rollout.response_mask) and rollout.text == decode(first.token_ids)
    assert len(asked) == 1


def test_a_reply_that_leaves_room_for_one_token_is_put_in(play) -> None:
    rollout, asked = play(until_eos("50"), segment(*range(13), STOP), segment(EOS))
    assert asked[1][1] == 1
    assert (rollout.finish_reason, len(rollout.response_ids)) == ("stop", 16)


def test_max_turns_allows_as_many_turns(play) -> None:
    rollout, _ = play(until_eos("50"), segment(1, STOP), segment(2, EOS), max_turns=2)
    assert (rollout.finish_reason, rollout.turn_lengths) == ("stop", (2, 2))


def raises(error: BaseException) -> Function:
    def function(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (raises(KeyError("tool")), "raised KeyError: 'tool'"),
        (raises(TimeoutError("the tool's own")), "raised TimeoutError: the tool's own"),
        (raises(StopIteration()), "raised StopIteration: "),
        (raises(SystemExit(3)), "raised SystemExit: 3"),
        (raises(asyncio.CancelledError()), "raised CancelledError: "),
        (lambda prompt, turns: "50", "returned '50', wants None or a Reply"),
        (lambda prompt, turns: Reply(text=50), r"returned Reply\(text=50, reward=None\), wants None or a Reply"),
        (lambda prompt, turns: Reply(text="", reward="1"), r"returned Reply\(text='', reward='1'\), wants"),
        (lambda prompt, turns: Reply(text="", reward=float("nan")), "returned the reward nan, wants a finite number"),
        (lambda prompt, turns: Reply(text="x"), "its reply cannot be put in: invalid literal"),
        (lambda prompt, turns: Reply(text="100"), r"its reply has the ids \[100\], wants ids in \[0, 100\)"),
    ],
)
def test_what_a_function_does_wrong_is_one_error_with_prompt_and_turn(play, function, problem) -> None:
    def later(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        return Reply(text="50") if len(turns) == 1 else function(prompt, turns)

    where = "rollout.multi_turn=functions_of_a_test:function: prompt 9f3a, turn 2: "
    with pytest.raises(RolloutError, match=where + problem):
        play(later, segment(1, STOP), segment(2, STOP))


def test_a_function_that_hangs_is_an_error_at_its_time_limit(play) -> None:
    release = threading.Event()
    try:
        with pytest.raises(RolloutError, match=r"9f3a, turn 1: no reply within 0\.2 s \(rollout.turn_timeout_s\)"):
            play(lambda prompt, turns: release.wait(60), segment(1, STOP), turn_timeout_s=0.2)
        hanging = [thread for thread in threading.enumerate() if thread.name == "rollout.multi_turn"]
        assert hanging and all(thread.daemon for thread in hanging)  # the process could end
    finally:
        release.set()


def test_calls_run_beside_each_other_up_to_the_limit(config: RolloutConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def function(prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1
        return None

    module = type(sys)("functions_of_a_test")
    module.function = function
    monkeypatch.setitem(sys.modules, module.__name__, module)

    async def sample(ids: tuple[int, ...], max_tokens: int) -> Segment:
        return segment(1, EOS)

    async def run() -> list[Rollout]:
        taker = TurnTaker(replace(config, max_concurrency=3), VOCABULARY)
        return await asyncio.gather(*(taker.sample(PROMPT, sample, sampling_seed=i) for i in range(12)))

    assert [r.sampling_seed for r in asyncio.run(run())] == list(range(12))
    assert most == 3


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def test_a_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_module(tmp_path, "tool_of_the_user", "def answer(prompt, turns):\n    return None\n")
    assert load_function("tool_of_the_user:answer")(PROMPT, ()) is None
    assert function_file("tool_of_the_user:answer") == tmp_path / "tool_of_the_user.py"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("tool", "wants module:function"),
        (":answer", "wants module:function"),
        ("tool:", "wants module:function"),
        ("no_such_tool:answer", "gives ModuleNotFoundError: No module named 'no_such_tool'; modules are"),
        ("broken_tool:answer", "importing broken_tool gives ZeroDivisionError: "),
        ("odd_tool:answer", r"odd_tool.py has no function answer"),
        ("odd_tool:number", r"odd_tool.py has no function number"),
        ("odd_tool:later", "is a coroutine function, wants a plain one"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_module(tmp_path, "broken_tool", "1 / 0\n")
    write_module(tmp_path, "odd_tool", "number = 1\nasync def later(prompt, turns):\n    pass\n")
    monkeypatch.delitem(sys.modules, "odd_tool", raising=False)
    with pytest.raises(ConfigError, match=f"rollout.multi_turn={path}: .*{problem}"):
        load_function(path)
