"""What is checked of a server's answer before anything trains on it."""

import base64
import copy
import math
from dataclasses import replace

import pytest

from gspo_megatron.engine import RolloutError
from gspo_megatron.responses import Expected, Segment, parse_segment
from gspo_megatron.routed_experts import RouteFormat

EXPECTED = Expected(
    stop_token_ids=frozenset({1, 2}), vocab_size=48, max_tokens=4, oldest_version=3, newest_version=5
)


def answer(ids=(5, 7, 1), reason="stop", matched=1, version="3"):
    finish = {"type": "stop", "matched": matched} if reason == "stop" else {"type": reason, "length": len(ids)}
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5 * (n + 1), i, None] for n, i in enumerate(ids)],
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "num_retractions": 0,
        },
    }


def parse(given):
    return parse_segment(given, where="http://h:1: prompt p", expected=EXPECTED)


def spans(*items):
    return [{"version": version, "start": start, "end": end} for version, start, end in items]


def test_a_stopped_response_keeps_its_stop_token_and_its_record():
    assert parse(answer()) == Segment(
        token_ids=(5, 7, 1), logprobs=(-0.5, -1.0, -1.5), weight_versions=(3, 3, 3), finish_reason="stop"
    )


def test_every_stop_token_ends_a_response():
    assert parse(answer(ids=(5, 2), matched=2)).finish_reason == "stop"


def test_a_response_cut_at_the_limit_is_of_reason_length():
    assert parse(answer(ids=(5, 7, 9, 0), reason="length")).finish_reason == "length"


def test_a_stop_token_alone_is_a_response():
    assert parse(answer(ids=(1,))).token_ids == (1,)


def test_a_stop_token_as_the_last_allowed_token_is_a_stop():
    assert parse(answer(ids=(5, 7, 9, 1))).finish_reason == "stop"


def test_each_token_has_the_version_of_its_span():
    given = edited(VERSIONS, spans(("3", 0, 1), ("5", 1, 3)))
    assert parse(given).weight_versions == (3, 5, 5)


def test_an_aborted_response_may_be_short_or_empty_and_is_aborted():
    assert parse(answer(ids=(5, 7), reason="abort")) == Segment(
        token_ids=(5, 7), logprobs=(-0.5, -1.0), weight_versions=(3, 3), finish_reason="abort"
    )
    assert parse(answer(ids=(), reason="abort")) == Segment()


def test_an_abort_that_comes_with_the_last_token_leaves_a_whole_response():
    assert parse(answer(ids=(5, 1), reason="abort")).finish_reason == "stop"
    assert parse(answer(ids=(5, 7, 9, 0), reason="abort")).finish_reason == "length"


def test_segments_of_one_response_follow_each_other():
    first, second = parse(answer(ids=(5, 7), reason="abort")), parse(answer(ids=(9, 1), version="4"))
    assert first.then(second) == Segment(
        token_ids=(5, 7, 9, 1),
        logprobs=(-0.5, -1.0, -0.5, -1.0),
        weight_versions=(3, 3, 4, 4),
        finish_reason="stop",
    )


def test_rounding_above_zero_is_a_logprob_and_more_is_not():
    given = answer()
    given["meta_info"]["output_token_logprobs"][0][0] = 5e-7
    assert parse(given).logprobs[0] == 5e-7
    given["meta_info"]["output_token_logprobs"][0][0] = 2e-6
    with pytest.raises(RolloutError, match=r"log-probs \[2e-06\]: want finite numbers <= 0"):
        parse(given)


def edited(path, value, **kwargs):
    """An answer with one field replaced; path is keys and indices."""
    given = copy.deepcopy(answer(**kwargs))
    node = given
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return given


