"""Which CUDA devices the trainer and each server get, and what their processes are told."""

from pathlib import Path

import pytest

from gspo_megatron.config import ConfigError, load_recipe
from gspo_megatron.engine import server_environment
from gspo_megatron.process import assign_devices, trainer_environment

RECIPES = Path(__file__).parents[2] / "recipes"
CUDA = ("device=cuda", "cluster.trainer_ranks=2", "cluster.rollout_servers=2")


def recipe_with(*overrides):
    return load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [f"model.hf_dir={RECIPES / 'tiny-moe'}", *overrides])


def test_trainer_and_servers_share_no_device():
    assert assign_devices(recipe_with(*CUDA), {}) == ["0,1", "2", "3"]
    two_each = recipe_with(*CUDA, "rollout.sglang={tp_size: 2}")
    assert assign_devices(two_each, {}) == ["0,1", "2,3", "4,5"]


def test_devices_come_from_the_inherited_list_in_its_order():
    recipe = recipe_with(*CUDA)
    assert assign_devices(recipe, {"CUDA_VISIBLE_DEVICES": "7,5,GPU-a,1,0"}) == ["7,5", "GPU-a", "1"]


def test_too_few_devices_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="2 CUDA devices for trainer_ranks and 2 x 1 for .* lists 3"):
        assign_devices(recipe_with(*CUDA), {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match="lists 0"):
        assign_devices(recipe_with(*CUDA), {"CUDA_VISIBLE_DEVICES": ""})


COLOCATED = ("device=cuda", "cluster.placement=colocated", "cluster.weight_transport=ipc", "cluster.trainer_ranks=4")


def test_colocated_servers_take_the_trainers_devices_one_after_the_other():
    two = recipe_with(*COLOCATED, "cluster.rollout_servers=2")
    assert assign_devices(two, {}) == ["0,1,2,3", "0", "1"]
    two_each = recipe_with(*COLOCATED, "cluster.rollout_servers=2", "rollout.sglang={tp_size: 2}")
    assert assign_devices(two_each, {"CUDA_VISIBLE_DEVICES": "7,5,GPU-a,1,0"}) == ["7,5,GPU-a,1", "7,5", "GPU-a,1"]
    with pytest.raises(ConfigError, match="wants 4 CUDA devices for trainer_ranks, CUDA_VISIBLE_DEVICES lists 3"):
        assign_devices(two, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_allocator_that_a_colocated_server_cannot_work_with_is_refused():
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        inherited = {name: "max_split_size_mb:512, expandable_segments:True"}
        with pytest.raises(ConfigError, match=f"environment: {name}=.*cannot release memory of expandable segments"):
            server_environment(recipe_with(*COLOCATED), inherited)
        server_environment(recipe_with(*CUDA), inherited)
        server_environment(recipe_with(*COLOCATED), {name: "expandable_segments:False"})


def test_on_cpu_nobody_gets_a_device():
    recipe = recipe_with("cluster.rollout_servers=2")
    assert assign_devices(recipe, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == ["", "", ""]


def test_processes_see_their_own_devices_only():
    inherited = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    trainer = trainer_environment("cuda", inherited, cuda_devices="0,1")
    server = server_environment(recipe_with(*CUDA), inherited, cuda_devices="2")
    assert (trainer["CUDA_VISIBLE_DEVICES"], server["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2")


def test_trainer_agrees_with_the_server_on_how_nccl_allocates():
    # SGLang takes NCCL_CUMEM_ENABLE=0 where it inherits none; one NCCL group wants one value.
    assert trainer_environment("cuda", {}, cuda_devices="0")["NCCL_CUMEM_ENABLE"] == "0"
    assert trainer_environment("cuda", {"NCCL_CUMEM_ENABLE": "1"}, cuda_devices="0")["NCCL_CUMEM_ENABLE"] == "1"


def test_trainer_and_servers_bind_the_interface_that_the_recipe_names():
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    inherited = dict.fromkeys(names, "eth9")
    for interface in ("lo", None):
        recipe = recipe_with(*([f"cluster.network_interface={interface}"] if interface else []))
        both = (
            trainer_environment("cpu", inherited, network_interface=recipe.cluster.network_interface),
            server_environment(recipe, inherited),
        )
        assert [[env[name] for name in names] for env in both] == [[interface or "eth9"] * 2] * 2


def test_unknown_interface_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="cluster.network_interface=eth99: this machine has .*lo"):
        server_environment(recipe_with("cluster.network_interface=eth99"), {})
