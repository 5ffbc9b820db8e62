"""Megatron checkpoint -> Hugging Face directory, as a list of files for `job.run_job`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.families import check_same_model
from gspo_megatron.convert.fp8_io import Fp8Export, fp8_config
from gspo_megatron.convert.hf_io import COMPANIONS, copy_companions, find_companions, read_config, write_synced
from gspo_megatron.convert.manifest import (
    HF_MANIFEST,
    FileRecord,
    Manifest,
    TensorRecord,
    dtype_name,
    dtype_of,
    hash_file,
    new_hash,
    verify_files,
    write_manifest,
)
from gspo_megatron.convert.mcore_io import McoreCheckpoint
from gspo_megatron.convert.mcore_layout import COMMON_KEY, HF_SUBFOLDER
from gspo_megatron.convert.ops import Box, ConversionError, TensorMap, check_table, mcore_problems, raise_problems
from gspo_megatron.convert.safetensors_io import (
    INDEX_NAME,
    MAX_FILE_BYTES,
    HfFile,
    SafetensorsWriter,
    index_json,
    plan_hf_files,
)
from gspo_megatron.convert.source import (
    SourceHashes,
    Specs,
    check_unchanged,
    file_states,
    merge_once,
    num_bytes_of,
)
from gspo_megatron.convert.to_mcore import WEIGHT_DTYPES, read_model
from gspo_megatron.convert.workers import PlannedFile, Record

_SCALE = "_scale_inv"


@dataclass(frozen=True, kw_only=True)
class ToHf:
    """The conversion; see `workers.Conversion`."""

    mcore_dir: Path
    require_manifest: bool
    verify_files: bool
    """Hash data files before they are used: needless where the manifest has a hash of every tensor to compare."""
    companions_dir: Path
    """config.json, tokenizer."""
    table: tuple[TensorMap, ...]
    source: Specs
    """Megatron tensors as they are stored."""
    hf: Specs
    """Hugging Face tensors, before quantisation."""
    quantization_config: Mapping[str, Any] | None
    """For FP8 output."""
    scale_dtype: torch.dtype
    hf_files: tuple[HfFile, ...]
    source_files: Mapping[str, list[int]]
    """[bytes, mtime in ns] of everything that is read."""
    options: Mapping[str, Any]
    notes: tuple[str, ...]
    """For the console."""

    @cached_property
    def files(self) -> Sequence[PlannedFile]:
        """Safetensors files."""
        return [PlannedFile(file.name, file.data_bytes) for file in self.hf_files]

    @cached_property
    def target(self) -> Specs:
        """Tensors that are written: with --fp8 payloads and scales."""
        return {name: (dtype, shape) for file in self.hf_files for name, dtype, shape in file.tensors}

    def identity(self) -> dict[str, dict[str, Any]]:
        """What decides the bytes of the output."""
        digest = new_hash()
        digest.update(repr(self.hf_files).encode())
        return {
            "options": dict(self.options),
            "source": dict(self.source_files),
            "plan": {"files": len(self.hf_files), "tensors": digest.hexdigest()},
        }

    @cached_property
    def _checkpoint(self) -> McoreCheckpoint:
        return McoreCheckpoint(self.mcore_dir, require_manifest=self.require_manifest, verify=self.verify_files)

    @cached_property
    def _export(self) -> Fp8Export | None:
        if self.quantization_config is None:
            return None
        specs = [(name, *spec) for name, spec in self.hf.items()]
        return Fp8Export(specs, self.quantization_config, scale_dtype=self.scale_dtype)

    @cached_property
    def _op_of(self) -> Mapping[str, TensorMap]:
        return {name: op for op in self.table for name in op.hf_shapes}

    @cached_property
    def _hashed_in(self) -> Mapping[str, int]:
        """Index of the file with which a Megatron tensor is hashed: the first that has a part of it."""
        found: dict[str, int] = {}
        for index, file in enumerate(self.hf_files):
            for name, _, _ in file.tensors:
                found.setdefault(self._op_of[name.removesuffix(_SCALE)].mcore_name, index)
        return found

    def write_file(self, index: int, directory: Path, report: Callable[[int], None]) -> Record:
        """Write one safetensors file."""
        file = self.hf_files[index]
        hashes = SourceHashes(self.source, self._checkpoint.read_box)

        def read_mcore(mcore_name: str, box: Box) -> Tensor:
            if self._hashed_in[mcore_name] == index:
                hashes.advance(mcore_name, box)
            return self._checkpoint.read_box(mcore_name, box)

        wanted = {name for name, _, _ in file.tensors}
        with SafetensorsWriter(directory / file.name, file) as writer:
            for name, tensor in self._tensors(file, read_mcore):
                if name in wanted:  # payload and scale may lie in two files
                    writer.write(name, tensor)
                    report(tensor.nbytes)
        source = hashes.records()
        self._check_hashes(source)
        return {
            "bytes": file.total_bytes,
            "hash": writer.file_hash,
            "tensors": {
                name: asdict(
                    TensorRecord(dtype_name(d), shape, num_bytes_of((d, shape)), writer.tensor_hashes[name], file.name)
                )
                for name, d, shape in file.tensors
            },
            "source": {name: asdict(record) for name, record in source.items()},
        }

    def _tensors(self, file: HfFile, read_mcore: Callable[[str, Box], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a file, in its order."""
        names = list(dict.fromkeys(name.removesuffix(_SCALE) for name, _, _ in file.tensors))

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name in names:
                op = self._op_of[name]
                tensor = op.read_hf(name, partial(read_mcore, op.mcore_name))
                is_quantised = f"{name}{_SCALE}" in self.target  # from what is stored, rounded once
                yield name, tensor if is_quantised else tensor.to(self.hf[name][0])

        return weights() if self._export is None else self._export.tensors(weights())

    def _check_hashes(self, found: Mapping[str, TensorRecord]) -> None:
        manifest = self._checkpoint.manifest
        if manifest is None:
            return
        wanted = manifest.tensors
        wrong = [n for n, record in found.items() if n in wanted and wanted[n].hash != record.hash]
        problems = [f"{name}, in {wanted[name].file}" for name in wrong]
        raise_problems(f"{self._checkpoint.folder}: tensors do not have the hash of the manifest", problems)

    def preload(self) -> None:
        """Nothing."""

    def finish(self, directory: Path, records: Sequence[Record]) -> None:
        """Write index, config and tokenizer, manifest."""
        now = _source_files(self._checkpoint.folder, self.companions_dir)
        check_unchanged(str(self.mcore_dir), self.source_files, now)
        target = merge_once(records, "tensors", self.target, "Hugging Face tensors were written")
        names = [op.mcore_name for op in self.table]
        source = merge_once(records, "source", names, f"{self.mcore_dir}: tensors were read")
        if len(self.hf_files) > 1:
            write_synced(directory / INDEX_NAME, index_json(self.hf_files).encode())
        copy_companions(
            self.companions_dir,
            directory,
            quantization_config=self.quantization_config,
            specs=[(name, *spec) for name, spec in self.hf.items()],
        )
        done = {f.name: FileRecord(r["bytes"], r["hash"]) for f, r in zip(self.files, records, strict=True)}
        rest = sorted(path.name for path in directory.iterdir() if path.name not in done)
        manifest = Manifest(
            kind="hf",
            tensors=target,
            files=done | {name: hash_file(directory / name) for name in rest},
            source_tensors=source,
            source_files={name: FileRecord(num_bytes) for name, (num_bytes, _) in self.source_files.items()},
            options=self.options,
        )
        write_manifest(directory / HF_MANIFEST, manifest)


