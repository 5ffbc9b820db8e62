"""Prompt -> RolloutGroup over SGLang's HTTP API: token ids in and out, log-probs and weight_version of every token.

Source of the answer's fields: sglang 0.5.21, srt/managers/tokenizer_manager.py (meta_info).
The only module that retries. What a server answers is checked here, on arrival, before anything trains on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from gspo_megatron.config import RolloutConfig
from gspo_megatron.engine import RolloutError, post
from gspo_megatron.types import Prompt, Rollout, RolloutGroup

__all__ = ["Expected", "RolloutError", "generate", "parse_response", "sampling_seed"]

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
"""Wait before the first retry; doubles with each."""
MAX_LOGPROB = 1e-6
"""A certain token's log-prob may round to just above 0."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What every response of one generate call must agree with."""

    eos_token_id: int
    vocab_size: int
    max_response_tokens: int
    weight_version: int


def sampling_seed(seed: int, rollout_step: int, prompt_id: str, member: int) -> int:
    """The server-side seed of one response, in [0, 2**31): a hash, so that no two responses share a noise stream."""
    text = f"{seed}:{rollout_step}:{prompt_id}:{member}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def generate(
    urls: Sequence[str],
    prompts: Sequence[Prompt],
    cfg: RolloutConfig,
    *,
    eos_token_id: int,
    vocab_size: int,
    decode: Decode,
    seed: int,
    rollout_step: int,
    weight_version: int,
    group_size: int,
    temperature: float,
    retries: Counter[str] | None = None,
) -> list[RolloutGroup]:
    """Sample group_size responses for every prompt; one HTTP request per prompt.

    Args:
        urls: servers, all with the weights of weight_version. A prompt goes to the one with the fewest
            requests in flight; its tokens do not depend on which one that is, nor on what runs beside it.
        prompts: each prompt_id once, since it seeds the sampling.
        cfg: max_response_tokens and the limits of time, concurrency and retries are used.
        eos_token_id: ends a response, as its last token.
        vocab_size: ids of prompts and responses are below it.
        decode: token ids without EOS -> text.
        seed, rollout_step: seed the sampling, with prompt_id and the response's place in its group.
        weight_version: version that every token must come from.
        group_size: responses per prompt.
        temperature: divides the logits.
        retries: counts repeated requests per url, for the caller's metrics.

    Returns:
        Groups in the order of prompts, rollouts in the order of their seeds.

    Raises:
        ValueError: a prompt occurs twice, is empty, or has ids outside the vocabulary.
        RolloutError: a request failed after cfg.max_retries repetitions, or an answer fails a check.
    """
    _check_prompts(prompts, vocab_size)
    expected = Expected(
        eos_token_id=eos_token_id,
        vocab_size=vocab_size,
        max_response_tokens=cfg.max_response_tokens,
        weight_version=weight_version,
    )
    client = _Client(urls, cfg, expected, decode, Counter() if retries is None else retries)
    seeds = [[sampling_seed(seed, rollout_step, p.prompt_id, member) for member in range(group_size)] for p in prompts]
    return asyncio.run(client.generate(prompts, seeds, temperature))


def _check_prompts(prompts: Sequence[Prompt], vocab_size: int) -> None:
    repeated = [prompt_id for prompt_id, n in Counter(p.prompt_id for p in prompts).items() if n > 1]
    if repeated:
        raise ValueError(f"prompts: {repeated} occur more than once; their responses would be the same")
    for prompt in prompts:
        # SGLang's scheduler dies of an id that its embedding does not have.
        if not prompt.token_ids or not all(0 <= i < vocab_size for i in prompt.token_ids):
            raise ValueError(
                f"prompt {prompt.prompt_id}: token_ids={prompt.token_ids}, wants at least one id in [0, {vocab_size})"
            )


