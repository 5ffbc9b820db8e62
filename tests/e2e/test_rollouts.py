"""Two real servers: where requests go, what failures do to them, and responses that go on over weight pushes."""

import asyncio

import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.engine import Engine
from gspo_megatron.rollout import Client, sampling_seed
from tests.e2e.conftest import make_model_dir
from tests.e2e.serving import (
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
