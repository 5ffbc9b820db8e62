"""Memory and speed of the converter on the true shape of Qwen3-30B-A3B, beside cp.

For each number of layers: a Hugging Face directory of random bfloat16 weights is converted to Megatron and back by the
two command lines, with one worker. Memory is RssAnon, summed over the process tree and sampled; it must not grow with
the number of layers. Time is that of the whole command, in turn with cp, with fsync, of the same source; medians are
compared, and the speed limit is for the largest size: the start takes seconds, whatever the size. Before every timed
command the page cache is filled, since a virtual machine is slow to get its first memory from the host, and then the
source is read, so that it is there. The commands run under RLIMIT_DATA, which bounds each process's heap and private
mappings, but not the page cache. With --peer-path, mbridge does the first size, too (mbridge_convert.py).

Exit status 1 if a limit is broken or the weights that come back are not those that went in.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import read_config, write_hf_dir
from gspo_megatron.convert.manifest import HF_MANIFEST, MANIFEST, read_manifest
from gspo_megatron.convert.mcore_layout import resolve_folder
from gspo_megatron.convert.safetensors_io import TensorSpec
from gspo_megatron.progress import format_bytes

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "recipes" / "qwen3-30b-a3b"
GIB = 2**30
ANON_LIMIT_BYTES = int(1.5 * GIB)
"""Beside the largest source tensor."""
GROWTH_LIMIT = 1.10
"""Peak of the largest model / peak of the smallest."""
DATA_LIMIT_BYTES = int(2.5 * GIB)
SPEED_LIMIT = 0.5
"""Of cp's bytes per second, at the largest size."""
REPEATS = 3
SAMPLE_S = 0.02
CHILDREN_S = 0.2
WAYS = {
    "to Megatron": ("convert_hf_to_mcore.py", "--hf-dir", "--mcore-dir"),
    "to Hugging Face": ("convert_mcore_to_hf.py", "--mcore-dir", "--hf-dir"),
}
"""Tool, options of source and target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A command."""

    seconds: float
    peak_anon_bytes: int
    last_line: str
    """Of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One conversion beside cp."""

    num_layers: int
    way: str
    num_bytes: int
    runs: tuple[Run, ...]
    copies_s: tuple[float, ...]
    anon_limit_bytes: int

    @property
    def speed(self) -> float:
        """Of cp's."""
        return self.copy_s / self.seconds

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(run.seconds for run in self.runs)

    @property
    def copy_s(self) -> float:
        """Median."""
        return statistics.median(self.copies_s)

    @property
    def peak_anon_bytes(self) -> int:
        """Largest."""
        return max(run.peak_anon_bytes for run in self.runs)


def tensor_specs(num_layers: int) -> tuple[dict[str, Any], list[TensorSpec]]:
    """config.json with that many layers, and what it makes."""
    config = read_config(MODEL_DIR) | {"num_hidden_layers": num_layers}
    table = family_of(config).op_list(config)
    return config, [(name, torch.bfloat16, shape) for op in table for name, shape in op.hf_shapes.items()]