class _Client:
    """One generate call: shared limits, counts of requests in flight, and what to expect."""

    def __init__(
        self, urls: Sequence[str], cfg: RolloutConfig, expected: Expected, decode: Decode, retries: Counter[str]
    ) -> None:
        self.cfg, self.expected, self.decode, self.retries = cfg, expected, decode, retries
        self.in_flight = {url: 0 for url in urls}
        self.slots = asyncio.Semaphore(cfg.max_concurrency)

    async def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[list[int]], temperature: float
    ) -> list[RolloutGroup]:
        """All groups; the first failure cancels the rest."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            tasks = [
                asyncio.create_task(self._group(session, prompt, group_seeds, temperature))
                for prompt, group_seeds in zip(prompts, seeds, strict=True)
            ]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _group(
        self, session: aiohttp.ClientSession, prompt: Prompt, seeds: list[int], temperature: float
    ) -> RolloutGroup:
        sampling = {
            "temperature": temperature,
            "top_p": self.cfg.top_p,
            "top_k": self.cfg.top_k,
            "max_new_tokens": self.expected.max_response_tokens,
            "stop_token_ids": [self.expected.eos_token_id],
        }
        body = {
            "input_ids": [list(prompt.token_ids)] * len(seeds),
            "sampling_params": [{**sampling, "sampling_seed": s} for s in seeds],
            "return_logprob": True,
        }
        async with self.slots:
            url, answers = await self._send(session, body, where=f"prompt {prompt.prompt_id}")
        where = f"{url}: prompt {prompt.prompt_id}"
        if not isinstance(answers, list) or len(answers) != len(seeds):
            raise RolloutError(f"{where}: answer wants a list of {len(seeds)} responses, got {str(answers)[:300]}")
        rollouts = (
            parse_response(
                answer, where=f"{where} member {member}", expected=self.expected, sampling_seed=s, decode=self.decode
            )
            for member, (answer, s) in enumerate(zip(answers, seeds, strict=True))
        )
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

    async def _send(self, session: aiohttp.ClientSession, body: Mapping[str, Any], *, where: str) -> tuple[str, Any]:
        """POST to the server with the fewest requests in flight; again, elsewhere if possible, if that may help."""
        failures: list[str] = []
        failed: Counter[str] = Counter()
        while True:
            url = min(self.in_flight, key=lambda u: (failed[u], self.in_flight[u]))
            self.in_flight[url] += 1
            try:
                return url, await post(session, url + "/generate", body, timeout_s=self.cfg.request_timeout_s)
            except RolloutError as error:
                failures.append(str(error))
                if not error.retryable or len(failures) > self.cfg.max_retries:
                    tried = f" after {len(failures)} tries" if len(failures) > 1 else ""
                    raise RolloutError(f"{where}{tried}: {failures[-1]}") from error
                failed[url] += 1
                self.retries[url] += 1
                logger.warning("%s: retry %d of %d: %s", where, len(failures), self.cfg.max_retries, error)
            finally:
                self.in_flight[url] -= 1
            await asyncio.sleep(FIRST_BACKOFF_S * 2 ** (len(failures) - 1))


def parse_response(answer: Any, *, where: str, expected: Expected, sampling_seed: int, decode: Decode) -> Rollout:
    """Check one response of /generate and turn it into a Rollout.

    Raises:
        RolloutError: the first thing that is wrong with it, with `where` in front.
    """
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        pairs = [(logprob, token_id) for logprob, token_id, _ in meta["output_token_logprobs"]]
        finish = dict(meta["finish_reason"])
        spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"{where}: not an answer of /generate ({error!r}): {str(answer)[:500]}") from error
    problem = (
        _problem_of_ids(ids, expected.vocab_size)
        or _problem_of_logprobs(pairs, ids)
        or _problem_of_finish(finish, ids, expected)
        or _problem_of_versions(spans, len(ids), expected.weight_version)
    )
    if problem:
        raise RolloutError(f"{where}: {problem}")
    return Rollout(
        response_ids=tuple(ids),
        rollout_logprobs=tuple(logprob for logprob, _ in pairs),
        weight_versions=(expected.weight_version,) * len(ids),
        finish_reason=finish["type"],
        text=decode(ids[:-1] if finish["type"] == "stop" else ids),
        sampling_seed=sampling_seed,
    )


def _problem_of_ids(ids: Any, vocab_size: int) -> str | None:
    if not isinstance(ids, list) or not ids:
        return f"output_ids={ids!r}: wants a list with at least one token id"
    wrong = [i for i in ids if type(i) is not int or not 0 <= i < vocab_size]
    return f"output_ids has {wrong[:5]}: wants integers in [0, {vocab_size})" if wrong else None


def _problem_of_logprobs(pairs: Sequence[tuple[Any, Any]], ids: Sequence[int]) -> str | None:
    if len(pairs) != len(ids):
        return f"{len(pairs)} log-probs for {len(ids)} response tokens: wants one each"
    if [token_id for _, token_id in pairs] != ids:
        return f"log-probs are of tokens {[i for _, i in pairs][:20]}, the response is {ids[:20]}"
    wrong = [v for v, _ in pairs if type(v) is not float or not math.isfinite(v) or v > MAX_LOGPROB]
    return f"log-probs {wrong[:5]}: want finite numbers <= 0" if wrong else None


def _problem_of_finish(finish: Mapping[str, Any], ids: Sequence[int], expected: Expected) -> str | None:
    eos, limit = expected.eos_token_id, expected.max_response_tokens
    reason, before_eos = finish.get("type"), ids
    if reason == "stop":
        # SGLang writes EOS over a token outside the vocabulary (NaN logits); `matched` is a text then.
        if ids[-1] != eos or finish.get("matched") != eos:
            return f"finish reason {dict(finish)} after token {ids[-1]}: wants EOS, {eos}, for both"
        before_eos = ids[:-1]
    elif reason != "length":
        return f"finish reason {dict(finish)}: wants stop or length"
    elif len(ids) != limit:
        return f"finish reason length after {len(ids)} tokens: wants max_response_tokens, {limit}"
    if eos in before_eos or len(ids) > limit:
        return f"{len(ids)} tokens {ids[:20]}: want at most {limit}, with EOS, {eos}, nowhere but at the end"
    return None


def _problem_of_versions(spans: Sequence[tuple[Any, Any, Any]], length: int, version: int) -> str | None:
    if spans == [(str(version), 0, length)]:
        return None
    return f"weight_versions (version, start, end) {spans}: want [{(str(version), 0, length)}] for all {length} tokens"
