"""verify_checkpoint --logits: what a bitwise comparison cannot see, since it reads through the same table and mapping.

megatron-core runs in one process of its own, which works through all cases: the shim of the CPU is not for pytest's.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_megatron.convert import layers
from gspo_megatron.convert.manifest import Manifest, hash_file, read_manifest, write_manifest
from gspo_megatron.convert.ops import TensorMap, fuse_qkv, fuse_rows, stack
from gspo_megatron.convert.verify import verify
from tests.models import TINY_CONFIGS
from tests.unit.conversion import ROOT, convert, random_model, write_hf

FAMILIES = ("qwen3_moe_mlp_only", "qwen2_moe_sparse", "llama_biases", "mixtral_tied_window")
ITERATION = "iter_0000000"

SCRIPT = """
import json, runpy, sys
from io import StringIO
from contextlib import redirect_stdout
from pathlib import Path
from rich.console import Console
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.mcore.layer_outputs import compare_logits

results = {}
for name, (hf_dir, mcore_dir) in json.loads(sys.argv[1]).items():
    said, error = StringIO(), ""
    try:
        compare_logits(Path(hf_dir), Path(mcore_dir), Console(file=said, width=200))
    except ConversionError as caught:
        error = str(caught)
    results[name] = [said.getvalue(), error]
