"""verify_checkpoint: equal sides pass; any tensor dropped, swapped, doubled, transposed or changed by a bit is named.

The faults are put into the Hugging Face side before a conversion, and into the Megatron tensors of a checkpoint that
is written anew with a manifest of its own, so that nothing but the comparison can find them.
"""

import importlib.util
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo_megatron.convert.manifest import Manifest, hash_file, write_manifest
from gspo_megatron.convert.mcore_io import (
    DataFileWriter,
    McoreCheckpoint,
    common_state,
    data_file_name,
    write_checkpoint_metadata,
)
from gspo_megatron.convert.ops import ConversionError, slices
from gspo_megatron.convert.to_hf import plan_to_hf
from gspo_megatron.convert.verify import verify
from tests.models import TINY_CONFIGS
from tests.unit.conversion import call, convert, random_model, to_mcore, write_hf

ITERATION = "iter_0000000"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": TINY_CONFIGS["qwen3_moe_mlp_only"] | {"num_hidden_layers": 2, "num_experts": 3},
    "qwen2_moe": TINY_CONFIGS["qwen2_moe"] | {"num_hidden_layers": 1, "num_experts": 3},
    "llama_tied": TINY_CONFIGS["llama_tied"] | {"num_hidden_layers": 1},
    "mixtral": TINY_CONFIGS["mixtral"] | {"num_hidden_layers": 1, "num_local_experts": 3},
}
"""A stack with a dense and a MoE layer; biases and a shared expert; a tied head; other names."""

Tensors = dict[str, Tensor]


