"""Memory and speed of the converter on the true shape of Qwen3-30B-A3B, beside cp.

For each number of layers: a Hugging Face directory of random bfloat16 weights is converted to Megatron and back by
the two command lines, with one worker. Memory is RssAnon, summed over the process tree and sampled; it must not grow
with the number of layers. Time is taken in turn with cp, with fsync, of the same source, and medians are compared.
The limit is for the largest size, and for the seconds that the command itself states: all but the start of Python
and the plan, which take 3 s whatever the size, a quarter of the whole at 8 layers and a twentieth at 48. Before
every timed command the page cache is filled, since a virtual machine is slow to get its first memory from the host,
and then the source is read, so that it is there. The commands run under RLIMIT_DATA, which bounds each process's
heap and private mappings, but not the page cache. With --peer-path, mbridge does the first size, too
(mbridge_convert.py).

Exit status 1 if a limit is broken or the weights that come back are not those that went in.
"""

import argparse
import json
import os
import re
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
from gspo_megatron.convert.source import num_bytes_of
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
REPEATS = 2
SAMPLE_S = 0.02
CHILDREN_S = 0.2
WAYS = {
    "to Megatron": ("convert_hf_to_mcore.py", "--hf-dir", "--mcore-dir"),
    "to Hugging Face": ("convert_mcore_to_hf.py", "--mcore-dir", "--hf-dir"),
}
"""Tool, options of source and target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Conversions and copies of the same source."""

    num_layers: int
    way: str
    num_bytes: int
    runs_s: tuple[float, ...]
    converting_s: tuple[float, ...]
    """Without the start and the plan."""
    copies_s: tuple[float, ...]
    peak_anon_bytes: int

    @property
    def speed(self) -> float:
        """Of cp's."""
        return statistics.median(self.copies_s) / statistics.median(self.converting_s)


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


def anon_bytes(pid: int) -> int:
    """RssAnon; 0 of a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))


def measure(command: Sequence[str | Path], data_limit_bytes: int) -> tuple[float, int, str]:
    """Run a command to its end: its seconds, its peak of RssAnon, its output. Ends this program if it fails."""
    limits = (data_limit_bytes, data_limit_bytes)
    with tempfile.TemporaryFile("w+") as output:
        start_s = looked_s = time.perf_counter()
        process = psutil.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limits),
        )
        children, peak_bytes = [], 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, sum(anon_bytes(p.pid) for p in [process, *children]))
            if time.perf_counter() > looked_s + CHILDREN_S:
                looked_s, children = time.perf_counter(), process.children(recursive=True)
            time.sleep(SAMPLE_S)
        seconds = time.perf_counter() - start_s
        output.seek(0)
        text = output.read()
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}: status {process.returncode}\n{text[-4000:]}")
    return seconds, peak_bytes, text


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
        shutil.rmtree(target, ignore_errors=True)
        settle(source)
        runs.append(measure(command, DATA_LIMIT_BYTES))
        copies_s.append(copy(source))
    return Row(
        num_layers=num_layers,
        way=way,
        num_bytes=sum(path.stat().st_size for path in source.rglob("*") if path.is_file()),
        runs_s=tuple(seconds for seconds, _, _ in runs),
        converting_s=tuple(stated_seconds(text) for _, _, text in runs),
        copies_s=tuple(copies_s),
        peak_anon_bytes=max(peak_bytes for _, peak_bytes, _ in runs),
    )


def stated_seconds(text: str) -> float:
    """Of the command's summary."""
    found = re.search(r"^([\d.]+) s, ", text, flags=re.MULTILINE)
    if found is None:
        sys.exit(f"no summary in\n{text[-4000:]}")
    return float(found[1])


def peer(hf_dir: Path, peer_path: Path) -> str:
    """What mbridge needs for the same files."""
    out_dir = hf_dir.with_name("peer")
    settle(hf_dir)
    options = ["--hf-dir", hf_dir, "--out-dir", out_dir, "--peer-path", peer_path]
    script = Path(__file__).with_name("mbridge_convert.py")
    seconds, peak_bytes, text = measure([sys.executable, script, *options], resource.RLIM_INFINITY)
    shutil.rmtree(out_dir)
    return f"{text.splitlines()[-1]}; the whole command {seconds:.1f} s, RssAnon {peak_bytes / GIB:.2f} GiB"


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
    needed = 3 * sum(num_bytes_of(spec) for _, *spec in tensor_specs(num_layers)[1]) + GIB
    if needed > (free := shutil.disk_usage(folder).free):
        have = f"{format_bytes(needed)} of disk space, {format_bytes(free)} are free"
        sys.exit(f"{folder}: {num_layers} layers need {have}; give --layers or --work-dir")


def report(rows: Sequence[Row], console: Console) -> bool:
    """Print the table; whether the limits are kept."""
    anon_limit_bytes = ANON_LIMIT_BYTES + max(num_bytes_of(spec) for _, *spec in tensor_specs(1)[1])
    table = Table(
        *("layers", "way", "GB", "command, s", "converting, s", "GB/s", "cp, s", "GB/s", "to cp", "RssAnon, GiB"),
        title=f"limits: {SPEED_LIMIT} of cp's speed, {anon_limit_bytes / GIB:.2f} GiB",
    )
    for row in rows:
        cells = [str(row.num_layers), row.way, f"{row.num_bytes / 1e9:.1f}"]
        cells.append(" ".join(f"{s:.1f}" for s in row.runs_s))
        for times_s in (row.converting_s, row.copies_s):
            rate = row.num_bytes / 1e9 / statistics.median(times_s)
            cells += [" ".join(f"{s:.1f}" for s in times_s), f"{rate:.2f}"]
        table.add_row(*cells, f"{row.speed:.2f}", f"{row.peak_anon_bytes / GIB:.2f}")
    console.print(table)
    largest = max(row.num_layers for row in rows)
    kept = all(row.speed >= SPEED_LIMIT for row in rows if row.num_layers == largest)
    for way in WAYS:
        peaks = [r.peak_anon_bytes for r in sorted(rows, key=lambda r: r.num_layers) if r.way == way]
        console.print(f"{way}: memory {peaks[-1] / peaks[0]:.2f}x from smallest to largest, limit {GROWTH_LIMIT}x")
        kept = kept and peaks[-1] <= GROWTH_LIMIT * peaks[0] and max(peaks) <= anon_limit_bytes
    return kept


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="sizes; default 2 4 8")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    parser.add_argument("--peer-path", type=Path, metavar="DIR", help="folder that has mbridge 0.15.1")
    args = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
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
