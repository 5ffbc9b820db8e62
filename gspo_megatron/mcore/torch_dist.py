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

from gspo_megatron.convert.manifest import FileRecord, Manifest, hash_file, verify_files
from gspo_megatron.convert.mcore_io import CONTENT_METADATA, McoreCheckpoint
from gspo_megatron.convert.ops import ConversionError, TensorMap, mcore_problems, raise_problems
from gspo_megatron.mcore.model import Policy, checkpoint_metadata


def write_shards(policy: Policy, optimizer: Any, folder: Path) -> None:
    """Write weights and optimizer state into an existing empty folder. Collective over all ranks."""
    model_state = policy.sharded_state_dict()
    optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=False, metadata=checkpoint_metadata())
    dist_checkpointing.save(
        {"model": model_state, "optimizer": optimizer_state},
        str(folder),
        TorchDistSaveShardedStrategy(),
        content_metadata=dict(CONTENT_METADATA),
    )


def hash_shards(policy: Policy, folder: Path) -> dict[str, FileRecord]:
    """Records of the data files, each hashed by the rank that wrote it. Collective over all ranks."""
    own = sorted(folder.glob(f"__{policy.parallel.rank}_*.distcp"))
    by_rank = policy.parallel.on_every_rank(lambda: {path.name: hash_file(path) for path in own})
    return {name: record for records in by_rank for name, record in records.items()}


def read_weights(policy: Policy, path: Path) -> None:
    """Fill the policy's parameters from a checkpoint of any layout. Collective over all ranks.

    megatron-core unpickles the metadata: before that the whole checkpoint is verified, each file by one rank.

    Args:
        policy: its parameters are filled.
        path: as McoreCheckpoint's; a converted file or one of save_checkpoint.

    Raises:
        ConversionError: no finished checkpoint, one that does not fit its manifest, or one of another model; on the
            rank that found it, OtherRankFailed on the others.
    """
    rank, world_size = policy.parallel.rank, policy.parallel.world_size

    def check() -> str:
        with McoreCheckpoint(path, verify=False) as checkpoint:
            _check_fit(checkpoint, policy.ops)
            _ = checkpoint.common  # upstream unpickles it too, and without restriction
            assert checkpoint.manifest is not None  # it is required
            verify_files(checkpoint.folder, checkpoint.manifest, names=_share(checkpoint.manifest, rank, world_size))
            return str(checkpoint.folder)

    folder = policy.parallel.on_every_rank(check)[rank]
    state = {"model": policy.sharded_state_dict()}
    loaded = dist_checkpointing.load(state, folder, TorchDistLoadShardedStrategy())
    policy.load_state_dict(loaded["model"])


def _share(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that a rank verifies: large ones first, in turn."""
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].num_bytes, name))
    return by_size[rank::world_size]


def _check_fit(checkpoint: McoreCheckpoint, ops: list[TensorMap]) -> None:
    """megatron-core says nothing about tensors that the model does not ask for."""
    if checkpoint.is_stacked:
        raise ConversionError(
            f"{checkpoint.folder}: stacks all layers in one tensor, as Megatron-LM does; "
            "convert it to Hugging Face, and load that"
        )
    found = {name: shape for name, (_, shape) in checkpoint.tensors.items()}
    raise_problems(f"{checkpoint.folder}: tensors do not fit the model", mcore_problems(ops, found))
