"""Prompt -> RolloutGroup over SGLang's HTTP API: token ids in and out, log-probs and weight_version of every token.

The only module that repeats requests. It sends to servers that the Fleet calls ready and to no other, checks what
comes back (responses.py), and tells the Fleet which server failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import aiohttp

from gspo_megatron.config import Recipe
from gspo_megatron.engine import RolloutError, post
from gspo_megatron.fleet import Fleet, Server
from gspo_megatron.multi_turn import TurnTaker
from gspo_megatron.responses import ABORT, Expected, Segment, parse_segment
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.types import Prompt, Rollout, RolloutGroup

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
"""Wait before the first retry; doubles with each."""
MAX_FAILURES_IN_A_ROW = 3
"""Of one server, over all requests; then it gets no more."""
POLL_S = 0.1
"""Between two looks for a ready server where there is none."""
KEEPALIVE_S = 2.0
"""An idle connection is used again for this long. SGLang closes it after 5 s; a request that meets that is lost."""

@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A sequence that is to be continued."""

    input_ids: tuple[int, ...]
    """Prompt and what of the response there is."""
    sampling_seed: int
    """With the position of a token it decides the noise that samples it, so that a response does not depend on where
    it was cut."""
    max_tokens: int
    """How far to go at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the client knows of the model's tokens."""

    size: int
    """Ids of prompts and responses are below it."""
    stop_token_ids: frozenset[int]
    """Each ends a response, as its last token."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text."""
    encode: Callable[[str], Sequence[int]]
    """Text -> token ids; a ValueError for what the tokenizer cannot spell."""


@dataclass(kw_only=True, slots=True)
class Trail:
    """Where a sequence was sampled last. Its next part goes there if that server is no busier than others."""

    server: Server | None = None
    weight_version: int = 0
    """Of its last token: no later one may have a lower."""


def sampling_seed(seed: int, rollout_step: int, prompt_id: str, member: int) -> int:
    """The server-side seed of one response, in [0, 2**31): a hash, so that no two responses share a noise stream."""
    text = f"{seed}:{rollout_step}:{prompt_id}:{member}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


