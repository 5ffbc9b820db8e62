"""megatron-core's torch_dist checkpoint format, written and read without a process group, a model or Megatron.

Source: megatron-core 0.19.2, dist_checkpointing; torch 2.13, distributed.checkpoint. A checkpoint is a folder of data
files, each a row of items (a box of a tensor as torch.save writes it), and `.metadata`, which says where each is.
What is written depends on the weights and on nothing else: no time, no random id. Pickles are read after the
manifest's hash of their file verified, and through stand-ins only (unpickle.py).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from gspo_megatron.convert.disk import WRITE_BYTES, Writeback
from gspo_megatron.convert.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_name,
    dtype_of,
    hash_bytes,
    new_hash,
    read_manifest,
    tensor_bytes,
    verify_files,
)
from gspo_megatron.convert.mcore_data import DataFiles
from gspo_megatron.convert.mcore_layout import (
    BACKEND,
    COMMON_KEY,
    CONFIG,
    LEGACY_COMMON,
    METADATA,
    parse_metadata,
    resolve_folder,
)
from gspo_megatron.convert.ops import Box, ConversionError, Shape, extent, raise_problems, whole
from gspo_megatron.convert.strict_json import check_regular
from gspo_megatron.convert.unpickle import load_common

MAX_CHUNK_BYTES = 64 * 2**20
COMMON_FILE = "__0_0.distcp"
CONTENT_METADATA = {
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""How the keys of a checkpoint are to be read: layers by their own names, experts stacked, optimizer reshardable."""
_ALIGNMENT = 64
"""torch.save aligns a storage to this within its item; so are items, so that a mapped tensor is aligned."""
_BUFFER_BYTES = 2**16
"""Below WRITE_BYTES, so that what is written in such pieces is not copied."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_STACKED_LAYERS = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.+)")
_NO_WEIGHTS = ("common_state", "rng_state", "rerun_state_machine_state", "opt_param_scheduler")


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a tensor and its bytes in a data file."""

    mcore_name: str
    box: Box
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """What a finished data file holds. Pickles; json of asdict() comes back through from_json."""

    file: str
    """Its name in the checkpoint's folder."""
    record: FileRecord
    items: tuple[Item, ...]
    tensors: Mapping[str, TensorRecord]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> DataFile:
        """From what json.loads(json.dumps(asdict(data_file))) gives."""
        items = (i | {"box": tuple((a, b) for a, b in i["box"])} for i in fields["items"])
        tensors = {name: t | {"shape": tuple(t["shape"])} for name, t in fields["tensors"].items()}
        return cls(
            file=fields["file"],
            record=FileRecord(**fields["record"]),
            items=tuple(Item(**i) for i in items),
            tensors={name: TensorRecord(**t) for name, t in tensors.items()},
        )


def data_file_name(index: int) -> str:
    """Name of the index-th data file, from 0: rank index + 1's in megatron-core; rank 0's has the common state."""
    return f"__{index + 1}_0.distcp"


def common_state(*, iteration: int = 0) -> dict[str, Any]:
    """What a checkpoint of weights alone has as common state."""
    return {"checkpoint_version": 3.0, "iteration": iteration, "content_metadata": dict(CONTENT_METADATA)}


