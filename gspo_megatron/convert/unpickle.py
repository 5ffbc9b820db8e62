"""The pickles inside a torch_dist checkpoint, read without running what they name.

`.metadata` and each tensor's `data.pkl` name classes of torch. Every name that is known is answered with a stand-in
that only keeps its arguments, and every other is an error: nothing of the file's choosing is imported or called.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import pathlib
import pickle
import signal
import struct
import types
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from gspo_megatron.convert.manifest import DTYPES
from gspo_megatron.convert.ops import ConversionError, Shape

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_STRATEGY = "megatron.core.dist_checkpointing.strategies.torch"
_METADATA_CLASSES = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        *((_METADATA, "TensorProperties"), (_SHARDED, "TensorProperties"), (_SHARDED, "MEM_FORMAT_ENCODING")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # megatron-core keeps the ranks' save plans in the metadata, and did so in classes of its own before 0.16
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType")),
        *((_PLANNER, name) for name in ("BytesIOWriteData", "TensorWriteData")),
        *((_STRATEGY, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
    }
)
_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
# What Megatron-LM's arguments hold beside plain values (megatron-core 0.19.2, safe_globals.py).
_COMMON_CLASSES = (argparse.Namespace, types.SimpleNamespace, pathlib.PosixPath, signal.Signals)
_COMMON_STANDINS = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(f"megatron.core.rerun_state_machine.{name}" for name in ("RerunDiagnostic", "RerunMode", "RerunState")),
    *(f"megatron.core.transformer.enums.{name}" for name in ("AttnBackend", "CudaGraphModule", "CudaGraphScope")),
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)
_DAMAGED = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, struct.error, EOFError),
    *(KeyError, IndexError, AttributeError, TypeError, ValueError, NotImplementedError, OverflowError, MemoryError),
)
"""What parsing bytes that are no such file raises; the last two where they ask for an absurd length."""


class Refused(pickle.UnpicklingError):
    """A pickle that names something outside the list."""


class Standin:
    """In place of an object of a class: its constructor's arguments and its state."""

    def __init__(self, *args: Any) -> None:
        """Keep them."""
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep it."""
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Answers the names in `known`, dtypes, and OrderedDict; persistent ids stay what they are."""

    def __init__(self, data: bytes, known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise Refused(f"names {module}.{name}, which is not on the list of what such a file may hold")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def load_metadata(data: bytes, where: str) -> dict[str, Any]:
    """The fields of a torch.distributed.checkpoint Metadata; objects inside are Standins, sizes are tuples.

    Args:
        data: the file's bytes.
        where: its name, for messages.

    Raises:
        ConversionError: damaged, or it names something else; the message says what.
    """
    # New classes each time: a pickle can set attributes of what it names.
    known: dict[tuple[str, str], Any] = {key: type(key[1], (Standin,), {}) for key in _METADATA_CLASSES}
    known |= {("torch", "Size"): tuple, ("collections", "OrderedDict"): collections.OrderedDict}
    try:
        metadata = _Unpickler(data, known).load()
        if not isinstance(metadata, known[_METADATA, "Metadata"]):
            raise TypeError(f"holds a {type(metadata).__name__}, wants Metadata")
        fields: dict[str, Any] = dict(metadata.state)
    except Refused as error:
        raise ConversionError(f"{where}: refused: {error}") from error
    except _DAMAGED as error:
        raise ConversionError(f"{where}: damaged, or no checkpoint metadata ({error})") from error
    return fields


def load_common(data: bytes, where: str) -> Any:
    """A common state, through torch's own restricted loader.

    Raises:
        ConversionError: damaged, or it names a class outside the list.
    """
    standins = [(type(name.rpartition(".")[2], (Standin,), {}), name) for name in _COMMON_STANDINS]
    try:
        with torch.serialization.safe_globals([*_COMMON_CLASSES, *standins]):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (*_DAMAGED, RuntimeError) as error:  # RuntimeError: torch's zip reader
        reason = next((line.strip() for line in str(error).splitlines() if "nsupported" in line), str(error))
        raise ConversionError(f"{where}: common state damaged or refused ({reason[:300]})") from error


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor inside a data file; the storage is a plain range of the file's bytes."""

    dtype: torch.dtype
    shape: Shape
    stride: tuple[int, ...]
    """Elements."""
    offset: int
    """Bytes from the file's start to element (0, ..., 0)."""


class _Window(io.RawIOBase):
    """Part of a file as a file: zipfile looks for its directory at the end."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._position = fd, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("not a zip archive")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._start + self._position)
        self._position += len(data)
        return data


def locate_tensor(fd: int, offset: int, length: int) -> StoredTensor:
    """Find the elements of a torch.save'd tensor, without reading them.

    Args:
        fd: the data file, open for reading.
        offset: of the item, bytes.
        length: of the item, bytes; inside the file.

    Raises:
        ConversionError: not a tensor as torch.save writes it; the caller adds file and tensor.
    """
    try:
        return _locate_tensor(_Window(fd, offset, length), offset)
    except Refused as error:
        raise ConversionError(f"refused: its pickle {error}") from error
    except _DAMAGED as error:
        raise ConversionError(f"damaged, or not a tensor as torch.save writes it ({error!r})") from error


def _locate_tensor(window: _Window, offset: int) -> StoredTensor:
    with zipfile.ZipFile(window) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    if "byteorder" in records and (order := _read(window, records["byteorder"])) != b"little":
        raise ValueError(f"byte order {order!r}, wants little")
    known: dict[tuple[str, str], Any] = {("torch", name): name for name in _STORAGE_DTYPES}
    known |= {
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch.storage", "UntypedStorage"): "UntypedStorage",
        ("collections", "OrderedDict"): collections.OrderedDict,
    }
    storage, dtype, first, shape, stride = _Unpickler(_read(window, records["data.pkl"]), known).load()
    kind, _, key, _, _ = storage
    record = records[f"data/{key}"]
    itemsize = dtype.itemsize
    if kind != "storage" or not _inside(first, shape, stride, record.file_size // itemsize):
        raise ValueError(f"a tensor of {shape} outside its storage of {record.file_size} bytes")
    return StoredTensor(dtype, shape, stride, offset + _data_start(window, record) + first * itemsize)


def _rebuild_v2(storage: Any, first: int, shape: Any, stride: Any, *_: Any) -> Any:
    return storage, DTYPES[_STORAGE_DTYPES[storage[1]]], first, tuple(shape), tuple(stride)


def _rebuild_v3(storage: Any, first: int, shape: Any, stride: Any, *more: Any) -> Any:
    dtype = more[2]  # after requires_grad and backward_hooks
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {dtype!r}")
    return storage, dtype, first, tuple(shape), tuple(stride)


def _inside(first: int, shape: Shape, stride: Shape, num_elements: int) -> bool:
    if any(type(n) is not int or n < 0 for n in (first, *shape, *stride)) or len(shape) != len(stride):
        return False
    last = first + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return prod(shape) == 0 or last < num_elements


def _data_start(window: _Window, info: zipfile.ZipInfo) -> int:
    """Start of a record's bytes within the item; its local header has a name and padding of its own length."""
    window.seek(info.header_offset)
    signature, name_length, extra_length = struct.unpack("<4s22xHH", window.read(30))
    if signature != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"record {info.filename}")
    start: int = info.header_offset + 30 + name_length + extra_length
    if start + info.file_size > window.seek(0, io.SEEK_END):
        raise zipfile.BadZipFile(f"record {info.filename} is cut off")
    return start


def _read(window: _Window, info: zipfile.ZipInfo) -> bytes:
    # Not through zipfile: it checks CRCs, which the writer here leaves out.
    window.seek(_data_start(window, info))
    return window.read(info.file_size)
