"""Does a Megatron checkpoint hold exactly the weights of a Hugging Face directory? Read back, compared bit by bit.

It shares the families' tables, their checks and the two readers with the converter, and none of its writing code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from gspo_megatron.convert.families import check_same_model, table_for
from gspo_megatron.convert.hf_io import COMPANIONS, TensorReader, read_config
from gspo_megatron.convert.manifest import HF_MANIFEST, MANIFEST, Manifest, read_manifest, verify_files
from gspo_megatron.convert.mcore_io import McoreCheckpoint
from gspo_megatron.convert.mcore_layout import HF_SUBFOLDER, resolve_folder
from gspo_megatron.convert.ops import TensorMap, check_names_and_shapes, raise_problems
from gspo_megatron.convert.source import SourceHashes
from gspo_megatron.convert.to_hf import check_mcore_names_and_shapes, may_be_padded
from gspo_megatron.convert.to_mcore import read_model

Progress = Callable[[int], None]
"""Gets the bytes that were read since its last call."""


_OF_FILES = ("dtype", "torch_dtype", "quantization_config")
"""Keys of config.json that say how weights are stored, and may change in a conversion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was found equal."""

    num_tensors: int
    num_rounded: int
    """Of another dtype on the two sides, as --dtype asked or FP8 needs; equal once the one is converted."""
    num_parameters: int
    num_files: int
    num_bytes: int
    model_type: str


def bytes_to_read(hf_dir: Path, mcore_dir: Path) -> int:
    """What verify reads: the files of both manifests, and the tensors of both sides.

    Raises:
        ConversionError: one of the two cannot be read.
    """
    manifest = read_manifest(resolve_folder(mcore_dir) / MANIFEST)
    files = [*manifest.files.values(), *_hf_manifest(hf_dir).files.values()]
    tensors = TensorReader(hf_dir, dtype=torch.float32).tensors().values()
    return (
        sum(file.num_bytes for file in files)
        + sum(tensor.num_bytes for tensor in manifest.tensors.values())
        + sum(prod(shape) * dtype.itemsize for dtype, shape in tensors)
    )


def _hf_manifest(hf_dir: Path) -> Manifest:
    """An export has one, a published directory none: then one that says nothing."""
    path = hf_dir / HF_MANIFEST
    return read_manifest(path) if path.exists() else Manifest(kind="hf", files={})


def verify(hf_dir: Path, mcore_dir: Path, *, progress: Progress) -> Verified:
    """Hashes of the manifests, names, shapes, and every tensor's bits.

    Args:
        hf_dir: either side of a conversion; its weights may be FP8 or have fused experts.
        mcore_dir: the other side.
        progress: of bytes_to_read.

    Memory: one Hugging Face tensor and its parts.

    Raises:
        ConversionError: the first check that failed, with everything that it found.
    """
    checkpoint = McoreCheckpoint(mcore_dir, verify=False)  # at once, in the next line
    manifest = checkpoint.manifest
    assert manifest is not None  # it is required
    _check_listed(checkpoint.folder, manifest)
    verify_files(checkpoint.folder, manifest, progress=progress)
    _ = checkpoint.common  # a pickle: plain values, or refused
    exported = _hf_manifest(hf_dir)
    verify_files(hf_dir, exported, progress=progress)
    _, hf_config = read_model(hf_dir)
    reader = TensorReader(hf_dir, dtype=torch.float32)  # of FP8; the checkpoint's dtype is a rounding of it
    table = table_for(hf_config, reader.shapes())
    check_names_and_shapes(table, reader.shapes(), str(hf_dir), read_hf=reader.read_box)
    check_mcore_names_and_shapes(
        table, checkpoint.tensors, str(checkpoint.folder), may_be_padded=may_be_padded(checkpoint)
    )
    raise_problems(f"{checkpoint.folder}: neither tensors nor known state", checkpoint.unknown_names)
    _check_companions(hf_dir, checkpoint.folder / HF_SUBFOLDER)
    _check_hashes(checkpoint, manifest, progress)
    num_rounded, problems = _differences(table, reader, checkpoint, exported, progress)
    hint = "; an --fp8 export of weights that were not FP8 before is rounded" if exported.options.get("fp8") else ""
    raise_problems(f"{checkpoint.folder} and {hf_dir} differ{hint}", problems)
    return Verified(
        num_tensors=len(reader.shapes()),
        num_rounded=num_rounded,
        num_parameters=sum(prod(shape) for shape in reader.shapes().values()),
        num_files=len(manifest.files),
        num_bytes=sum(record.num_bytes for record in manifest.files.values()),
        model_type=hf_config["model_type"],
    )


def _check_hashes(checkpoint: McoreCheckpoint, manifest: Manifest, progress: Progress) -> None:
    hashes = SourceHashes(checkpoint.tensors, checkpoint.read_box)
    for name, record in manifest.tensors.items():
        hashes.advance(name)
        progress(record.num_bytes)
    found = hashes.records()
    wrong = [
        f"{name}, in {record.file}" for name, record in manifest.tensors.items() if found[name].hash != record.hash
    ]
    raise_problems(f"{checkpoint.folder}: tensors do not have the hash of {MANIFEST}", wrong)


def _check_listed(folder: Path, manifest: Manifest) -> None:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    unknown = sorted(names - manifest.files.keys() - {MANIFEST})
    raise_problems(f"{folder}: holds files that {MANIFEST} does not list", unknown)


def _differences(
    table: Sequence[TensorMap],
    reader: TensorReader,
    checkpoint: McoreCheckpoint,
    exported: Manifest,
    progress: Progress,
) -> tuple[int, list[str]]:
    """(tensors equal but for an asked change of dtype, problems)."""
    assert checkpoint.manifest is not None
    is_mcore_converted, is_hf_converted = (m.options.get("dtype") for m in (checkpoint.manifest, exported))
    num_rounded, problems = 0, []
    for op in table:
        for hf_name in op.hf_shapes:
            want = reader.read(hf_name)
            progress(want.nbytes)
            found = op.read_hf(hf_name, partial(checkpoint.read_box, op.mcore_name))
            name = f"{hf_name} (in {op.mcore_name})"
            if want.dtype != found.dtype:
                num_rounded += 1
                if is_hf_converted:
                    found = found.to(want.dtype)
                elif is_mcore_converted or reader.scale_name(hf_name) is not None:
                    want = want.to(found.dtype)
                else:
                    problems.append(f"{name}: {want.dtype} in Hugging Face, {found.dtype} in Megatron, unasked")
                    continue
            problems += _difference(name, want, found)
    return num_rounded, problems


def _difference(name: str, want: Tensor, found: Tensor) -> list[str]:
    want, found = want.contiguous(), found.contiguous()
    bits, found_bits = want.view(torch.uint8), found.view(torch.uint8)  # bits: NaN is equal to itself
    if torch.equal(bits, found_bits):
        return []
    different = (bits != found_bits).view(*want.shape, want.element_size()).any(-1)
    first = tuple(int(i) for i in different.nonzero()[0])
    return [
        f"{name}: {int(different.sum())} of {want.numel()} elements differ; first at {first}: "
        f"{want[first].item()!r} in Hugging Face, {found[first].item()!r} in Megatron"
    ]


def _check_companions(hf_dir: Path, carried: Path) -> None:
    problems = []
    for name in COMPANIONS:
        if (hf_dir / name).is_file() != (carried / name).is_file():
            has, lacks = (hf_dir, carried) if (hf_dir / name).is_file() else (carried, hf_dir)
            problems.append(f"{name}: {has} has it, {lacks} does not")
        elif (hf_dir / name).is_file() and name != "config.json":
            if (hf_dir / name).read_bytes() != (carried / name).read_bytes():
                problems.append(f"{name}: contents differ")
    raise_problems(f"{carried}: does not carry the files of {hf_dir}", problems)
    ours, theirs = ({k: v for k, v in read_config(d).items() if k not in _OF_FILES} for d in (hf_dir, carried))
    check_same_model(ours, theirs, carried)
    different = [f"config.json: {k}" for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k)]
    raise_problems(f"{carried} and {hf_dir} say different things", different)
