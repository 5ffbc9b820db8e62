"""Two real servers: where requests go, what failures do to them, and responses that go on over weight pushes."""

import asyncio
import time
from contextlib import closing, suppress
from dataclasses import replace

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.engine import Engine, RolloutError, ServerClient
from gspo_megatron.metrics import summarize_rollout
from gspo_megatron.rollout import Client, sampling_seed
from gspo_megatron.sampling import Sampler
from tests.e2e.conftest import make_model_dir
from tests.e2e.serving import (
    EOS,
    VOCABULARY,
    hf_logprobs,
    hf_model,
    make_fleet,
    make_prompts,
    push,
    push_weights,
    rollout_with,
    sample,
    tokens,
)


@pytest.fixture(scope="module")
def second(recipe, model_dir, tmp_path_factory):
    """Another server with the same weights, without the overlap schedule, as pause_mode in_place wants it."""
    recipe = rollout_with(recipe, sglang=recipe.rollout.sglang | {"disable_overlap_schedule": True})
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=tmp_path_factory.mktemp("log") / "server.log")
    try:
        engine.wait_ready(timeout_s=180)
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def new_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("new"), seed=7)


def state_of(folder):
    return load_file(folder / "model.safetensors")


def test_both_servers_get_requests_and_tokens_do_not_depend_on_which(engine, second, recipe):
    prompts = make_prompts(16)
    alone = tokens(sample(engine.url, prompts, recipe))
    assert tokens(sample([engine.url, second.url], prompts, recipe)) == alone
    assert tokens(sample(second.url, prompts, recipe)) == alone


