"""Every bad input of both converters, through their command lines, and of what a trainer starts from.

One error on stderr that names the file (and the tensor), no traceback, no wait, nothing under the final name.
"""

import json
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.convert.manifest import Manifest, hash_file, read_manifest, write_manifest
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.launch import check_weights
from tests.unit.conversion import ROOT, call, convert, environment, make_hf_dir, open_folder, to_hf, to_mcore

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ITERATION = "iter_0000000"
DATA = "__1_0.distcp"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a Hugging Face directory of two files, and the Megatron checkpoint of it."""
    folder = tmp_path_factory.mktemp("good")
    make_hf_dir(folder / "hf", num_files=2, num_hidden_layers=1)
    convert(folder / "hf", folder / "mcore")
    return folder


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """A hang is a failure, not a wait."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def assert_one_error(result: tuple[int, str, str], *messages: str, status: int = 2) -> None:
    found, _, stderr = result
    assert found == status, stderr
    assert stderr.startswith("error: ") and stderr.count("error: ") == 1 and "Traceback" not in stderr, stderr
    for message in messages:
        assert re.search(message, stderr), stderr


# Hugging Face directories. Each is the good one, damaged in one place.


def config(**changes: Any) -> Damage:
    """... drops a key."""

    def damage(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return damage


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        found = json.loads((folder / INDEX).read_text())
        change(found["weight_map"])
        (folder / INDEX).write_text(json.dumps(found))

    return damage


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Of the file that holds HEAD."""

    def damage(folder: Path) -> None:
        path = next(p for p in (folder / FIRST, folder / SECOND) if HEAD.encode() in p.read_bytes()[:100_000])
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        found = json.loads(content[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return damage


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    """Into one file, without index."""

    def damage(folder: Path) -> None:
        found = load_file(folder / FIRST) | load_file(folder / SECOND)
        change(found)
        for name in (FIRST, SECOND, INDEX):
            (folder / name).unlink()
        save_file({name: t.clone().contiguous() for name, t in found.items()}, folder / "model.safetensors")

    return damage


def instead(name: str, make: Callable[[Path], Any]) -> Damage:
    """Another thing in a file's place."""

    def damage(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def twice(name: str, old: str, new: str) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_text()
        assert old in content
        (folder / name).write_text(content.replace(old, new, 1))

    return damage


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.symlink_to("absent")


def only_pickles(folder: Path) -> None:
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    os.mkfifo(folder / "pytorch_model.bin")  # who opened it would wait for ever


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

HF: dict[str, tuple[Damage, list[str]]] = {
    # files
    "truncated": (
        lambda f: os.truncate(f / FIRST, 400_000),
        [f"{FIRST}: .+: ends at byte .*truncated, fetch it again"],
    ),
    "truncated in the header": (lambda f: os.truncate(f / SECOND, 99), [f"{SECOND}: 99 bytes cannot hold the header"]),
    "empty file": (text(FIRST, b""), [f"{FIRST}: 0 bytes cannot hold the header"]),
    "longer than its header says": (lambda f: os.truncate(f / FIRST, 600_000), [f"{FIRST}: corrupt: the last tensor"]),
    "huge header": (text(SECOND, struct.pack("<Q", 2**63) + bytes(99)), [f"{SECOND}: 107 bytes cannot hold"]),
    "pointer of git-lfs": (
        text(FIRST, "version https://git-lfs.github.com/spec/v1\n"),
        [f"{FIRST}: .*fetch it again"],
    ),
    "missing shard": (lambda f: (f / SECOND).unlink(), [f"{INDEX} lists {SECOND}, which is missing"]),
    "shard is a folder": (instead(FIRST, Path.mkdir), [f"{FIRST}: Is a directory"]),
    "shard is a pipe": (instead(FIRST, pipe), [f"{FIRST}: no regular file"]),
    "shard is a loop": (instead(FIRST, loop), [f"{FIRST}: Too many levels of symbolic links"]),
    "shard leads nowhere": (instead(FIRST, nowhere), [f"{FIRST}: No such file .* a link that leads nowhere; fetch"]),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], [r"no \*.safetensors"]),
    "pickles": (only_pickles, [r"only as pickle \(pytorch_model.bin\), which is never opened .*wants safetensors"]),
    "shards without index": (lambda f: (f / INDEX).unlink(), [f"has {FIRST}, {SECOND} and no {INDEX}"]),
    "file beside the index": (
        lambda f: shutil.copy(f / FIRST, f / "x.safetensors"),
        ["x.safetensors: .* not list it"],
    ),
    # index
    "index names an absent tensor": (index(lambda m: m.update(a=FIRST)), [f"{INDEX} has a in {FIRST}; it is in no"]),
    "index lacks a tensor": (index(lambda m: m.pop(HEAD)), [f"has {HEAD}, {INDEX} does not"]),
    "index leads out": (index(lambda m: m.update({HEAD: f"../hf/{FIRST}"})), [f"lists ../hf/{FIRST}, which is miss"]),
    "index leads to the root": (
        index(lambda m: m.update({HEAD: "/etc/passwd"})),
        ["lists /etc/passwd, which is miss"],
    ),
    "index has a key twice": (
        twice(INDEX, '"weight_map": {', f'"weight_map": {{"{HEAD}": "x", '),
        [f"{INDEX}: {HEAD} occurs twice"],
    ),
    "index is a list": (text(INDEX, "[]"), [f"{INDEX}: holds a list"]),
    "index is empty": (text(INDEX, ""), [f"{INDEX}: Expecting value"]),
    "index is deep": (text(INDEX, "[" * 100_000), [f"{INDEX}: nested too deeply"]),
    "index is a pipe": (instead(INDEX, pipe), [f"{INDEX}: no regular file"]),
    # headers
    "tensor twice": (
        header(lambda h: h.update({"z": dict(h[HEAD])})),
        ["z: corrupt header: starts at byte|.*corrupt header: starts at byte"],
    ),
    "dtype is a list": (header(lambda h: h[HEAD].update(dtype=[])), [rf"{HEAD}: dtype \[\] is not understood"]),
    "dtype unknown": (header(lambda h: h[HEAD].update(dtype="F4")), [f"{HEAD}: dtype 'F4' is not understood"]),
    "negative size": (header(lambda h: h[HEAD].update(shape=[-48, -96])), [rf"{HEAD}: corrupt header: shape \[-48"]),
    "size is no number": (header(lambda h: h[HEAD].update(shape=[float("nan")])), [f"{HEAD}: corrupt header"]),
    "tensor without end": (
        header(lambda h: h.update(z={"dtype": "U8", "shape": [10**20], "data_offsets": [0, 10**20]})),
        ["z: ends at byte 1"],
    ),
    "metadata is no object": (header(lambda h: h.update(__metadata__=3)), ["corrupt header: __metadata__ is 3"]),
    "metadata is no text": (
        header(lambda h: h.update(__metadata__={"a": 3})),
        ["corrupt header: __metadata__ is {'a': 3}"],
    ),
    "name that steers a terminal": (
        header(lambda h: h.update({"\x1b[31m\u202e": EMPTY})),
        [r"has \\x1b\[31m\\u202e, "],
    ),
    "name out of text": (header(lambda h: h.update({"\ud800 [/red]": EMPTY})), [r"has \\ud800 \[/red\], "]),
    # tensors
    "missing tensor": (tensors(lambda t: t.pop(NORM)), [rf"hf: tensors .*\n  missing {NORM} \(96,\)"]),
    "extra tensor": (tensors(lambda t: t.update(x=t[NORM])), [r"surplus x \(96,\)"]),
    "wrong shape": (tensors(lambda t: t.update({HEAD: t[HEAD].T})), [rf"{HEAD} has shape \(96, 48\), config.json"]),
    "int8 weights": (tensors(lambda t: t.update({HEAD: t[HEAD].char()})), [f"hf: dtypes.*\n  {HEAD} is torch.int8"]),
    "float8 without scales": (
        tensors(lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)})),
        [f"{HEAD}.*float8_e4m3fn"],
    ),
    "layer of another model": (
        tensors(lambda t: t.update({"model.layers.1.eh_proj.weight": t[NORM]})),
        ["surplus model.layers.1.eh_proj.weight .*MTP"],
    ),
    # config
    "no config": (lambda f: (f / "config.json").unlink(), ["hf/config.json: No such file"]),
    "config is a folder": (instead("config.json", Path.mkdir), ["hf/config.json: Is a directory"]),
    "config is a pipe": (instead("config.json", pipe), ["hf/config.json: no regular file"]),
    "config is a loop": (instead("config.json", loop), ["hf/config.json: Too many levels"]),
    "config is no JSON": (text("config.json", "{"), ["hf/config.json: Expecting property name"]),
    "config is no text": (text("config.json", b"\xff\xfe"), ["hf/config.json: .*decode"]),
    "config has a key twice": (
        twice("config.json", '"vocab_size"', '"vocab_size": 7, "vocab_size"'),
        ["hf/config.json: vocab_size occurs twice"],
    ),
    "config is deep": (text("config.json", "[" * 100_000), ["hf/config.json: nested too deeply"]),
    "unknown architecture": (config(model_type="gpt_oss"), ["config.json: model_type='gpt_oss': known are llama,"]),
    "no architecture": (config(model_type=...), ["config.json: model_type=None: known are"]),
    "architecture is a list": (config(model_type=[]), [r"config.json: model_type=\[\]: known are"]),
    "unknown key": (config(attention_sinks=True), ["config.json:\n  attention_sinks=True: not understood"]),
    "NaN": (config(rms_norm_eps=float("nan")), ["config.json:\n  rms_norm_eps=nan: wants a number"]),
    "no vocabulary": (config(vocab_size=0), ["config.json:\n  vocab_size=0: wants a whole number above zero"]),
    "negative hidden size": (config(hidden_size=-96), ["config.json:\n  hidden_size=-96: wants"]),
    "text for a number": (config(vocab_size="48"), ["config.json:\n  vocab_size='48': wants"]),
    "a thousand million layers": (config(num_hidden_layers=10**9), ["num_hidden_layers=1000000000, .*at most 10000"]),
    "a hundred million heads": (
        config(num_attention_heads=10**8, num_key_value_heads=10**8),
        ["with 100000000 num_key_value_heads .*no such model is known"],
    ),
    "a vocabulary without end": (config(vocab_size=10**30), [rf"{HEAD} has shape \(48, 96\), config.json wants"]),
    "other layers": (config(num_hidden_layers=2), ["missing model.layers.1.self_attn.q_proj.weight"]),
    "other hidden size": (
        config(hidden_size=64),
        [r"input_layernorm.weight has shape \(96,\), config.json wants \(64,\)"],
    ),
    "tied, with a head": (config(tie_word_embeddings=True), [f"surplus {HEAD} .*no proven copy; remove it, or set"]),
    "FP8 that is none": (
        config(quantization_config={"quant_method": "fp8"}),
        ["hf: .*quantization_config.*no tensor"],
    ),
    "quantised another way": (
        config(quantization_config={"quant_method": "gptq"}),
        ["quant_method='gptq': wants fp8"],
    ),
}


