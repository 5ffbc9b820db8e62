"""Weight pushes to real servers: what they hold afterwards, and what becomes of one that fails."""

import signal

import pytest
import torch
from safetensors.torch import load_file

from gspo_megatron.engine import Engine, RolloutError
from gspo_megatron.fleet import Server, announce, read_restart_request
from gspo_megatron.quantize import quantize_blockwise
from gspo_megatron.weight_sync import check_received
from tests.distributed.spawn import spawn
from tests.e2e.push_worker import Fault, fp8_stream, push_versions, push_with_fault
from tests.e2e.test_sglang_server import as_served, call, make_prompts, push, rollout_with, sample, sha256_8


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "servers"


@pytest.fixture
def restored(engine, model_dir):
    """The session's server, which gets the weights back that other tests expect."""
    yield engine
    push(engine.url, load_file(model_dir / "model.safetensors"), weight_version=0)


def in_run(tmp_path, *overrides):
    return [f"output_dir={tmp_path}", *overrides]


def held(url):
    """Upstream's own checksums of a server's parameters."""
    (checksums,) = call(url, "weights_checksum")
    return checksums


def exported(tensors):
    return {name: sha256_8(tensor) for name, tensor in as_served(dict(tensors)).items()}


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_pushed_server_holds_what_the_trainer_exports_and_says_so(restored, folder, tmp_path, transport):
    announce(folder, Server(name="server_0", url=restored.url, incarnation=0))
    overrides = in_run(tmp_path, f"cluster.weight_transport={transport}")
    sent, _ = spawn(push_versions, 2, folder, overrides, [0, 3, 4], timeout_s=120)
    assert held(restored.url) == exported(sent[4]) != exported(sent[3])
    assert call(restored.url, "weight_version") == 4
    assert not (tmp_path / "tiny-moe" / "pushed_weights").exists()


def send(url, tensors):
    """Update a server from files' tensors, without WeightSync; what it says that it received."""
    push(url, tensors, weight_version=9)
    (received,) = call(url, "received_weights")
    return received


def test_server_names_what_it_was_not_given_and_what_it_was_given_for_nothing(restored, model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    whole = send(restored.url, tensors)
    check_received([whole], whole)
    assert set(whole) == set(tensors)
    lost, norm = "model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"
    received = send(restored.url, {n: t for n, t in tensors.items() if n not in (lost, norm)})
    assert set(received) == set(tensors) - {lost, norm} | {
        "unfilled model.layers.1.mlp.experts.w13_weight",
        f"unfilled {norm}",
    }
    unknown = "model.layers.1.mlp.experts.8.up_proj.weight"  # skipped by SGLang without a word
    received = send(restored.url, tensors | {unknown: tensors[lost]})
    assert set(received) == {*tensors, unknown}
    with pytest.raises(RolloutError, match=f"{unknown} was not sent"):
        check_received([received], whole)
    changed = tensors[lost].clone()
    changed[0, 0] += 1.0e-3
    with pytest.raises(RolloutError, match=f"rank 0: {lost} differs$"):
        check_received([send(restored.url, tensors | {lost: changed})], whole)


def test_server_that_has_half_of_the_weights_answers_nothing_that_is_taken(restored, recipe, model_dir):
    tensors = load_file(model_dir / "model.safetensors")
    send(restored.url, dict(list(tensors.items())[: len(tensors) // 2]))
    with pytest.raises(RolloutError, match="log-prob"):
        sample(restored.url, make_prompts(2), rollout_with(recipe, max_retries=0), weight_version=9)


def test_push_goes_on_with_the_others_when_a_server_is_killed_in_the_middle(
    restored, recipe, model_dir, folder, tmp_path
):
    log_path = tmp_path / "victim.log"
    victim = Engine.start(recipe, model_dir=model_dir, port=0, log_path=log_path, load_format="dummy")
    try:
        victim.wait_ready(timeout_s=180)
        for name, url in (("server_0", restored.url), ("server_1", victim.url)):
            announce(folder, Server(name=name, url=url, incarnation=0))
        fault = Fault(moment="bucket", signal_number=signal.SIGKILL, pids=[victim.process.pid])
        overrides = in_run(tmp_path, "cluster.probe_timeout_s=20")
        outcome, other = spawn(push_with_fault, 2, folder, overrides, fault, timeout_s=150)
        assert outcome.error == other.error == ""
        assert outcome.ready == outcome.ready_in_the_end == ("server_0",)
        assert outcome.rejected.startswith("server_1: ")
        assert held(restored.url) == exported(outcome.tensors)
        assert call(restored.url, "weight_version") == 1
        assert read_restart_request(folder, Server(name="server_1", url=victim.url, incarnation=0))
        sample(restored.url, make_prompts(2), recipe, weight_version=1)  # it is not paused
    finally:
        victim.stop()


def test_fp8_servers_are_sent_freshly_quantised_weights_with_their_scales(tmp_path):
    stream, _ = spawn(fp8_stream, 2, in_run(tmp_path), timeout_s=120)
    count = next(i for i, (name, _) in enumerate(stream) if i and name == stream[0][0])
    weights, pushed = dict(stream[:count]), dict(stream[count:])
    scales = {name for name in pushed if name.endswith("_scale_inv")}
    assert set(pushed) - scales == set(weights)
    quantised = {name.removesuffix("_scale_inv") for name in scales}
    assert "model.layers.2.mlp.experts.4.gate_proj.weight" in quantised
    assert "model.layers.2.mlp.gate.weight" not in quantised
    for name, weight in weights.items():
        if name not in quantised:
            assert torch.equal(pushed[name], weight)
            continue
        payload, scale_inv = quantize_blockwise(weight)
        assert torch.equal(pushed[name], payload.view(torch.uint8))
        assert torch.equal(pushed[name + "_scale_inv"], scale_inv)
