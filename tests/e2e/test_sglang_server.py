"""A real SGLang server on CPU: seeded sampling, log-probs, weight push, and how it ends."""

import asyncio
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace

import aiohttp
import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.config import ConfigError
from gspo_megatron.engine import Engine, RolloutError, post, session_members, take_port
from tests.e2e.conftest import make_model_dir
from tests.e2e.serving import (
    EOS,
    HOST,
    VOCAB,
    call,
    hf_logprobs,
    hf_model,
    make_prompts,
    push,
    rollout_with,
    sample,
    sample_and_count,
    tokens,
)


def test_tokens_depend_on_the_seed_alone_whatever_runs_beside_them(engine, recipe):
    prompts = make_prompts(32)
    reference = tokens(sample(engine.url, prompts, recipe))
    assert list(reference) == [p.prompt_id for p in prompts]
    rng = random.Random(3)
    for concurrency in (1, 3, 64):
        some = rng.sample(prompts, 20)
        again = sample(engine.url, some, rollout_with(recipe, max_concurrency=concurrency))
        assert [g.prompt.prompt_id for g in again] == [p.prompt_id for p in some]
        assert tokens(again) == {p.prompt_id: reference[p.prompt_id] for p in some}
    assert len({r for group in reference.values() for r in group}) > 200
    assert tokens(sample(engine.url, prompts, recipe, seed=2)) != reference
    assert tokens(sample(engine.url, prompts, recipe, rollout_step=1)) != reference


def test_tokens_do_not_depend_on_greedy_or_truncated_neighbours(engine, recipe):
    prompts = make_prompts(16)
    reference = tokens(sample(engine.url, prompts, recipe))
    neighbours = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "top_k": 3}]
    done = threading.Event()

    async def keep_busy(sampling):
        body = {"input_ids": [3, 4, 5], "sampling_params": {**sampling, "max_new_tokens": 100, "ignore_eos": True}}
        async with aiohttp.ClientSession() as session:
            while not done.is_set():
                await post(session, engine.url + "/generate", body, timeout_s=60)

    threads = [threading.Thread(target=asyncio.run, args=(keep_busy(s),)) for s in neighbours]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        assert tokens(sample(engine.url, prompts, recipe)) == reference
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_seeded_samples_follow_the_models_distribution(engine, recipe, model_dir):
    prompt = make_prompts(1)[0]
    recipe = rollout_with(recipe, max_response_tokens=1)
    count = 8192
    (group,) = sample(engine.url, [prompt], recipe, group_size=count)
    with torch.no_grad():
        p = hf_model(model_dir)(torch.tensor([prompt.token_ids])).logits[0, -1].double().softmax(-1)
    seen = torch.bincount(torch.tensor([r.response_ids[0] for r in group.rollouts]), minlength=VOCAB)
    chi_square = ((seen - count * p) ** 2 / (count * p)).sum()
    # 47 degrees of freedom: mean 47, standard deviation 9.7.
    assert chi_square < 47 + 5 * 9.7


def test_256_responses_arrive_with_their_text_version_and_finish_reason(engine, recipe):
    started = time.monotonic()
    groups = sample(engine.url, make_prompts(32), recipe)
    assert time.monotonic() - started < 20
    rollouts = [r for g in groups for r in g.rollouts]
    assert len(rollouts) == 256 and {len(g.rollouts) for g in groups} == {8}
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert r.weight_versions == (0,) * len(r.response_ids)
        body = r.response_ids[:-1] if r.finish_reason == "stop" else r.response_ids
        assert EOS not in body and r.text == " ".join(map(str, body))
    assert len({r.sampling_seed for r in rollouts}) == 256


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_transformers_at_the_sampling_temperature(engine, recipe, model_dir, temperature):
    model = hf_model(model_dir)
    differences = []
    for group in sample(engine.url, make_prompts(16), recipe, temperature=temperature, group_size=2):
        for r in group.rollouts:
            ids = list(group.prompt.token_ids + r.response_ids)
            reference = hf_logprobs(model, ids, temperature)[-len(r.response_ids) :]
            differences.append((torch.tensor(r.rollout_logprobs, dtype=torch.float64) - reference).abs())
    assert torch.cat(differences).mean() < 1e-5
    assert torch.cat(differences).max() < 1e-4