class Client:
    """Sends requests to a fleet's ready servers. Belongs to one event loop; an async context manager.

    A request holds all parts of a group that are to go on, which keeps siblings on the server that has their prompt's
    keys and values. It goes to the server with the fewest outstanding tokens. With rollout.multi_turn a request holds
    one turn of one response, so that no response waits for another. What becomes of a failed one:

    - connection lost: the server is rejected, the request goes elsewhere at once. Restarts are bounded (launch.py).
    - status 5xx, no answer in time, no JSON: again after a wait that doubles, at most max_retries times; the third in
      a row of one server rejects it.
    - an answer that a check refuses: the same, and the server is rejected.
    - another status: the request itself is wrong, which is an error.
    - the server is rejected meanwhile, by whomever: the request goes elsewhere at once.

    Attributes:
        events: counts of `retries` (requests sent again after a failure), `continued` (responses sent on after a push
            had aborted them), `retracted` (responses that a server computed anew), `rejected` (servers that the run
            stopped sending to).
        may_wait: False stops the clock of the wait for a ready server; where no one could make a server ready.
    """

    def __init__(self, fleet: Fleet, recipe: Recipe, vocabulary: Vocabulary) -> None:
        self.events: Counter[str] = Counter()
        self.may_wait = True
        self._fleet, self._cfg, self._vocabulary = fleet, recipe.rollout, vocabulary
        self._wait_s = recipe.return_limit_s
        self._turns = None if recipe.rollout.multi_turn is None else TurnTaker(recipe.rollout, vocabulary)
        self._open: dict[Server, dict[asyncio.Task[Any], int]] = {}
        self._failures_in_a_row: Counter[Server] = Counter()

    async def __aenter__(self) -> Client:
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(self._cfg.max_concurrency)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(connector=connector)
        self._fleet.on_reject(self._on_reject)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def take_events(self) -> Counter[str]:
        """The events since the last call."""
        events, self.events = self.events, Counter()
        return events

    async def sample_group(
        self, prompt: Prompt, seeds: Sequence[int], *, temperature: float, routes: RouteFormat | None = None
    ) -> RolloutGroup:
        """Sample one response for each seed.

        Args:
            prompt: its text and ids.
            seeds: of the responses, in their order.
            temperature: divides the logits.
            routes: of the model, to bring each token's experts; None for none.

        Raises:
            ValueError: the prompt is empty or has ids outside the vocabulary.
            RolloutError: as sample, or from the function of rollout.multi_turn.
        """
        # SGLang's scheduler dies of an id that its embedding does not have.
        if not prompt.token_ids or not all(0 <= i < self._vocabulary.size for i in prompt.token_ids):
            raise ValueError(
                f"prompt {prompt.prompt_id}: token_ids={prompt.token_ids}, wants at least one id in "
                f"[0, {self._vocabulary.size})"
            )
        if self._turns is not None:
            rollouts = await self._sample_turns(self._turns, prompt, seeds, temperature, routes)
            return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))
        limit, where = self._cfg.max_response_tokens, f"prompt {prompt.prompt_id}"
        parts = [Part(input_ids=prompt.token_ids, sampling_seed=seed, max_tokens=limit) for seed in seeds]
        segments = await self.sample(parts, temperature=temperature, routes=routes, where=where)
        rollouts = [self._rollout(segment, seed) for segment, seed in zip(segments, seeds, strict=True)]
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

    async def _sample_turns(
        self, turns: TurnTaker, prompt: Prompt, seeds: Sequence[int], temperature: float, routes: RouteFormat | None
    ) -> list[Rollout]:
        """A response for each seed; the first failure ends the others."""

        def response(seed: int) -> Coroutine[Any, Any, Rollout]:
            trail = Trail()

            async def sample(ids: tuple[int, ...], max_tokens: int) -> Segment:
                part = Part(input_ids=ids, sampling_seed=seed, max_tokens=max_tokens)
                where = f"prompt {prompt.prompt_id}"
                return (await self.sample([part], temperature=temperature, routes=routes, where=where, trail=trail))[0]

            return turns.sample(prompt, sample, sampling_seed=seed)

        tasks = [asyncio.ensure_future(response(seed)) for seed in seeds]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def _rollout(self, segment: Segment, seed: int) -> Rollout:
        ids, is_stopped = segment.token_ids, segment.finish_reason == "stop"
        return Rollout(
            response_ids=ids,
            rollout_logprobs=segment.logprobs,
            weight_versions=segment.weight_versions,
            finish_reason=segment.finish_reason,
            text=self._vocabulary.decode(ids[:-1] if is_stopped else ids),
            sampling_seed=seed,
            routed_experts=segment.routed_experts,
        )

    async def sample(
        self,
        parts: Sequence[Part],
        *,
        temperature: float,
        routes: RouteFormat | None,
        where: str,
        trail: Trail | None = None,
    ) -> list[Segment]:
        """Continue each part up to a stop token or its max_tokens; what a push aborts goes on with the new weights.

        Args:
            parts: sent together, so best with a common start.
            temperature: divides the logits.
            routes: as sample_group.
            where: names the request in messages.
            trail: of a single part that goes on; is brought up to date.

        Returns:
            For each part what was sampled, to `stop` or `length`; its routes are those of the whole sequence.

        Raises:
            RolloutError: a request failed max_retries times more than once, servers abort what no push interrupts, or
                no server was ready for too long.
        """
        segments = [Segment()] * len(parts)
        trail, unexplained = Trail() if trail is None else trail, 0
        while open_parts := [i for i, segment in enumerate(segments) if segment.finish_reason == ABORT]:
            rest = [_rest(parts[i], segments[i]) for i in open_parts]
            async with self._slots:
                server, version, later = await self._request(
                    rest,
                    temperature=temperature,
                    routes=routes,
                    where=where,
                    near=trail.server,
                    oldest_version=trail.weight_version,
                )
            for i, segment in zip(open_parts, later, strict=True):
                segments[i] = segments[i].then(segment)
            self.events["retracted"] += sum(segment.num_retractions > 0 for segment in later)
            trail.server = server
            trail.weight_version = max([trail.weight_version, *(v for s in later for v in s.weight_versions[-1:])])
            num_aborted = sum(segment.finish_reason == ABORT for segment in later)
            if num_aborted:
                self.events["continued"] += num_aborted
                unexplained += self._fleet.newest_version == version
                if unexplained > self._cfg.max_retries:
                    raise RolloutError(f"{where}: {server.url} aborted it {unexplained} times without a weight push")
        return segments

    async def _request(
        self,
        parts: Sequence[Part],
        *,
        temperature: float,
        routes: RouteFormat | None,
        where: str,
        near: Server | None,
        oldest_version: int,
    ) -> tuple[Server, int, list[Segment]]:
        """One request, repeated until an answer passes: who answered, the weight_version when it was sent, the answer.

        oldest_version is the lowest that a token may have beside what the fleet says: that of the tokens before.
        """
        body = self._body(parts, temperature) | ({} if routes is None else {"return_routed_experts": True})
        cost = sum(len(part.input_ids) + part.max_tokens for part in parts)
        reasons: list[str] = []
        num_failures = 0
        failed: Counter[str] = Counter()
        while True:
            try:
                server, version = await self._ready_server(cost, near, failed)
            except RolloutError as error:
                raise RolloutError("; ".join([f"{where}: {error}", *reasons])) from error
            at = f"{server.url}: {where}"
            try:
                answer = await self._post(server, body, cost)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                continue  # the server was rejected
            except RolloutError as error:
                if not error.retryable:
                    raise RolloutError(f"{where}: {error}") from error
                reasons.append(str(error))
                if error.is_lost:
                    self._reject(server, str(error))
                    continue
                self._failures_in_a_row[server] += 1
                if self._failures_in_a_row[server] >= MAX_FAILURES_IN_A_ROW:
                    self._reject(server, f"{MAX_FAILURES_IN_A_ROW} failures in a row, the last: {error}")
            else:
                self._failures_in_a_row.pop(server, None)
                if not self._fleet.is_ready(server):
                    continue
                expected = Expected(
                    stop_token_ids=self._vocabulary.stop_token_ids,
                    vocab_size=self._vocabulary.size,
                    max_tokens=0,
                    oldest_version=max(version, oldest_version),
                    newest_version=self._fleet.newest_version,
                    routes=routes,
                )
                try:
                    return server, version, _parse(answer, parts, expected, at)
                except RolloutError as error:
                    reasons.append(str(error))
                    self._reject(server, str(error))
            num_failures += 1
            if num_failures > self._cfg.max_retries:
                raise RolloutError(f"{where}: failed {num_failures} times: " + "; ".join(reasons))
            failed[server.name] += 1
            self.events["retries"] += 1
            logger.warning("%s: retry %d of %d: %s", at, num_failures, self._cfg.max_retries, reasons[-1])
            await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (num_failures - 1))

    def _body(self, parts: Sequence[Part], temperature: float) -> dict[str, Any]:
        sampling = {
            "temperature": temperature,
            "top_p": self._cfg.top_p,
            "top_k": self._cfg.top_k,
            "stop_token_ids": sorted(self._vocabulary.stop_token_ids),
        }
        return {
            "input_ids": [list(part.input_ids) for part in parts],
            "sampling_params": [
                {**sampling, "max_new_tokens": part.max_tokens, "sampling_seed": part.sampling_seed} for part in parts
            ],
            "return_logprob": True,
        }

    async def _ready_server(self, cost: int, near: Server | None, failed: Counter[str]) -> tuple[Server, int]:
        """The server for a request of so many tokens, and the weight_version that it has.

        It is the one where the request failed least, then the one with the fewest outstanding tokens; but `near`,
        which has the request's prefix, unless it is behind by more than the request itself.
        """
        waited_s = 0.0
        while True:
            version, servers = self._fleet.weight_version, self._fleet.ready()
            if servers and version == self._fleet.weight_version:  # else a push came in between
                break
            if waited_s >= self._wait_s:
                raise RolloutError(
                    f"no SGLang server was ready for {self._wait_s:g} s (cluster.start_timeout_s + "
                    "cluster.probe_timeout_s)"
                )
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S if self.may_wait else 0.0
        load = {server: sum(self._open[server].values()) if server in self._open else 0 for server in servers}
        best = min(servers, key=lambda server: (failed[server.name], load[server]))
        if near in load and not failed[near.name] and load[near] <= load[best] + cost:
            best = near
        return best, version

    async def _post(self, server: Server, body: dict[str, Any], cost: int) -> Any:
        """The answer of /generate; cancelled when the server is rejected. A cancelled request ends on the server, too:
        SGLang looks every few seconds for closed connections."""
        request = post(self._session, server.url + "/generate", body, timeout_s=self._cfg.request_timeout_s)
        task = asyncio.ensure_future(request)
        self._open.setdefault(server, {})[task] = cost
        try:
            return await task
        finally:
            del self._open[server][task]
            if not self._open[server]:
                del self._open[server]

    def _reject(self, server: Server, reason: str) -> None:
        """Once for all requests that meet one failure."""
        if self._fleet.is_ready(server):
            self._fleet.reject(server, reason)

    def _on_reject(self, server: Server) -> None:
        """Called in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel_requests, server)

    def _cancel_requests(self, server: Server) -> None:
        self.events["rejected"] += 1
        self._failures_in_a_row.pop(server, None)
        for task in list(self._open[server]) if server in self._open else ():
            task.cancel()


def _parse(answer: Any, parts: Sequence[Part], expected: Expected, at: str) -> list[Segment]:
    """One segment for each part; `expected` lacks what is the part's own."""
    if not isinstance(answer, list) or len(answer) != len(parts):
        raise RolloutError(f"{at}: answer wants a list of {len(parts)} responses, got {str(answer)[:300]}")
    segments = []
    for i, (one, part) in enumerate(zip(answer, parts, strict=True)):
        own = replace(expected, max_tokens=part.max_tokens, num_input_tokens=len(part.input_ids))
        segments.append(parse_segment(one, where=f"{at}, part {i}", expected=own))
    return segments


def _rest(part: Part, segment: Segment) -> Part:
    """What is left of a part after a segment of it."""
    return replace(
        part,
        input_ids=part.input_ids + segment.token_ids,
        max_tokens=part.max_tokens - len(segment.token_ids),
    )
