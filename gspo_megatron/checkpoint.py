"""Weights and state in and out: the Megatron checkpoint (torch_dist, layout-free), and what a run starts from."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gspo_megatron.checks import is_hf_weights
from gspo_megatron.config import Recipe
from gspo_megatron.convert.hf_io import COMPANIONS, TensorReader, random_tensors
from gspo_megatron.convert.manifest import MANIFEST, Manifest, hash_file, write_manifest
from gspo_megatron.convert.mcore_layout import HF_SUBFOLDER
from gspo_megatron.mcore.model import Policy, load_hf_weights
from gspo_megatron.mcore.torch_dist import hash_shards, read_weights, write_shards
from gspo_megatron.types import TrainState


def save_checkpoint(
    policy: Policy, optimizer: Any, state: TrainState, out_dir: Path, *, companions_from: Path
) -> None:
    """Write weights, optimizer state, counters and a manifest. Collective over all ranks.

    The directory appears under its name only when every rank has written.

    Args:
        policy: its weights.
        optimizer: its state.
        state: counters.
        out_dir: must not exist.
        companions_from: Hugging Face directory whose config and tokenizer files go into hf/, for the way back.

    Raises:
        ValueError: out_dir exists.
    """
    tmp = out_dir.with_name(out_dir.name + ".tmp")

    def prepare() -> None:
        if out_dir.exists():
            raise ValueError(f"{out_dir}: exists; remove it or name another directory")
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)

    policy.parallel.on_rank_0(prepare)
    write_shards(policy, optimizer, tmp)
    files = hash_shards(policy, tmp)

    def publish() -> None:
        (tmp / "train_state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
        (tmp / HF_SUBFOLDER).mkdir()
        for name in COMPANIONS:
            if (companions_from / name).is_file():
                shutil.copyfile(companions_from / name, tmp / HF_SUBFOLDER / name)
        names = (str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.is_file())
        for name in sorted(set(names) - files.keys()):
            files[name] = hash_file(tmp / name)
        write_manifest(tmp / MANIFEST, Manifest(kind="mcore", files=files))
        tmp.rename(out_dir)

    policy.parallel.on_rank_0(publish)


def load_initial_weights(policy: Policy, optimizer: Any, recipe: Recipe, load: str | Path) -> None:
    """Weights of a Hugging Face directory or a Megatron checkpoint, or drawn from the seed; equal for every layout.

    Collective over all ranks.

    Args:
        policy: its parameters are filled.
        optimizer: its master copies follow.
        recipe: its seed and initializer_range draw.
        load: as model.load; the cold start's directory where there was one.
    """
    if load == "random":
        tensors = random_tensors(policy.ops, std=policy.config.init_method_std, seed=recipe.seed)
        load_hf_weights(policy, optimizer, dict(tensors), "random")
    elif is_hf_weights(Path(load)):
        load_hf_weights(policy, optimizer, TensorReader(Path(load), dtype=policy.config.params_dtype), str(load))
    else:
        load_weights(policy, optimizer, Path(load))


def load_weights(policy: Policy, optimizer: Any, checkpoint_dir: Path) -> None:
    """Load the weights of a checkpoint, written on any layout, and refresh the optimizer's master copies.

    Collective over all ranks.

    Args:
        policy: its parameters are filled.
        optimizer: its master copies follow.
        checkpoint_dir: of save_checkpoint, or converted, with latest_checkpointed_iteration.txt or without.

    Raises:
        ConversionError: as read_weights.
    """
    read_weights(policy, checkpoint_dir)
    optimizer.reload_model_params()