def test_wrong_prompts_are_refused_before_they_reach_the_server(engine, recipe):
    good = make_prompts(1)[0]
    for bad, message in [
        ([replace(good, token_ids=(3, VOCAB))], "wants at least one id in"),
        ([replace(good, token_ids=())], "wants at least one id in"),
    ]:
        with pytest.raises(ValueError, match=message):
            sample(engine.url, bad, recipe)


def test_an_old_weight_version_takes_the_server_out(engine, recipe):
    with pytest.raises(RolloutError, match=r"no SGLang server was ready for 1 s.*want versions from 1 to 1"):
        sample(engine.url, make_prompts(1), recipe, weight_version=1)


def test_an_old_weight_version_is_an_error_without_retries(engine, recipe):
    with pytest.raises(RolloutError, match=r"weight_versions .*\('0', 0, \d+\).* want versions from 1 to 1"):
        sample(engine.url, make_prompts(1), rollout_with(recipe, max_retries=0), weight_version=1)


def test_a_request_that_the_server_refuses_is_not_repeated(engine, recipe):
    with pytest.raises(RolloutError, match=r"prompt 0+: POST .*/generate: status 400: .*maximum context length"):
        sample(engine.url, make_prompts(1), rollout_with(recipe, max_response_tokens=1000))


def test_a_server_that_refuses_connections_is_taken_out_and_costs_no_retry(engine, recipe):
    dead = f"http://{HOST}:{take_port(HOST, 0)}"
    prompts = make_prompts(4)
    groups, events = sample_and_count([dead, engine.url], prompts, rollout_with(recipe, max_retries=0))
    assert tokens(groups) == tokens(sample(engine.url, prompts, recipe))
    assert events == Counter(rejected=1)


def test_a_server_that_hangs_is_an_error_within_the_time_limit(engine, recipe):
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(RolloutError, match="failed 2 times: POST .*: no answer within 1 s"):
            sample(engine.url, make_prompts(2), rollout_with(recipe, request_timeout_s=1.0, max_retries=1))
        assert time.monotonic() - started < 6
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


def sha256_8(tensor):
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def as_served(state):
    """The parameters as one SGLang rank holds them: fused projections and experts, vocabulary padded to 64 rows."""
    served = {}
    for layer in range(4):
        block = f"model.layers.{layer}."
        qkv = [state.pop(f"{block}self_attn.{x}_proj.weight") for x in "qkv"]
        served[f"{block}self_attn.qkv_proj.weight"] = torch.cat(qkv)
        experts = [
            {x: state.pop(f"{block}mlp.experts.{e}.{x}_proj.weight") for x in ("gate", "up", "down")} for e in range(8)
        ]
        served[f"{block}mlp.experts.w13_weight"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in experts])
        served[f"{block}mlp.experts.w2_weight"] = torch.stack([e["down"] for e in experts])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        served[name] = torch.nn.functional.pad(state.pop(name), (0, 0, 0, 64 - VOCAB))
    return served | state


def test_a_push_over_gloo_replaces_the_weights_and_the_version(engine, recipe, model_dir, tmp_path):
    new_dir = make_model_dir(tmp_path / "new", seed=7)
    old, new = hf_model(model_dir), hf_model(new_dir)
    # The files' names: transformers fuses the experts in memory, and SGLang skips names that it does not know.
    old_state, new_state = (load_file(path / "model.safetensors") for path in (model_dir, new_dir))
    ids = [int(i) for i in torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(0))]
    old_reference, new_reference = hf_logprobs(old, ids), hf_logprobs(new, ids)
    assert (old_reference - new_reference).abs().max() > 1.0
    served = torch.tensor(call(engine.url, "score", ids), dtype=torch.float64)
    assert (served - old_reference).abs().max() < 1e-5
    before = call(engine.url, "weights_checksum")
    assert call(engine.url, "weight_version") == 0
    try:
        push(engine.url, new_state, weight_version=1)
        served = torch.tensor(call(engine.url, "score", ids), dtype=torch.float64)
        assert (served - new_reference).abs().max() < 1e-5
        assert call(engine.url, "weight_version") == 1
        (checksums,) = call(engine.url, "weights_checksum")
        assert checksums != before[0] and set(checksums) == set(before[0])
        assert checksums == {name: sha256_8(tensor) for name, tensor in as_served(dict(new_state)).items()}
        groups = sample(engine.url, make_prompts(4), recipe, weight_version=1)
        assert {v for g in groups for r in g.rollouts for v in r.weight_versions} == {1}
    finally:
        push(engine.url, old_state, weight_version=0)
    assert call(engine.url, "weights_checksum") == before


