"""What the recipe says about devices and processes, before anything is started. Imports no torch."""

from __future__ import annotations

from typing import Any

from gspo_megatron.config import Recipe

_CAPTURED = "captures the weights' addresses, which offloading changes"
_UNFIT_FOR_COLOCATED: dict[str, tuple[Any, str]] = {
    "rollout.sglang.enable_weights_cpu_backup": (
        False,
        "keeps weights in host memory while a server sleeps, which the push then overwrites",
    ),
    "rollout.sglang.weight_cache_mode": ("off", "SGLang releases no weights that a cache holds"),
    "rollout.sglang.base_gpu_id": (0, "moves a server off the devices that it shares with the trainer"),
    "rollout.sglang.gpu_id_step": (1, "moves a server off the devices that it shares with the trainer"),
    "model.mcore.fp8_param": (False, "makes parameters that are no plain memory, which the trainer cannot offload"),
    "model.mcore.cuda_graph_impl": ("none", _CAPTURED),
    "model.mcore.enable_cuda_graph": (False, _CAPTURED),
    "model.mcore.external_cuda_graph": (False, _CAPTURED),
}
"""Keys passed through to upstream -> the one value that colocated servers permit, and why."""
_UNFIT_FOR_PUSH: dict[str, tuple[Any, str]] = {
    "quantization": (None, "would take pushed weights without their scales; use rollout.serve_fp8"),
    "pp_size": (1, "stages would have the same ranks in a weight push; use 1"),
    "speculative_algorithm": (None, "a push cannot verify the weights of a draft model; remove it"),
}
"""Keys of rollout.sglang -> the one value that a weight push permits, and why."""


def check_placement(recipe: Recipe) -> list[str]:
    """Whether servers can share the trainer's devices, where the recipe says so."""
    c, tp_size = recipe.cluster, recipe.rollout.sglang.get("tp_size", 1)
    if c.placement != "colocated":
        if c.weight_transport != "ipc":
            return []
        return ["cluster.weight_transport=ipc: hands over memory of shared devices; wants placement: colocated"]
    if recipe.device == "cpu":
        return ["cluster.placement=colocated: SGLang releases memory of CUDA devices only; use separate on the CPU"]
    problems = []
    if c.max_policy_lag > 0:
        problems.append(
            f"cluster.max_policy_lag={c.max_policy_lag}: colocated servers sleep while the trainer trains and cannot "
            "sample ahead; use 0, or placement: separate"
        )
    if c.weight_transport != "ipc":
        problems.append(
            f"cluster.weight_transport={c.weight_transport}: colocated servers want ipc; NCCL takes no two ranks of a "
            "group on one device, and files would be slow"
        )
    if type(tp_size) is int and tp_size >= 1:
        if c.trainer_ranks % tp_size:
            problems.append(
                f"rollout.sglang.tp_size={tp_size}: does not divide cluster.trainer_ranks={c.trainer_ranks}, whose "
                "devices colocated servers share out"
            )
        if c.rollout_servers * tp_size > c.trainer_ranks:
            problems.append(
                f"cluster.rollout_servers={c.rollout_servers}: times rollout.sglang.tp_size={tp_size} is more than "
                f"cluster.trainer_ranks={c.trainer_ranks}, whose devices colocated servers share out"
            )
    given = {f"rollout.sglang.{k}": v for k, v in recipe.rollout.sglang.items()}
    given |= {f"model.mcore.{k}": v for k, v in recipe.model.mcore.items()}
    problems += [
        f"{key}={given[key]}: with cluster.placement: colocated wants {permitted}: {why}"
        for key, (permitted, why) in _UNFIT_FOR_COLOCATED.items()
        if given.get(key, permitted) != permitted
    ]
    return problems


def check_push(recipe: Recipe) -> list[str]:
    """Whether weights can be pushed as the recipe says."""
    c, r = recipe.cluster, recipe.rollout
    problems = []
    if r.serve_fp8 and recipe.device == "cpu":
        problems.append("rollout.serve_fp8: SGLang serves FP8 on CUDA devices only; set it to false on the CPU")
    problems += [
        f"rollout.sglang.{key}={r.sglang[key]}: {why}"
        for key, (permitted, why) in _UNFIT_FOR_PUSH.items()
        if r.sglang.get(key, permitted) != permitted
    ]
    if r.sglang.get("dp_size", 1) != 1 and not r.sglang.get("enable_dp_attention"):
        problems.append(
            f"rollout.sglang.dp_size={r.sglang['dp_size']}: SGLang takes no weights so; use cluster.rollout_servers"
        )
    if c.weight_port and c.server_port <= c.weight_port < c.server_port + c.rollout_servers:
        problems.append(f"cluster.weight_port={c.weight_port}: is the port of a server; use another one, or 0")
    return problems
