"""What SGLang answers to /generate, checked on arrival: one Segment of each response.

Source of the answer's fields: sglang 0.5.21, srt/managers/tokenizer_manager.py (meta_info).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_megatron.engine import RolloutError
from gspo_megatron.routed_experts import RouteFormat, pack_routes

MAX_LOGPROB = 1e-6
"""A certain token's log-prob may round to just above 0."""
ABORT = "abort"
"""Finish reason of a segment that a weight push ended: the response goes on in another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What an answer must agree with."""

    stop_token_ids: frozenset[int]
    """Each ends a response, as its last token."""
    vocab_size: int
    max_tokens: int
    """Of the segment; one that reaches it ends with finish reason `length`."""
    oldest_version: int
    """Lowest weight_version that a token may have."""
    newest_version: int
    """Highest weight_version that a token may have."""
    num_input_tokens: int = 0
    """Of the request; the routes are of these, too."""
    routes: RouteFormat | None = None
    """Of the model, where the request asked for routes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens that were sampled one after the other, with their record."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each token, nats."""
    weight_versions: tuple[int, ...] = ()
    """That produced each token; never falls."""
    finish_reason: str = ABORT
    """`stop` (a stop token, the last), `length` or ABORT."""
    num_retractions: int = 0
    """How often SGLang took it out of its batch and computed it anew: at a push, or for want of memory."""
    routed_experts: bytes | None = None
    """As Rollout's, of the request's input and of these tokens; None unless asked for, and of an aborted segment."""

    def then(self, later: Segment) -> Segment:
        """This one, which was aborted, and what was sampled after it."""
        return Segment(
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            weight_versions=self.weight_versions + later.weight_versions,
            finish_reason=later.finish_reason,
            num_retractions=self.num_retractions + later.num_retractions,
            routed_experts=later.routed_experts,
        )


def parse_segment(answer: Any, *, where: str, expected: Expected) -> Segment:
    """Check one response of /generate.

    Raises:
        RolloutError: the first thing that is wrong with it, with `where` in front.
    """
    try:
        ids, meta = answer["output_ids"], answer["meta_info"]
        pairs = [(logprob, token_id) for logprob, token_id, _ in meta["output_token_logprobs"]]
        finish = dict(meta["finish_reason"])
        num_retractions = int(meta["num_retractions"])
        spans = [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]]
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"{where}: not an answer of /generate ({error!r}): {str(answer)[:500]}") from error
    problem = (
        _problem_of_ids(ids, finish, expected.vocab_size)
        or _problem_of_logprobs(pairs, ids)
        or _problem_of_finish(finish, ids, expected)
        or _problem_of_versions(spans, len(ids), expected)
    )
    if problem:
        raise RolloutError(f"{where}: {problem}")
    finish_reason, routed_experts = _finish_reason(finish, ids, expected), None
    if expected.routes is not None and finish_reason != ABORT:
        try:
            num_tokens = expected.num_input_tokens + len(ids)
            routed_experts = pack_routes(meta.get("routed_experts"), num_tokens, expected.routes)
        except ValueError as error:
            raise RolloutError(f"{where}: {error}") from error
    return Segment(
        token_ids=tuple(ids),
        logprobs=tuple(logprob for logprob, _ in pairs),
        weight_versions=tuple(int(version) for version, start, end in spans for _ in range(start, end)),
        finish_reason=finish_reason,
        num_retractions=num_retractions,
        routed_experts=routed_experts,
    )


def _finish_reason(finish: Mapping[str, Any], ids: Sequence[int], expected: Expected) -> str:
    """SGLang's, but an abort leaves a response whole if the token that it still let through is the last anyway."""
    if finish["type"] == ABORT and ids and ids[-1] in expected.stop_token_ids:
        return "stop"
    if finish["type"] == ABORT and len(ids) == expected.max_tokens:
        return "length"
    return str(finish["type"])


def _problem_of_ids(ids: Any, finish: Mapping[str, Any], vocab_size: int) -> str | None:
    if not isinstance(ids, list) or not (ids or finish.get("type") == ABORT):
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
    stops, limit = expected.stop_token_ids, expected.max_tokens
    reason = finish.get("type")
    if reason == "stop":
        # SGLang writes a stop token over one outside the vocabulary (NaN logits); `matched` is a text then.
        if ids[-1] not in stops or finish.get("matched") != ids[-1]:
            return f"finish reason {dict(finish)} after token {ids[-1]}: wants one of {sorted(stops)} for both"
    elif reason == "length":
        if len(ids) != limit:
            return f"finish reason length after {len(ids)} tokens: wants {limit}"
    elif reason != ABORT:
        return f"finish reason {dict(finish)}: wants stop, length or abort"
    before_end = ids if reason == "length" else ids[:-1]
    if not stops.isdisjoint(before_end) or len(ids) > limit:
        return f"{len(ids)} tokens {ids[:20]}: want at most {limit}, with {sorted(stops)} nowhere but at the end"
    return None


def _problem_of_versions(spans: Sequence[tuple[Any, Any, Any]], length: int, expected: Expected) -> str | None:
    """Spans must follow each other from 0 to length, each of a version in range, none older than the one before."""
    oldest, newest = expected.oldest_version, expected.newest_version
    allowed = {str(version): version for version in range(oldest, newest + 1)}
    at, last = 0, oldest
    for version, start, end in spans:
        # An aborted response without a token has one empty span.
        if version not in allowed or allowed[version] < last or start != at or type(end) is not int:
            break
        if end <= start and length > 0:
            break
        at, last = end, allowed[version]
    else:
        if at == length:
            return None
    return (
        f"weight_versions (version, start, end) {list(spans)}: want versions from {oldest} to {newest} that do not "
        f"fall, over all {length} tokens"
    )