def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "verify_checkpoint.py"
    spec = importlib.util.spec_from_file_location("verify_checkpoint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(hf_dir: Path, mcore_dir: Path) -> tuple[int, str, str]:
    return call(tool().main, "--hf-dir", hf_dir, "--mcore-dir", mcore_dir)


def write_mcore(folder: Path, tensors: Tensors, hf_dir: Path) -> Path:
    """A checkpoint of any Megatron tensors, with a manifest that it fits."""
    folder.mkdir()
    with DataFileWriter(folder / data_file_name(0)) as writer:
        for name, t in tensors.items():
            writer.write_tensor(name, tuple(t.shape), t.dtype, lambda box, t=t: t[slices(box)])
    write_checkpoint_metadata(folder, [writer.result], common_state())
    shutil.copytree(hf_dir, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    files = {str(p.relative_to(folder)): hash_file(p) for p in folder.rglob("*") if p.is_file()}
    write_manifest(folder / "manifest.json", Manifest(kind="mcore", files=files, tensors=writer.result.tensors))
    return folder


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small checkpoints, none of which has to outlive a loss of power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(Hugging Face directory, Megatron checkpoint)."""
    folder = tmp_path_factory.mktemp(request.param)
    config = MODELS[request.param]
    hf_dir = write_hf(folder / "hf", config, random_model(config))
    return hf_dir, convert(hf_dir, folder / "mcore")


def flip(tensor: Tensor, bit: int) -> Tensor:
    """One bit of one element, far inside."""
    changed = tensor.clone()
    flat = changed.view(torch.int32).view(-1)
    flat[len(flat) * 2 // 3] ^= 1 << bit
    return changed


def as_nan(tensor: Tensor, payload: int) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.int32).view(-1)[0] = 0x7FC00000 + payload
    return changed


def transposed(tensor: Tensor) -> Tensor:
    """The bytes of the transpose under the shape of the tensor; of a vector, its reverse."""
    if tensor.dim() == 1:
        return tensor.flip(0)
    return tensor.transpose(-1, -2).contiguous().view(tensor.shape)


def faults(tensors: Tensors, name: str) -> Iterator[tuple[str, Tensors, set[str]]]:
    """(what, the tensors with it, names that differ)."""
    t = tensors[name]
    yield "one bit", {**tensors, name: flip(t, 0)}, {name}
    yield "sign", {**tensors, name: flip(t, 31)}, {name}
    if 1 not in t.shape[-2:]:
        yield "transposed", {**tensors, name: transposed(t)}, {name}
    twins = [other for other in tensors if other != name and tensors[other].shape == t.shape]
    if twins:
        other = twins[zlib.crc32(name.encode()) % len(twins)]
        yield f"swapped with {other}", {**tensors, name: tensors[other], other: t}, {name, other}
        yield f"a copy of {other}", {**tensors, name: tensors[other]}, {name}


def test_equal_sides_pass_and_the_summary_counts_them(model: tuple[Path, Path]) -> None:
    hf_dir, mcore_dir = model
    tensors = load_file(hf_dir / "model.safetensors")
    status, stdout, stderr = run_tool(hf_dir, mcore_dir)
    assert (status, stderr) == (0, "")
    config = json.loads((hf_dir / "config.json").read_text())
    num_parameters = sum(t.numel() for t in tensors.values())
    assert stdout.startswith(
        f"equal: {config['model_type']}, {len(tensors)} tensors, {num_parameters:,} parameters, bit for bit; 6 files "
    )
    assert f"{mcore_dir} (0.00 GiB) match its manifest" in stdout


def test_a_fault_in_any_tensor_before_a_conversion_is_named(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf_dir, _ = model
    config, tensors = json.loads((hf_dir / "config.json").read_text()), load_file(hf_dir / "model.safetensors")
    num_faults = 0
    for name in tensors:
        for what, changed, names in faults(tensors, name):
            bad_dir = write_hf(tmp_path / "bad", config, changed)
            mcore_dir = convert(bad_dir, tmp_path / "mcore")
            with pytest.raises(ConversionError, match="differ") as caught:
                verify(hf_dir, mcore_dir, progress=lambda _: None)
            found = {line.split(" (in ")[0].strip() for line in str(caught.value).splitlines()[1:]}
            assert found == names, (what, str(caught.value))
            shutil.rmtree(bad_dir)
            shutil.rmtree(mcore_dir)
            num_faults += 1
    assert num_faults >= 3 * len(tensors)


def test_a_fault_in_any_megatron_tensor_is_named(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf_dir, mcore_dir = model
    with McoreCheckpoint(mcore_dir) as checkpoint:
        tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    verify(hf_dir, write_mcore(tmp_path / "same", tensors, hf_dir), progress=lambda _: None)
    for name, t in tensors.items():
        absent = {n: other for n, other in tensors.items() if n != name}
        cases = [("dropped", absent, {name}), ("another name", {**absent, f"{name}_": t}, {name, f"{name}_"})]
        cases += [("twice", {**tensors, f"{name}_": t}, {f"{name}_"}), *faults(tensors, name)]
        if t.dim() > 1 and t.shape[-1] != t.shape[-2]:
            cases.append(("other shape", {**tensors, name: t.transpose(-1, -2).contiguous()}, {name}))
        if t.dim() == 3:
            cases.append(("experts reversed", {**tensors, name: t.flip(0)}, {name}))
            fc1_halves_swapped = t.roll(t.shape[1] // 2, 1)  # up above gate
            cases.append(("halves swapped", {**tensors, name: fc1_halves_swapped}, {name}))
        for what, changed, names in cases:
            folder = write_mcore(tmp_path / "bad", changed, hf_dir)
            with pytest.raises(ConversionError) as caught:
                verify(hf_dir, folder, progress=lambda _: None)
            assert all(n in str(caught.value) for n in names), (what, str(caught.value))
            untouched = [n for n in tensors if n not in names and f"{n})" in str(caught.value)]
            assert not untouched, (what, str(caught.value))
            shutil.rmtree(folder)


def test_nans_are_equal_only_with_equal_payloads(tmp_path: Path) -> None:
    config = MODELS["llama_tied"]
    tensors = random_model(config)
    name = "model.layers.0.self_attn.k_proj.weight"
    hf_dir = write_hf(tmp_path / "hf", config, {**tensors, name: as_nan(tensors[name], 1)})
    verify(hf_dir, convert(hf_dir, tmp_path / "a"), progress=lambda _: None)
    other = write_hf(tmp_path / "other", config, {**tensors, name: as_nan(tensors[name], 2)})
    status, _, stderr = run_tool(hf_dir, convert(other, tmp_path / "b"))
    assert status == 2 and f"{name} (in decoder.layers.0.self_attention.linear_qkv.weight): 1 of " in stderr
    zero = {**tensors, name: tensors[name].index_fill(0, torch.tensor([0]), 0.0)}
    plus = write_hf(tmp_path / "plus", config, zero)
    minus = write_hf(tmp_path / "minus", config, {**zero, name: -(-zero[name]).abs()})
    assert run_tool(plus, convert(minus, tmp_path / "c"))[0] == 2, "0.0 and -0.0 are other bits"


def test_difference_says_where_and_how_much(tmp_path: Path) -> None:
    config = MODELS["mixtral"]
    tensors = random_model(config)
    hf_dir = write_hf(tmp_path / "hf", config, tensors)
    name = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
    changed = tensors[name].clone()
    changed[2, 5] = 3.0
    changed[4, 0] = 4.0
    bad = convert(write_hf(tmp_path / "bad", config, {**tensors, name: changed}), tmp_path / "b")
    status, stdout, stderr = run_tool(hf_dir, bad)
    assert (status, stdout) == (2, "")
    assert stderr.splitlines() == [
        f"error: {bad / ITERATION} and {hf_dir} differ (1 problem(s))",
        f"  {name} (in decoder.layers.0.mlp.experts.experts.linear_fc1.weight): 2 of {changed.numel()} elements "
        f"differ; first at (2, 5): {float(tensors[name][2, 5])!r} in Hugging Face, 3.0 in Megatron",
    ]


def test_a_flipped_bit_in_any_file_is_found_by_the_manifest(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf_dir, mcore_dir = model
    names = [str(p.relative_to(mcore_dir)) for p in mcore_dir.rglob("*") if p.is_file()]
    assert {f"{ITERATION}/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp", "hf/config.json")} <= set(
        names
    )
    for name in sorted(set(names) - {"latest_checkpointed_iteration.txt", f"{ITERATION}/manifest.json"}):
        path = mcore_dir / name
        good = path.read_bytes()
        for place in (0, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 4
            path.write_bytes(bad)
            status, stdout, stderr = run_tool(hf_dir, mcore_dir)
            assert (status, stdout) == (2, "") and stderr.startswith("error: ") and path.name in stderr, stderr
        path.write_bytes(good)
    assert run_tool(hf_dir, mcore_dir)[0] == 0


def changed_manifest(mcore_dir: Path, change: Callable[[Any], Any]) -> tuple[int, str, str]:
    """What the tool says of the checkpoint with another manifest, which is put back."""
    path = mcore_dir / ITERATION / "manifest.json"
    good = path.read_text()
    manifest = json.loads(good)
    change(manifest)
    path.write_text(json.dumps(manifest))
    result = run_tool(mcore_dir.parent / "hf", mcore_dir)
    path.write_text(good)
    return result


def test_manifest_that_says_something_else_of_any_tensor_is_found(model: tuple[Path, Path]) -> None:
    _, mcore_dir = model
    with McoreCheckpoint(mcore_dir) as checkpoint:
        names = list(checkpoint.tensors)
    for name in names:
        for change in (
            lambda m, name=name: m["tensors"].pop(name),
            lambda m, name=name: m["tensors"][name].update(hash="0" * 32),
            lambda m, name=name: m["tensors"][name].update(shape=[1]),
            lambda m, name=name: m["tensors"][name].update(dtype="bfloat16"),
            lambda m, name=name: m["tensors"].update({f"{name}_": m["tensors"][name]}),
        ):
            status, _, stderr = changed_manifest(mcore_dir, change)
            assert status == 2 and name in stderr, stderr


def test_config_and_tokenizer_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    config = MODELS["qwen3_moe"]
    hf_dir = write_hf(tmp_path / "hf", config, random_model(config))
    mcore_dir = convert(hf_dir, tmp_path / "mcore")
    tensors = load_file(hf_dir / "model.safetensors")
    other = write_hf(tmp_path / "other", config | {"norm_topk_prob": False}, tensors)
    status, _, stderr = run_tool(other, mcore_dir)
    assert status == 2 and "describes another model" in stderr and "moe_router_pre_softmax" in stderr
    stops_elsewhere = write_hf(tmp_path / "stops", config | {"eos_token_id": 3}, tensors)
    status, _, stderr = run_tool(stops_elsewhere, mcore_dir)
    assert status == 2 and "config.json: eos_token_id" in stderr
    same = write_hf(tmp_path / "same", config | {"dtype": "bfloat16"}, tensors)
    assert run_tool(same, mcore_dir)[0] == 0, "what files are made of may change"
    (same / "tokenizer_config.json").write_text("{}")
    status, _, stderr = run_tool(same, mcore_dir)
    assert status == 2 and "tokenizer_config.json: contents differ" in stderr
    (same / "tokenizer_config.json").unlink()
    status, _, stderr = run_tool(same, mcore_dir)
    assert status == 2 and f"tokenizer_config.json: {mcore_dir / ITERATION / 'hf'} has it, {same} does not" in stderr


def test_other_sides_of_a_conversion_are_equal_too(tmp_path: Path) -> None:
    """An export, whose manifest counts as well; a rounded checkpoint; an FP8 source in both dtypes."""
    config = MODELS["qwen3_moe"]
    hf_dir = write_hf(tmp_path / "hf", config, random_model(config))
    assert to_mcore("--hf-dir", hf_dir, "--mcore-dir", tmp_path / "b", "--dtype", "bfloat16")[0] == 0
    assert run_tool(hf_dir, tmp_path / "b")[0] == 0
    convert(tmp_path / "b", tmp_path / "c", plan_to_hf)
    assert run_tool(tmp_path / "c", tmp_path / "b")[0] == 0
    (tmp_path / "c" / "generation_config.json").write_text("{}")  # not in its manifest, and not carried
    assert run_tool(tmp_path / "c", tmp_path / "b")[0] == 2
    (tmp_path / "c" / "generation_config.json").unlink()
    path = tmp_path / "c" / "conversion_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["model.safetensors"]["hash"] = "0" * 32
    path.write_text(json.dumps(manifest))
    status, _, stderr = run_tool(tmp_path / "c", tmp_path / "b")
    assert status == 2 and "model.safetensors: has xxh3_128" in stderr

    convert(tmp_path / "b", tmp_path / "c8", plan_to_hf, fp8=True)
    for dtype in (torch.float32, torch.bfloat16):
        out = convert(tmp_path / "c8", tmp_path / f"b8_{dtype}", dtype=dtype)
        status, _, stderr = run_tool(tmp_path / "c8", out)
        assert status == 0, stderr
    status, _, stderr = run_tool(tmp_path / "c8", tmp_path / "b")
    assert status == 2 and "differ" in stderr, "FP8 is no bitwise copy of what it was made from"


def test_tied_head_that_is_no_copy_is_refused(tmp_path: Path) -> None:
    config = MODELS["llama_tied"]
    tensors = random_model(config)
    embedding = tensors["model.embed_tokens.weight"]
    mcore_dir = convert(write_hf(tmp_path / "hf", config, tensors), tmp_path / "mcore")
    both = write_hf(tmp_path / "both", config, {**tensors, "lm_head.weight": embedding.clone()})
    assert run_tool(both, mcore_dir)[0] == 0
    other = write_hf(tmp_path / "other", config, {**tensors, "lm_head.weight": flip(embedding, 0)})
    status, _, stderr = run_tool(other, mcore_dir)
    assert status == 2 and "surplus lm_head.weight" in stderr and "no proven copy" in stderr


def test_rows_beyond_the_vocabulary_are_no_padding_in_a_converted_checkpoint(tmp_path: Path) -> None:
    config = MODELS["llama_tied"]
    hf_dir = write_hf(tmp_path / "hf", config, random_model(config))
    with McoreCheckpoint(convert(hf_dir, tmp_path / "mcore")) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    name = "embedding.word_embeddings.weight"
    padded = {**tensors, name: torch.cat([tensors[name], torch.zeros(5, 96)])}
    status, _, stderr = run_tool(hf_dir, write_mcore(tmp_path / "padded", padded, hf_dir))
    assert status == 2 and f"{name} has shape (76, 96), config.json wants (71, 96)" in stderr


def test_errors_of_the_system_are_no_tracebacks(tmp_path: Path) -> None:
    for arguments in ((tmp_path / "none", tmp_path), (tmp_path, tmp_path / "none"), (tmp_path, tmp_path)):
        status, stdout, stderr = run_tool(*arguments)
        assert (status, stdout) == (2, "") and stderr.startswith("error: ") and "Traceback" not in stderr


def test_another_dtype_is_equal_where_it_was_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    config = MODELS["qwen3_moe"]
    hf_dir = write_hf(tmp_path / "hf", config, random_model(config))
    rounded = convert(hf_dir, tmp_path / "rounded", dtype=torch.bfloat16)
    status, stdout, _ = run_tool(hf_dir, rounded)
    assert status == 0 and "of them in another dtype, as was asked" in stdout
    manifest = json.loads((rounded / "iter_0000000" / "manifest.json").read_text())
    manifest["options"]["dtype"] = None
    (rounded / "iter_0000000" / "manifest.json").write_text(json.dumps(manifest))
    status, _, stderr = run_tool(hf_dir, rounded)
    assert status == 2 and "torch.float32 in Hugging Face, torch.bfloat16 in Megatron, unasked" in stderr


def test_file_that_the_manifest_does_not_list_is_found(model: tuple[Path, Path], tmp_path: Path) -> None:
    hf_dir, mcore_dir = model
    copy = Path(shutil.copytree(mcore_dir, tmp_path / "copy"))
    next(copy.rglob("metadata.json")).with_name("__9_0.distcp").touch()
    status, _, stderr = run_tool(hf_dir, copy)
    assert status == 2 and "does not list" in stderr and "__9_0.distcp" in stderr
