"""Turns against a real server: what was sampled and what was put in, token for token."""

import asyncio
import json
import threading
import zlib

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.engine import ServerClient, post
from gspo_megatron.multi_turn import Reply, Turn
from gspo_megatron.prompts import load_tokenizer, tokenize
from gspo_megatron.rollout import Client, Vocabulary, sampling_seed
from tests.e2e.conftest import make_model_dir
from tests.e2e.serving import (
    EOS,
    VOCAB,
    hf_logprobs,
    hf_model,
    make_fleet,
    make_prompts,
    push,
    push_weights,
    rollout_with,
)

STOPS = (5, 17, 33, 46)
"""Stop tokens of turns: enough of them for several turns in 60 tokens of a model with random weights."""
SEEDS = [sampling_seed(1, 0, "turns", member) for member in range(6)]
LIMITS = {"max_response_tokens": 60, "max_turns": 6}
LOGPROBS = 1.0e-4
"""Nats: of one sequence in one pass and in several, and of two implementations (measured 2e-6)."""


def answer(prompt, turns):
    """Text that depends on all that was sampled, of 0 to 4 characters; the response is over at EOS."""
    if turns[-1].stop == "<|eos|>":
        return None
    digest = zlib.crc32(json.dumps([turn.token_ids for turn in turns]).encode())
    return Reply(text=f"{digest}"[: digest % 5], reward=len(turns) / 4)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return make_vocabulary(tokenizer)


def make_vocabulary(tokenizer):
    return Vocabulary(
        size=VOCAB,
        stop_token_ids=frozenset({EOS, *STOPS}),
        decode=lambda ids: tokenizer.decode(list(ids)),
        encode=lambda text: tokenize(tokenizer, text),
    )


def ask(url, **body):
    """An answer of /generate without the client."""

    async def run():
        async with aiohttp.ClientSession() as session:
            return await post(session, url + "/generate", {"return_logprob": True, **body}, timeout_s=60)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def groups(engine, recipe, vocabulary, tmp_path_factory):
    recipe = rollout_with(recipe, multi_turn=f"{__name__}:answer", **LIMITS)

    async def run():
        async with Client(make_fleet(tmp_path_factory.mktemp("fleet"), [engine.url]), recipe, vocabulary) as client:
            prompts = make_prompts(8)
            return await asyncio.gather(*(client.sample_group(p, SEEDS, temperature=1.0) for p in prompts))

    return asyncio.run(run())


def turns_of(rollout):
    """Start and end of each turn's tokens, from the record."""
    sampled = [i for i, is_sampled in enumerate(rollout.response_mask) if is_sampled]
    spans, first = [], 0
    for length in rollout.turn_lengths:
        own = sampled[first : first + length]
        assert own == list(range(own[0], own[-1] + 1))
        spans.append((own[0], own[-1] + 1))
        first += length
    assert first == len(sampled)
    return spans


def every(groups):
    return [(group.prompt, rollout) for group in groups for rollout in group.rollouts]


def test_responses_have_turns_of_all_kinds(groups):
    rollouts = [rollout for _, rollout in every(groups)]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    assert {len(rollout.turn_lengths) for rollout in rollouts} >= {1, 2, 3, 6}
    assert len({len(r.turn_lengths) for r in groups[0].rollouts}) > 1
    assert all(len(rollout.response_ids) <= 60 for rollout in rollouts)


def test_mask_is_false_on_the_replys_tokens_and_nowhere_else(groups, tokenizer):
    """The function is asked again about the turns that the mask shows: what lies between them is what it says."""
    for _, rollout in every(groups):
        ids, turns, replies, at = rollout.response_ids, [], [], 0
        for start, end in turns_of(rollout):
            assert tokenizer.decode(ids[at:start]) == "".join(reply.text for reply in replies[-1:])
            turns.append(make_turn(ids[start:end], tokenizer))
            at = end
            if ids[end - 1] in (EOS, *STOPS):
                replies.append(answer(None, turns) or Reply(text=None))
        assert at == len(ids)
        assert rollout.finish_reason == "stop" if replies[-1:] == [Reply(text=None)] else "length"
        for i in [i for i, is_sampled in enumerate(rollout.response_mask) if not is_sampled]:
            assert (rollout.rollout_logprobs[i], rollout.weight_versions[i]) == (0.0, 0)
        assert sum(rollout.turn_rewards or ()) == sum(reply.reward or 0.0 for reply in replies)


def make_turn(ids, tokenizer):
    return Turn(token_ids=tuple(ids), text=tokenizer.decode(ids[:-1]), stop=tokenizer.decode(ids[-1:]))


def test_each_turn_is_what_the_server_samples_after_those_very_tokens(engine, groups):
    """Without the client: the ids before a turn, as a request of its own with the response's seed."""
    cases = [(p, r, span) for p, r in every(groups[:4]) for span in turns_of(r)]
    answers = ask(
        engine.url,
        input_ids=[[*p.token_ids, *r.response_ids[:start]] for p, r, (start, _) in cases],
        sampling_params=[
            {
                "temperature": 1.0,
                "max_new_tokens": 60 - start,
                "stop_token_ids": [EOS, *STOPS],
                "sampling_seed": r.sampling_seed,
            }
            for _, r, (start, _) in cases
        ],
    )
    assert len(cases) > 40
    for (_, rollout, (start, end)), got in zip(cases, answers, strict=True):
        assert tuple(got["output_ids"]) == rollout.response_ids[start:end]


