"""The two command lines: bitwise round trip, dry run, exit status and one error line for each bad input."""

import json
import os
import pty
import re
import subprocess
import time

import pytest
import torch
from safetensors.torch import save_file

from tests.models import QWEN3_30B_A3B, QWEN3_235B_A22B
from tests.unit.conversion import (
    TINY,
    command,
    environment,
    hashes,
    load,
    make_hf_dir,
    run,
    same_bits,
    to_hf,
    to_mcore,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder with hf and mcore, tensors, what the conversion printed)."""
    folder = tmp_path_factory.mktemp("command")
    tensors = make_hf_dir(folder / "hf")
    arguments = ("--hf-dir", folder / "hf", "--mcore-dir", folder / "mcore")
    status, stdout, stderr = run("convert_hf_to_mcore", *arguments)
    assert (status, stderr) == (0, ""), stdout
    return folder, tensors, stdout


def test_round_trip_is_bitwise_and_gives_config_and_tokenizer_back(tiny, tmp_path):
    folder, tensors, _ = tiny
    assert len({value for t in tensors.values() for value in t.flatten().tolist()}) == 1_008_672
    arguments = ("--mcore-dir", folder / "mcore", "--hf-dir", tmp_path / "c", "--workers", 2)
    status, stdout, stderr = run("convert_mcore_to_hf", *arguments)
    assert (status, stderr) == (0, ""), stdout
    assert same_bits(load(tmp_path / "c"), tensors)
    for path in TINY.iterdir():
        assert (tmp_path / "c" / path.name).read_bytes() == (folder / "hf" / path.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_checkpoint_has_the_habits_of_megatron_lm(tiny):
    folder = tiny[0] / "mcore"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "0\n"
    names = {str(p.relative_to(folder / "iter_0000000")) for p in (folder / "iter_0000000").rglob("*")}
    assert {".metadata", "metadata.json", "manifest.json", "hf/config.json", "hf/tokenizer.json"} <= names


def test_manifest_lists_both_sides_and_nothing_of_the_moment(tiny, tmp_path):
    folder, tensors, _ = tiny
    manifest = json.loads((folder / "mcore" / "iter_0000000" / "manifest.json").read_text())
    source = manifest["source"]["tensors"]
    assert {n: (t["dtype"], t["shape"], t["bytes"]) for n, t in source.items()} == {
        n: ("float32", list(t.shape), t.nbytes) for n, t in tensors.items()
    }
    assert (
        manifest["source"]["files"]["model.safetensors"]["bytes"] == (folder / "hf/model.safetensors").stat().st_size
    )
    assert sum(t["bytes"] for t in manifest["tensors"].values()) == 4 * 1_008_672
    assert "decoder.layers.3.mlp.experts.experts.linear_fc2.weight" in manifest["tensors"]
    status, _, stderr = to_mcore("--hf-dir", folder / "hf", "--mcore-dir", tmp_path / "again")
    assert status == 0, stderr
    assert hashes(tmp_path / "again") == hashes(folder / "mcore")
    status, _, stderr = to_hf("--mcore-dir", folder / "mcore", "--hf-dir", tmp_path / "c")
    assert status == 0, stderr
    back = json.loads((tmp_path / "c" / "conversion_manifest.json").read_text())
    assert {n: t["hash"] for n, t in back["tensors"].items()} == {n: t["hash"] for n, t in source.items()}
    assert {n: t["hash"] for n, t in back["source"]["tensors"].items()} == {
        n: t["hash"] for n, t in manifest["tensors"].items()
    }


def test_summary_says_what_was_made_where_and_at_what_cost(tiny):
    folder, _, stdout = tiny
    assert stdout.startswith(f"{folder / 'mcore'}: 39 tensors, 4 MiB in 1 files\n")
    assert re.search(r"\d+\.\d s, \d+ (K|M)iB/s, peak memory \d+ MiB", stdout)


def test_export_cuts_files_at_the_size_asked_for(tiny, tmp_path):
    folder, tensors, _ = tiny
    status, _, stderr = to_hf(
        "--mcore-dir", folder / "mcore", "--hf-dir", tmp_path / "c", "--max-shard-size", "500KB", "--workers", 2
    )
    assert status == 0, stderr
    files = sorted(p.name for p in (tmp_path / "c").glob("*.safetensors"))
    assert len(files) >= 8 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "c" / name).stat().st_size < 520_000 for name in files)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert same_bits(load(tmp_path / "c"), tensors)


def test_experts_as_transformers_holds_them_convert_to_the_same_checkpoint(tiny, tmp_path):
    folder, tensors, _ = tiny
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(4):
        experts = [f"model.layers.{layer}.mlp.experts.{e}." for e in range(8)]
        gate_up = [torch.cat([tensors[f"{e}gate_proj.weight"], tensors[f"{e}up_proj.weight"]]) for e in experts]
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        down = torch.stack([tensors[f"{e}down_proj.weight"] for e in experts])
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    source = tmp_path / "hf"
    source.mkdir()
    for path in TINY.iterdir():
        (source / path.name).write_bytes((folder / "hf" / path.name).read_bytes())
    save_file(fused, source / "model.safetensors")
    status, _, stderr = to_mcore("--hf-dir", source, "--mcore-dir", tmp_path / "b")
    assert status == 0, stderr
    a, b = (json.loads((f / "iter_0000000/manifest.json").read_text()) for f in (folder / "mcore", tmp_path / "b"))
    assert a["tensors"] == b["tensors"]
    assert set(b["source"]["tensors"]) == set(fused)


def test_fp8_comes_back_bit_for_bit_and_config_says_so(tmp_path):
    """Export to FP8, import to bfloat16, export again: payload, scales and quantization_config are the same."""
    make_hf_dir(tmp_path / "a", dtype=torch.bfloat16, num_hidden_layers=2)
    assert to_mcore("--hf-dir", tmp_path / "a", "--mcore-dir", tmp_path / "b")[0] == 0
    status, _, stderr = to_hf("--mcore-dir", tmp_path / "b", "--hf-dir", tmp_path / "one", "--fp8")
    assert status == 0, stderr
    with (tmp_path / "one" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    last = "model.layers.0.mlp.experts.3.up_proj.weight"
    small = ("--max-shard-size", header[last]["data_offsets"][1])  # a file ends between a payload and its scale
    status, _, stderr = to_hf("--mcore-dir", tmp_path / "b", "--hf-dir", tmp_path / "c8", "--fp8", *small)
    assert status == 0, stderr
    weight_map = json.loads((tmp_path / "c8" / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map[last] < weight_map[f"{last}_scale_inv"]
    first = load(tmp_path / "c8")
    assert same_bits(first, load(tmp_path / "one"))
    payloads = [name for name, t in first.items() if t.dtype == torch.float8_e4m3fn]
    assert len(payloads) == 2 * (4 + 24) and {f"{name}_scale_inv" for name in payloads} <= first.keys()
    quantization = json.loads((tmp_path / "c8/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "fp8" and quantization["weight_block_size"] == [128, 128]

    status, stdout, stderr = to_mcore(
        "--hf-dir", tmp_path / "c8", "--mcore-dir", tmp_path / "b8", "--dtype", "float32"
    )
    assert status == 0 and "56 tensors are FP8 and are converted to float32" in stdout, stderr
    manifest = json.loads((tmp_path / "b8/iter_0000000/manifest.json").read_text())
    assert manifest["source"]["tensors"].keys() == first.keys()
    status, _, stderr = to_hf("--mcore-dir", tmp_path / "b8", "--hf-dir", tmp_path / "d8", "--fp8", *small)
    assert status == 0, stderr
    second = load(tmp_path / "d8")
    fp8_names = [n for n in first if n in payloads or n.endswith("_scale_inv")]
    assert same_bits({n: first[n] for n in fp8_names}, {n: second[n] for n in fp8_names})
    status, _, stderr = to_hf("--mcore-dir", tmp_path / "b8", "--hf-dir", tmp_path / "d")
    assert status == 0, stderr
    config = json.loads((tmp_path / "d/config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "float32"
    assert {t.dtype for t in load(tmp_path / "d").values()} == {torch.float32}


@pytest.mark.parametrize(
    ("config", "num_tensors", "num_parameters"),
    [(QWEN3_30B_A3B, 18_867, 30_532_122_624), (QWEN3_235B_A22B, 36_945, 235_093_634_560)],
)
def test_dry_run_needs_only_config_and_lists_the_published_tensors(tmp_path, config, num_tensors, num_parameters):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    arguments = ("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b", "--dry-run")
    start_s = time.monotonic()
    status, stdout, stderr = to_mcore(*arguments)
    assert status == 0 and time.monotonic() - start_s < 10, stderr
    listed = dict(re.findall(r"^(\S+)  bfloat16 (\[[\d, ]+\])  ", stdout, flags=re.MULTILINE))
    assert len(listed) == num_tensors
    hidden, last = config["hidden_size"], config["num_hidden_layers"] - 1
    assert listed["lm_head.weight"] == f"[151936, {hidden}]"
    down = f"model.layers.{last}.mlp.experts.127.down_proj.weight"
    assert listed[down] == f"[{hidden}, {config['moe_intermediate_size']}]"
    assert listed[f"model.layers.{last}.self_attn.q_norm.weight"] == "[128]"
    num_mcore = 9 * config["num_hidden_layers"] + 3
    assert f"{num_tensors} Hugging Face tensors, {num_mcore} Megatron tensors, {num_parameters} parameters" in stdout
    assert f"writes {2 * num_parameters / 2**30:.2f} GiB" in stdout
    assert "free" in stdout and "about" in stdout and "/s per worker" in stdout
    assert not (tmp_path / "b").exists()


def test_dry_run_checks_weights_that_are_there_and_writes_nothing(tiny, tmp_path):
    folder, tensors, _ = tiny
    status, stdout, stderr = to_mcore("--hf-dir", folder / "hf", "--mcore-dir", tmp_path / "b", "--dry-run")
    assert status == 0, stderr
    assert f"{len(tensors)} Hugging Face tensors, 39 Megatron tensors, 1008672 parameters" in stdout
    status, stdout, stderr = to_hf("--mcore-dir", folder / "mcore", "--hf-dir", tmp_path / "c", "--dry-run")
    assert status == 0, stderr
    assert f"{len(tensors)} Hugging Face tensors, 39 Megatron tensors, 1008672 parameters" in stdout
    assert list(tmp_path.iterdir()) == []


def copy_with(folder, path, change):
    """The tiny model with some tensors changed."""
    tensors = dict(load(folder / "hf"))
    change(tensors)
    path.mkdir()
    for file in TINY.iterdir():
        (path / file.name).write_bytes((folder / "hf" / file.name).read_bytes())
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing model\.norm\.weight \(96,\)"),
        (lambda t: t.update({"x.y": torch.zeros(3)}), r"surplus x\.y \(3,\)"),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.contiguous()}),
            r"lm_head\.weight has shape \(96, 48\)",
        ),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].long()}), r"lm_head\.weight is torch\.int64"),
        (
            lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(48, 96, dtype=torch.bfloat16)}),
            r"decoder\.layers\.1\.self_attention\.linear_qkv\.weight: made of bfloat16 and float32; give --dtype",
        ),
    ],
    ids=["missing", "surplus", "shape", "integers", "mixed"],
)
def test_tensors_that_do_not_fit_are_listed_with_status_2(tiny, tmp_path, change, message):
    copy_with(tiny[0], tmp_path / "hf", change)
    status, stdout, stderr = to_mcore("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b")
    assert (status, stdout) == (2, "") and stderr.startswith("error: ") and "Traceback" not in stderr
    assert re.search(message, stderr), stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_unknown_architecture_and_absent_directories_have_status_2(tiny, tmp_path):
    folder = tiny[0]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "gpt_oss"}')
    for arguments in (
        ("--hf-dir", tmp_path / "hf", "--mcore-dir", tmp_path / "b"),
        ("--hf-dir", tmp_path / "absent", "--mcore-dir", tmp_path / "b"),
        ("--hf-dir", folder / "hf", "--mcore-dir", tmp_path / "absent" / "b"),
        ("--hf-dir", folder / "hf", "--mcore-dir", folder / "mcore"),
    ):
        status, _, stderr = to_mcore(*arguments)
        assert status == 2 and stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_checkpoint_without_manifest_wants_the_word(tiny, tmp_path):
    folder, tensors, _ = tiny
    subprocess.run(["cp", "-r", folder / "mcore", tmp_path / "b"], check=True)
    (tmp_path / "b/iter_0000000/manifest.json").unlink()
    arguments = ("--mcore-dir", tmp_path / "b", "--hf-dir", tmp_path / "c")
    status, _, stderr = to_hf(*arguments)
    assert status == 2 and "manifest" in stderr and not (tmp_path / "c").exists()
    status, stdout, stderr = to_hf(*arguments, "--without-manifest")
    assert status == 0 and "read unverified" in stdout, stderr
    assert same_bits(load(tmp_path / "c"), tensors)


def test_checkpoint_without_config_wants_one(tiny, tmp_path):
    folder, tensors, _ = tiny
    subprocess.run(["cp", "-r", folder / "mcore", tmp_path / "b"], check=True)
    subprocess.run(["rm", "-r", tmp_path / "b/iter_0000000/hf", tmp_path / "b/iter_0000000/manifest.json"], check=True)
    arguments = ("--mcore-dir", tmp_path / "b", "--hf-dir", tmp_path / "c", "--without-manifest")
    status, _, stderr = to_hf(*arguments)
    assert status == 2 and "--hf-config" in stderr
    status, _, stderr = to_hf(*arguments, "--hf-config", folder / "hf")
    assert status == 0, stderr
    assert same_bits(load(tmp_path / "c"), tensors)


def test_damaged_checkpoint_is_refused(tiny, tmp_path):
    folder = tiny[0]
    subprocess.run(["cp", "-r", folder / "mcore", tmp_path / "b"], check=True)
    (file,) = [p for p in (tmp_path / "b/iter_0000000").glob("*.distcp") if p.stat().st_size > 2**20]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, _, stderr = to_hf("--mcore-dir", tmp_path / "b", "--hf-dir", tmp_path / "c")
    assert status == 2 and stderr.startswith("error: ") and file.name in stderr and "Traceback" not in stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("size", ["0", "5 parsecs", "-3GB", ""])
def test_bad_sizes_are_refused(tmp_path, size):
    status, _, stderr = to_mcore("--hf-dir", tmp_path, "--mcore-dir", tmp_path / "b", f"--max-shard-size={size}")
    assert status == 2 and "wants a size such as 5GB" in stderr


def test_terminal_shows_a_bar(tiny, tmp_path):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command("convert_hf_to_mcore", "--hf-dir", tiny[0] / "hf", "--mcore-dir", tmp_path / "b"),
        env=environment() | {"TERM": "xterm", "COLUMNS": "120"},
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the terminal's other end is closed
            break
        shown += piece
    os.close(master)
    assert process.wait() == 0, shown
    assert b"MiB" in shown and b"/s" in shown and "\u2501".encode() in shown
