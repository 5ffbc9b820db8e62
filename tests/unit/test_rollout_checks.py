"""What is checked of a server's answer before anything trains on it."""

import copy
import math

import pytest

from gspo_megatron.rollout import Expected, RolloutError, parse_response, sampling_seed

EXPECTED = Expected(eos_token_id=1, vocab_size=48, max_response_tokens=4, weight_version=3)


def answer(ids=(5, 7, 1), reason="stop", matched=1, version="3"):
    finish = {"type": "stop", "matched": matched} if reason == "stop" else {"type": reason, "length": len(ids)}
    return {
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5 * (n + 1), i, None] for n, i in enumerate(ids)],
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        },
    }


def parse(given):
    return parse_response(
        given,
        where="http://h:1: prompt p",
        expected=EXPECTED,
        sampling_seed=9,
        decode=lambda ids: ",".join(map(str, ids)),
    )


def test_a_stopped_response_keeps_eos_in_its_ids_and_not_in_its_text():
    rollout = parse(answer())
    assert rollout.response_ids == (5, 7, 1) and rollout.text == "5,7"
    assert rollout.rollout_logprobs == (-0.5, -1.0, -1.5)
    assert rollout.weight_versions == (3, 3, 3)
    assert (rollout.finish_reason, rollout.sampling_seed) == ("stop", 9)


def test_a_response_cut_at_the_limit_keeps_all_its_text():
    rollout = parse(answer(ids=(5, 7, 9, 0), reason="length"))
    assert (rollout.finish_reason, rollout.text) == ("length", "5,7,9,0")


def test_eos_alone_is_a_response():
    assert parse(answer(ids=(1,))).text == ""


def test_eos_as_the_last_allowed_token_is_a_stop():
    assert parse(answer(ids=(5, 7, 9, 1))).text == "5,7,9"


def test_rounding_above_zero_is_a_logprob_and_more_is_not():
    given = answer()
    given["meta_info"]["output_token_logprobs"][0][0] = 5e-7
    assert parse(given).rollout_logprobs[0] == 5e-7
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
        (answer(ids=(5, 7), reason="abort"), "finish reason .*abort.*: wants stop or length"),
        (answer(ids=(5, 7)), r"finish reason .* after token 7: wants EOS, 1, for both"),
        (answer(matched="NaN happened"), r"NaN happened.* wants EOS, 1, for both"),
        (answer(ids=(5, 7, 9), reason="length"), "length after 3 tokens: wants max_response_tokens, 4"),
        (answer(ids=(5, 1, 9, 1)), "nowhere but at the end"),
        (answer(ids=(5, 7, 9, 1), reason="length"), "nowhere but at the end"),
        (answer(ids=(5, 7, 9, 9, 1)), "want at most 4"),
        (answer(version="2"), r"\('2', 0, 3\).*want \[\('3', 0, 3\)\] for all 3 tokens"),
        (answer(version="default"), "weight_versions"),
        (edited(VERSIONS, []), "weight_versions"),
        (edited((*VERSIONS, 0, "end"), 2), "weight_versions"),
        (
            edited(VERSIONS, [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]),
            r"\('2', 0, 1\), \('3', 1, 3\)",
        ),
    ],
)
def test_a_wrong_answer_is_an_error_that_names_server_prompt_and_fault(given, message):
    with pytest.raises(RolloutError, match=f"^http://h:1: prompt p: .*{message}"):
        parse(given)


def test_sampling_seeds_differ_in_every_part_and_fit_31_bits():
    parts = [(s, step, prompt, member) for s in (1, 11) for step in (1, 11) for prompt in "ab" for member in range(64)]
    seeds = {sampling_seed(*part) for part in parts}
    assert len(seeds) == len(parts) and all(0 <= s < 2**31 for s in seeds)
    assert max(seeds) > 2**30
    assert sampling_seed(1, 2, "p", 3) == sampling_seed(1, 2, "p", 3)