def may_be_padded(checkpoint: McoreCheckpoint) -> bool:
    """Whether rows beyond the vocabulary are padding; a converted checkpoint, whose manifest has tensors, has none."""
    return checkpoint.manifest is None or not checkpoint.manifest.tensors


def check_mcore_names_and_shapes(
    table: Sequence[TensorMap], found: Specs, where: str, *, may_be_padded: bool = True
) -> None:
    """Compare the table with a checkpoint's tensors.

    Args:
        table: the family's.
        found: the checkpoint's tensors.
        where: for the message.
        may_be_padded: tensors of the vocabulary may have more rows.

    Raises:
        ConversionError: lists every missing, surplus and misshapen tensor, and those that are no weights.
    """
    shapes = {name: shape for name, (_, shape) in found.items()}
    problems = mcore_problems(table, shapes, may_be_padded=may_be_padded)
    problems += [f"{n} is {d}, wants a weight's dtype" for n, (d, _) in found.items() if d not in WEIGHT_DTYPES]
    raise_problems(f"{where}: tensors do not fit config.json", problems)


def plan_to_hf(
    mcore_dir: Path,
    *,
    hf_config_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    require_manifest: bool = True,
) -> ToHf:
    """Check a checkpoint and plan its conversion; no tensor is read.

    Args:
        mcore_dir: torch_dist checkpoint.
        hf_config_dir: config.json and tokenizer; None: those that the checkpoint carries.
        dtype: of all tensors; None: as they are stored.
        fp8: write FP8 with the quantization_config that the config carries, or else blocks of 128 x 128.
        max_file_bytes: of a file's tensors; a larger tensor is a file of its own.
        require_manifest: refuse a checkpoint that cannot be verified.

    Raises:
        ConversionError: not such a checkpoint; an unknown architecture; config and tensors that disagree.
    """
    checkpoint = McoreCheckpoint(mcore_dir, require_manifest=require_manifest)
    companions_dir = hf_config_dir or checkpoint.folder / HF_SUBFOLDER
    if not (companions_dir / "config.json").is_file():
        raise ConversionError(
            f"{companions_dir}: has no config.json; name a directory that has the model's with --hf-config"
        )
    companions = find_companions(companions_dir)
    carried_dir = checkpoint.folder / HF_SUBFOLDER
    if hf_config_dir is not None and (carried_dir / "config.json").is_file():
        check_same_model(read_config(hf_config_dir), read_config(carried_dir), carried_dir)
    if hf_config_dir is None and checkpoint.manifest is not None:
        carried = {name for name in checkpoint.manifest.files if name.startswith(f"{HF_SUBFOLDER}/")}
        carried |= {f"{HF_SUBFOLDER}/{name}" for name in companions}
        verify_files(checkpoint.folder, checkpoint.manifest, names=sorted(carried))
    family, config = read_model(companions_dir)
    table = family.op_list(config)
    check_table(table)
    found = dict(checkpoint.tensors)
    check_mcore_names_and_shapes(table, found, str(mcore_dir), may_be_padded=may_be_padded(checkpoint))
    unknown = [f"{name}: neither a tensor nor known state" for name in checkpoint.unknown_names]
    raise_problems(f"{mcore_dir}: objects that would be lost", unknown)
    specs = [(n, dtype or found[op.mcore_name][0], shape) for op in table for n, shape in op.hf_shapes.items()]
    quantization_config, scale_dtype, written = None, torch.float32, specs
    if fp8:
        carried_config = read_config(companions_dir).get("quantization_config")
        quantization_config = carried_config or fp8_config(specs)
        scale_dtype = _scale_dtype(checkpoint)
        written = Fp8Export(specs, quantization_config, scale_dtype=scale_dtype).specs
    return ToHf(
        mcore_dir=mcore_dir.absolute(),
        require_manifest=require_manifest,
        verify_files=checkpoint.manifest is None or not checkpoint.manifest.tensors.keys() >= found.keys(),
        companions_dir=companions_dir.absolute(),
        table=tuple(table),
        source=found,
        hf={name: (d, shape) for name, d, shape in specs},
        quantization_config=quantization_config,
        scale_dtype=scale_dtype,
        hf_files=tuple(plan_hf_files(written, max_file_bytes=max_file_bytes)),
        source_files=_source_files(checkpoint.folder, companions_dir),
        options={
            "to": "hf",
            "dtype": dtype and dtype_name(dtype),
            "fp8": fp8,
            "max_shard_bytes": max_file_bytes,
        },
        notes=_notes(checkpoint, table),
    )


