"""Safetensors files: headers checked before any tensor is read, and files written tensor by tensor.

Layout: size of the header (8 bytes, little-endian), header (JSON: dtype, shape, byte range per tensor), tensor bytes.
The safetensors package reads; it cannot write a file without holding all of its tensors, so the writer is here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from gspo_megatron.convert.disk import WRITE_BYTES, Writeback
from gspo_megatron.convert.mapped import StoredTensor, contiguous_stride
from gspo_megatron.convert.ops import ConversionError, Shape
from gspo_megatron.convert.strict_json import check_regular, parse_json

TensorSpec = tuple[str, torch.dtype, Shape]
"""(name, dtype, shape)."""
MAX_FILE_BYTES = 5 * 10**9
"""Hugging Face's default size of a shard."""
INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Dtype, shape and place of each tensor of a file whose header fits its size.

    Raises:
        ConversionError: unreadable, truncated or corrupt; names the file and, where it can, the tensor.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
                raise ConversionError(
                    f"{path}: {file_bytes} bytes cannot hold the header of {header_bytes} bytes that they start with; "
                    "truncated or not a safetensors file, fetch it again"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}") from error
    try:
        header = parse_json(text.decode())
    except ValueError as error:  # not JSON, not text, a name twice
        raise ConversionError(f"{path}: corrupt header: {error}") from error
    if not isinstance(header, dict):
        raise ConversionError(f"{path}: corrupt header: holds a {type(header).__name__}, wants an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConversionError(f"{path}: corrupt header: __metadata__ is {metadata!r:.80}, wants names with texts")
    spans = {name: _span(entry, f"{path}: {name}") for name, entry in header.items()}
    _check_spans(path, spans, file_bytes - 8 - header_bytes)
    return {
        name: StoredTensor(
            dtype=_DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
            stride=contiguous_stride(tuple(entry["shape"])),
            offset=8 + header_bytes + spans[name][0],
        )
        for name, entry in header.items()
    }


def _span(entry: Any, where: str) -> tuple[int, int]:
    """Byte range of a tensor in the file's data."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ConversionError(f"{where}: corrupt header: is {entry!r}, wants dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
    if not lists or any(type(n) is not int or n < 0 for n in (*shape, *offsets)):
        raise ConversionError(f"{where}: corrupt header: shape {shape!r}, data_offsets {offsets!r}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in _DTYPES:
        raise ConversionError(f"{where}: dtype {entry['dtype']!r} is not understood; known are {', '.join(_DTYPES)}")
    want = prod(shape) * _DTYPES[entry["dtype"]].itemsize
    if offsets[1] - offsets[0] != want:
        got = offsets[1] - offsets[0]
        raise ConversionError(f"{where}: has {got} bytes, {entry['dtype']} of shape {shape} wants {want}")
    return offsets[0], offsets[1]


def _check_spans(path: Path, spans: dict[str, tuple[int, int]], data_bytes: int) -> None:
    """Tensors follow one another without holes and end where the file does."""
    end = 0
    for name, (start, stop) in sorted(spans.items(), key=lambda item: item[1]):
        if stop > data_bytes:
            raise ConversionError(
                f"{path}: {name}: ends at byte {stop}, the file's data at {data_bytes}; truncated, fetch it again"
            )
        if start != end:
            raise ConversionError(f"{path}: {name}: corrupt header: starts at byte {start}, wants {end}")
        end = stop
    if end != data_bytes:
        raise ConversionError(f"{path}: corrupt: the last tensor ends at byte {end}, the file's data at {data_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HfFile:
    """A file to be written, known to the byte before any tensor is."""

    name: str
    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes."""
    header: bytes
    """With its size in front."""
    data_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.data_bytes


def plan_hf_files(tensors: Sequence[TensorSpec], *, max_file_bytes: int = MAX_FILE_BYTES) -> list[HfFile]:
    """Cut tensors, in their order, into Hugging Face's files.

    Args:
        tensors: of the whole model.
        max_file_bytes: of a file's tensors; a larger tensor is a file of its own.

    Raises:
        ConversionError: no tensors, a name that occurs twice, a dtype that safetensors does not have.
    """
    if not tensors:
        raise ConversionError("no tensors to write")
    names = set()
    for name, dtype, _ in tensors:
        if name in names:
            raise ConversionError(f"{name}: would be written twice")
        if dtype not in _DTYPE_NAMES:
            raise ConversionError(f"{name}: {dtype} cannot be written to safetensors")
        names.add(name)
    groups = in_groups(tensors, max_file_bytes)
    if len(groups) == 1:
        return [_plan_file("model.safetensors", groups[0])]
    return [_plan_file(f"model-{i:05d}-of-{len(groups):05d}.safetensors", g) for i, g in enumerate(groups, start=1)]


def in_groups(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Neighbours of together at most max_bytes; a larger tensor is a group of its own."""
    groups: list[list[TensorSpec]] = [[]]
    group_bytes = 0
    for spec in specs:
        if groups[-1] and group_bytes + spec_bytes(spec) > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(spec)
        group_bytes += spec_bytes(spec)
    return groups


def spec_bytes(spec: TensorSpec) -> int:
    """Of the tensor."""
    return prod(spec[2]) * spec[1].itemsize


def _plan_file(file_name: str, tensors: Sequence[TensorSpec]) -> HfFile:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        stop = offset + spec_bytes((name, dtype, shape))
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return HfFile(
        name=file_name, tensors=tuple(tensors), header=len(text).to_bytes(8, "little") + text, data_bytes=offset
    )


def index_json(files: Sequence[HfFile]) -> str:
    """Content of INDEX_NAME, which a model of several files needs."""
    weight_map = {name: file.name for file in files for name, _, _ in file.tensors}
    index = {
        "metadata": {"total_size": sum(file.data_bytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"


class SafetensorsWriter:
    """One file, written tensor by tensor in the planned order; holds none of them.

    A context manager. Leaving it without an error checks that all tensors came and puts the file on the disk (fsync);
    leaving it with one closes the file as it is.
    """

    def __init__(self, path: Path, file: HfFile) -> None:
        """Create the file and write the header.

        Args:
            path: must not exist. The name under which the file is complete is the caller's business.
            file: what is to be written.

        Raises:
            ConversionError: the file exists or cannot be written.
        """
        self.tensor_hashes: dict[str, str] = {}
        """xxh3_128 of each tensor's bytes, hexadecimal."""
        self._path, self._file, self._hash = path, file, xxhash.xxh3_128()
        try:
            self._out = path.open("xb", buffering=0)
        except OSError as error:
            raise ConversionError(f"{path}: {error.strerror}") from error
        self._writeback = Writeback(self._out.fileno())
        self._put(memoryview(file.header), "the header", self._hash)

    @property
    def file_hash(self) -> str:
        """xxh3_128 of all bytes so far, hexadecimal."""
        return self._hash.hexdigest()

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor.

        Args:
            name: as planned.
            tensor: of the planned dtype and shape; copied only where it is not contiguous or not in main memory.

        Raises:
            ConversionError: another name, dtype or shape is due; the disk is full or refuses.
        """
        position = len(self.tensor_hashes)
        due = self._file.tensors[position] if position < len(self._file.tensors) else None
        if due != (name, tensor.dtype, tuple(tensor.shape)):
            got = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
            want = f"{due[0]} {due[1]} {due[2]}" if due else "no more"
            raise ConversionError(f"{self._path}: got {got}, the plan has {want} next")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        tensor_hash = xxhash.xxh3_128()
        self._put(data, name, tensor_hash, self._hash)
        self.tensor_hashes[name] = tensor_hash.hexdigest()

    def _put(self, data: memoryview, what: str, *hashes: xxhash.xxh3_128) -> None:
        try:
            for start in range(0, len(data), WRITE_BYTES):
                part = data[start : start + WRITE_BYTES]
                for running in hashes:
                    running.update(part)
                while part:
                    part = part[self._out.write(part) :]
                self._writeback.advance(self._out.tell())
        except OSError as error:
            raise ConversionError(
                f"{self._path}: {what}: {error.strerror}; the file needs {self._file.total_bytes} bytes"
            ) from error

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check that the file is whole, and put it on the disk."""
        with self._out:
            if kind is not None:
                return
            missing = [name for name, _, _ in self._file.tensors[len(self.tensor_hashes) :]]
            if missing:
                raise ConversionError(f"{self._path}: {len(missing)} tensor(s) did not come, the first {missing[0]}")
            try:
                os.fsync(self._out.fileno())
            except OSError as failed:
                raise ConversionError(f"{self._path}: {failed.strerror}") from failed
