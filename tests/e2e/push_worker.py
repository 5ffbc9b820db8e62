"""Trainer ranks that push changing weights to running servers; runs in tests.distributed.spawn."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.fleet import Fleet
from gspo_megatron.weight_sync import WeightSync
from tests.distributed.policy_worker import build, hf_tensors

EP2 = ["cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2"]


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
