"""Trainer ranks that push changing weights to running servers; runs in tests.distributed.spawn."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gspo_megatron import weight_sync as weight_sync_module
from gspo_megatron.engine import RolloutError
from gspo_megatron.fleet import Fleet
from gspo_megatron.mcore.rank import OtherRankFailed
from gspo_megatron.transports import Bucket
from gspo_megatron.weight_sync import WeightSync
from tests.distributed.policy_worker import build, hf_tensors

EP2 = ["cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2"]
BUCKET_BYTES = 60_000
"""The tiny model makes 13 buckets of it."""
Moment = Literal["before", "joining", "bucket", "verify"]


def change(policy: Any, seed: int) -> None:
    """Other weights, the same on ranks that hold the same parameter."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2**16, generator=generator)
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter += 0.05 * noise[: parameter.numel()].view(parameter.shape)


def push_versions(rank: int, folder: Path, overrides: list[str], versions: list[int]) -> dict[int, dict[str, Tensor]]:
    """Push each version with weights of its own to the servers announced in a folder.

    Returns:
        On rank 0 the Hugging Face tensors of each version.
    """
    weight_sync_module.BUCKET_BYTES = BUCKET_BYTES
    recipe, policy, _ = build([*EP2, *overrides])
    fleet = Fleet(folder) if rank == 0 else None
    weight_sync = WeightSync(policy, recipe, fleet)
    sent = {}
    for version in versions:
        change(policy, version)
        weight_sync.push(version)
        sent[version] = hf_tensors(policy)
        if fleet is not None:
            assert fleet.wanting() == [] and fleet.weight_version == version
    weight_sync.close()
    return sent


def fp8_stream(rank: int, overrides: list[str]) -> list[tuple[str, Tensor]]:
    """On rank 0 what is pushed to servers that serve FP8, payloads as bytes, after the weights it is made of."""
    recipe, policy, _ = build([*EP2, *overrides])
    recipe = replace(recipe, rollout=replace(recipe.rollout, serve_fp8=True))  # refused with device: cpu
    weight_sync = WeightSync(policy, recipe, None)
    pushed = [item for bucket in weight_sync._buckets() for item in bucket]
    # torch cannot send FP8 between processes, nor views of bytes.
    pushed = [(name, t.view(torch.uint8) if t.itemsize == 1 else t) for name, t in pushed]
    return [(name, t.clone()) for name, t in [*hf_tensors(policy).items(), *pushed]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal to processes at a moment of a push."""

    moment: Moment
    signal_number: int
    pids: list[int]

    def strike(self) -> None:
        for pid in self.pids:
            os.kill(pid, self.signal_number)


@dataclass(kw_only=True)
class Outcome:
    """What became of a push with a fault."""

    error: str = ""
    seconds: float = 0.0
    ready: tuple[str, ...] = ()
    """Names of servers, after the push."""
    rejected: str = ""
    """What the trainer had against servers."""
    ready_in_the_end: tuple[str, ...] = ()
    """After bring_up, where stopped processes went on."""
    tensors: dict[str, Tensor] | None = None


def push_with_fault(rank: int, folder: Path, overrides: list[str], fault: Fault) -> Outcome:
    """Push version 0 to all servers, then version 1 with the fault; let stopped processes go on and bring them up."""
    weight_sync_module.BUCKET_BYTES = BUCKET_BYTES
    recipe, policy, _ = build([*EP2, *overrides])
    fleet = Fleet(folder) if rank == 0 else None
    weight_sync = WeightSync(policy, recipe, fleet)
    weight_sync.push(0)
    change(policy, 1)
    if fleet is not None:
        _arm(weight_sync, fault)
    outcome = Outcome()
    start_s = time.monotonic()
    try:
        weight_sync.push(1)
    except (RolloutError, OtherRankFailed) as error:
        outcome.error = str(error)
    outcome.seconds = time.monotonic() - start_s
    if fleet is not None:
        outcome.ready = tuple(server.name for server in fleet.ready())
        outcome.rejected = " | ".join(f"{s.name}: {reason}" for s, reason in weight_sync._failed.items())
        if fault.signal_number == signal.SIGSTOP:
            for pid in fault.pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(2)
    if not outcome.error:
        for _ in range(2):  # a server that was stopped may have to get through what it was asked first
            weight_sync.bring_up()
        outcome.tensors = hf_tensors(policy)
        if fleet is not None:
            outcome.ready_in_the_end = tuple(server.name for server in fleet.ready())
    weight_sync.close()
    return outcome


def _arm(weight_sync: WeightSync, fault: Fault) -> None:
    """Let the fault happen once, at its moment of the next push."""
    struck: list[bool] = []

    def once() -> None:
        if not struck:
            struck.append(True)
            fault.strike()

    if fault.moment == "before":
        once()
    elif fault.moment == "joining":
        weight_sync._transport._servers = []  # so that a group is built
        _before(weight_sync._transport, "_connect", once)
    elif fault.moment == "bucket":
        original = weight_sync._buckets

        def buckets() -> Iterator[Bucket]:
            for i, bucket in enumerate(original()):
                if i == 5:
                    once()
                yield bucket

        weight_sync._buckets = buckets  # type: ignore[method-assign]
    else:
        check = weight_sync_module.check_received

        def check_after(*args: Any) -> None:
            once()
            check(*args)

        weight_sync_module.check_received = check_after


def _before(owner: Any, name: str, act: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def both(*args: Any) -> Any:
        act()
        return original(*args)

    setattr(owner, name, both)
