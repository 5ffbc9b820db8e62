"""Where a torch_dist checkpoint keeps what: its folder, and the boxes of its tensors in its data files.

Source: megatron-core 0.19.2, dist_checkpointing; torch 2.13, distributed.checkpoint.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from gspo_megatron.convert.manifest import DTYPES, MANIFEST
from gspo_megatron.convert.ops import Box, ConversionError, Shape, extent
from gspo_megatron.convert.strict_json import parse_json
from gspo_megatron.convert.unpickle import load_metadata

METADATA = ".metadata"
CONFIG = "metadata.json"
LATEST = "latest_checkpointed_iteration.txt"
LEGACY_COMMON = "common.pt"
BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON_KEY = "common_state/shard_0_1"
"""megatron-core's key of the one common state object."""
HF_SUBFOLDER = "hf"
"""What a Hugging Face directory has beside its weights: config.json, tokenizer, chat template."""


def resolve_folder(path: Path) -> Path:
    """The iteration folder: of path through latest_checkpointed_iteration.txt ("release" too), else path itself.

    Raises:
        ConversionError: not a torch_dist checkpoint.
    """
    folder = path
    if (path / LATEST).is_file():
        text = (path / LATEST).read_text(errors="replace").strip()
        if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
            raise ConversionError(f"{path / LATEST}: holds {text[:80]!r}, wants an iteration number or 'release'")
        folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not folder.is_dir():
        raise ConversionError(f"{folder}: no such folder, wants a Megatron checkpoint")
    config = folder / CONFIG
    if not config.is_file():
        legacy = any(folder.glob("mp_rank_*"))
        what = "is in the legacy torch format" if legacy else f"has no {CONFIG}, so it is no finished checkpoint"
        raise ConversionError(f"{folder}: {what}; wants megatron-core's torch_dist (--ckpt-format torch_dist)")
    try:
        backend = parse_json(config.read_text())["sharded_backend"]
    except OSError as error:
        raise ConversionError(f"{config}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{config}: not megatron-core's description of a checkpoint ({error!r})") from error
    if backend != BACKEND["sharded_backend"]:
        raise ConversionError(f"{config}: sharded_backend is {backend!r}, only 'torch_dist' is read; save it as that")
    return folder


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a stored tensor and the item that holds it."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file, under its key there."""

    dtype: torch.dtype
    shape: Shape
    chunks: list[Chunk]
    """In the order of their first rows."""

    def within(self, box: Box) -> list[Chunk]:
        """Chunks that meet the box."""
        longest = max(c.box[0][1] - c.box[0][0] for c in self.chunks) if box and self.chunks else 0
        first, last = 0, len(self.chunks)
        if longest:
            first = bisect_left(self.chunks, box[0][0] - longest + 1, key=lambda c: c.box[0][0])
            last = bisect_left(self.chunks, box[0][1], key=lambda c: c.box[0][0])
        return [c for c in self.chunks[first:last] if prod(extent(meet(c.box, box)))]


def parse_metadata(
    data: bytes, where: Path, files: Collection[str] | None
) -> tuple[dict[str, Stored], dict[str, Chunk]]:
    """Read `.metadata`.

    Args:
        data: its bytes.
        where: its path, for messages.
        files: names that the manifest lists; None without a manifest.

    Returns:
        Tensors by key, and the items of the other objects by key.

    Raises:
        ConversionError: damaged, refused, or it points outside of the folder or of the manifest.
    """
    fields = load_metadata(data, str(where))
    tensors: dict[str, Stored] = {}
    objects: dict[str, Chunk] = {}
    try:
        storage = {_index_of(index): info.state for index, info in fields["storage_data"].items()}
        for key, entry in fields["state_dict_metadata"].items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[key] = _stored(key, entry.state, storage)
            else:
                objects[key] = _chunk(key, (), storage[key, None])
    except ConversionError as error:
        raise ConversionError(f"{where}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConversionError(f"{where}: not the metadata of a torch_dist checkpoint ({error!r})") from error
    used = {c.file for stored in tensors.values() for c in stored.chunks} | {c.file for c in objects.values()}
    if files is not None and not used <= set(files):
        raise ConversionError(f"{where}: names data files that {MANIFEST} does not: {sorted(used - set(files))}")
    return tensors, objects


def _index_of(index: Any) -> tuple[str, Shape | None]:
    offset = index.state.get("offset")
    return index.state["fqn"], None if offset is None else tuple(offset)


def _stored(key: str, entry: Mapping[str, Any], storage: Mapping[Any, Any]) -> Stored:
    shape, dtype = tuple(entry["size"]), entry["properties"].state[0]
    if dtype not in DTYPES.values():
        raise ConversionError(f"{key} has dtype {dtype}, wants one of {', '.join(DTYPES)}")
    chunks = []
    for chunk in entry["chunks"]:
        start, size = tuple(chunk.state["offsets"]), tuple(chunk.state["sizes"])
        box = tuple((a, a + n) for a, n in zip(start, size, strict=True))
        if any(a < 0 or b < a or b > n for (a, b), n in zip(box, shape, strict=True)):
            raise ConversionError(f"{key} {shape} has a chunk at {box}, outside of it")
        if (key, start) not in storage:
            raise ConversionError(f"{key}: the chunk at {box} is in no data file")
        chunks.append(_chunk(key, box, storage[key, start]))
    return Stored(dtype, shape, sorted(chunks, key=lambda c: c.box))


def _chunk(key: str, box: Box, info: Mapping[str, Any]) -> Chunk:
    file, offset, length = info["relative_path"], info["offset"], info["length"]
    if file != Path(file).name or file in ("", ".", "..") or offset < 0 or length < 0:
        raise ConversionError(f"{key} is at byte {offset} of {file!r}, wants a file of the folder")
    if info.get("transform_descriptors"):
        raise ConversionError(f"{key} is transformed by {info['transform_descriptors']}, which is not read")
    return Chunk(box, file, offset, length)


def meet(a: Box, b: Box) -> Box:
    """The intersection; some extent is 0 where there is none."""
    starts = [max(p[0], q[0]) for p, q in zip(a, b, strict=True)]
    stops = [min(p[1], q[1]) for p, q in zip(a, b, strict=True)]
    return tuple((start, max(start, stop)) for start, stop in zip(starts, stops, strict=True))


def relative(box: Box, to: Box) -> Box:
    """The box counted from the corner of another."""
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, to, strict=True))