async def sample_over_a_push(engine, recipe, folder, state, *, mode, prompts, group_size):
    """Groups of which many were under way while new weights were pushed, and the client's events."""
    fleet = make_fleet(folder, [engine.url])
    async with Client(fleet, recipe, VOCABULARY) as client:
        tasks = [
            asyncio.create_task(
                client.sample_group(
                    prompt, [sampling_seed(1, 0, prompt.prompt_id, m) for m in range(group_size)], temperature=1.0
                )
            )
            for prompt in prompts
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        fleet.begin_push(1)
        await push_weights(engine.url, state, weight_version=1, mode=mode, flush=mode != "in_place")
        fleet.confirm(fleet.announced(), 1)
        return await asyncio.gather(*tasks), client.take_events()


def differences(model, group, rollout):
    """|SGLang's - transformers'| log-prob of each token."""
    reference = hf_logprobs(model, list(group.prompt.token_ids + rollout.response_ids))
    own = torch.tensor(rollout.rollout_logprobs, dtype=torch.float64)
    return (own - reference[-len(rollout.response_ids) :]).abs()


SAME, OTHER = 1.0e-4, 1.0e-3
"""Nats: two implementations of one model are closer than the first, two models' tokens further than the second."""


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_each_token_of_a_response_that_goes_on_over_a_push_comes_from_the_weights_that_it_says(
    second, recipe, model_dir, new_dir, tmp_path, mode
):
    recipe = rollout_with(recipe, max_response_tokens=100)
    old, new = hf_model(model_dir), hf_model(new_dir)
    try:
        groups, events = asyncio.run(
            sample_over_a_push(
                second, recipe, tmp_path, state_of(new_dir), mode=mode, prompts=make_prompts(12), group_size=8
            )
        )
    finally:
        push(second.url, state_of(model_dir), weight_version=0)
    assert (events["continued"] > 0) == (mode == "abort")
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    assert {v for _, rollout in pairs for v in rollout.weight_versions} == {0, 1}
    mixed = [(g, r) for g, r in pairs if len(set(r.weight_versions)) > 1]
    assert len(mixed) > 8
    first_after = []
    for group, rollout in pairs:
        versions = torch.tensor(rollout.weight_versions)
        from_old, from_new = (differences(model, group, rollout) for model in (old, new))
        assert (versions.diff() >= 0).all()
        assert (from_old[versions == 0] < SAME).all()
        if mode != "in_place":  # there keys and values of the old weights stay
            assert (from_new[versions == 1] < SAME).all()
        if len(versions.unique()) > 1:
            first_after.append(from_old[versions == 1][0])
    assert sum(d > OTHER for d in first_after) > 0.9 * len(first_after)


NUM_STEPS = 5


def make_recipe(recipe, *, max_policy_lag, **rollout):
    cluster = replace(recipe.cluster, max_policy_lag=max_policy_lag, start_timeout_s=30.0)
    train = replace(recipe.train, num_rollout_steps=NUM_STEPS)
    return rollout_with(replace(recipe, cluster=cluster, train=train), num_prompts=8, group_size=4, **rollout)


def drive(recipe, fleet, states, *, train_s):
    """What train.py does around a Sampler: weights of states in turn, pushed to all servers after each step.

    Yields:
        (rollout step, groups, metrics) of each step.
    """
    with closing(Sampler(recipe, fleet, on_rank_0=lambda fn: fn(), bring_up=lambda: None)) as sampler:
        for step in range(1, NUM_STEPS + 1):
            groups, report = sampler.collect(step)
            time.sleep(train_s)
            fleet.begin_push(step)
            for server in fleet.ready():
                push(server.url, states[step % len(states)], weight_version=step)
            fleet.confirm(fleet.announced(), step)
            yield step, groups, summarize_rollout(groups, report, trained_from=step - 1)


@pytest.mark.parametrize(("max_policy_lag", "is_generation_slow"), [(1, False), (2, True)], ids=str)
def test_no_token_is_older_than_the_limit_and_the_reported_lag_is_that_of_the_weights(
    engine, second, recipe, model_dir, new_dir, tmp_path, max_policy_lag, is_generation_slow
):
    models, states = [hf_model(d) for d in (model_dir, new_dir)], [state_of(d) for d in (model_dir, new_dir)]
    # Slow generation: responses that run over several pushes. Slow training: all is there before the next push.
    recipe = make_recipe(
        recipe, max_policy_lag=max_policy_lag, max_response_tokens=100 if is_generation_slow else 8
    )
    fleet = make_fleet(tmp_path, [engine.url, second.url])
    reported, lags, num_mixed = [], [], 0
    try:
        for step, groups, metrics in drive(recipe, fleet, states, train_s=0.0 if is_generation_slow else 3.0):
            assert [len(g.rollouts) for g in groups] == [4] * 8
            assert metrics["num_asked"] == metrics["num_used"] == 32
            for group in groups:
                for rollout in group.rollouts:
                    versions = torch.tensor(rollout.weight_versions)
                    num_mixed += len(versions.unique()) > 1
                    for parity, model in enumerate(models):
                        assert (differences(model, group, rollout)[versions % 2 == parity] < SAME).all()
            versions = torch.cat([torch.tensor(r.weight_versions) for g in groups for r in g.rollouts])
            lags.append((step - 1 - versions).double())
            reported.append((metrics["policy_lag_mean"], metrics["policy_lag_max"]))
    finally:
        for server in (engine, second):
            push(server.url, states[0], weight_version=0)
    assert reported == [(pytest.approx(float(lag.mean())), int(lag.max())) for lag in lags]
    assert min(float(lag.min()) for lag in lags) >= 0
    assert [int(lag.max()) for lag in lags] == [min(step, max_policy_lag) for step in range(NUM_STEPS)]
    if is_generation_slow:
        assert num_mixed > 0
    else:  # step k + max_policy_lag is sampled, all of it, while step k trains
        assert [float(lag.mean()) for lag in lags] == [min(step, max_policy_lag) for step in range(NUM_STEPS)]


def test_a_second_stop_token_ends_responses_too(engine, recipe, tmp_path):
    stops = frozenset({EOS, 5, 6, 7})
    groups = sample(engine.url, make_prompts(8), recipe, vocabulary=replace(VOCABULARY, stop_token_ids=stops))
    ended = [r for g in groups for r in g.rollouts if r.finish_reason == "stop"]
    assert {r.response_ids[-1] for r in ended} == stops
    for rollout in ended:
        assert rollout.text == " ".join(map(str, rollout.response_ids[:-1]))
        assert stops.isdisjoint(rollout.response_ids[:-1])


def test_cancelled_requests_end_on_the_server(engine, recipe, tmp_path):
    recipe = rollout_with(recipe, max_response_tokens=100)

    async def run():
        async with Client(make_fleet(tmp_path, [engine.url]), recipe, VOCABULARY) as client:
            tasks = [
                asyncio.create_task(client.sample_group(prompt, range(64), temperature=1.0))
                for prompt in make_prompts(64)
            ]
            await asyncio.wait(tasks, timeout=2.0)
            assert not any(task.done() for task in tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with aiohttp.ClientSession() as session:
            server = ServerClient(session, engine.url, timeout_s=30.0)
            for _ in range(40):
                with suppress(RolloutError):  # refused while requests run
                    return await server.flush_cache()
                await asyncio.sleep(0.5)
            raise AssertionError("4,096 requests that nobody waits for still run")

    asyncio.run(run())
