"""The command lines of the two conversions."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gspo_megatron.convert.job import Outcome, check_target, partial_dir, run_job
from gspo_megatron.convert.manifest import dtype_name, new_hash
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.source import num_bytes_of
from gspo_megatron.convert.to_hf import ToHf, plan_to_hf
from gspo_megatron.convert.to_mcore import ToMcore, plan_to_mcore
from gspo_megatron.convert.workers import JobError
from gspo_megatron.progress import format_bytes

Direction = ToMcore | ToHf
ERROR_PREFIX = "error: "
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
SAMPLE_BYTES = 128 * 2**20
"""Written to estimate the time of a conversion."""


def size_bytes(text: str) -> int:
    """5GB, 200MB, 1.5GiB or a number of bytes.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: wants a size such as 5GB, 200MB or 1.5GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def num_workers(text: str) -> int:
    """A positive whole number.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: wants a number of at least 1")
    return int(text)


def hf_to_mcore_main(arguments: Sequence[str] | None = None) -> int:
    """Convert a Hugging Face directory to a Megatron checkpoint; returns the exit status."""
    parser = argparse.ArgumentParser(description="Convert a Hugging Face directory to a Megatron checkpoint.")
    parser.add_argument("--hf-dir", type=Path, required=True, metavar="DIR", help="config.json, *.safetensors, ...")
    parser.add_argument("--mcore-dir", type=Path, required=True, metavar="DIR", help="checkpoint to make")
    _add_common(parser, max_shard_size="1GiB")
    args = parser.parse_args(arguments)

    def plan() -> Direction:
        return plan_to_mcore(args.hf_dir, dtype=_dtype(args), max_file_bytes=args.max_shard_size, dry_run=args.dry_run)

    return _main(args, args.mcore_dir, plan)


def mcore_to_hf_main(arguments: Sequence[str] | None = None) -> int:
    """Convert a Megatron checkpoint to a Hugging Face directory; returns the exit status."""
    parser = argparse.ArgumentParser(description="Convert a Megatron checkpoint to a Hugging Face directory.")
    parser.add_argument("--mcore-dir", type=Path, required=True, metavar="DIR", help="checkpoint, torch_dist")
    parser.add_argument("--hf-dir", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--fp8", action="store_true", help="write blockwise FP8 with weight_scale_inv")
    parser.add_argument(
        "--hf-config", type=Path, metavar="DIR", help="config.json and tokenizer, for a checkpoint without hf/"
    )
    parser.add_argument(
        "--without-manifest", action="store_true", help="read a checkpoint that has no manifest, unverified"
    )
    _add_common(parser, max_shard_size="5GB")
    args = parser.parse_args(arguments)

    def plan() -> Direction:
        return plan_to_hf(
            args.mcore_dir,
            hf_config_dir=args.hf_config,
            dtype=_dtype(args),
            fp8=args.fp8,
            max_file_bytes=args.max_shard_size,
            require_manifest=not args.without_manifest,
        )

    return _main(args, args.hf_dir, plan)


def _add_common(parser: argparse.ArgumentParser, *, max_shard_size: str) -> None:
    parser.add_argument(
        "--max-shard-size",
        type=size_bytes,
        default=max_shard_size,
        metavar="SIZE",
        help="of a file (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of all tensors (default: as stored)")
    parser.add_argument("--workers", type=num_workers, default=1, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--restart", action="store_true", help="begin anew where an interrupted conversion lies")
    parser.add_argument("--dry-run", action="store_true", help="list the tensors, sizes and disk need, and stop")


def _dtype(args: argparse.Namespace) -> torch.dtype | None:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32, None: None}[args.dtype]


def _main(args: argparse.Namespace, target: Path, plan: Callable[[], Direction]) -> int:
    """Exit status: 0 success, 2 bad arguments or checkpoint, 130 interrupted, else 1."""
    console = Console(highlight=False, soft_wrap=True, markup=False)  # a path may hold what markup is made of
    torch.set_num_threads(1)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background jobs ignore it
            signal.signal(number, _interrupt)
        check_target(target.absolute())
        conversion = plan()
        for note in conversion.notes:
            console.print(note)
        if args.dry_run:
            _describe(conversion, target.absolute(), num_workers=args.workers)
            return 0
        outcome = run_job(conversion, target, console=console, num_workers=args.workers, restart=args.restart)
        console.print(_summary(conversion, target, outcome))
    except ConversionError as error:
        print_error(error)
        return 2
    except (JobError, OSError) as error:
        print_error(error)
        _say_how_to_go_on(target)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _say_how_to_go_on(target)
        return 130
    return 0


def print_error(error: Exception) -> None:
    """On stderr; names out of a file cannot steer the terminal."""
    text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in str(error))
    print(f"{ERROR_PREFIX}{text}", file=sys.stderr)


def _interrupt(signal_number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _say_how_to_go_on(target: Path) -> None:
    partial = partial_dir(target.absolute())
    if partial.exists():
        print(
            f"{partial} keeps the finished files: the same command goes on from there, --restart begins anew",
            file=sys.stderr,
        )


def _summary(conversion: Direction, target: Path, outcome: Outcome) -> str:
    num_bytes = sum(f.num_bytes for f in conversion.files)
    rate = outcome.num_bytes / outcome.seconds
    resumed = f" ({outcome.num_resumed} of them from before)" if outcome.num_resumed else ""
    return (
        f"{target}: {len(conversion.target)} tensors, {format_bytes(num_bytes)} "
        f"in {outcome.num_files} files{resumed}\n"
        f"{outcome.seconds:.1f} s, {format_bytes(rate)}/s, "
        f"peak memory {format_bytes(outcome.peak_anon_bytes)} (anonymous, largest process)"
    )


def _describe(conversion: Direction, target: Path, *, num_workers: int) -> None:
    """Print what would be read and made; no progress, so that it can be piped."""
    of_hf = {name: op.mcore_name for op in conversion.table for name in op.hf_shapes}
    lines = [
        f"{name}  {dtype_name(dtype)} {list(shape)}  {format_bytes(num_bytes_of((dtype, shape)))}  {of_hf[name]}"
        for name, (dtype, shape) in conversion.hf.items()
    ]
    num_parameters = sum(prod(shape) for _, shape in conversion.hf.values())
    num_bytes = sum(f.num_bytes for f in conversion.files)
    rate = _measured_rate(target.parent)
    seconds = num_bytes / rate / num_workers
    lines += [
        "",
        f"{len(conversion.hf)} Hugging Face tensors, {len(conversion.table)} Megatron tensors, "
        f"{num_parameters} parameters",
        f"writes {format_bytes(num_bytes)} in {len(conversion.files)} files into {target}; "
        f"{format_bytes(shutil.disk_usage(target.parent).free)} are free",
        f"about {seconds:.0f} s at {format_bytes(rate)}/s per worker, the rate of a "
        f"{format_bytes(SAMPLE_BYTES)} sample in {target.parent}",
    ]
    if num_bytes > shutil.disk_usage(target.parent).free:
        lines.append(f"warning: {target.parent} has no room for it")
    sys.stdout.write("\n".join(lines) + "\n")


def _measured_rate(folder: Path) -> float:
    """Bytes per second of hashing, writing and syncing a nameless file there."""
    sample = memoryview(bytearray(SAMPLE_BYTES))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start_s = time.perf_counter()
        for first in range(0, SAMPLE_BYTES, 2**22):
            piece = sample[first : first + 2**22]
            for _ in range(3):  # of the source, of the tensor, of the file
                new_hash().update(piece)
            file.write(piece)
        os.fsync(file.fileno())
        return SAMPLE_BYTES / (time.perf_counter() - start_s)
