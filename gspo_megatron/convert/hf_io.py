"""Hugging Face directories: read any box of any tensor, write them streaming under a temporary name."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.fp8_io import find_fp8
from gspo_megatron.convert.mapped import StoredTensor, map_box
from gspo_megatron.convert.ops import Box, ConversionError, Shape, TensorMap, raise_problems, whole
from gspo_megatron.convert.safetensors_io import (
    INDEX_NAME,
    MAX_FILE_BYTES,
    SafetensorsWriter,
    TensorSpec,
    index_json,
    plan_hf_files,
    read_header,
)
from gspo_megatron.convert.strict_json import check_regular, read_json
from gspo_megatron.quantize import WEIGHT_DTYPES

# Files that travel with the weights, where the source has them. Python files (remote code) never do.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS = "*.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl")


def read_config(hf_dir: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        ConversionError: absent, or not a JSON object.
    """
    return _read_object(hf_dir / "config.json", "the model's keys")


def _read_object(path: Path, of: str) -> dict[str, Any]:
    found: dict[str, Any] = read_json(path)
    if not isinstance(found, dict):
        raise ConversionError(f"{path}: holds a {type(found).__name__}, wants an object with {of}")
    return found


def has_weights(hf_dir: Path) -> bool:
    """Whether a directory has anything that may be weights, in whatever state."""
    names = [path.name for path in hf_dir.iterdir()]
    return any(name == INDEX_NAME or fnmatch(name, pattern) for name in names for pattern in (*_PICKLES, _WEIGHTS))