@pytest.mark.parametrize("case", HF)
def test_bad_hugging_face_directory(case: str, good: Path, tmp_path: Path) -> None:
    damage, messages = HF[case]
    shutil.copytree(good / "hf", tmp_path / "hf")
    damage(tmp_path / "hf")
    start_s = time.monotonic()
    assert_one_error(to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b"), *messages)
    if case != "no weights":  # of which a dry run says what they should be
        assert_one_error(to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b", "--dry-run"))
    if case != "pickles":  # the recipe refuses them before: no *.safetensors, no checkpoint
        with pytest.raises(ConversionError):
            check_weights(tmp_path / "hf", good / "hf")
    assert time.monotonic() - start_s < 5
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


MIXED = "linear_fc1.weight: made of bfloat16 and float32; give --dtype"


def test_mixed_dtypes_in_one_tensor_want_a_word(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "hf", tmp_path / "hf")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors(lambda t: t.update({name: t[name].bfloat16()}))(tmp_path / "hf")
    assert_one_error(to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b"), MIXED)
    assert (
        to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b", "--dtype", "float32", "--dry-run")[0] == 0
    )
    check_weights(tmp_path / "hf", good / "hf")  # the trainer has a dtype of its own
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(("make", "message"), [
    (nowhere, "tokenizer.json: No such file .*leads nowhere"),
    (Path.mkdir, "tokenizer.json: Is a directory"),
    (pipe, "tokenizer.json: no regular file"),
])  # fmt: skip
def test_tokenizer_that_cannot_be_carried_is_no_tokenizer_left_out(
    make: Callable[[Path], Any], message: str, good: Path, tmp_path: Path
) -> None:
    shutil.copytree(good / "hf", tmp_path / "hf")
    instead("tokenizer.json", make)(tmp_path / "hf")
    assert_one_error(to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b"), message)
    for path in (tmp_path / "hf").glob("tokenizer*"):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    status, stdout, _ = to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b", "--dry-run")
    assert status == 0 and f"{tmp_path / 'hf'}: has no tokenizer; the checkpoint will have none" in stdout


# Megatron checkpoints. Each is the good one, damaged in one place; `signed` gives it a manifest that fits again.


class Evil:
    """Its pickle runs a command when it is loaded as pickles are."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def signed(damage: Damage) -> Damage:
    def both(folder: Path) -> None:
        old = read_manifest(folder / ITERATION / "manifest.json")
        damage(folder)
        inside = folder / ITERATION
        files = {str(p.relative_to(inside)): hash_file(p) for p in inside.rglob("*") if p.is_file()}
        del files["manifest.json"]
        write_manifest(inside / "manifest.json", Manifest(kind="mcore", files=files, tensors=old.tensors))

    return both


def manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / ITERATION / "manifest.json"
        found = json.loads(path.read_text())
        change(found)
        path.write_text(json.dumps(found))

    return damage


def metadata(change: Callable[[Any, Path], Any]) -> Damage:
    """The pickle of torch's own classes, changed; change may return what is pickled instead."""

    def damage(folder: Path) -> None:
        path = folder / ITERATION / ".metadata"
        found = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps(change(found, folder) or found))

    return damage


def inside(name: str, damage: Damage) -> Damage:
    """In the iteration's folder."""
    return lambda folder: damage(folder / ITERATION / name)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def hf_config(**changes: Any) -> Damage:
    return lambda folder: config(**changes)(folder / ITERATION / "hf")


def relocate(target: str) -> Damage:
    def change(found: Any, _: Path) -> None:
        for info in found.storage_data.values():
            info.relative_path = target if info.relative_path == DATA else info.relative_path

    return metadata(change)


OUT = "output_layer.weight"
LATEST = "latest_checkpointed_iteration.txt"
MCORE: dict[str, tuple[Damage, list[str]]] = {
    # files
    "no manifest": (inside("manifest.json", Path.unlink), ["not a finished checkpoint; it has no manifest.json"]),
    "truncated data": (inside(DATA, lambda p: os.truncate(p, 999)), [f"{DATA}: is cut off: .* the file at 999"]),
    "data a byte short": (
        inside(DATA, lambda p: os.truncate(p, p.stat().st_size - 1)),
        [f"{DATA}: (is cut off|has [0-9]+ bytes, the manifest says)"],
    ),
    "data a byte long": (inside(DATA, lambda p: os.truncate(p, p.stat().st_size + 1)), [f"{DATA}: has .*says.*copy"]),
    "empty data": (inside(DATA, lambda p: os.truncate(p, 0)), [f"{DATA}: is cut off"]),
    "missing data": (inside(DATA, Path.unlink), [f"{DATA}: No such file .* it holds .*not complete"]),
    "data is a folder": (inside(DATA, lambda p: (p.unlink(), p.mkdir())), [f"{DATA}: Is a directory"]),
    "data is a pipe": (inside(DATA, lambda p: (p.unlink(), pipe(p))), [f"{DATA}: no regular file"]),
    "data is a loop": (inside(DATA, lambda p: (p.unlink(), loop(p))), [f"{DATA}: Too many levels"]),
    "metadata changed": (
        inside(".metadata", flip),
        [r"\.metadata: not the file that manifest.json describes; it is n"],
    ),
    "metadata missing": (inside(".metadata", Path.unlink), [r"\.metadata: No such file"]),
    "metadata is a pipe": (inside(".metadata", lambda p: (p.unlink(), pipe(p))), [r"\.metadata: no regular file"]),
    "config changed": (inside("hf/config.json", flip), ["hf/config.json: has xxh3_128 .*, the manifest says"]),
    "tokenizer changed": (inside("hf/tokenizer.json", flip), ["hf/tokenizer.json: has xxh3_128"]),
    "tokenizer missing": (inside("hf/tokenizer.json", Path.unlink), ["hf/tokenizer.json: missing"]),
    "tokenizer put beside": (
        inside("hf/tokenizer.model", lambda p: p.write_text("x")),
        ["hf/tokenizer.model: not in the manifest"],
    ),
    "no config": (signed(inside("hf", shutil.rmtree)), ["hf: has no config.json; name a directory .*--hf-config"]),
    # manifest
    "manifest is empty": (inside("manifest.json", lambda p: p.write_text("")), ["manifest.json: Expecting value"]),
    "manifest is a list": (
        inside("manifest.json", lambda p: p.write_text("[]")),
        ["manifest.json: not a manifest of"],
    ),
    "manifest is deep": (inside("manifest.json", lambda p: p.write_text("[" * 99_999)), ["manifest.json: nested too"]),
    "manifest of another hash": (manifest(lambda m: m.update(hash="md5")), ["manifest.json: has format and hash"]),
    "manifest of another kind": (manifest(lambda m: m.update(kind="hf")), ["of kind 'hf', wants mcore"]),
    "manifest lacks a tensor": (manifest(lambda m: m["tensors"].pop(OUT)), [rf"{OUT}: absent in manifest.json"]),
    "manifest has a tensor more": (
        manifest(lambda m: m["tensors"].update(x=m["tensors"][OUT])),
        [r"x: float32 \(48, 96\) in manifest.json, absent in .metadata"],
    ),
    "manifest has another shape": (
        manifest(lambda m: m["tensors"][OUT].update(shape=[3])),
        [rf"{OUT}: float32 \(3,\) in manifest.json, float32 \(48, 96\) in .metadata"],
    ),
    "manifest lacks a file": (
        manifest(lambda m: m["files"].pop(DATA)),
        [rf"data files that .* does not: \['{DATA}'\]"],
    ),
    "manifest lacks the config": (
        manifest(lambda m: m["files"].pop("hf/config.json")),
        ["hf/config.json: not in the manifest"],
    ),
    # a manifest that fits, and still
    "metadata that runs a command": (
        signed(metadata(lambda m, f: setattr(m, "planner_data", Evil(f.parent / "EVIL")))),
        [r"\.metadata: refused: names posix.system"],
    ),
    "metadata that is a command": (
        signed(metadata(lambda m, f: Evil(f.parent / "EVIL"))),
        [r"\.metadata: refused: names posix.system"],
    ),
    "metadata is no pickle": (signed(inside(".metadata", lambda p: p.write_text("x"))), [r"\.metadata: damaged"]),
    "metadata leads out": (
        signed(relocate("../../secret")),
        ["at byte .* of '../../secret', wants a file of the fold"],
    ),
    "metadata lacks a tensor": (
        signed(metadata(lambda m, _: m.state_dict_metadata.pop(OUT) and None)),
        [f"{OUT}: float32 .* in manifest.json, absent in .metadata"],
    ),
    "metadata has another shape": (
        signed(metadata(lambda m, _: setattr(m.state_dict_metadata[OUT], "size", torch.Size([96, 48])))),
        [rf"\.metadata: {OUT} \(96, 48\) has a chunk at .*, outside of it"],
    ),
    "foreign backend": (
        signed(inside("metadata.json", lambda p: p.write_text('{"sharded_backend": "zarr"}'))),
        ["metadata.json: sharded_backend is 'zarr', only 'torch_dist' is read; save it as that"],
    ),
    "description is deep": (
        signed(inside("metadata.json", lambda p: p.write_text("[" * 99_999))),
        ["metadata.json: not megatron-core's"],
    ),
    "legacy format": (
        lambda f: ((f / ITERATION / "metadata.json").unlink(), (f / ITERATION / "mp_rank_00").mkdir()),
        ["is in the legacy torch format; wants .*--ckpt-format torch_dist"],
    ),
    "other architecture": (signed(hf_config(model_type="gpt_oss")), ["hf/config.json: model_type='gpt_oss': known"]),
    "other layers": (signed(hf_config(num_hidden_layers=2)), ["mcore: tensors .*\n  missing decoder.layers.1."]),
    "other hidden size": (signed(hf_config(hidden_size=64)), [r"has shape \(96,\), config.json wants \(64,\)"]),
    "smaller vocabulary": (
        signed(hf_config(vocab_size=40)),
        [rf"{OUT} has shape \(48, 96\), config.json wants \(40,"],
    ),
    "larger vocabulary": (signed(hf_config(vocab_size=50)), [rf"{OUT} has shape \(48, 96\), config.json wants \(50,"]),
    # the folder
    "no such iteration": (text(LATEST, "7\n"), ["iter_0000007: no such folder"]),
    "iteration leads out": (text(LATEST, "../.."), [f"{LATEST}: holds '../..', wants an iteration number"]),
    "iteration without end": (text(LATEST, "9" * 5000), [f"{LATEST}: holds '999"]),
    "iteration is a pipe": (instead(LATEST, pipe), ["mcore: has no metadata.json, so it is no finished checkpoint"]),
    "no checkpoint": (
        lambda f: shutil.rmtree(f / ITERATION),
        [f"{ITERATION}: no such folder, wants a Megatron check"],
    ),
}
NOT_THE_TRAINERS = (
    "tokenizer changed",
    "tokenizer missing",
    "tokenizer put beside",
    "config changed",
    "manifest lacks the config",
)
"""Found by its ranks, which verify every file of the manifest before they load one."""


@pytest.mark.parametrize("case", MCORE)
def test_bad_megatron_checkpoint(case: str, good: Path, tmp_path: Path) -> None:
    damage, messages = MCORE[case]
    shutil.copytree(good / "mcore", tmp_path / "mcore")
    damage(tmp_path / "mcore")
    start_s = time.monotonic()
    assert_one_error(to_hf("--mcore-dir", tmp_path / "mcore", "--hf-dir", tmp_path / "c"), *messages)
    if case not in NOT_THE_TRAINERS:
        with pytest.raises(ConversionError):
            check_weights(tmp_path / "mcore", good / "hf")
    assert time.monotonic() - start_s < 5
    assert [p.name for p in tmp_path.iterdir()] == ["mcore"]


@pytest.mark.parametrize(
    "case",
    [
        "metadata that runs a command",
        "metadata that is a command",
        "metadata leads out",
        "missing data",
        "truncated data",
    ],
)
def test_without_manifest_the_same_is_refused(case: str, good: Path, tmp_path: Path) -> None:
    damage, messages = MCORE[case]
    shutil.copytree(good / "mcore", tmp_path / "mcore")
    damage(tmp_path / "mcore")
    (tmp_path / "mcore" / ITERATION / "manifest.json").unlink()
    arguments = ("--mcore-dir", tmp_path / "mcore", "--hf-dir", tmp_path / "c", "--without-manifest")
    assert_one_error(to_hf(*arguments), *messages)
    assert [p.name for p in tmp_path.iterdir()] == ["mcore"]


@pytest.mark.parametrize(("damage", "message"), [
    (inside(DATA, flip), rf"hash of the manifest.*\n  .*, in {DATA}"),
    (manifest(lambda m: m["tensors"][OUT].update(hash="0" * 32)), rf"hash of the manifest.*\n  {OUT}, in {DATA}"),
])  # fmt: skip
def test_bad_bits_are_found_while_they_are_read(damage: Damage, message: str, good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "mcore", tmp_path / "mcore")
    damage(tmp_path / "mcore")
    assert_one_error(to_hf("--mcore-dir", tmp_path / "mcore", "--hf-dir", tmp_path / "c"), message)
    assert not (tmp_path / "c").exists()


def test_padding_of_the_vocabulary_is_not_left_out_in_silence(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "mcore", tmp_path / "mcore")
    hf_config(vocab_size=40)(tmp_path / "mcore")
    (tmp_path / "mcore" / ITERATION / "manifest.json").unlink()
    arguments = ("--mcore-dir", tmp_path / "mcore", "--hf-dir", tmp_path / "c", "--without-manifest", "--dry-run")
    status, stdout, stderr = to_hf(*arguments)
    assert status == 0, stderr
    assert f"{OUT} has 48 rows, the vocabulary 40: the rest is left out as padding" in stdout


def test_trainer_takes_what_the_converter_takes(good: Path, tmp_path: Path) -> None:
    """Both sides of a conversion, and a head that repeats the embedding that it is tied to."""
    check_weights(good / "hf", good / "hf")
    check_weights(good / "mcore", good / "hf")
    shutil.copytree(good / "hf", tmp_path / "hf")
    config(tie_word_embeddings=True)(tmp_path / "hf")
    tensors(lambda t: t.update({HEAD: t["model.embed_tokens.weight"]}))(tmp_path / "hf")
    check_weights(tmp_path / "hf", tmp_path / "hf")
    status, stdout, _ = to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b", "--dry-run")
    assert status == 0 and f"{HEAD} is a copy, bit for bit, and left out" in stdout


# Targets and places.


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a folder": (lambda f: (f / "x").mkdir() or f / "x", "x: exists; remove it or name another"),
    "a file": (lambda f: (f / "x").touch() or f / "x", "x: exists"),
    "a link that leads nowhere": (lambda f: nowhere(f / "x") or f / "x", "x: exists"),
    "without a parent": (lambda f: f / "absent" / "x", "x: there is no folder .*absent"),
    "in a file": (lambda f: (f / "x").touch() or f / "x" / "y", "y: there is no folder .*x; make it"),
    "in a loop": (lambda f: loop(f / "x") or f / "x" / "y", "y: there is no folder"),
    "of too long a name": (lambda f: f / ("x" * 300), "File name too long"),
    "the root": (lambda f: Path("/"), "/: exists"),
    "where its work is a file": (
        lambda f: (f / "x.partial").touch() or f / "x",
        "x.partial: (File exists|Not a direc)",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_target_that_cannot_be_made(case: str, good: Path, tmp_path: Path) -> None:
    make, message = TARGETS[case]
    target = make(tmp_path)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    assert_one_error(to_mcore("--hf-dir", good / "hf", "--mcore-dir", target), message)
    assert_one_error(to_hf("--mcore-dir", good / "mcore", "--hf-dir", target), message)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_source_is_no_target_and_each_side_is_told_from_the_other(good: Path, tmp_path: Path) -> None:
    hf_dir, mcore_dir = good / "hf", good / "mcore"
    assert_one_error(to_mcore("--hf-dir", hf_dir, "--mcore-dir", hf_dir), "hf: exists")
    assert_one_error(to_hf("--hf-dir", mcore_dir, "--mcore-dir", mcore_dir), "mcore: exists")
    assert_one_error(to_mcore("--hf-dir", mcore_dir, "--mcore-dir", tmp_path / "x"), "config.json: No such file")
    assert_one_error(to_mcore("--hf-dir", hf_dir / FIRST, "--mcore-dir", tmp_path / "x"), "Not a directory")
    assert_one_error(to_hf("--mcore-dir", hf_dir, "--hf-dir", tmp_path / "x"), "has no metadata.json, so it is no fin")
    assert_one_error(to_hf("--mcore-dir", hf_dir / FIRST, "--hf-dir", tmp_path / "x"), "no such folder")
    arguments = ("--mcore-dir", mcore_dir, "--hf-dir", tmp_path / "x", "--hf-config", tmp_path)
    assert_one_error(to_hf(*arguments), f"{tmp_path}: has no config.json; name a directory that has the model's")
    assert list(tmp_path.iterdir()) == []


def test_target_inside_the_source_and_odd_paths_are_fine(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative, with a slash at the end, and with characters that a console takes for markup."""
    name = "[/red] \u00e9\u4e2d"
    shutil.copytree(good / "hf", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = to_mcore("--hf-dir", f"{name}/", "--mcore-dir", f"./{name}/b/")
    assert status == 0 and stdout.startswith(f"{name}/b: 12 tensors"), stderr
    status, stdout, stderr = to_hf("--mcore-dir", f"{name}/b", "--hf-dir", f"{name}/b/{ITERATION}/c")
    assert status == 0 and stdout.startswith(f"{name}/b/{ITERATION}/c: "), stderr
    found = load_file(tmp_path / name / "b" / ITERATION / "c" / "model.safetensors")
    want = load_file(good / "hf" / FIRST) | load_file(good / "hf" / SECOND)
    assert found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)


# Disks and permissions.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KiB, less than the model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk(good: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at once where it is full from the start; where it fills on the way, the file is named."""
    to_hf_arguments = ("--mcore-dir", good / "mcore", "--hf-dir", small_disk / "x")
    to_mcore_arguments = ("--hf-dir", good / "hf", "--mcore-dir", small_disk / "x")
    for result in (to_hf(*to_hf_arguments), to_mcore(*to_mcore_arguments)):
        assert_one_error(result, r"x: needs .* of disk space, 600 KiB are free", status=1)
    assert list(small_disk.iterdir()) == []
    plenty = shutil.disk_usage("/")._replace(free=2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: plenty)
    full = r"x.partial/data/.*: .*No space left on device"
    for result in (to_hf(*to_hf_arguments), to_mcore(*to_mcore_arguments, "--restart")):
        assert_one_error(result, full, "the same command goes on from there, --restart", status=1)
        assert [p.name for p in small_disk.iterdir()] == ["x.partial"]


AS_NOBODY = """
import json, multiprocessing.popen_fork, os, sys
from tests.unit.conversion import to_hf, to_mcore
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
cases = json.loads(sys.argv[1])
print(json.dumps([(to_mcore if a[0] == "--hf-dir" else to_hf)(*a) for a in cases]))
"""


def test_no_permission_to_read_or_write(good: Path) -> None:
    """In a child that is not root, who may do all."""
    with open_folder() as folder:
        for path in good.rglob("*.safetensors"):
            path.chmod(0o644)  # the safetensors package writes them for their owner alone
        shutil.copytree(good, folder / "from")
        hf_dir, mcore_dir = folder / "from" / "hf", folder / "from" / "mcore"
        closed = {
            "weights": hf_dir / SECOND,
            "config": hf_dir / "config.json",
            "tokenizer": hf_dir / "tokenizer.json",
            "data": mcore_dir / ITERATION / DATA,
            "metadata": mcore_dir / ITERATION / ".metadata",
            "manifest": mcore_dir / ITERATION / "manifest.json",
        }
        cases, messages = [], []
        for what, path in closed.items():
            copy = folder / what
            shutil.copytree(good / ("hf" if path.is_relative_to(hf_dir) else "mcore"), copy)
            path = copy / path.relative_to(hf_dir if path.is_relative_to(hf_dir) else mcore_dir)
            path.chmod(0)
            source, target = ("--hf-dir", "--mcore-dir") if (copy / INDEX).exists() else ("--mcore-dir", "--hf-dir")
            cases.append([source, str(copy), target, str(folder / "out" / what)])
            messages.append(f"{path}: Permission denied")
        (folder / "closed").mkdir(mode=0o555)
        cases.append(["--hf-dir", str(hf_dir), "--mcore-dir", str(folder / "closed" / "x")])
        messages.append(f"x: no permission to write in {folder / 'closed'}")
        (folder / "out").mkdir()
        (folder / "out").chmod(0o777)
        command = [sys.executable, "-c", AS_NOBODY, json.dumps(cases)]
        done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        for result, message in zip(json.loads(done.stdout), messages, strict=True):
            assert_one_error(tuple(result), re.escape(message))
        assert list((folder / "out").iterdir()) == [] and list((folder / "closed").iterdir()) == []


def test_bad_arguments_are_the_parsers(good: Path, tmp_path: Path) -> None:
    for arguments in (("--workers", "0"), ("--workers", "x"), ("--dtype", "int8"), ("--max-shard-size", "0")):
        status, _, stderr = to_mcore("--hf-dir", good / "hf", "--mcore-dir", tmp_path / "b", *arguments)
        assert status == 2 and "usage: " in stderr and f"argument {arguments[0]}" in stderr
    assert call(lambda arguments: to_hf(*arguments)[0])[0] == 2
    assert list(tmp_path.iterdir()) == []