Path(sys.argv[2]).write_text(json.dumps(results))
hf_dir, mcore_dir = json.loads(sys.argv[1])[sys.argv[4]]
sys.argv = [sys.argv[3], "--hf-dir", hf_dir, "--mcore-dir", mcore_dir, "--logits"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Its own output and exit status are the tool's, on one of the cases."""


def checked(hf_dir: Path, mcore_dir: Path) -> tuple[Path, Path]:
    """The two, which hold the same bits."""
    verify(hf_dir, mcore_dir, progress=lambda _: None)
    return hf_dir, mcore_dir


def with_fault(folder: Path, name: str, constructor: str, faulty: Callable[..., TensorMap]) -> tuple[Path, Path]:
    """Converted and verified with a wrong table: bit for bit all is well."""
    hf_dir = write_hf(folder / "hf", TINY_CONFIGS[name], random_model(TINY_CONFIGS[name]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, constructor, faulty)
        return checked(hf_dir, convert(hf_dir, folder / "mcore"))


def not_interleaved(mcore_name: str, hf_names: Any, **sizes: Any) -> TensorMap:
    """All queries, all keys, all values."""
    rows = [sizes["num_heads"], sizes["num_groups"], sizes["num_groups"]]
    parts = {n: (k * sizes["head_dim"], *sizes["trailing"]) for n, k in zip(hf_names, rows, strict=True)}
    return fuse_rows(mcore_name, parts)


def value_before_key(mcore_name: str, hf_names: Any, **sizes: Any) -> TensorMap:
    q, k, v = hf_names
    return fuse_qkv(mcore_name, (q, v, k), **sizes)


def up_before_gate(mcore_name: str, parts: Any) -> TensorMap:
    return fuse_rows(mcore_name, dict(reversed(parts.items())))


def experts_reversed(mcore_name: str, members: Any) -> TensorMap:
    return stack(mcore_name, members[::-1])


def up_before_gate_of_experts(mcore_name: str, members: Any) -> TensorMap:
    return stack(mcore_name, [dict(reversed(parts.items())) for parts in members])


FAULTS: dict[str, tuple[str, str, Callable[..., TensorMap]]] = {
    "not interleaved": ("llama_biases", "fuse_qkv", not_interleaved),
    "value before key": ("mixtral_tied_window", "fuse_qkv", value_before_key),
    "up before gate": ("llama_biases", "fuse_rows", up_before_gate),
    "experts reversed": ("mixtral_tied_window", "stack", experts_reversed),
    "up before gate of experts": ("qwen2_moe_sparse", "stack", up_before_gate_of_experts),
}
"""The model, the constructor of layers.py, and what it does wrong."""

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_theta": ("llama_tied", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0e6, "factor": 3.0}}),
    "norm_topk_prob": ("qwen3_moe_mlp_only", {"norm_topk_prob": False}),
    "rms_norm_eps": ("qwen3_moe", {"rms_norm_eps": 1.0e-3}),
    "rms_norm_eps by little": ("qwen3_moe", {"rms_norm_eps": 2.0e-5}),
    "sliding_window": ("qwen3_moe_window", {"sliding_window": 8}),
}
"""The model, and what the checkpoint's config.json says otherwise."""


def with_change(folder: Path, name: str, change: dict[str, Any]) -> tuple[Path, Path]:
    """A checkpoint whose config.json is another one, under a manifest that fits."""
    config = TINY_CONFIGS[name]
    hf_dir = write_hf(folder / "hf", config, random_model(config))
    _, mcore_dir = checked(hf_dir, convert(hf_dir, folder / "mcore"))
    inside = mcore_dir / ITERATION
    (inside / "hf" / "config.json").write_text(json.dumps(config | change))
    old = read_manifest(inside / "manifest.json")
    files = {file: hash_file(inside / file) for file in old.files}
    write_manifest(inside / "manifest.json", Manifest(kind="mcore", files=files, tensors=old.tensors))
    return hf_dir, mcore_dir


def incomparable(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Directories that have no comparable other side."""
    config = TINY_CONFIGS["llama_tied"]
    tensors = random_model(config)
    hf_dir = write_hf(folder / "hf", config, tensors)
    rounded = write_hf(folder / "rounded", config, {n: t.bfloat16() for n, t in tensors.items()})
    not_a_number = tensors["model.norm.weight"].index_fill(0, torch.tensor([3]), torch.nan)
    nan = write_hf(folder / "nan", config, {**tensors, "model.norm.weight": not_a_number})
    shorter = config | {"num_hidden_layers": 3}
    short = write_hf(folder / "short", shorter, {n: t for n, t in tensors.items() if ".layers.3." not in n})
    quantised = write_hf(folder / "quantised", config | {"quantization_config": {"quant_method": "fp8"}}, tensors)
    whole = convert(hf_dir, folder / "whole")
    return {
        "rounded": (hf_dir, convert(rounded, folder / "rounded_mcore")),
        "nan": (nan, convert(nan, folder / "nan_mcore")),
        "short": (short, whole),
        "quantised": (quantised, whole),
        "absent": (hf_dir, folder / "absent"),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """(table, error) of every case."""
    folder = tmp_path_factory.mktemp("logits")
    new = partial(tmp_path_factory.mktemp, "case")
    cases = {name: with_fault(new(), name, "stack", stack) for name in FAMILIES}
    cases |= {what: with_fault(new(), *fault) for what, fault in FAULTS.items()}
    cases |= {what: with_change(new(), *change) for what, change in CHANGES.items()}
    cases |= incomparable(new())
    paths = json.dumps({name: [str(a), str(b)] for name, (a, b) in cases.items()})
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    tool = str(ROOT / "tools" / "verify_checkpoint.py")
    command = [sys.executable, "-c", SCRIPT, paths, str(folder / "results.json"), tool, "qwen2_moe_sparse"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^equal: qwen2_moe, .*\n +64 fixed tokens", done.stdout), done.stdout
    return {name: tuple(result) for name, result in json.loads((folder / "results.json").read_text()).items()}


def first_of(error: str) -> str:
    """The first layer that the message names."""
    found = re.search(r"^  (.+?): ", error, flags=re.MULTILINE)
    assert found is not None, error
    return found[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_right_conversion_passes_layer_by_layer(name: str, results: dict[str, tuple[str, str]]) -> None:
    table, error = results[name]
    assert error == ""
    rows = re.findall(r"(embedding|layer \d|logits)\s+\S\s+(\S+)\s+\S\s+(\S+) ", table)
    assert [row[0] for row in rows] == ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "logits"]
    assert all(
        0 < float(in_float32) < 1e-5 and 0 < float(in_bfloat16) < 0.05 for _, in_float32, in_bfloat16 in rows[1:]
    )


@pytest.mark.parametrize("what", FAULTS)
def test_wrong_table_passes_the_bits_and_fails_the_logits(what: str, results: dict[str, tuple[str, str]]) -> None:
    _, error = results[what]
    assert "compute different things" in error
    assert first_of(error) == ("layer 1" if FAULTS[what][0] == "qwen2_moe_sparse" else "layer 0")
    assert "\n  logits: " in error and "embedding" not in error


@pytest.mark.parametrize("what", CHANGES)
def test_config_that_was_mapped_wrongly_fails_the_logits(what: str, results: dict[str, tuple[str, str]]) -> None:
    _, error = results[what]
    assert "compute different things" in error
    assert first_of(error) == ("layer 1" if what == "norm_topk_prob" else "layer 0")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("rounded", r"is torch.float32, which .* was rounded from to torch.bfloat16: .*export the checkpoint"),
        ("nan", r"nan: logits is not finite in torch.float32"),
        ("short", r"transformers has 3 layers, Megatron 4"),
        ("quantised", r"quantised: --logits wants weights that are not quantised"),
        ("absent", r"absent: no such folder"),
    ],
)
def test_what_cannot_be_compared_is_named(what: str, message: str, results: dict[str, tuple[str, str]]) -> None:
    table, error = results[what]
    assert re.search(message, error), error
    assert table == ""