def _find_files(hf_dir: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The directory's safetensors files, and the index's file name for each tensor where there is an index."""
    try:
        names = sorted(path.name for path in hf_dir.iterdir())
    except OSError as error:
        raise ConversionError(f"{hf_dir}: {error.strerror}") from error
    found = [name for name in names if fnmatch(name, _WEIGHTS)]
    for name in found:
        check_regular(hf_dir / name)
    if INDEX_NAME not in names:
        pickles = [name for name in names if any(fnmatch(name, pattern) for pattern in _PICKLES)]
        if not found and pickles:
            raise ConversionError(
                f"{hf_dir}: weights only as pickle ({', '.join(pickles[:3])}), which is never opened since it can run "
                "any code; wants safetensors, which save_pretrained of transformers writes"
            )
        if not found:
            raise ConversionError(f"{hf_dir}: no *.safetensors")
        if found != ["model.safetensors"]:
            shown = ", ".join(found[:3])
            raise ConversionError(f"{hf_dir}: has {shown} and no {INDEX_NAME}; wants the index, or model.safetensors")
        return [hf_dir / "model.safetensors"], None
    weight_map = _read_object(hf_dir / INDEX_NAME, "a weight_map").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ConversionError(f"{hf_dir / INDEX_NAME}: weight_map: wants an object, tensor name to file name")
    listed = sorted(set(weight_map.values()))
    problems = [f"{INDEX_NAME} lists {name}, which is missing" for name in listed if name not in found]
    problems += [
        f"{name}: {INDEX_NAME} does not list it; remove one of the two" for name in found if name not in listed
    ]
    raise_problems(str(hf_dir), problems)
    return [hf_dir / name for name in listed], weight_map


class TensorReader:
    """Tensors of a Hugging Face directory, read when asked for.

    FP8 weights appear as what they stand for: under the weight's name, in `dtype`, without their scales.
    """

    def __init__(self, hf_dir: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Open every file and check names, headers, index, and FP8 against config.json; read no tensor.

        Args:
            hf_dir: with model.safetensors, or several files and their index; config.json where weights are FP8.
            dtype: in which FP8 weights are given, bfloat16 or float32. Others are given as they are stored.

        Raises:
            ConversionError: names the file and tensor.
        """
        if dtype not in WEIGHT_DTYPES:
            raise ConversionError(f"dtype={dtype}: wants bfloat16 or float32")
        self._dtype = dtype
        files, weight_map = _find_files(hf_dir)
        self._places: dict[str, StoredTensor] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for name, place in read_header(file).items():
                if name in self._places:
                    raise ConversionError(f"{file}: {name} occurs in {self._file_of[name].name} too")
                self._places[name], self._file_of[name] = place, file
        if weight_map is not None:
            _check_index(hf_dir, weight_map, self._file_of)
        self._fds = {file: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files}
        weakref.finalize(self, _close, list(self._fds.values()))
        self._stored = {name: (place.dtype, place.shape) for name, place in self._places.items()}
        config = read_config(hf_dir) if (hf_dir / "config.json").exists() else {}
        self._fp8 = find_fp8(self._stored, config.get("quantization_config"), str(hf_dir))
        scales = {weight.scale_name for weight in self._fp8.values()}
        self._tensors = {
            name: (dtype if name in self._fp8 else stored_dtype, shape)
            for name, (stored_dtype, shape) in self._stored.items()
            if name not in scales
        }

    def tensors(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Dtype and shape of each tensor."""
        return dict(self._tensors)

    def shapes(self) -> dict[str, Shape]:
        """Shape of each tensor."""
        return {name: shape for name, (_, shape) in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """A tensor; do not write to it.

        Returns:
            A view of the mapped file: its memory is the page cache's. FP8 weights: new memory.

        Raises:
            ConversionError: a scale that is no scale.
        """
        return self.read_box(name, whole(self._tensors[name][1]))

    def read_box(self, name: str, box: Box) -> Tensor:
        """That box of a tensor and no more of the file; do not write to it.

        Args:
            name: one of tensors().
            box: (start, stop) per axis, inside the tensor.

        Returns:
            In the box's shape; a view of the mapped file, or new memory for FP8 weights.

        Raises:
            ConversionError: a scale that is no scale.
        """
        shape = self._tensors[name][1]
        inside = (0 <= start <= stop <= n for (start, stop), n in zip(box, shape, strict=True))
        assert all(inside), f"{name}: box {box} of shape {shape}"
        part = self.read_stored(name, box)
        weight = self._fp8.get(name)
        if weight is None:
            return part
        try:
            return weight.dequantize(
                part,
                self.read_stored(weight.scale_name, whole(self._stored[weight.scale_name][1])),
                shape,
                offset=tuple(start for start, _ in box),
                dtype=self._dtype,
            )
        except ValueError as error:
            raise ConversionError(f"{self._file_of[weight.scale_name]}: {weight.scale_name}: {error}") from error

    def stored(self) -> dict[str, tuple[torch.dtype, Shape]]:
        """Dtype and shape of each tensor of the files: of FP8 weights payload and scale."""
        return self._stored

    def scale_name(self, name: str) -> str | None:
        """Under which the scale of an FP8 weight is stored; None for others."""
        weight = self._fp8.get(name)
        return weight.scale_name if weight is not None else None

    def read_stored(self, name: str, box: Box) -> Tensor:
        """A box of a tensor as the file has it: a view of the mapped file, do not write to it."""
        file = self._file_of[name]
        return map_box(self._fds[file], self._places[name], box, where=f"{file}: {name}")


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _check_index(hf_dir: Path, weight_map: Mapping[str, str], file_of: Mapping[str, Path]) -> None:
    problems = [
        f"{INDEX_NAME} has {name} in {listed}; it is in {file_of[name].name if name in file_of else 'no file'}"
        for name, listed in weight_map.items()
        if name not in file_of or file_of[name].name != listed
    ]
    problems += [
        f"{file.name} has {name}, {INDEX_NAME} does not" for name, file in file_of.items() if name not in weight_map
    ]
    raise_problems(str(hf_dir), problems)


def write_hf_dir(
    out_dir: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    companions_from: Path,
    quantization_config: Mapping[str, Any] | None = None,
) -> None:
    """Write weights and companion files; the directory appears under its name only when complete and on the disk.

    Args:
        out_dir: must not exist; `<out_dir>.partial` is used meanwhile, and removed first where an earlier try left it.
        specs: (hf_name, dtype, shape) of what `tensors` gives, in its order.
        tensors: (hf_name, tensor); consumed once, no tensor is held.
        companions_from: directory whose config and tokenizer files are copied.
        quantization_config: that of the weights; config.json is given it, or loses its own where None.

    Raises:
        ConversionError: out_dir exists; specs and tensors differ; the disk is full or refuses.
    """
    if out_dir.exists():
        raise ConversionError(f"{out_dir}: exists; remove it or name another directory")
    files = plan_hf_files(specs, max_file_bytes=MAX_FILE_BYTES)
    partial = out_dir.with_name(out_dir.name + ".partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        stream = iter(tensors)
        for file in files:
            with SafetensorsWriter(partial / file.name, file) as writer:
                for name, _, _ in file.tensors:
                    item = next(stream, None)
                    if item is None:
                        raise ConversionError(f"{out_dir}: the tensors end before {name}")
                    writer.write(*item)
        for name, _ in stream:
            raise ConversionError(f"{out_dir}: {name}: comes after all planned tensors")
        if len(files) > 1:
            write_synced(partial / INDEX_NAME, index_json(files).encode())
        copy_companions(
            companions_from,
            partial,
            quantization_config=quantization_config,
            specs=None if quantization_config else specs,
        )
        sync_path(partial)
        partial.rename(out_dir)
        sync_path(out_dir.parent)
    except OSError as error:
        raise ConversionError(f"{error.filename or partial}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an error; it has its name by now without


def find_companions(folder: Path) -> list[str]:
    """Those of COMPANIONS that a directory has; each can be read.

    Raises:
        ConversionError: a name that leads to no file (a link to nowhere, a folder), or no permission.
    """
    names = [name for name in COMPANIONS if os.path.lexists(folder / name)]
    for name in names:
        check_regular(folder / name)
    return names


def copy_companions(
    source: Path,
    target: Path,
    *,
    quantization_config: Mapping[str, Any] | None,
    specs: Iterable[TensorSpec] | None = None,
) -> None:
    """Copy what COMPANIONS lists and source has; config.json gets that quantization_config, or none.

    Args:
        source: directory.
        target: directory.
        quantization_config: of the weights.
        specs: weights, before quantisation, of which most have the dtype that config.json is to name; None: it stays.

    Raises:
        ConversionError: as find_companions; config.json is no JSON object, or a quantization_config has no
            config.json to go to.
        OSError: the disk is full or refuses.
    """
    if quantization_config and not (source / "config.json").is_file():
        raise ConversionError(f"{source}: has no config.json, in which FP8 weights have to be described")
    for name in find_companions(source):
        content = (source / name).read_bytes()
        if name == "config.json":
            config = read_config(source)
            changed = {key: value for key, value in config.items() if key != "quantization_config"}
            changed |= {"quantization_config": dict(quantization_config)} if quantization_config else {}
            if specs is not None:
                dtype = _main_dtype(specs)
                changed |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
            if changed != config:
                content = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
        write_synced(target / name, content)


def _main_dtype(specs: Iterable[TensorSpec]) -> str:
    num_bytes: Counter[str] = Counter()
    for _, dtype, shape in specs:
        num_bytes[str(dtype).removeprefix("torch.")] += prod(shape) * dtype.itemsize
    return num_bytes.most_common(1)[0][0]


def write_synced(path: Path, content: bytes) -> None:
    """Write a small file and put it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Put a file's content, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def random_tensors(ops: Iterable[TensorMap], *, std: float, seed: int) -> Iterable[tuple[str, Tensor]]:
    """A random initialisation, the same for every layout: norms 1, biases 0, weights normal(0, std), float32."""
    generator = torch.Generator().manual_seed(seed)
    for op in ops:
        for name, shape in op.hf_shapes.items():
            if len(shape) == 1:
                yield name, torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            else:
                yield name, torch.randn(shape, generator=generator) * std