def test_a_weight_update_that_was_not_begun_is_an_error_with_the_servers_words(engine):
    with pytest.raises(RolloutError, match=r"/update_weights_from_distributed: status 400: .*begin_weight_update"):
        call(engine.url, "update_weights_from_distributed", group_name="none")


def test_a_busy_port_is_refused_before_anything_starts(recipe, model_dir, tmp_path):
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cluster.server_port={port}: port is in use on {HOST}"):
            Engine.start(recipe, model_dir=model_dir, port=port, log_path=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_server_that_dies_while_it_starts_is_an_error_that_quotes_its_log(recipe, tmp_path):
    engine = Engine.start(recipe, model_dir=tmp_path / "nothing-here", port=0, log_path=tmp_path / "log")
    try:
        with pytest.raises(RolloutError, match=r"(?s)ended with status .* before it was ready.*nothing-here"):
            engine.wait_ready(timeout_s=120)
    finally:
        engine.stop()
    assert not session_members(engine.process.pid)


def test_a_server_that_is_late_is_an_error_and_stop_ends_it(recipe, model_dir, tmp_path):
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=tmp_path / "log")
    try:
        with pytest.raises(RolloutError, match=r"was not ready within 1 s \(cluster.start_timeout_s\)"):
            engine.wait_ready(timeout_s=1)
        assert session_members(engine.process.pid)
    finally:
        engine.stop()
    assert not session_members(engine.process.pid)


def test_a_server_killed_during_generation_is_one_error_and_leaves_nothing(recipe, model_dir, tmp_path):
    engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=tmp_path / "log")
    try:
        engine.wait_ready(timeout_s=180)
        assert len(session_members(engine.process.pid)) >= 3
        killer = threading.Timer(1.0, engine.process.kill)
        killer.start()
        started = time.monotonic()
        with pytest.raises(RolloutError, match="prompt [0-9a-f]{64}: no SGLang server was ready for 1 s.*POST http"):
            sample(engine.url, make_prompts(64), rollout_with(recipe, max_response_tokens=100), group_size=32)
        assert 0.5 < time.monotonic() - started < 15
        killer.join()
        assert not engine.is_alive()
    finally:
        engine.stop()
    assert not session_members(engine.process.pid)
    engine.stop()


START_AND_WAIT = """
import sys, time
from pathlib import Path
from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine
recipe = load_recipe(Path(sys.argv[1]), sys.argv[2:4])
engine = Engine.start(recipe, model_dir=Path(recipe.model.hf_dir), port=0, log_path=Path(sys.argv[4]))
print(engine.process.pid, flush=True)
time.sleep(600)
"""


def test_a_server_does_not_outlive_a_starter_that_was_killed(recipe, model_dir, tmp_path):
    from tests.e2e.conftest import RECIPES

    overrides = [f"model.hf_dir={model_dir}", f"model.load={model_dir}"]
    command = [sys.executable, "-c", START_AND_WAIT, str(RECIPES / "gspo-tiny-moe-cpu.yaml"), *overrides]
    with subprocess.Popen([*command, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True) as starter:
        server = int(starter.stdout.readline())
        deadline = time.monotonic() + 60
        while len(session_members(server)) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(session_members(server)) >= 2
        starter.kill()
    deadline = time.monotonic() + 5
    while session_members(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not session_members(server)
