"""Hugging Face directories: read tensors lazily, write them streaming under a temporary name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.convert.ops import Box, ConversionError, TensorMap, slices

# Files that travel with the weights, where the source has them.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
MAX_FILE_BYTES = 4 * 2**30


def read_config(hf_dir: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        ConversionError: absent, or not a JSON object.
    """
    path = hf_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:  # ValueError: not JSON, not text
        raise ConversionError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ConversionError(f"{path}: holds a {type(config).__name__}, wants an object with the model's keys")
    return config


class TensorReader:
    """Tensors of all *.safetensors files of a directory, read when asked for."""

    def __init__(self, hf_dir: Path) -> None:
        """Open every file.

        Raises:
            ConversionError: no file, an unreadable file, or a name that occurs twice.
        """
        files = sorted(hf_dir.glob("*.safetensors"))
        if not files:
            raise ConversionError(f"{hf_dir}: no *.safetensors")
        self._where: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise ConversionError(f"{file}: {error}") from error
            for name in handle.keys():
                if name in self._where:
                    raise ConversionError(f"{file}: {name} occurs in another file too")
                self._where[name] = handle

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, without reading it."""
        return {name: tuple(handle.get_slice(name).get_shape()) for name, handle in self._where.items()}

    def __call__(self, name: str) -> Tensor:
        """Read one tensor."""
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def read_box(self, name: str, box: Box) -> Tensor:
        """Read that box of a tensor and no more."""
        tensor: Tensor = self._where[name].get_slice(name)[slices(box)]
        return tensor


def write_hf_dir(out_dir: Path, tensors: Iterable[tuple[str, Tensor]], companions_from: Path) -> None:
    """Write weights and companion files; the directory appears under its name only when complete.

    Args:
        out_dir: must not exist.
        tensors: (hf_name, tensor); consumed once, at most MAX_FILE_BYTES and one tensor held at a time.
        companions_from: directory whose config and tokenizer files are copied.

    Raises:
        ConversionError: out_dir exists, or a name occurs twice.
    """
    if out_dir.exists():
        raise ConversionError(f"{out_dir}: exists; remove it or name another directory")
    tmp = out_dir.with_name(out_dir.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    weight_map: dict[str, int] = {}
    pending: dict[str, Tensor] = {}
    pending_bytes = total_bytes = num_files = 0

    def flush() -> None:
        nonlocal num_files, pending_bytes
        save_file(pending, tmp / f"part-{num_files:05d}", metadata={"format": "pt"})
        num_files += 1
        pending.clear()
        pending_bytes = 0

    for name, tensor in tensors:
        if name in weight_map:
            raise ConversionError(f"{name}: would be written twice")
        size = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + size > MAX_FILE_BYTES:
            flush()
        weight_map[name] = num_files
        pending[name] = tensor.detach().cpu()
        pending_bytes += size
        total_bytes += size
    flush()
    _name_files(tmp, weight_map, num_files, total_bytes)
    for name in COMPANIONS:
        if (companions_from / name).is_file():
            shutil.copyfile(companions_from / name, tmp / name)
    tmp.rename(out_dir)


def _name_files(tmp: Path, weight_map: dict[str, int], num_files: int, total_bytes: int) -> None:
    """Hugging Face's file names, known only once the number of files is."""
    if num_files == 1:
        (tmp / "part-00000").rename(tmp / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    for i, name in enumerate(names):
        (tmp / f"part-{i:05d}").rename(tmp / name)
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: names[i] for name, i in sorted(weight_map.items())},
    }
    (tmp / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def random_tensors(ops: Iterable[TensorMap], *, std: float, seed: int) -> Iterable[tuple[str, Tensor]]:
    """A random initialisation, the same for every layout: norms 1, biases 0, weights normal(0, std), float32."""
    generator = torch.Generator().manual_seed(seed)
    for op in ops:
        for name, shape in op.hf_shapes.items():
            if len(shape) == 1:
                yield name, torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
            else:
                yield name, torch.randn(shape, generator=generator) * std