LOGPROBS = ("meta_info", "output_token_logprobs")
VERSIONS = ("meta_info", "weight_versions")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gone", "not an answer of /generate"),
        ({"text": "no ids"}, "not an answer of /generate"),
        (edited(("meta_info", "finish_reason"), None), "not an answer of /generate"),
        (edited(LOGPROBS, [[-1.0]]), "not an answer of /generate"),
        (answer(ids=()), "wants a list with at least one token id"),
        (edited(("output_ids",), "5 7 1"), "wants a list with at least one token id"),
        (answer(ids=(5, 48, 1)), r"output_ids has \[48\]: wants integers in \[0, 48\)"),
        (answer(ids=(5, -1, 1)), r"output_ids has \[-1\]"),
        (answer(ids=(5, True, 1)), r"output_ids has \[True\]"),
        (answer(ids=(5, 7.0, 1)), r"output_ids has \[7.0\]"),
        (edited(LOGPROBS, [[-1.0, 5, None], [-1.0, 7, None]]), "2 log-probs for 3 response tokens"),
        (edited((*LOGPROBS, 1, 1), 8), r"log-probs are of tokens \[5, 8, 1\], the response is \[5, 7, 1\]"),
        (edited((*LOGPROBS, 1, 0), 0.1), r"log-probs \[0.1\]"),
        (edited((*LOGPROBS, 1, 0), -math.inf), r"log-probs \[-inf\]"),
        (edited((*LOGPROBS, 1, 0), math.nan), r"log-probs \[nan\]"),
        (edited((*LOGPROBS, 1, 0), None), r"log-probs \[None\]"),
        (answer(ids=(5, 7), reason="tired"), "finish reason .*tired.*: wants stop, length or abort"),
        (answer(ids=(5, 7)), r"finish reason .* after token 7: wants one of \[1, 2\] for both"),
        (answer(ids=(5, 2)), r"finish reason .* after token 2: wants one of \[1, 2\] for both"),
        (answer(matched="NaN happened"), r"NaN happened.* wants one of \[1, 2\] for both"),
        (answer(ids=(5, 7, 9), reason="length"), "length after 3 tokens: wants 4"),
        (answer(ids=(5, 1, 9), reason="abort"), "nowhere but at the end"),
        (answer(ids=(5, 1, 9, 1)), "nowhere but at the end"),
        (answer(ids=(5, 7, 9, 1), reason="length"), "nowhere but at the end"),
        (answer(ids=(5, 7, 9, 9, 1)), "want at most 4"),
        (answer(ids=(5, 2, 9, 1)), "nowhere but at the end"),
        (answer(version="2"), r"\('2', 0, 3\).*: want versions from 3 to 5 .* over all 3 tokens"),
        (answer(version="6"), "want versions from 3 to 5"),
        (answer(version="default"), "weight_versions"),
        (answer(version=3), "weight_versions"),
        (edited(VERSIONS, []), "weight_versions"),
        (edited((*VERSIONS, 0, "end"), 2), "over all 3 tokens"),
        (edited((*VERSIONS, 0, "end"), "3"), "over all 3 tokens"),
        (edited((*VERSIONS, 0, "start"), 1), "over all 3 tokens"),
        (edited(VERSIONS, spans(("2", 0, 1), ("3", 1, 3))), r"\('2', 0, 1\), \('3', 1, 3\)"),
        (edited(VERSIONS, spans(("4", 0, 1), ("3", 1, 3))), "do not fall"),
        (edited(VERSIONS, spans(("3", 0, 1), ("4", 2, 3))), "over all 3 tokens"),
        (edited(VERSIONS, spans(("3", 0, 2), ("4", 1, 3))), "over all 3 tokens"),
        (edited(VERSIONS, spans(("3", 0, 3), ("4", 3, 3))), "over all 3 tokens"),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_server_prompt_and_fault(given, message):
    with pytest.raises(RolloutError, match=f"^http://h:1: prompt p: .*{message}"):
        parse(given)


ROUTES = RouteFormat(num_layers=1, moe_layers=(0,), num_experts=4, topk=1)
WITH_ROUTES = replace(EXPECTED, num_input_tokens=2, routes=ROUTES)


def routed(experts, **kwargs):
    given = answer(**kwargs)
    raw = b"".join(expert.to_bytes(4, "little") for expert in experts)
    given["meta_info"]["routed_experts"] = base64.b64encode(raw).decode()
    return given


def test_routes_cover_the_input_and_all_but_the_last_token():
    segment = parse_segment(routed([3, 0, 2, 1]), where="w", expected=WITH_ROUTES)
    assert segment.routed_experts == bytes([3, 0, 2, 1])
    assert parse(routed([3, 0, 2, 1])).routed_experts is None, "they were not asked for"
    for given, message in [
        (answer(), "^w: routed_experts=None: the server returned no routes"),
        (routed([3, 0, 2]), "^w: routed_experts has 12 bytes, wants int32"),
        (routed([3, 0, 2, 4]), r"^w: routed_experts: 1 of 4 routes are not 1 different experts in \[0, 4\)"),
    ]:
        with pytest.raises(RolloutError, match=message):
            parse_segment(given, where="w", expected=WITH_ROUTES)


def test_response_that_went_on_after_an_abort_has_the_routes_of_the_last_answer():
    first = parse_segment(answer(ids=(5,), reason="abort"), where="w", expected=WITH_ROUTES)
    assert first.routed_experts is None
    rest = replace(WITH_ROUTES, num_input_tokens=3)
    given = routed([3, 0, 2, 1], ids=(7, 1))
    given["meta_info"]["num_retractions"] = 2
    whole = first.then(parse_segment(given, where="w", expected=rest))
    assert (whole.token_ids, whole.routed_experts, whole.num_retractions) == ((5, 7, 1), bytes([3, 0, 2, 1]), 2)
