"""Turns of a response: a function of one's own answers what was sampled, and the policy goes on from there.

With `rollout.multi_turn: recipes.calculator:answer` and `=` among rollout.stop_token_ids a response may go so:

    12+45=     turn 1, sampled; a turn ends at EOS or another stop token
    57,        the function's Reply: put in, with response_mask False, log-prob 0 and the version of the token before
    57-7=      turn 2
    50,
    50 EOS     turn 3; the function returns None: the response is over

Every request holds the very ids that were sampled and put in before: text becomes ids once, in a reply, and sampled
ids never become text and ids again. All requests of a response have its sampling seed; SGLang's noise is a function of
seed and position, so turns share none.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_megatron.config import ConfigError, RolloutConfig
from gspo_megatron.engine import RolloutError
from gspo_megatron.threads import in_daemon_thread
from gspo_megatron.types import Prompt, Rollout

if TYPE_CHECKING:
    from gspo_megatron.responses import Segment
    from gspo_megatron.rollout import Vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the function answers to a turn."""

    text: str | None
    """Put in before the next turn, special tokens by their names; may be empty. None: the response is over."""
    reward: float | None = None
    """Of the turn, beside the response's own reward; wants advantage.turn_rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What the policy sampled in one go."""

    token_ids: tuple[int, ...]
    """Its stop token included."""
    text: str
    """Decoded without the stop token."""
    stop: str
    """The stop token, decoded."""
    reply: Reply | None = None
    """What the function answered; None for the turn that it is asked about."""


TurnFunction = Callable[[Prompt, Sequence[Turn]], Reply | None]
"""Called after each turn with all turns so far; None is Reply(text=None). It runs in threads, for several responses
at once, so it must not keep state between calls; for runs that can be repeated it depends on its arguments alone."""
Sample = Callable[[tuple[int, ...], int], Awaitable["Segment"]]
"""Continues a sequence by at most so many tokens, up to a stop token."""


