"""Child processes that end with their parent, and the trainer's torchrun."""

from __future__ import annotations

import ctypes
import itertools
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from gspo_megatron.config import ConfigError, Recipe

PR_SET_PDEATHSIG = 1


class RunError(RuntimeError):
    """A started process failed; the message says which, why, and where its log is."""


def die_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process a signal when its parent ends, however it ends. Survives exec."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal_number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


class Torchrun:
    """torchrun with its ranks. Rank output on stdout is the console's, everything on stderr goes to the log."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        num_ranks: int,
        host: str,
        port: int,
        environment: Mapping[str, str],
        log_path: Path,
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        rendezvous = ["--nproc-per-node", str(num_ranks), "--master-addr", host, "--master-port", str(port)]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--module", module, *arguments],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def poll(self) -> int | None:
        """Exit status, None while it runs."""
        return self.process.poll()

    def stop(self, limit_s: float = 10.0) -> None:
        """End torchrun and its ranks, which run in sessions of their own. Safe to call twice."""
        if self.process.poll() is not None:
            return
        tree = [psutil.Process(self.process.pid)]
        tree += tree[0].children(recursive=True)
        self.process.terminate()  # torchrun passes it on
        _, alive = psutil.wait_procs(tree, timeout=limit_s)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=limit_s)
        self.process.wait()


def assign_devices(recipe: Recipe, inherited: Mapping[str, str]) -> list[str]:
    """CUDA_VISIBLE_DEVICES of the trainer, then of each server of this node.

    The trainer's ranks take the first devices, one each; every server the next ones, so that no device is given twice.
    Colocated servers take the trainer's devices, each the next tp_size of them. With `device: cpu` all are "".

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES is inherited and lists fewer devices than the recipe wants.
    """
    cluster = recipe.cluster
    counts = [recipe.ranks_per_server] * cluster.rollout_servers
    if recipe.device == "cpu":
        return ["", *("" for _ in counts)]
    is_shared = cluster.placement == "colocated"
    wanted = cluster.trainer_ranks + (0 if is_shared else sum(counts))
    devices = [str(i) for i in range(wanted)]
    if "CUDA_VISIBLE_DEVICES" in inherited:
        devices = [name for name in inherited["CUDA_VISIBLE_DEVICES"].split(",") if name]
    if len(devices) < wanted:
        servers = f" and {cluster.rollout_servers} x {recipe.ranks_per_server} for rollout_servers"
        raise ConfigError(
            f"cluster: wants {cluster.trainer_ranks} CUDA devices for trainer_ranks{'' if is_shared else servers}, "
            f"CUDA_VISIBLE_DEVICES lists {len(devices)}; "
            "ask for more devices, or set fewer ranks, servers or rollout.sglang.tp_size"
        )
    remaining = iter(devices if is_shared else devices[cluster.trainer_ranks :])
    of_trainer = ",".join(devices[: cluster.trainer_ranks])
    return [of_trainer, *(",".join(itertools.islice(remaining, count)) for count in counts)]


def interface_variables(network_interface: str | None) -> dict[str, str]:
    """What binds gloo and NCCL to cluster.network_interface; null leaves them as inherited.

    Raises:
        ConfigError: this machine has no such interface.
    """
    if network_interface is None:
        return {}
    names = [name for _, name in socket.if_nameindex()]
    if network_interface not in names:
        raise ConfigError(
            f"cluster.network_interface={network_interface}: this machine has {', '.join(names)}; "
            "set one of them, or null"
        )
    return {"GLOO_SOCKET_IFNAME": network_interface, "NCCL_SOCKET_IFNAME": network_interface}


def trainer_environment(
    device: str, inherited: Mapping[str, str], *, cuda_devices: str = "", network_interface: str | None = None
) -> dict[str, str]:
    """The ranks' environment: what is inherited, plus what the device needs.

    Args:
        device: the recipe's.
        inherited: this process's environment.
        cuda_devices: what the ranks see, as CUDA_VISIBLE_DEVICES has it.
        network_interface: the recipe's.

    Raises:
        ConfigError: an inherited NVTE_* variable would change what Transformer Engine computes, or the interface is
            none of this machine's.
    """
    foreign = sorted(name for name in inherited if name.startswith("NVTE_"))
    if foreign:
        raise ConfigError(f"environment: {', '.join(foreign)}: changes results and is not in the recipe; unset it")
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    own |= {"CUDA_VISIBLE_DEVICES": cuda_devices, **interface_variables(network_interface)}
    if device == "cpu":
        own |= {"THP_MEM_ALLOC_ENABLE": "1"}  # as engine.server_environment
    if device == "cuda":
        own |= {
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core's overlap of tensor-parallel communication
            # SGLang runs with 0 unless told otherwise, and ranks of one NCCL group (the weight push) must agree.
            "NCCL_CUMEM_ENABLE": inherited.get("NCCL_CUMEM_ENABLE", "0"),
        }
    return {**inherited, **own}