def test_logprobs_of_sampled_tokens_are_those_of_the_whole_sequence_in_one_pass(engine, groups, model_dir):
    model = hf_model(model_dir)

    async def scores():
        async with aiohttp.ClientSession() as session:
            client = ServerClient(session, engine.url, timeout_s=60)
            return [await client.score([*p.token_ids, *r.response_ids]) for p, r in every(groups[:4])]

    for (prompt, rollout), score in zip(every(groups[:4]), asyncio.run(scores()), strict=True):
        mask, n = torch.tensor(rollout.response_mask), len(rollout.response_ids)
        logprobs = torch.tensor(rollout.rollout_logprobs, dtype=torch.float64)
        assert (logprobs - torch.tensor(score[-n:], dtype=torch.float64)).abs()[mask].max() < LOGPROBS
        reference = hf_logprobs(model, [*prompt.token_ids, *rollout.response_ids])[-n:]
        assert (logprobs - reference).abs()[mask].max() < LOGPROBS


def test_noise_belongs_to_seed_and_position_so_turns_share_none(engine):
    """At a temperature that leaves little but the noise: equal positions give equal tokens, others do not."""
    short, long = [7] * 6, [9] * 9
    body = {"temperature": 1000.0, "max_new_tokens": 80, "sampling_seed": SEEDS[0], "ignore_eos": True}
    (a, b) = (got["output_ids"] for got in ask(engine.url, input_ids=[short, long], sampling_params=[body] * 2))
    same = sum(x == y for x, y in zip(a[3:], b, strict=False)) / 77
    shifted = sum(x == y for x, y in zip(a, b, strict=True)) / 80
    assert same > 0.8
    assert shifted < 0.2


WAITING, PUSHED = threading.Semaphore(0), threading.Event()


def answer_after_the_push(prompt, turns):
    """The first turn's reply waits for the test."""
    if len(turns) == 1:
        WAITING.release()
        assert PUSHED.wait(60)
    return answer(prompt, turns)


def test_turns_after_a_push_come_from_the_new_weights_and_replies_have_the_version_before(
    engine, recipe, vocabulary, model_dir, tmp_path
):
    recipe = rollout_with(recipe, multi_turn=f"{__name__}:answer_after_the_push", **LIMITS)
    new_dir = make_model_dir(tmp_path / "new", seed=7)
    prompts = make_prompts(4)

    async def run():
        fleet = make_fleet(tmp_path / "fleet", [engine.url])
        async with Client(fleet, recipe, vocabulary) as client:
            sampling = [asyncio.ensure_future(client.sample_group(p, SEEDS, temperature=1.0)) for p in prompts]
            for _ in range(12):
                assert await asyncio.to_thread(WAITING.acquire, timeout=60)
            fleet.begin_push(1)
            await push_weights(engine.url, load_file(new_dir / "model.safetensors"), weight_version=1)
            fleet.confirm(fleet.announced(), 1)
            PUSHED.set()
            return await asyncio.gather(*sampling)

    try:
        groups = asyncio.run(run())
    finally:
        PUSHED.set()
        push(engine.url, load_file(model_dir / "model.safetensors"), weight_version=0)
    old, new = hf_model(model_dir), hf_model(new_dir)
    mixed = 0
    for prompt, rollout in every(groups):
        versions, n = torch.tensor(rollout.weight_versions), len(rollout.response_ids)
        spans = turns_of(rollout)
        if len(spans) > 1 and rollout.weight_versions[spans[0][1] - 1] == 0:
            mixed += 1
            second = spans[1][0]
            assert set(rollout.weight_versions[:second]) == {0} and set(rollout.weight_versions[second:]) == {1}
        mask, logprobs = torch.tensor(rollout.response_mask), torch.tensor(rollout.rollout_logprobs)
        for version, model in ((0, old), (1, new)):
            reference = hf_logprobs(model, [*prompt.token_ids, *rollout.response_ids])[-n:]
            of_version = mask & (versions == version)
            assert ((logprobs - reference).abs()[of_version] < LOGPROBS).all()
    assert mixed > 8


def test_a_run_of_the_same_seeds_is_the_same_run(engine, recipe, vocabulary, groups, tmp_path):
    recipe = rollout_with(recipe, multi_turn=f"{__name__}:answer", **LIMITS)

    async def run():
        async with Client(make_fleet(tmp_path, [engine.url]), recipe, vocabulary) as client:
            return await client.sample_group(groups[3].prompt, SEEDS, temperature=1.0)

    again = asyncio.run(run())
    assert [r.response_ids for r in again.rollouts] == [r.response_ids for r in groups[3].rollouts]