def load_function(path: str) -> TurnFunction:
    """The function that `module:function` names.

    The module is imported as `python -m` would: from the working directory first, then from where packages are.

    Raises:
        ConfigError: the import fails, or there is no such function, or it is a coroutine function.
    """
    where = f"rollout.multi_turn={path}"
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{where}: wants module:function")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module of the user's may raise anything
        raise ConfigError(
            f"{where}: importing {module_name} gives {type(error).__name__}: {error}; modules are looked for in the "
            f"working directory, {folder}, then among the installed packages"
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        raise ConfigError(f"{where}: {module.__file__} has no function {name}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: is a coroutine function, wants a plain one; it runs in a thread of its own")
    return function


def function_file(path: str) -> Path:
    """The file that load_function reads.

    Raises:
        ConfigError: from load_function.
    """
    load_function(path)
    return Path(str(sys.modules[path.partition(":")[0]].__file__))


class TurnTaker:
    """Samples whole responses of a recipe with rollout.multi_turn. Belongs to one event loop."""

    def __init__(self, cfg: RolloutConfig, vocabulary: Vocabulary) -> None:
        """Load the function.

        Args:
            cfg: the recipe's section, with multi_turn.
            vocabulary: of the model.

        Raises:
            ConfigError: from load_function.
        """
        assert cfg.multi_turn is not None
        self._cfg, self._vocabulary = cfg, vocabulary
        self._function = load_function(cfg.multi_turn)
        self._calls = asyncio.Semaphore(cfg.max_concurrency)

    async def sample(self, prompt: Prompt, sample: Sample, *, sampling_seed: int) -> Rollout:
        """One response, turn by turn.

        It ends with finish reason `stop` when the function says so, else with `length`: in a turn that reached
        max_response_tokens, or after one whose reply leaves no room for another token or would begin a turn beyond
        max_turns; such a reply is left out.

        Args:
            prompt: of the response.
            sample: one segment; never aborted.
            sampling_seed: for the record.

        Raises:
            RolloutError: from sample; or the function raised, took too long or returned something else than a Reply
                or None, or a reply has text that the tokenizer cannot spell.
        """
        record, turns = _Record(), list[Turn]()
        limit, is_over = self._cfg.max_response_tokens, False
        while True:
            segment = await sample(prompt.token_ids + tuple(record.token_ids), limit - len(record.token_ids))
            record.add_turn(segment)
            if segment.finish_reason != "stop":
                break
            turns.append(self._turn(segment.token_ids))
            where = f"rollout.multi_turn={self._cfg.multi_turn}: prompt {prompt.prompt_id}, turn {len(turns)}"
            reply = await self._ask(prompt, turns, where)
            turns[-1] = replace(turns[-1], reply=reply)
            record.rewards[-1] = reply.reward
            if reply.text is None:
                is_over = True
                break
            ids = self._encode(reply.text, where)
            if len(turns) == self._cfg.max_turns or len(record.token_ids) + len(ids) >= limit:
                break
            record.add_reply(ids)
        return record.rollout(self._vocabulary.decode, is_over=is_over, sampling_seed=sampling_seed)

    def _turn(self, token_ids: tuple[int, ...]) -> Turn:
        decode = self._vocabulary.decode
        return Turn(token_ids=token_ids, text=decode(token_ids[:-1]), stop=decode(token_ids[-1:]))

    def _encode(self, text: str, where: str) -> Sequence[int]:
        try:
            ids = self._vocabulary.encode(text)
        except ValueError as error:
            raise RolloutError(f"{where}: its reply cannot be put in: {error}") from error
        if not all(0 <= i < self._vocabulary.size for i in ids):  # SGLang's scheduler would die of it
            raise RolloutError(f"{where}: its reply has the ids {ids}, wants ids in [0, {self._vocabulary.size})")
        return ids

    async def _ask(self, prompt: Prompt, turns: Sequence[Turn], where: str) -> Reply:
        """The function's reply, within its time limit."""
        async with self._calls:
            call = in_daemon_thread(
                partial(_outcome, self._function, prompt, tuple(turns)), name="rollout.multi_turn"
            )
            try:
                reply, error = await asyncio.wait_for(call, self._cfg.turn_timeout_s)
            except TimeoutError as late:
                limit = f"{self._cfg.turn_timeout_s:g} s (rollout.turn_timeout_s)"
                raise RolloutError(f"{where}: no reply within {limit}") from late
        if error is not None:
            logger.error("%s: raised", where, exc_info=error)
            raise RolloutError(f"{where}: raised {type(error).__name__}: {error}") from error
        if reply is None:
            return Reply(text=None)
        is_reply = isinstance(reply, Reply) and isinstance(reply.text, str | None)
        if not is_reply or not isinstance(reply.reward, float | int | None):
            raise RolloutError(f"{where}: returned {reply!r}, wants None or a Reply with a text and a number or None")
        if reply.reward is not None and not math.isfinite(reply.reward):
            raise RolloutError(f"{where}: returned the reward {reply.reward}, wants a finite number")
        return reply


class _Record:
    """A response as it grows: all lists but rewards have one entry per token."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.weight_versions: list[int] = []
        self.mask: list[bool] = []
        self.lengths: list[int] = []
        self.rewards: list[float | None] = []
        self.routed_experts: bytes | None = None

    def add_turn(self, segment: Segment) -> None:
        self.token_ids += segment.token_ids
        self.logprobs += segment.logprobs
        self.weight_versions += segment.weight_versions
        self.mask += [True] * len(segment.token_ids)
        self.lengths.append(len(segment.token_ids))
        self.rewards.append(None)
        self.routed_experts = segment.routed_experts  # of all tokens so far

    def add_reply(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.weight_versions += self.weight_versions[-1:] * len(token_ids)
        self.mask += [False] * len(token_ids)

    def rollout(self, decode: Callable[[Sequence[int]], str], *, is_over: bool, sampling_seed: int) -> Rollout:
        has_rewards = any(reward is not None for reward in self.rewards)
        return Rollout(
            response_ids=tuple(self.token_ids),
            rollout_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.weight_versions),
            finish_reason="stop" if is_over else "length",
            text=decode(self.token_ids[:-1] if is_over else self.token_ids),
            sampling_seed=sampling_seed,
            response_mask=tuple(self.mask),
            routed_experts=self.routed_experts,
            turn_lengths=tuple(self.lengths),
            turn_rewards=tuple(float(reward or 0.0) for reward in self.rewards) if has_rewards else None,
        )


def _outcome(function: TurnFunction, prompt: Prompt, turns: tuple[Turn, ...]) -> tuple[Any, BaseException | None]:
    """What it returned and what it raised: as a result, since an asyncio future takes no StopIteration."""
    try:
        return function(prompt, turns), None
    except BaseException as error:  # whatever it is, it is reported with prompt and turn
        return None, error