def make_source(hf_dir: Path, num_layers: int) -> None:
    """A directory of finite random weights."""
    config, specs = tensor_specs(num_layers)
    random = np.random.Generator(np.random.SFC64(num_layers))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, _, shape in specs:
            quads = random.integers(2**64, size=-(-prod(shape) // 4), dtype=np.uint64)
            quads &= np.uint64(0xBFFF_BFFF_BFFF_BFFF)  # without the exponent's top bit: below 2
            yield name, torch.from_numpy(quads.view(np.int16)[: prod(shape)]).view(torch.bfloat16).view(shape)

    with tempfile.TemporaryDirectory(dir=hf_dir.parent) as folder:
        Path(folder, "config.json").write_text(json.dumps(config, indent=2))
        write_hf_dir(hf_dir, specs, tensors(), companions_from=Path(folder))


def tree_anon_bytes(tree: Sequence[psutil.Process]) -> int:
    """Sum of RssAnon; of those that have ended, 0."""
    num_kib = 0
    for process in tree:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        num_kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return num_kib * 1024


def measure(command: Sequence[str | Path], *, data_limit_bytes: int = resource.RLIM_INFINITY) -> Run:
    """Run a command to its end; ends this program if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start_s = children_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = psutil.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (data_limit_bytes, data_limit_bytes)),
        )
        tree: list[psutil.Process] = [process]
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, tree_anon_bytes(tree))
            if time.perf_counter() > children_s + CHILDREN_S:
                children_s = time.perf_counter()
                tree = [process, *process.children(recursive=True)]
            time.sleep(SAMPLE_S)
        seconds = time.perf_counter() - start_s
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(map(str, command))}: status {process.returncode}\n{output.read()[-4000:]}")
        output.seek(0)
        return Run(seconds=seconds, peak_anon_bytes=peak_bytes, last_line=output.read().splitlines()[-1])


def folder_bytes(folder: Path) -> int:
    """Of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def settle(source: Path) -> None:
    """Let the disk finish with what was deleted, fill the page cache and read all files of the source."""
    subprocess.run(["sync", "--file-system", source], check=True)
    filler = source.with_name("filler")
    filler.touch()
    os.truncate(filler, psutil.virtual_memory().total)  # a hole: it takes no disk space
    block = bytearray(2**22)
    for path in [filler, *(p for p in source.rglob("*") if p.is_file())]:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass


def copy(source: Path) -> float:
    """Seconds of cp, every file and folder on the disk; the copy is deleted."""
    target = source.with_name("copy")
    settle(source)
    start_s = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for path in [*target.rglob("*"), target]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start_s
    shutil.rmtree(target)
    return seconds


def beside_copy(num_layers: int, way: str, source: Path, target: Path) -> Row:
    """Conversions between copies; the last conversion's target stays."""
    tool, *options = WAYS[way]
    command = [sys.executable, ROOT / "tools" / tool, options[0], source, options[1], target]
    copies_s, runs = [copy(source)], []
    for _ in range(REPEATS):
        if target.exists():
            shutil.rmtree(target)
        settle(source)
        runs.append(measure(command, data_limit_bytes=DATA_LIMIT_BYTES))
        copies_s.append(copy(source))
    largest_bytes = max(dtype.itemsize * prod(shape) for _, dtype, shape in tensor_specs(num_layers)[1])
    return Row(
        num_layers=num_layers,
        way=way,
        num_bytes=folder_bytes(source),
        runs=tuple(runs),
        copies_s=tuple(copies_s),
        anon_limit_bytes=ANON_LIMIT_BYTES + largest_bytes,
    )


def peer(hf_dir: Path, peer_path: Path) -> str:
    """What mbridge needs."""
    out_dir = hf_dir.with_name("peer")
    settle(hf_dir)
    options = ["--hf-dir", hf_dir, "--out-dir", out_dir, "--peer-path", peer_path]
    run = measure([sys.executable, Path(__file__).with_name("mbridge_convert.py"), *options])
    shutil.rmtree(out_dir)
    times = json.loads(run.last_line)
    return (
        f"into a model in memory {times['load_s']:.1f} s, out of it (no fsync) {times['save_s']:.1f} s, "
        f"whole command {run.seconds:.1f} s, RssAnon {run.peak_anon_bytes / GIB:.2f} GiB"
    )


def convert_both_ways(folder: Path, num_layers: int, peer_path: Path | None, console: Console) -> list[Row]:
    """Rows of one size; nothing of it stays on the disk."""
    hf_dir, mcore_dir, back_dir = folder / "hf", folder / "mcore", folder / "back"
    with console.status(f"{num_layers} layers: random weights") as status:
        make_source(hf_dir, num_layers)
        if peer_path is not None:
            status.update(f"{num_layers} layers: mbridge")
            console.print(f"{num_layers} layers: mbridge: {peer(hf_dir, peer_path)}", soft_wrap=True)
        status.update(f"{num_layers} layers: to Megatron")
        rows = [beside_copy(num_layers, "to Megatron", hf_dir, mcore_dir)]
        shutil.rmtree(hf_dir)
        status.update(f"{num_layers} layers: to Hugging Face")
        rows.append(beside_copy(num_layers, "to Hugging Face", mcore_dir, back_dir))
    went_in = read_manifest(resolve_folder(mcore_dir) / MANIFEST).source_tensors
    came_back = read_manifest(back_dir / HF_MANIFEST).tensors
    if {n: (r.shape, r.hash) for n, r in went_in.items()} != {n: (r.shape, r.hash) for n, r in came_back.items()}:
        sys.exit(f"{num_layers} layers: the weights that came back are not those that went in")
    console.print(f"{num_layers} layers: {len(came_back)} tensors came back with the hashes that they went in with")
    shutil.rmtree(mcore_dir)
    shutil.rmtree(back_dir)
    return rows


def check_disk(folder: Path, num_layers: int) -> None:
    """End with a message where three copies of the model do not fit."""
    needed = 3 * sum(dtype.itemsize * prod(shape) for _, dtype, shape in tensor_specs(num_layers)[1]) + GIB
    free = shutil.disk_usage(folder).free
    if needed > free:
        sys.exit(
            f"{folder}: {num_layers} layers need {format_bytes(needed)} of disk space, {format_bytes(free)} are free; "
            "give --layers or --work-dir"
        )


def report(rows: Sequence[Row], console: Console) -> bool:
    """Print the table; whether the limits are kept."""
    table = Table(
        *("layers", "way", "GB", "seconds", "GB/s", "cp: seconds", "GB/s", "to cp", "RssAnon, GiB", "limit"),
        title=f"Qwen3-30B-A3B, bfloat16, one worker; limit: {SPEED_LIMIT} of cp's speed",
    )
    for row in rows:
        gb = row.num_bytes / 1e9
        table.add_row(
            *(str(row.num_layers), row.way, f"{gb:.1f}"),
            *(" ".join(f"{run.seconds:.1f}" for run in row.runs), f"{gb / row.seconds:.2f}"),
            *(" ".join(f"{s:.1f}" for s in row.copies_s), f"{gb / row.copy_s:.2f}", f"{row.speed:.2f}"),
            *(f"{row.peak_anon_bytes / GIB:.2f}", f"{row.anon_limit_bytes / GIB:.2f}"),
        )
    console.print(table)
    largest = max(r.num_layers for r in rows)
    kept = all(r.speed >= SPEED_LIMIT for r in rows if r.num_layers == largest)
    kept = kept and all(r.peak_anon_bytes <= r.anon_limit_bytes for r in rows)
    for way in dict.fromkeys(r.way for r in rows):
        peaks = [r.peak_anon_bytes for r in sorted(rows, key=lambda r: r.num_layers) if r.way == way]
        growth = peaks[-1] / peaks[0]
        console.print(f"{way}: memory of the largest is {growth:.2f}x that of the smallest, limit {GROWTH_LIMIT}x")
        kept = kept and growth <= GROWTH_LIMIT
    return kept


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sizes; default 2 4 8")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    parser.add_argument("--peer-path", type=Path, metavar="DIR", help="folder that has mbridge 0.15.1")
    args = parser.parse_args()
    console = Console(highlight=False)
    check_disk(args.work_dir, max(args.layers))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.work_dir, prefix="convert-") as folder:
        for i, num_layers in enumerate(args.layers):
            rows += convert_both_ways(Path(folder), num_layers, args.peer_path if i == 0 else None, console)
    if args.peer_path is None:
        console.print("mbridge: not run, no --peer-path")
    return int(not report(rows, console))


if __name__ == "__main__":
    sys.exit(main())
