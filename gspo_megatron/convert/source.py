"""Tensors of a conversion's source: hashed as they are read, and compared with what the source should have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.convert.manifest import TensorRecord, dtype_name, new_hash, tensor_bytes
from gspo_megatron.convert.ops import Box, Shape, raise_problems
from gspo_megatron.convert.workers import Record

BAND_BYTES = 16 * 2**20

Spec = tuple[torch.dtype, Shape]
Specs = Mapping[str, Spec]
"""By tensor name."""


def num_bytes_of(spec: Spec) -> int:
    """Of a tensor."""
    return spec[0].itemsize * prod(spec[1])


def file_states(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    """[bytes, time of modification in ns] of those files that exist: whether a source is still the same."""
    states = {name: (folder / name).stat() for name in sorted(names) if (folder / name).is_file()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def check_unchanged(where: str, before: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> None:
    """A source that was written to during its conversion may have given half of each.

    Raises:
        ConversionError: lists the files.
    """
    changed = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    raise_problems(f"{where}: changed while it was converted; begin anew with --restart", changed)


class SourceHashes:
    """Hashes each tensor once, row after row, no further than it has been read.

    So a tensor is hashed while its pages are at hand, and one larger than memory can be.
    """

    def __init__(self, specs: Specs, read_box: Callable[[str, Box], Tensor]) -> None:
        """Of a reader.

        Args:
            specs: tensors as they are stored.
            read_box: (name, box) -> that box.
        """
        self._specs, self._read_box = specs, read_box
        self._hashes: dict[str, Any] = {}
        self._num_rows: dict[str, int] = {}

    def advance(self, name: str, box: Box | None = None) -> None:
        """Hash a tensor up to the last row of a box, or all of it."""
        spec = self._specs[name]
        end = box[0][1] if box else _num_rows(spec)
        row = self._num_rows.setdefault(name, 0)
        running = self._hashes.setdefault(name, new_hash())
        band = max(1, BAND_BYTES * _num_rows(spec) // max(1, num_bytes_of(spec)))
        while row < end:
            stop = min(row + band, end)
            rows = ((row, stop), *((0, n) for n in spec[1][1:])) if spec[1] else ()
            running.update(tensor_bytes(self._read_box(name, rows)))
            row = self._num_rows[name] = stop

    def records(self) -> dict[str, TensorRecord]:
        """Of the tensors that were begun; finishes them."""
        for name in self._hashes:
            self.advance(name)
        return {
            name: TensorRecord(dtype_name(dtype), shape, num_bytes_of((dtype, shape)), running.hexdigest())
            for name, running in self._hashes.items()
            for dtype, shape in [self._specs[name]]
        }


def _num_rows(spec: Spec) -> int:
    return spec[1][0] if spec[1] else 1


def tensor_record_of(fields: Mapping[str, Any]) -> TensorRecord:
    """From what json.loads(json.dumps(asdict(record))) gives."""
    return TensorRecord(**{**fields, "shape": tuple(fields["shape"])})


def merge_once(records: Iterable[Record], section: str, wanted: Iterable[str], where: str) -> dict[str, TensorRecord]:
    """Tensors of all files; each wanted name once, and no other.

    Args:
        records: of the files; record[section] is TensorRecords as JSON, by name.
        section: of the records.
        wanted: names, in the order of the result.
        where: for the message.

    Raises:
        ConversionError: lists the names that are missing, surplus or there twice.
    """
    merged: dict[str, TensorRecord] = {}
    problems = []
    for record in records:
        problems += [f"{name}: twice" for name in record[section] if name in merged]
        merged |= {name: tensor_record_of(fields) for name, fields in record[section].items()}
    order = list(wanted)
    problems += [f"{name}: not at all" for name in order if name not in merged]
    problems += [f"{name}: not asked for" for name in merged.keys() - set(order)]
    raise_problems(where, problems)
    return {name: merged[name] for name in order}
