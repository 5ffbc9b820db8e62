"""Hugging Face directory -> Megatron checkpoint, as a list of files for `job.run_job`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.families import family_of, table_for
from gspo_megatron.convert.family import Family
from gspo_megatron.convert.hf_io import (
    COMPANIONS,
    TensorReader,
    copy_companions,
    find_companions,
    has_weights,
    read_config,
    write_synced,
)
from gspo_megatron.convert.manifest import (
    HF_MANIFEST,
    MANIFEST,
    FileRecord,
    Manifest,
    dtype_name,
    hash_file,
    new_hash,
    write_manifest,
)
from gspo_megatron.convert.mcore_io import (
    DataFile,
    DataFileWriter,
    common_state,
    data_file_name,
    write_checkpoint_metadata,
)
from gspo_megatron.convert.mcore_layout import HF_SUBFOLDER
from gspo_megatron.convert.ops import (
    Box,
    ConversionError,
    TensorMap,
    check_names_and_shapes,
    extent,
    raise_problems,
)
from gspo_megatron.convert.safetensors_io import INDEX_NAME
from gspo_megatron.convert.source import (
    SourceHashes,
    Specs,
    check_unchanged,
    file_states,
    merge_once,
    num_bytes_of,
)
from gspo_megatron.convert.workers import PlannedFile, Record

MAX_FILE_BYTES = 2**30
"""Tensors of a data file. An interruption loses as much per worker."""
ITERATION_DIR = "iter_0000000"
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def read_model(folder: Path) -> tuple[Family, dict[str, Any]]:
    """The family of a directory's model, and its config.json.

    Raises:
        ConversionError: an unknown architecture, or a config.json that is not understood; names the file.
    """
    # What it says of the storage of FP8 weights is the reader's business.
    config = {key: value for key, value in read_config(folder).items() if key != "quantization_config"}
    try:
        family = family_of(config)
        family.transformer_config(config)
    except ConversionError as error:  # begins with config.json
        raise ConversionError(f"{folder}/{error}") from error
    return family, config


def check_weight_dtypes(found: Specs, where: str) -> None:
    """A directory's tensors are weights, and no numbers of another kind.

    Raises:
        ConversionError: lists those that are not.
    """
    wanted = ", ".join(map(dtype_name, WEIGHT_DTYPES))
    problems = [f"{name} is {d}, wants {wanted}" for name, (d, _) in found.items() if d not in WEIGHT_DTYPES]
    raise_problems(f"{where}: dtypes", problems)


def target_dtypes(table: Sequence[TensorMap], hf: Specs, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """dtype of each Megatron tensor: the one asked for, or that of its Hugging Face tensors.

    Raises:
        ConversionError: one that is put together from several dtypes.
    """
    found = {op.mcore_name: sorted({dtype_name(hf[name][0]) for name in op.hf_shapes}) for op in table}
    if dtype is None:
        mixed = [f"{name}: made of {' and '.join(d)}; give --dtype" for name, d in found.items() if len(d) > 1]
        raise_problems("dtypes", mixed)
    return {op.mcore_name: dtype or hf[next(iter(op.hf_shapes))][0] for op in table}


@dataclass(frozen=True, kw_only=True)
class ToMcore:
    """The conversion; see `workers.Conversion`."""

    hf_dir: Path
    table: tuple[TensorMap, ...]
    hf: Specs
    """Hugging Face tensors as they are converted: FP8 ones with the dtype that they are dequantised to."""
    hf_copies: tuple[str, ...]
    """Tensors that are there twice (a head beside tied embeddings), compared and left out."""
    target: Specs
    """Megatron tensors."""
    max_file_bytes: int
    options: Mapping[str, Any]
    source_files: Mapping[str, list[int]]
    """[bytes, mtime in ns] of everything that is read."""
    dequantised: torch.dtype
    notes: tuple[str, ...]
    """For the console."""

    @cached_property
    def _groups(self) -> list[list[TensorMap]]:
        """Operations of each data file."""
        groups: list[list[TensorMap]] = []
        group_bytes = 0
        for op in self.table:
            op_bytes = num_bytes_of(self.target[op.mcore_name])
            if not groups or group_bytes + op_bytes > self.max_file_bytes:
                groups.append([])
                group_bytes = 0
            groups[-1].append(op)
            group_bytes += op_bytes
        return groups

    @cached_property
    def files(self) -> Sequence[PlannedFile]:
        """Data files."""
        sizes = [sum(num_bytes_of(self.target[op.mcore_name]) for op in group) for group in self._groups]
        return [PlannedFile(f"{ITERATION_DIR}/{data_file_name(i)}", n) for i, n in enumerate(sizes)]

    def identity(self) -> dict[str, dict[str, Any]]:
        """What decides the bytes of the output."""
        plan = [[(op.mcore_name, op.shape, str(self.target[op.mcore_name])) for op in group] for group in self._groups]
        digest = new_hash()
        digest.update(repr(plan).encode())
        return {
            "options": dict(self.options),
            "source": dict(self.source_files),
            "plan": {"files": len(plan), "tensors": digest.hexdigest()},
        }

    @cached_property
    def _reader(self) -> TensorReader:
        return TensorReader(self.hf_dir, dtype=self.dequantised)

    def write_file(self, index: int, directory: Path, report: Callable[[int], None]) -> Record:
        """Write one data file."""
        path = directory / self.files[index].name
        path.parent.mkdir(exist_ok=True)
        hashes = SourceHashes(self._reader.stored(), self._reader.read_stored)
        num_read: Counter[str] = Counter()

        def read_hf(name: str, box: Box) -> Tensor:
            hashes.advance(name, box)
            num_read[name] += prod(extent(box))
            return self._reader.read_box(name, box)

        with DataFileWriter(path) as writer:
            for op in self._groups[index]:
                dtype, shape = self.target[op.mcore_name]
                read = BoxSource(op, dtype, read_hf, report)
                writer.write_tensor(op.mcore_name, shape, dtype, read)
                for name, hf_shape in op.hf_shapes.items():
                    if num_read[name] != prod(hf_shape):
                        raise ConversionError(f"{name}: {num_read[name]} of {prod(hf_shape)} elements were read")
                    scale_name = self._reader.scale_name(name)
                    if scale_name is not None:
                        hashes.advance(scale_name)
        done = writer.result
        return {
            "bytes": done.record.num_bytes,
            "hash": done.record.hash,
            "data_file": asdict(done),
            "tensors": {name: asdict(record) for name, record in done.tensors.items()},
            "source": {name: asdict(record) for name, record in hashes.records().items()},
        }

    def preload(self) -> None:
        """A second's import."""
        import_module("torch.distributed.checkpoint")

    def finish(self, directory: Path, records: Sequence[Record]) -> None:
        """Write metadata, config and tokenizer, manifest."""
        check_unchanged(str(self.hf_dir), self.source_files, file_states(self.hf_dir, self.source_files))
        stored = [name for name in self._reader.stored() if name not in self.hf_copies]
        target = merge_once(records, "tensors", self.target, "Megatron tensors were written")
        source = merge_once(records, "source", stored, f"{self.hf_dir}: tensors were read")
        folder = directory / ITERATION_DIR
        data_files = [DataFile.from_json(record["data_file"]) for record in records]
        names = write_checkpoint_metadata(folder, data_files, common_state())
        (folder / HF_SUBFOLDER).mkdir(exist_ok=True)
        config = read_config(self.hf_dir)
        copy_companions(self.hf_dir, folder / HF_SUBFOLDER, quantization_config=config.get("quantization_config"))
        names += [f"{HF_SUBFOLDER}/{path.name}" for path in sorted((folder / HF_SUBFOLDER).iterdir())]
        manifest = Manifest(
            kind="mcore",
            tensors=target,
            files={d.file: d.record for d in data_files} | {name: hash_file(folder / name) for name in names},
            source_tensors=source,
            source_files={name: FileRecord(num_bytes) for name, (num_bytes, _) in self.source_files.items()},
            options=self.options,
        )
        write_manifest(folder / MANIFEST, manifest)
        write_synced(directory / "latest_checkpointed_iteration.txt", b"0\n")


