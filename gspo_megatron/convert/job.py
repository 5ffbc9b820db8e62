"""A conversion as a job: files made one by one under a temporary name, resumable, renamed when all is there.

While it runs:
    TARGET.partial/journal.jsonl   what is converted, then one line per finished file; also the lock
    TARGET.partial/data/           becomes TARGET

Nothing but the rename makes TARGET, so it is complete or absent whatever happens.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo_megatron.convert.hf_io import sync_path
from gspo_megatron.convert.manifest import hash_file
from gspo_megatron.convert.ops import ConversionError, raise_problems
from gspo_megatron.convert.workers import Conversion, Finished, JobError, Record, Workers, anon_bytes
from gspo_megatron.progress import ByteProgress, format_bytes

SPARE_BYTES = 64 * 2**20
"""Disk space for what is not tensors: headers, metadata, tokenizer, manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a finished job did."""

    num_files: int
    num_resumed: int
    """Of them, those that an earlier run had finished."""
    num_bytes: int
    """Of tensors, written by this run."""
    seconds: float
    peak_anon_bytes: int
    """RssAnon of the largest process."""


def partial_dir(target: Path) -> Path:
    """Where a conversion into target works."""
    return target.with_name(f"{target.name}.partial")


def run_job(
    conversion: Conversion, target: Path, *, console: Console, num_workers: int = 1, restart: bool = False
) -> Outcome:
    """Carry out a conversion, or the rest of an interrupted one.

    Args:
        conversion: what to do.
        target: directory to make; must not exist.
        console: progress.
        num_workers: processes; the bytes do not depend on it.
        restart: begin anew, whatever TARGET.partial holds.

    Raises:
        ConversionError: target exists or cannot be made there, or TARGET.partial is of another conversion.
        JobError: a file cannot be written or a worker died; TARGET.partial keeps the finished files.
    """
    start_s = time.monotonic()
    target = target.absolute()
    check_target(target)
    total_bytes = sum(f.num_bytes for f in conversion.files)
    if not partial_dir(target).exists():  # a job that cannot be done leaves nothing
        check_disk(target, total_bytes)
    with _locked_journal(target, console) as journal:
        data = partial_dir(target) / "data"
        records = _resume(conversion, data, journal, restart=restart)
        if records:
            console.print(f"going on with {data.parent}: {len(records)} of {len(conversion.files)} files are complete")
        pending = [i for i, f in enumerate(conversion.files) if f.name not in records]
        pending_bytes = sum(conversion.files[i].num_bytes for i in pending)
        check_disk(target, pending_bytes)
        num_resumed, peak_bytes = len(records), 0
        workers = Workers(conversion, data, num_workers=min(num_workers, len(pending)))
        with workers, ByteProgress(console, total_bytes, done_bytes=total_bytes - pending_bytes) as progress:
            threading.Thread(target=conversion.preload, daemon=True).start()
            for event in workers.write(pending):
                if isinstance(event, Finished):
                    name = conversion.files[event.index].name
                    records[name] = event.record
                    journal.add(name, event.record)
                else:
                    progress.advance(event.num_bytes)
                    peak_bytes = max(peak_bytes, event.peak_anon_bytes)
        _finish(conversion, target, [records[f.name] for f in conversion.files])
    return Outcome(
        num_files=len(conversion.files),
        num_resumed=num_resumed,
        num_bytes=pending_bytes,
        seconds=time.monotonic() - start_s,
        peak_anon_bytes=max(peak_bytes, anon_bytes()),
    )


def check_target(target: Path) -> None:
    """Refuse a directory that exists or cannot be made.

    Raises:
        ConversionError: what is in the way.
    """
    if os.path.lexists(target):
        raise ConversionError(f"{target}: exists; remove it or name another directory")
    if not target.parent.is_dir():
        raise ConversionError(f"{target}: there is no folder {target.parent}; make it or name another directory")
    try:
        os.lstat(partial_dir(target))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConversionError(f"{target}: {error.strerror}; name another directory") from error
    if not os.access(target.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise ConversionError(f"{target}: no permission to write in {target.parent}")


def check_disk(target: Path, num_bytes: int) -> None:
    """Refuse a conversion that the disk has no room for.

    Raises:
        JobError: what it needs and what is free.
    """
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(target.parent).free
    if needed > free:
        raise JobError(
            f"{target}: needs {format_bytes(needed)} of disk space, {format_bytes(free)} are free in {target.parent}"
        )


class _Journal:
    """journal.jsonl, open and locked."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file = path, file

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Empty it and say what is converted."""
        self._file.truncate(0)
        self._write({"identity": identity})

    def add(self, name: str, record: Record) -> None:
        """A file is complete."""
        self._write({"file": name, "record": record})

    def _write(self, line: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise JobError(f"{self._path}: {error.strerror}") from error

    def read(self) -> tuple[Any, dict[str, Record]]:
        """(identity or None, records by file name); a torn line and what follows it are cut off."""
        self._file.seek(0)
        lines: list[dict[str, Any]] = []
        end = 0
        for text in self._file.readall().splitlines(keepends=True):
            try:
                line = json.loads(text)
            except ValueError:
                break
            if not text.endswith(b"\n"):
                break
            lines.append(line)
            end += len(text)
        self._file.truncate(end)
        if not lines:
            return None, {}
        try:
            identity = {part: dict(values) for part, values in lines[0]["identity"].items()}
            records = {line["file"]: dict(line["record"]) for line in lines[1:]}
            _ = [(record["bytes"], record["hash"]) for record in records.values()]
            return identity, records
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConversionError(f"{self._path}: no journal of a conversion; --restart begins anew") from None


@contextmanager
def _locked_journal(target: Path, console: Console) -> Iterator[_Journal]:
    """Make TARGET.partial and its journal, or find them, and keep others out.

    Raises:
        ConversionError: another conversion is at work there.
    """
    partial = partial_dir(target)
    busy = ConversionError(f"{target}: another conversion is writing {partial}; wait for it or stop it")
    try:
        (partial / "data").mkdir(parents=True, exist_ok=True)
        path = partial / "journal.jsonl"
        file = path.open("ab+", buffering=0)
    except OSError as error:
        raise ConversionError(f"{partial}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        except OSError as error:
            console.print(f"warning: {path}: {error.strerror}; start no second conversion into {target}")
        # The one that had the lock may have finished between our open and our lock.
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise busy
        check_target(target)
        yield _Journal(path, file)


def _resume(conversion: Conversion, data: Path, journal: _Journal, *, restart: bool) -> dict[str, Record]:
    """Records of the files that an earlier run finished and that are still as they were; all else is deleted.

    Raises:
        ConversionError: the earlier run was of another conversion; says what differs.
    """
    identity = json.loads(json.dumps(conversion.identity()))
    earlier, records = (None, {}) if restart else journal.read()
    if earlier is not None:
        head = f"{data.parent}: begun with other input or options; --restart begins anew"
        raise_problems(head, _differences(earlier, identity))
    records = {name: record for name, record in records.items() if _is_intact(data / name, record)}
    keep = {data / name for name in records}
    for path in [p for p in data.rglob("*") if not p.is_dir() and p not in keep]:
        path.unlink()
    if earlier is None:  # after that: the disk may be full of what was deleted
        journal.begin(identity)
    return records


def _is_intact(path: Path, record: Record) -> bool:
    return path.is_file() and path.stat().st_size == record["bytes"] and hash_file(path).hash == record["hash"]


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, two levels deep."""
    problems = []
    for section in sorted(earlier.keys() | now.keys()):
        a, b = earlier.get(section, {}), now.get(section, {})
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                problems.append(f"{section} {key}: was {a.get(key)}, is {b.get(key)}")
    return problems


def _finish(conversion: Conversion, target: Path, records: list[Record]) -> None:
    """Write the rest, bring everything to disk, and give it its name."""
    partial = partial_dir(target)
    data = partial / "data"
    done = {data / f.name for f in conversion.files}  # synced by their workers
    try:
        conversion.finish(data, records)
        for path in data.rglob("*"):
            if path not in done:
                sync_path(path)
        sync_path(data)
        data.rename(target)
        sync_path(partial)
        sync_path(target.parent)
    except OSError as error:
        raise JobError(f"{error.filename or data}: {error.strerror or error}") from error
    except ConversionError as error:
        if isinstance(error.__cause__, OSError):
            raise JobError(str(error)) from error
        raise
    (partial / "journal.jsonl").unlink()
    with suppress(OSError):  # one that came too late may have put its own there
        partial.rmdir()
