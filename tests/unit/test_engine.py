"""What a server is started with."""

import socket
from pathlib import Path

import pytest

from gspo_megatron import engine as engine_module
from gspo_megatron.config import ConfigError, load_recipe
from gspo_megatron.engine import server_arguments, server_environment, take_port

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe_with(*overrides):
    hf_dir = f"model.hf_dir={RECIPES / 'tiny-moe'}"
    return load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [hf_dir, *overrides])


def arguments(*overrides):
    return server_arguments(recipe_with(*overrides), model_dir=Path("m"), port=7, weight_version=4)


def value_of(flag, given):
    assert given.count(flag) == 1
    return given[given.index(flag) + 1]


def test_arguments_come_from_the_recipe():
    given = arguments("seed=17", "model.dtype=bfloat16", "rollout.sglang={max_total_tokens: 99}")
    wanted = {
        "--model-path": "m",
        "--host": "127.0.0.1",
        "--port": "7",
        "--device": "cpu",
        "--dtype": "bfloat16",
        "--random-seed": "17",
        "--weight-version": "4",
        "--max-total-tokens": "99",
        "--attention-backend": "torch_native",
    }
    assert {flag: value_of(flag, given) for flag in wanted} == wanted
    assert "--sleep-on-idle" in given


@pytest.mark.parametrize(
    "dtype, fp32_lm_head, is_asked_for",
    [("bfloat16", "true", True), ("bfloat16", "false", False), ("float32", "true", False)],
)
def test_server_multiplies_by_its_head_as_the_trainer_does(dtype, fp32_lm_head, is_asked_for):
    given = arguments(f"model.dtype={dtype}", f"model.fp32_lm_head={fp32_lm_head}")
    assert ("--enable-fp32-lm-head" in given) == is_asked_for


def test_server_returns_routes_where_the_trainer_replays_them():
    flag = "--enable-return-routed-experts"
    given = {replay: arguments(f"loss.routing_replay={replay}") for replay in ("none", "r2", "r3")}
    assert {replay: flag in found for replay, found in given.items()} == {"none": False, "r2": False, "r3": True}


def test_colocated_server_is_asked_to_make_its_memory_releasable():
    colocated = ("device=cuda", "cluster.placement=colocated", "cluster.weight_transport=ipc")
    assert "--enable-memory-saver" in arguments(*colocated)
    assert "--enable-memory-saver" not in arguments("device=cuda")


def test_a_key_that_the_user_set_is_not_overridden():
    given = arguments("rollout.sglang={attention_backend: intel_amx, sleep_on_idle: false, log_level_http: info}")
    assert value_of("--attention-backend", given) == "intel_amx"
    assert value_of("--log-level-http", given) == "info"
    assert "--sleep-on-idle" not in given


def test_values_of_every_kind_become_arguments():
    given = arguments(
        "rollout.sglang={disable_radix_cache: true, quantization: null, cuda_graph_bs_decode: [1, 2], "
        "model_loader_extra_config: {a: 1}}"
    )
    assert "--disable-radix-cache" in given and "--quantization" not in given
    at = given.index("--cuda-graph-bs-decode")
    assert given[at : at + 3] == ["--cuda-graph-bs-decode", "1", "2"]
    assert value_of("--model-loader-extra-config", given) == '{"a": 1}'


def test_cpu_server_sees_no_gpu_and_one_thread():
    environment = server_environment(
        recipe_with(), {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "8"}
    )
    assert environment["PATH"] == "/bin"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["GSPO_MEGATRON_DEVICE"] == "cpu"


def test_an_inherited_sglang_variable_is_refused_by_name():
    with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=1: .*unset SGLANG_RETURN_ORIGINAL_LOGPROB"):
        server_environment(recipe_with(), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})
    with pytest.raises(ConfigError, match="SGLANG_USE_CPU_ENGINE=0"):
        server_environment(recipe_with(), {"SGLANG_USE_CPU_ENGINE": "0"})
    assert server_environment(recipe_with(), {"SGLANG_USE_CPU_ENGINE": "1"})["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_free_port_is_one_that_no_outgoing_connection_gets():
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {take_port("127.0.0.1", 0) for _ in range(20)}
    assert len(ports) > 1
    assert all(1024 < port < first_outgoing for port in ports)
    with pytest.raises(ConfigError, match="cluster.host=nowhere.invalid: is no address of this machine"):
        take_port("nowhere.invalid", 0)


def test_a_taken_port_is_not_offered_as_free(monkeypatch):
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    monkeypatch.setattr(engine_module, "FIRST_FREE_PORT", first_outgoing - 1)
    assert take_port("127.0.0.1", 0) == first_outgoing - 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first_outgoing - 1))
        taken.listen()
        assert take_port("127.0.0.1", 0) != first_outgoing - 1