@dataclass(slots=True)
class BoxSource:
    """Boxes of a Megatron tensor for the writer, each gone with the next.

    Those that are put together share one piece of memory: with a new tensor for each, glibc's heap (2.36) grew by as
    much as all boxes of a file have together.
    """

    op: TensorMap
    dtype: torch.dtype
    read_hf: Callable[[str, Box], Tensor]
    report: Callable[[int], None]
    memory: Tensor | None = None

    def __call__(self, box: Box) -> Tensor:
        if len(self.op.blocks_within(box)) == 1:
            tensor = self.op.read_mcore(box, self.read_hf).to(self.dtype)  # mostly a view
        else:
            num_elements = prod(extent(box))
            if self.memory is None or len(self.memory) < num_elements:
                self.memory = torch.empty(num_elements, dtype=self.dtype)
            tensor = self.memory[:num_elements].view(extent(box))
            self.op.load_into(tensor, box, self.read_hf)
        self.report(tensor.nbytes)
        return tensor


def plan_to_mcore(
    hf_dir: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    dry_run: bool = False,
) -> ToMcore:
    """Check a directory and plan its conversion; no tensor is read, but for copies.

    Args:
        hf_dir: config.json, safetensors, tokenizer.
        dtype: of all tensors; None: as they are stored, FP8 ones in bfloat16.
        max_file_bytes: of a data file's tensors; a larger tensor is a file of its own.
        dry_run: config.json is enough; where there are no weights, what they should be is planned.

    Raises:
        ConversionError: an unknown architecture; files that are damaged; config and weights that disagree.
    """
    _, config = read_model(hf_dir)
    notes = []
    if not any(name.startswith(("tokenizer", "vocab")) for name in find_companions(hf_dir)):
        notes.append(f"{hf_dir}: has no tokenizer; the checkpoint will have none to give back")
    dequantised = dtype or torch.bfloat16
    if dry_run and not has_weights(hf_dir):
        table = table_for(config, ())
        stated = _stated_dtype(config, hf_dir)
        found: Specs = {name: (stated, shape) for op in table for name, shape in op.hf_shapes.items()}
        notes.append(f"{hf_dir}: has no weights; these are the tensors that config.json wants")
    else:
        reader = TensorReader(hf_dir, dtype=dequantised)
        found = reader.tensors()
        table = table_for(config, found)
        check_names_and_shapes(table, reader.shapes(), str(hf_dir), read_hf=reader.read_box)
        num_fp8 = sum(reader.scale_name(name) is not None for name in found)
        if num_fp8:
            notes.append(f"{hf_dir}: {num_fp8} tensors are FP8 and are converted to {dtype_name(dequantised)}")
    hf_copies = tuple(name for op in table for name in op.hf_copies if name in found)
    notes += [f"{hf_dir}: {name} is a copy, bit for bit, and left out: the config ties it" for name in hf_copies]
    hf = {name: found[name] for op in table for name in op.hf_shapes}
    check_weight_dtypes(hf, str(hf_dir))
    dtypes = target_dtypes(table, hf, dtype)
    notes += _left_behind(hf_dir)
    source_names = [path.name for path in hf_dir.glob("*.safetensors")]
    return ToMcore(
        hf_dir=hf_dir.absolute(),
        table=tuple(table),
        hf=hf,
        hf_copies=hf_copies,
        target={op.mcore_name: (dtypes[op.mcore_name], op.shape) for op in table},
        max_file_bytes=max_file_bytes,
        options={"to": "mcore", "dtype": dtype and dtype_name(dtype), "max_shard_bytes": max_file_bytes},
        source_files=file_states(hf_dir, [*source_names, INDEX_NAME, *COMPANIONS]),
        dequantised=dequantised,
        notes=tuple(notes),
    )


def _left_behind(hf_dir: Path) -> list[str]:
    """A word about what else a directory holds."""
    carried = {*COMPANIONS, INDEX_NAME, HF_MANIFEST}
    others = [p.name for p in sorted(hf_dir.iterdir()) if p.name not in carried and p.suffix != ".safetensors"]
    others = [name for name in others if not name.startswith(".")]
    return [f"{hf_dir}: not carried along: {', '.join(others)}"] if others else []


def _stated_dtype(config: Mapping[str, Any], hf_dir: Path) -> torch.dtype:
    """Of the weights that a config.json without weights speaks of."""
    name = config.get("dtype", config.get("torch_dtype"))
    known = {dtype_name(dtype): dtype for dtype in WEIGHT_DTYPES}
    if name not in known:
        raise ConversionError(f"{hf_dir / 'config.json'}: dtype={name!r}: wants one of {', '.join(known)}")
    return known[name]
