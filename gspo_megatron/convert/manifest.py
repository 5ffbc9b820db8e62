"""What a converted checkpoint consists of: shapes, dtypes, byte counts and hashes of its tensors and files.

Hash: XXH3 with 128 bits. It finds damage and mix-ups at the speed of memory; it is no signature, and does not protect
against somebody who rewrites the manifest too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from gspo_megatron.convert.ops import ConversionError, raise_problems
from gspo_megatron.convert.strict_json import read_json

FORMAT = "gspo_megatron.manifest/1"
HASH = "xxh3_128"
MANIFEST = "manifest.json"
"""In a Megatron checkpoint's iteration folder."""
HF_MANIFEST = "conversion_manifest.json"
"""In a Hugging Face directory."""
_BLOCK_BYTES = 8 * 2**20

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Every dtype that a checkpoint may hold, by the name that manifests use."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    hash: str
    """Of its bytes, row by row."""
    file: str = ""
    """Relative name of the file that holds it; empty where that does not matter."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file."""

    num_bytes: int
    hash: str = ""
    """Empty for a source file that was not read whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A directory's content and where it comes from."""

    kind: str
    """mcore or hf."""
    files: Mapping[str, FileRecord]
    """Every file of the directory but the manifest, by relative name."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Empty in a training checkpoint: its ranks hold no whole tensors to hash."""
    source_tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    source_files: Mapping[str, FileRecord] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the conversion was asked for; plain JSON values."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16".

    Raises:
        ConversionError: none of DTYPES.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConversionError(f"{dtype}: a dtype that checkpoints here do not hold; wants one of {', '.join(DTYPES)}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """ "bfloat16" -> torch.bfloat16.

    Raises:
        ConversionError: none of DTYPES.
    """
    if name not in DTYPES:
        raise ConversionError(f"{name!r}: unknown dtype, wants one of {', '.join(DTYPES)}")
    return DTYPES[name]


def new_hash() -> Any:
    """An empty hash with update(buffer) and hexdigest()."""
    return xxhash.xxh3_128()


def hash_bytes(data: Any) -> str:
    """Hash of a buffer."""
    digest: str = xxhash.xxh3_128(data).hexdigest()
    return digest


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, row by row; its own memory where it is a contiguous CPU tensor, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_record(tensor: Tensor, file: str = "") -> TensorRecord:
    """Record of a whole tensor."""
    data = tensor_bytes(tensor)
    return TensorRecord(dtype_name(tensor.dtype), tuple(tensor.shape), len(data), hash_bytes(data), file)


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> FileRecord:
    """Read a file and hash it; progress gets the bytes of each block.

    Raises:
        ConversionError: it cannot be read.
    """
    running, num_bytes = xxhash.xxh3_128(), 0
    block = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                running.update(block[:count])
                num_bytes += count
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}") from error
    return FileRecord(num_bytes, running.hexdigest())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write it; the file appears under its name only when it is on disk."""
    source = {
        "tensors": {name: _tensor_json(record) for name, record in manifest.source_tensors.items()},
        "files": {name: _file_json(record) for name, record in manifest.source_files.items()},
    }
    content = {
        "format": FORMAT,
        "kind": manifest.kind,
        "hash": HASH,
        "tensors": {name: _tensor_json(record) for name, record in manifest.tensors.items()},
        "files": {name: _file_json(record) for name, record in manifest.files.items()},
        "source": source,
        "options": dict(manifest.options),
    }
    tmp = path.with_name(path.name + ".tmp")
    with tmp.open("w") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    tmp.rename(path)


def read_manifest(path: Path) -> Manifest:
    """Read what write_manifest wrote.

    Raises:
        ConversionError: absent, or not such a file.
    """
    content = read_json(path)
    try:
        if (found := (content["format"], content["hash"])) != (FORMAT, HASH):
            raise ConversionError(f"{path}: has format and hash {found}, wants {(FORMAT, HASH)}")
        source = content["source"]
        return Manifest(
            kind=content["kind"],
            tensors={name: _tensor_of(record) for name, record in content["tensors"].items()},
            files={name: _file_of(record) for name, record in content["files"].items()},
            source_tensors={name: _tensor_of(record) for name, record in source["tensors"].items()},
            source_files={name: _file_of(record) for name, record in source["files"].items()},
            options=content["options"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: not a manifest of {FORMAT} ({error!r})") from error


def verify_files(
    folder: Path,
    manifest: Manifest,
    *,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Read files again and compare them with the manifest.

    Args:
        folder: that the manifest describes.
        manifest: its manifest.
        names: relative names, each in the manifest; None: all of it.
        progress: gets the bytes of each block read.

    Raises:
        ConversionError: lists the files that are missing, of another size, or of another content.
    """
    problems = []
    for name in manifest.files if names is None else names:
        want, path = manifest.files.get(name), folder / name
        if want is None:
            problems.append(f"{path}: not in the manifest")
        elif not path.is_file():
            problems.append(f"{path}: missing")
        elif (size := path.stat().st_size) != want.num_bytes:
            problems.append(f"{path}: has {size} bytes, the manifest says {want.num_bytes}")
        elif (found := hash_file(path, progress).hash) != want.hash:
            problems.append(f"{path}: has {HASH} {found}, the manifest says {want.hash}")
    raise_problems(f"{folder}: files do not fit the manifest; copy or convert it again", problems)


def _tensor_json(record: TensorRecord) -> dict[str, Any]:
    fields = {"dtype": record.dtype, "shape": list(record.shape), "bytes": record.num_bytes, "hash": record.hash}
    return fields | {"file": record.file} if record.file else fields


def _tensor_of(fields: dict[str, Any]) -> TensorRecord:
    shape = tuple(fields["shape"])
    return TensorRecord(fields["dtype"], shape, fields["bytes"], fields["hash"], fields.get("file", ""))


def _file_json(record: FileRecord) -> dict[str, Any]:
    return {"bytes": record.num_bytes, "hash": record.hash} if record.hash else {"bytes": record.num_bytes}


def _file_of(fields: dict[str, Any]) -> FileRecord:
    return FileRecord(fields["bytes"], fields.get("hash", ""))