def plan_chunks(shape: Shape, dtype: torch.dtype, *, max_bytes: int = MAX_CHUNK_BYTES) -> list[Box]:
    """Boxes of a tensor, in row-major order, that are stored one by one.

    Stacked experts [E, ...]: one per expert; rows in bands; cut further where a piece is above max_bytes.
    """
    if not shape:
        return [()]
    bytes_per_slice = prod(shape[1:]) * dtype.itemsize
    if len(shape) < 3 and (bytes_per_slice <= max_bytes or len(shape) == 1):
        step = max(1, max_bytes // max(1, bytes_per_slice))
        bands = range(0, max(1, shape[0]), step)
        return [((first, min(first + step, shape[0])), *whole(shape[1:])) for first in bands]
    inner = plan_chunks(shape[1:], dtype, max_bytes=max_bytes)
    if bytes_per_slice <= max_bytes:
        inner = [whole(shape[1:])]
    return [((i, i + 1), *box) for i in range(shape[0]) for box in inner]


class DataFileWriter:
    """Writes one data file: `with DataFileWriter(path) as writer: writer.write_tensor(...)`, then writer.result.

    Attributes:
        result: the DataFile, after the with block.
    """

    result: DataFile

    def __init__(self, path: Path) -> None:
        """For path, whose folder is the checkpoint's; a file that exists is overwritten."""
        self._path = path
        self._items: list[Item] = []
        self._tensors: dict[str, TensorRecord] = {}
        self._hash = new_hash()
        self._num_bytes = 0
        self._failure: OSError | None = None

    def __enter__(self) -> DataFileWriter:
        """Open the file."""
        try:
            self._file = self._path.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise ConversionError(f"{self._path}: {error.strerror}") from error
        self._writeback = Writeback(self._file.fileno())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close: on disk, with result; after an error the incomplete file stays for the caller to remove."""
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:
            if kind is None:
                raise ConversionError(f"{self._path}: {error.strerror}") from error
        record = FileRecord(self._num_bytes, self._hash.hexdigest())
        self.result = DataFile(self._path.name, record, tuple(self._items), self._tensors)

    def write_tensor(
        self, mcore_name: str, shape: Shape, dtype: torch.dtype, read_box: Callable[[Box], Tensor]
    ) -> None:
        """Write one whole tensor, chunk by chunk.

        Args:
            mcore_name: its key.
            shape: global.
            dtype: of the file.
            read_box: box -> that box, in this dtype; called once per box of plan_chunks, in order; what it gives is
                held until it is called again, no longer.

        Raises:
            ConversionError: read_box gave another shape or dtype, the name occurs twice, or the disk refused.
        """
        if mcore_name in self._tensors:
            raise ConversionError(f"{self._path}: {mcore_name} would be written twice")
        running, num_bytes = new_hash(), 0
        for box in plan_chunks(shape, dtype):
            tensor = read_box(box)
            if (tensor.dtype, tuple(tensor.shape)) != (dtype, extent(box)):
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ConversionError(f"{self._path}: {mcore_name}: got {found}, wants {dtype} {extent(box)} at {box}")
            data = tensor_bytes(tensor)
            running.update(data)
            num_bytes += len(data)
            self._write_chunk(mcore_name, box, data, dtype)
        record = TensorRecord(dtype_name(dtype), tuple(shape), num_bytes, running.hexdigest(), self._path.name)
        self._tensors[mcore_name] = record

    def _write_chunk(self, mcore_name: str, box: Box, data: memoryview, dtype: torch.dtype) -> None:
        # A tensor of just these bytes: torch.save writes the whole storage, of which a view is a part.
        tensor = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
        self._pad()
        offset, with_crc32 = self._num_bytes, get_crc32_options()
        # zip's own checksum costs more than writing (1.7 GB/s), and torch.load does not look at it: files and tensors
        # have their hashes in the manifest.
        set_crc32_options(False)
        try:
            torch.save(tensor.view(extent(box)), cast(BinaryIO, self))  # it calls write and flush alone
        except RuntimeError as error:  # torch's zip writer on a write that failed
            reason = error if self._failure is None else self._failure.strerror
            raise ConversionError(f"{self._path}: {mcore_name}: {reason}") from (self._failure or error)
        finally:
            set_crc32_options(with_crc32)
        self._items.append(Item(mcore_name, box, offset, self._num_bytes - offset))

    def _pad(self) -> None:
        self.write(memoryview(bytes(-self._num_bytes % _ALIGNMENT)))

    def write(self, data: memoryview) -> int:
        """For torch.save: append bytes to the file and to its hash."""
        for first in range(0, len(data), WRITE_BYTES):
            piece = data[first : first + WRITE_BYTES]
            self._hash.update(piece)
            try:
                self._file.write(piece)
            except OSError as error:
                self._failure = error
                raise
        self._num_bytes += len(data)
        self._writeback.advance(self._num_bytes)
        return len(data)

    def flush(self) -> None:
        """For torch.save; the file is flushed at its end."""


def write_checkpoint_metadata(folder: Path, data_files: Iterable[DataFile], common: Mapping[str, Any]) -> list[str]:
    """Write what makes a folder of data files a checkpoint: common state, `.metadata`, `metadata.json`.

    Args:
        folder: holds the data files.
        data_files: what their writers gave, in any order.
        common: plain Python values, see common_state.

    Returns:
        The names of the files written, for the manifest.

    Raises:
        ConversionError: a tensor occurs in two files, or the disk refused.
    """
    # A second, which the workers of a conversion and its way back need not spend (ToMcore.preload).
    from torch.distributed.checkpoint import filesystem, metadata

    ordered = sorted(data_files, key=lambda f: (len(f.file), f.file))
    names = [name for f in ordered for name in f.tensors]
    raise_problems(f"{folder}: written twice", [name for name, count in Counter(names).items() if count > 1])
    content = io.BytesIO()
    torch.save([dict(common)], content)
    tensors: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {}
    storage: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
    for data_file in ordered:
        _describe(data_file, tensors, storage)
    tensors[COMMON_KEY] = metadata.BytesStorageMetadata()
    storage[metadata.MetadataIndex(COMMON_KEY)] = filesystem._StorageInfo(COMMON_FILE, 0, len(content.getbuffer()))
    described = metadata.Metadata(
        state_dict_metadata=tensors,
        planner_data=None,
        storage_data=storage,
        storage_meta=metadata.StorageMeta(),
        version=filesystem.CURRENT_DCP_VERSION,
    )
    _write_file(folder / COMMON_FILE, content.getvalue())
    _write_file(folder / METADATA, pickle.dumps(described, protocol=4))
    _write_file(folder / CONFIG, json.dumps(BACKEND).encode())  # last: it is what makes the folder a checkpoint
    return [COMMON_FILE, METADATA, CONFIG]


def _describe(data_file: DataFile, tensors: dict[str, Any], storage: dict[Any, Any]) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    # Interned: pickle writes a text once per object, and equal ones that came out of a journal are several.
    for name, record in data_file.tensors.items():
        properties = TensorProperties(dtype=dtype_of(record.dtype))
        tensors[sys.intern(name)] = TensorStorageMetadata(properties, torch.Size(record.shape), [])
    for item in data_file.items:
        name = sys.intern(item.mcore_name)
        start = torch.Size([a for a, _ in item.box])
        chunks = tensors[name].chunks
        storage[MetadataIndex(name, start, len(chunks))] = _StorageInfo(data_file.file, item.offset, item.length)
        chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(extent(item.box))))


def _write_file(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}") from error


class McoreCheckpoint:
    """A torch_dist checkpoint, read box by box.

    Attributes:
        folder: the iteration folder.
        manifest: None where there is none and require_manifest is False.
        tensors: weights, mcore_name -> (dtype, shape as stored). Megatron-LM's stacked layers (one tensor
            [L, ...] for all) appear one by one.
        is_stacked: layers are stored so.
        optimizer_names: keys of optimizer state, tensors and objects.
        object_names: keys of objects that hold no weights: common, random and extra state.
        unknown_names: keys of all other objects; who wants totality refuses them.
    """

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
            require_manifest: refuse a folder without manifest.json. Where there is one, `.metadata` is always checked.
            verify: hash each data file before its first byte is used. A caller that compares the manifest's hashes of
                tensors need not. Without a manifest there is nothing to compare.
            progress: gets the bytes hashed.

        Raises:
            ConversionError: not such a checkpoint, or it does not fit its manifest.
        """
        self.folder = resolve_folder(path)
        self.manifest = self._read_manifest(require_manifest)
        self._verify = verify
        self._files = DataFiles(self.folder, self.manifest if verify else None, progress)
        self._check_small_file(CONFIG)
        files = None if self.manifest is None else self.manifest.files
        metadata = self._check_small_file(METADATA)
        self._stored, self._objects = parse_metadata(metadata, self.folder / METADATA, files)
        self.optimizer_names = tuple(n for n in (*self._stored, *self._objects) if _OPTIMIZER.match(n))
        others = [n for n in self._objects if not _OPTIMIZER.match(n)]
        self.object_names = tuple(n for n in others if _holds_no_weights(n))
        self.unknown_names = tuple(n for n in others if not _holds_no_weights(n))
        self._places = dict(self._name_tensors())
        self.is_stacked = any(layer is not None for _, layer in self._places.values())
        self.tensors: Mapping[str, tuple[torch.dtype, Shape]] = {
            name: (self._stored[key].dtype, self._stored[key].shape[layer is not None :])
            for name, (key, layer) in self._places.items()
        }
        self._check_tensors()
        self._check_sizes()

    def _check_tensors(self) -> None:
        """The manifest of a converted checkpoint lists its tensors, one of a training checkpoint none."""
        if self.manifest is None or not self.manifest.tensors:
            return
        found = {name: f"{dtype_name(dtype)} {shape}" for name, (dtype, shape) in self.tensors.items()}
        listed = {name: f"{record.dtype} {record.shape}" for name, record in self.manifest.tensors.items()}
        problems = [
            f"{name}: {listed.get(name, 'absent')} in {MANIFEST}, {found.get(name, 'absent')} in {METADATA}"
            for name in sorted(found.keys() | listed.keys())
            if found.get(name) != listed.get(name)
        ]
        raise_problems(f"{self.folder}: {MANIFEST} and {METADATA} differ; copy or convert it again", problems)

    def _check_sizes(self) -> None:
        """Data files are there and as long as what is in them, which a copy that broke off shows at once."""
        chunks = [(c, key) for key, stored in self._stored.items() for c in stored.chunks]
        chunks += [(c, key) for key, c in self._objects.items()]
        last: dict[str, tuple[int, str]] = {}
        for chunk, key in chunks:
            last[chunk.file] = max(last.get(chunk.file, (0, "")), (chunk.offset + chunk.length, key))
        for file, (end, key) in sorted(last.items()):
            path = self.folder / file
            try:
                check_regular(path)
            except ConversionError as error:
                raise ConversionError(f"{error}; it holds {key}, the checkpoint is not complete") from error
            size = path.stat().st_size
            if size < end:
                raise ConversionError(f"{path}: is cut off: {key} ends at byte {end}, the file at {size}")
            if self.manifest is not None and size != (want := self.manifest.files[file].num_bytes):
                raise ConversionError(f"{path}: has {size} bytes, the manifest says {want}; copy it again")

    def _read_manifest(self, required: bool) -> Manifest | None:
        path = self.folder / MANIFEST
        if path.is_file():
            manifest = read_manifest(path)
            if manifest.kind != "mcore":
                raise ConversionError(f"{path}: describes a directory of kind {manifest.kind!r}, wants mcore")
            # Upstream's loader takes it for the common state where it exists.
            if (self.folder / LEGACY_COMMON).exists() and LEGACY_COMMON not in manifest.files:
                raise ConversionError(f"{self.folder / LEGACY_COMMON}: not in the manifest; remove it")
            return manifest
        if required:
            raise ConversionError(
                f"{self.folder}: not a finished checkpoint; it has no {MANIFEST}, so its pickles cannot be checked"
            )
        return None

    def _check_small_file(self, name: str) -> bytes:
        """Bytes of a file, the very ones that were hashed."""
        path = self.folder / name
        check_regular(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConversionError(f"{path}: {error.strerror}; the checkpoint is not complete") from error
        if self.manifest is not None:
            want = self.manifest.files.get(name)
            if want is None or (len(data), hash_bytes(data)) != (want.num_bytes, want.hash):
                raise ConversionError(f"{path}: not the file that {MANIFEST} describes; it is not read")
        return data

    def _name_tensors(self) -> Iterator[tuple[str, tuple[str, int | None]]]:
        for key, stored in self._stored.items():
            if _OPTIMIZER.match(key):
                continue
            stacked = _STACKED_LAYERS.fullmatch(key)
            if stacked is None:
                yield key, (key, None)
                continue
            for layer in range(stored.shape[0]):
                name = f"{stacked[1]}{layer}.{stacked[2]}"
                if name in self._stored:
                    raise ConversionError(f"{self.folder / METADATA}: holds both {name} and {key}")
                yield name, (key, layer)

    @property
    def common(self) -> dict[str, Any]:
        """The common state: iteration, content_metadata, and what its writer added.

        Raises:
            ConversionError: absent, damaged, or it holds objects of classes that are not known.
        """
        if (self.folder / LEGACY_COMMON).is_file():
            state = load_common(self._check_small_file(LEGACY_COMMON), str(self.folder / LEGACY_COMMON))
        elif COMMON_KEY in self._objects:
            chunk = self._objects[COMMON_KEY]
            if self.manifest is not None and not self._verify:
                verify_files(self.folder, self.manifest, names=[chunk.file])
            state = load_common(self._files.read_item(COMMON_KEY, chunk), str(self.folder / chunk.file))[0]
        else:
            raise ConversionError(f"{self.folder}: has no common state, neither {LEGACY_COMMON} nor {COMMON_KEY}")
        return dict(state)

    def read_box(self, mcore_name: str, box: Box) -> Tensor:
        """A box of a tensor: memory mapped from the file where one stored chunk covers it, else assembled.

        Args:
            mcore_name: one of tensors.
            box: inside its shape.

        Returns:
            In the box's shape. A mapped one stays valid after close; writing into it does not change the file.

        Raises:
            ConversionError: the tensor or a part of the box is not there, or its data file is damaged.
        """
        key, layer = self._place(mcore_name)
        stored = self._stored[key]
        place = box if layer is None else ((layer, layer + 1), *box)
        if len(place) != len(stored.shape) or any(
            a < 0 or b < a or b > n for (a, b), n in zip(place, stored.shape, strict=True)
        ):
            raise ConversionError(f"{self.folder}: {mcore_name} {self.tensors[mcore_name][1]} has no box {box}")
        tensor = self._files.read(key, stored, place)
        return tensor if layer is None else tensor[0]

    def read(self, mcore_name: str) -> Tensor:
        """A whole tensor; see read_box."""
        self._place(mcore_name)
        return self.read_box(mcore_name, whole(self.tensors[mcore_name][1]))

    def _place(self, mcore_name: str) -> tuple[str, int | None]:
        if mcore_name not in self._places:
            raise ConversionError(f"{self.folder}: has no tensor {mcore_name}")
        return self._places[mcore_name]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def __enter__(self) -> McoreCheckpoint:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()


def _holds_no_weights(key: str) -> bool:
    name = key.partition("/")[0]
    return name in _NO_WEIGHTS or name.endswith("_extra_state")
