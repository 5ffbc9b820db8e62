"""megatron-core's torch_dist checkpoint format, written and read without a process group, a model or Megatron.

Source: megatron-core 0.19.2, dist_checkpointing; torch 2.13, distributed.checkpoint. A checkpoint is a folder of data
files, each a row of items (a box of a tensor as torch.save writes it), and `.metadata`, which says where each is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.manifest import FileRecord, TensorRecord
from gspo_megatron.convert.ops import Box, Shape

MAX_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Item:
    """Where a box of a tensor lies in a data file. Ints, text and tuples of them only: asdict() is JSON."""

    mcore_name: str
    box: Box
    file: str
    """Name within the checkpoint's folder."""
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """What a finished data file holds; pickles, and asdict() is JSON (item_of, records back: DataFile.from_json)."""

    file: str
    record: FileRecord
    items: tuple[Item, ...]
    tensors: Mapping[str, TensorRecord]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DataFile:
        """From what json.loads(json.dumps(asdict(data_file))) gives."""
        raise NotImplementedError


def data_file_name(index: int) -> str:
    """Name of the index-th data file, from 0. (`__0_0.distcp` is taken: it has the common state.)"""
    return f"__{index + 1}_0.distcp"


def plan_chunks(shape: Shape, dtype: torch.dtype, *, max_bytes: int = MAX_CHUNK_BYTES) -> list[Box]:
    """Boxes of a tensor, in row-major order, that are stored one by one.

    Stacked experts [E, ...]: one per expert; rows in bands; cut further where a piece is above max_bytes.
    """
    raise NotImplementedError


class DataFileWriter:
    """Writes one data file: `with DataFileWriter(path) as writer: writer.write_tensor(...)`, then writer.result."""

    result: DataFile
    """After the with block."""

    def __init__(self, path: Path) -> None:
        """Create or overwrite path; its name is the item's file, the folder that of the checkpoint."""
        raise NotImplementedError

    def __enter__(self) -> DataFileWriter:
        """Open."""
        raise NotImplementedError

    def __exit__(self, *error: Any) -> None:
        """Finish: fsync, fill result. After an error: close, leave the incomplete file to the caller."""
        raise NotImplementedError

    def write_tensor(
        self, mcore_name: str, shape: Shape, dtype: torch.dtype, read_box: Callable[[Box], Tensor]
    ) -> None:
        """Write one whole tensor, chunk by chunk.

        Args:
            mcore_name: its key.
            shape: global.
            dtype: of the file; read_box's must be the same.
            read_box: box -> that box; called once per box of plan_chunks, in its order; one is held at a time.

        Raises:
            ConversionError: read_box gave another shape or dtype, the name occurs twice, or the disk refused.
        """
        raise NotImplementedError


def write_checkpoint_metadata(folder: Path, data_files: Iterable[DataFile], common: Mapping[str, Any]) -> list[str]:
    """Write what makes a folder of data files a checkpoint: common state, `.metadata`, `metadata.json`.

    Args:
        folder: holds the data files.
        data_files: results of their writers; each tensor in exactly one.
        common: plain Python values, see common_state.

    Returns:
        The names of the files that it wrote, for the manifest (hash_file them).

    Raises:
        ConversionError: a tensor occurs in two files.
    """
    raise NotImplementedError


def common_state(*, iteration: int = 0) -> dict[str, Any]:
    """What a checkpoint of weights alone has as common state."""
    raise NotImplementedError


def resolve_folder(path: Path) -> Path:
    """The iteration folder: of B through latest_checkpointed_iteration.txt ("release" too), else path itself.

    Raises:
        ConversionError: not a torch_dist checkpoint.
    """
    raise NotImplementedError


class McoreCheckpoint:
    """A torch_dist checkpoint, read box by box."""

    folder: Path
    """The iteration folder."""
    manifest: Any
    """Manifest, or None where require_manifest was False and there is none."""
    tensors: Mapping[str, tuple[torch.dtype, Shape]]
    """Weights by mcore_name; layers stacked along an axis ([L, ...]) appear one by one. Shapes as stored."""
    optimizer_names: tuple[str, ...]
    """Keys of optimizer state."""
    object_names: tuple[str, ...]
    """Keys of stored objects that are known to hold no weights: rng state, extra state, schedulers."""
    unknown_names: tuple[str, ...]
    """Keys of stored objects that are none of those; a caller that wants totality refuses them."""

    def __init__(
        self,
        path: Path,
        *,
        require_manifest: bool = True,
        verify: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read the metadata.

        Args:
            path: B with latest_checkpointed_iteration.txt, an iteration folder, or a flat one (run_dir/checkpoint).
            require_manifest: refuse a folder without manifest.json. Where there is one it is always checked.
            verify: hash each data file before its first byte is used; needs a manifest.
            progress: gets the bytes hashed.

        Raises:
            ConversionError: not such a checkpoint, incomplete, or its hashes do not verify.
        """
        raise NotImplementedError

    @property
    def common(self) -> dict[str, Any]:
        """The common state: iteration, content_metadata, and what its writer added."""
        raise NotImplementedError

    def read_box(self, mcore_name: str, box: Box) -> Tensor:
        """A box of a tensor; file memory (private to this process) where one stored chunk covers it, else a copy.

        Raises:
            ConversionError: the tensor or a part of the box is not there, or its file is damaged.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files; tensors handed out stay valid."""
        raise NotImplementedError