def _scale_dtype(checkpoint: McoreCheckpoint) -> torch.dtype:
    """That of the FP8 checkpoint which this one was made from, else float32."""
    source = checkpoint.manifest.source_tensors if checkpoint.manifest is not None else {}
    stored = (dtype_of(record.dtype) for name, record in source.items() if name.endswith(f".weight{_SCALE}"))
    return next(stored, torch.float32)


def _source_files(folder: Path, companions_dir: Path) -> dict[str, list[int]]:
    place = HF_SUBFOLDER if companions_dir == folder / HF_SUBFOLDER else "hf_config"
    companions = {f"{place}/{name}": state for name, state in file_states(companions_dir, COMPANIONS).items()}
    return file_states(folder, [path.name for path in folder.iterdir()]) | companions


def _notes(checkpoint: McoreCheckpoint, table: Sequence[TensorMap]) -> tuple[str, ...]:
    notes = []
    for op in table:
        num_rows = checkpoint.tensors[op.mcore_name][1][0]
        if num_rows > op.shape[0]:
            notes.append(
                f"{checkpoint.folder}: {op.mcore_name} has {num_rows} rows, the vocabulary {op.shape[0]}: "
                "the rest is left out as padding"
            )
    if checkpoint.manifest is None:
        notes.append(f"warning: {checkpoint.folder} has no manifest: it is read unverified")
    other = [name for name in checkpoint.object_names if name != COMMON_KEY]
    left_out = [*checkpoint.optimizer_names, *other]
    if left_out:
        shown = ", ".join(left_out[:3])
        notes.append(f"{checkpoint.folder}: left out, no weights: {len(left_out)} entries, such as {shown}")
    return tuple(notes)
