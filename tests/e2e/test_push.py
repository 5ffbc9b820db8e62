"""Weight pushes to real servers: what they hold afterwards, and what becomes of one that fails."""

import pytest
from safetensors.torch import load_file

from gspo_megatron.engine import RolloutError
from gspo_megatron.fleet import Server, announce
from gspo_megatron.weight_sync import check_received
from tests.distributed.spawn import spawn
from tests.e2e.push_worker import push_versions
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
