"""megatron-core's torch_dist checkpoint format: shards of every rank to files and back.

Source: megatron-core 0.19.2, dist_checkpointing. Optimizer state is `fully_reshardable`: any layout can load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

from gspo_megatron.mcore.model import Policy, checkpoint_metadata


def write_shards(policy: Policy, optimizer: Any, folder: Path) -> None:
    """Write weights and optimizer state into an existing empty folder. Collective over all ranks."""
    model_state = policy.sharded_state_dict()
    optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=checkpoint_metadata())
    dist_checkpointing.save(
        {"model": model_state, "optimizer": optimizer_state}, str(folder), TorchDistSaveShardedStrategy()
    )


def read_weights(policy: Policy, folder: Path) -> None:
    """Fill the policy's parameters from a checkpoint of any layout. Collective over all ranks."""
    state = {"model": policy.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, str(folder), TorchDistLoadShardedStrategy())
    policy.load_state_dict(loaded["model"])
