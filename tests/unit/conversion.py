"""Small models for conversion tests, the two tools as processes, and a fingerprint of what they write."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gspo_megatron.convert.command import hf_to_mcore_main, mcore_to_hf_main
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.to_mcore import plan_to_mcore

ROOT = Path(__file__).parents[2]
TINY = ROOT / "recipes" / "tiny-moe"


def make_hf_dir(path, config=None, *, dtype=torch.float32, num_files=1, fused_experts=False, **overrides):
    """A model with its own number in every element (other dtypes than float32 repeat); without config the tiny one.

    Returns:
        Its tensors by name.
    """
    path.mkdir(parents=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((TINY / name).read_bytes())
    config = json.loads((TINY / "config.json").read_text()) if config is None else config
    config = config | {"dtype": str(dtype).removeprefix("torch.")} | overrides
    (path / "config.json").write_text(json.dumps(config, indent=2))
    table = family_of(config).op_list(config, fused_experts=fused_experts)
    tensors, first = {}, 0
    for name, shape in ((n, s) for op in table for n, s in op.hf_shapes.items()):
        count = prod(shape)
        tensors[name] = torch.arange(first, first + count, dtype=torch.float64).reshape(shape).to(dtype)
        first += count
    save(path, tensors, num_files=num_files)
    return tensors


def save(path, tensors, *, num_files=1):
    """Write safetensors, and the index where there are several files."""
    if num_files == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {}
    for i in range(num_files):
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        part = list(tensors)[i::num_files]
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def load(hf_dir):
    """All tensors of a directory, read by the safetensors package alone."""
    found = {}
    for file in sorted(hf_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                assert name not in found
                found[name] = handle.get_tensor(name)
    return found


def write_hf(folder, config, tensors):
    """A directory of that config.json and those tensors, which may be views of one another."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_bytes((TINY / "tokenizer_config.json").read_bytes())
    save_file({name: t.clone() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def random_model(config, dtype=torch.float32):
    """Every element of every tensor has its own value, near enough; norms around 1."""
    generator = torch.Generator().manual_seed(7)
    shapes = {n: s for op in family_of(config).op_list(config) for n, s in op.hf_shapes.items()}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (t * 0.1 + float(name.endswith("norm.weight"))).to(dtype) for name, t in drawn.items()}


def convert(source, out, plan=plan_to_mcore, **options):
    """A conversion (the other way with plan_to_hf) as the command does it, without its processes."""
    conversion = plan(source, **options)
    out.mkdir()
    records = [conversion.write_file(i, out, lambda _: None) for i in range(len(conversion.files))]
    conversion.finish(out, records)
    return out


def same_bits(a, b):
    """Same names, dtypes, shapes and bytes."""
    if a.keys() != b.keys():
        return False
    pairs = [(a[name], b[name]) for name in a]
    return all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in pairs
    )


def hashes(folder):
    """SHA-256 of every file of a directory."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@contextmanager
def open_folder():
    """A folder that everybody may enter, which pytest's are not: each of its sessions closes them to others."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def command(tool, *arguments):
    """convert_hf_to_mcore or convert_mcore_to_hf with its arguments."""
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(tool, *arguments, **options):
    """The tool as a process: (exit status, stdout, stderr)."""
    done = subprocess.run(
        command(tool, *arguments), env=environment(), capture_output=True, text=True, timeout=200, **options
    )
    return done.returncode, done.stdout, done.stderr


def call(main, *arguments):
    """The tool's main function, which spares the seconds of a new process: (exit status, stdout, stderr)."""
    stdout, stderr = StringIO(), StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            status = main([str(argument) for argument in arguments])
    except SystemExit as stopped:  # argparse
        status = stopped.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, stdout.getvalue(), stderr.getvalue()


def to_mcore(*arguments):
    return call(hf_to_mcore_main, *arguments)


def to_hf(*arguments):
    return call(mcore_to_hf_main, *arguments)


def num_finished(target):
    """Files that a running conversion has in its journal."""
    journal = Path(f"{target}.partial") / "journal.jsonl"
    return max(0, journal.read_text().count("\n") - 1) if journal.exists() else 0


def start_and_wait(arguments, target, *, num_files):
    """Start a conversion, a command's arguments, and return its process when that many files are finished."""
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while num_finished(target) < num_files:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    return process
