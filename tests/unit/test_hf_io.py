"""Hugging Face directories: what is written is read back, in files of the right names, and never half of it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.convert import hf_io
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import TensorReader, random_tensors, read_config, write_hf_dir
from gspo_megatron.convert.ops import ConversionError, fuse_qkv, slices, stack
from gspo_megatron.convert.safetensors_io import INDEX_NAME, TensorSpec, index_json, plan_hf_files, read_header
from tests.unit.conversion import open_folder

TINY = Path(__file__).parents[2] / "recipes" / "tiny-moe"


def tensors() -> dict[str, Tensor]:
    """Six tensors of 400 bytes, one of 4,000 and one bfloat16 scalar, in an order that is not the alphabet's."""
    generator = torch.Generator().manual_seed(0)
    small = {name: torch.randn(10, 10, generator=generator) for name in "fbdeac"}
    return {**small, "large": torch.randn(1000, generator=generator), "half": torch.tensor(1.5, dtype=torch.bfloat16)}


def specs_of(found: dict[str, Tensor]) -> list[TensorSpec]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def write(out_dir: Path, found: dict[str, Tensor], companions_from: Path, **options: Any) -> None:
    write_hf_dir(out_dir, specs_of(found), found.items(), companions_from=companions_from, **options)


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def assert_reads_back(folder: Path, want: dict[str, Tensor]) -> None:
    reader = TensorReader(folder)
    assert reader.shapes() == {name: tuple(tensor.shape) for name, tensor in want.items()}
    assert reader.tensors() == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in want.items()}
    for name, tensor in want.items():
        assert reader.read(name).dtype == tensor.dtype
        assert torch.equal(reader.read(name), tensor), name


def test_small_model_is_one_file_with_its_companions(tmp_path: Path) -> None:
    write(tmp_path / "out", tensors(), TINY)
    companions = [name for name in hf_io.COMPANIONS if (TINY / name).is_file()]
    assert len(companions) >= 3
    assert files_in(tmp_path / "out") == sorted([*companions, "model.safetensors"])
    for name in companions:
        assert (tmp_path / "out" / name).read_bytes() == (TINY / name).read_bytes()
    assert_reads_back(tmp_path / "out", tensors())
    assert files_in(tmp_path) == ["out"], "no temporary folder stays"


def test_large_model_is_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", 1000)
    out_dir = tmp_path / "out"
    write(out_dir, tensors(), tmp_path)
    names = [f"model-{i}-of-00005.safetensors" for i in ("00001", "00002", "00003", "00004", "00005")]
    assert files_in(out_dir) == [*names, "model.safetensors.index.json"]
    assert_reads_back(out_dir, tensors())
    index = json.loads((out_dir / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6 * 400 + 4000 + 2}
    assert index["weight_map"] == {
        "f": names[0], "b": names[0], "d": names[1], "e": names[1], "a": names[2], "c": names[2],
        "large": names[3],  # larger than a file may be: alone
        "half": names[4],
    }  # fmt: skip
    for name in set(index["weight_map"].values()):
        inside = {k for k, v in index["weight_map"].items() if v == name}
        assert set(read_header(out_dir / name)) == inside


def test_several_files_load_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", 2**20)
    config = read_config(TINY)
    ops = family_of(config).op_list(config)
    want = dict(random_tensors(ops, std=0.05, seed=1))
    write(tmp_path / "out", want, TINY)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    found = model.state_dict()
    assert torch.equal(found["lm_head.weight"], want["lm_head.weight"])
    fused = found["model.layers.3.mlp.experts.gate_up_proj"]
    assert torch.equal(fused[7, :96], want["model.layers.3.mlp.experts.7.gate_proj.weight"])
    assert torch.equal(fused[7, 96:], want["model.layers.3.mlp.experts.7.up_proj.weight"])


def test_views_of_one_stacked_tensor_are_written_once_each(tmp_path: Path) -> None:
    op = stack("m", [{f"{e}.down": (8, 4)} for e in range(4)])
    whole = torch.arange(128.0).view(4, 8, 4)
    write(tmp_path / "out", {n: op.read_hf(n, lambda box: whole[slices(box)]) for n in op.hf_shapes}, tmp_path)
    assert_reads_back(tmp_path / "out", {f"{e}.down": whole[e] for e in range(4)})
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 128 * 4 + 1000


def broken(after: int) -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(tensors().items()):
        if i == after:
            raise RuntimeError("the source broke")
        yield item


@pytest.mark.parametrize("after", [0, 3])
def test_nothing_lies_under_the_final_name_when_the_source_breaks(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", 500)
    with pytest.raises(RuntimeError, match="the source broke"):
        write_hf_dir(tmp_path / "out", specs_of(tensors()), broken(after), companions_from=TINY)
    assert files_in(tmp_path) == []
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model.safetensors").write_text("of a run that was killed")
    write(tmp_path / "out", tensors(), TINY)
    assert_reads_back(tmp_path / "out", tensors())
    assert files_in(tmp_path) == ["out"]


def test_existing_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    consumed: list[str] = []

    def source() -> Iterator[tuple[str, Tensor]]:
        consumed.append("x")
        yield "x", torch.zeros(1)

    with pytest.raises(ConversionError, match="out: exists"):
        write_hf_dir(tmp_path / "out", specs_of({"x": torch.zeros(1)}), source(), companions_from=TINY)
    assert files_in(tmp_path / "out") == ["mine"] and consumed == []


@pytest.mark.parametrize(("given", "message"), [
    ("fbdea", r"out: the tensors end before c"),
    ("fbdeacx", r"out: x: comes after all planned tensors"),
    ("fbedac", r"00002-of-00003.safetensors: got e torch.float32 .*the plan has d "),
])  # fmt: skip
def test_stream_that_is_not_as_planned_is_refused(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", 1000)
    planned = {name: tensors()[name] for name in "fbdeac"}
    stream = ((name, torch.zeros(10, 10)) for name in given)
    with pytest.raises(ConversionError, match=message):
        write_hf_dir(tmp_path / "out", specs_of(planned), stream, companions_from=TINY)
    assert files_in(tmp_path) == []


def test_companions_are_those_of_the_list_and_config_loses_its_quantization(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in (*hf_io.COMPANIONS, "README.md", "LICENSE", "modeling_x.py", "tokenizer.py", "pytorch_model.bin"):
        (source / name).write_text(name)
    (source / "config.json").write_text(json.dumps({"b": "\u00e4", "a": 1, "quantization_config": {"old": 1}}))
    write(tmp_path / "out", tensors(), source)
    assert files_in(tmp_path / "out") == sorted([*hf_io.COMPANIONS, "model.safetensors"])
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "tokenizer.model"
    assert list(read_config(tmp_path / "out").items()) == [("b", "\u00e4"), ("a", 1)]
    write(tmp_path / "fp8", tensors(), source, quantization_config={"new": 2})
    assert read_config(tmp_path / "fp8") == {"b": "\u00e4", "a": 1, "quantization_config": {"new": 2}}
    (source / "config.json").unlink()
    with pytest.raises(ConversionError, match="source: has no config.json"):
        write(tmp_path / "none", tensors(), source, quantization_config={"new": 2})


def test_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match="file/out.partial: Not a directory"):
        write(tmp_path / "file" / "out", tensors(), TINY)


# Bad input. Each directory is a good one of three files, changed in one place.


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """a and b in the first file, c and d in the second."""
    return make_good(tmp_path)


def make_good(folder: Path) -> Path:
    found = {name: torch.full((10,), float(i)) for i, name in enumerate("abcd")}
    files = plan_hf_files(specs_of(found), max_file_bytes=80)
    for file in files:
        save_file({name: found[name] for name, _, _ in file.tensors}, folder / file.name)
    (folder / INDEX_NAME).write_text(index_json(files))
    return folder


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_good_directory_is_read(good: Path) -> None:
    reader = TensorReader(good)
    assert reader.shapes() == {name: (10,) for name in "abcd"}
    assert [reader.read(name)[0].item() for name in "abcd"] == [0.0, 1.0, 2.0, 3.0]


def change_index(folder: Path, **places: str | None) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    weight_map = {**index["weight_map"], **places}
    index["weight_map"] = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(("damage", "messages"), [
    (lambda d: (d / SECOND).unlink(), [f"{INDEX_NAME} lists {SECOND}, which is missing"]),
    (lambda d: change_index(d, e=SECOND), [f"{INDEX_NAME} has e in {SECOND}; it is in no file"]),
    (lambda d: change_index(d, a=SECOND), [f"{INDEX_NAME} has a in {SECOND}; it is in {FIRST}"]),
    (lambda d: change_index(d, c=None), [f"{SECOND} has c, {INDEX_NAME} does not"]),
    (lambda d: change_index(d, c="../c.safetensors"), ["lists ../c.safetensors, which is missing"]),
    (lambda d: shutil.copy(d / FIRST, d / "model.safetensors"), ["model.safetensors: ", "does not list it"]),
    (lambda d: shutil.copy(d / FIRST, d / SECOND), [f"{SECOND}: a occurs in {FIRST} too"]),
    (lambda d: os.truncate(d / SECOND, (d / SECOND).stat().st_size - 1), [f"{SECOND}: d: ends at byte 80, ", "fetch"]),
    (lambda d: os.truncate(d / SECOND, 3), [f"{SECOND}: 3 bytes cannot hold the header"]),
    (lambda d: (d / INDEX_NAME).write_text("{"), [f"{INDEX_NAME}: Expecting property name"]),
    (lambda d: (d / INDEX_NAME).write_text("[]"), [f"{INDEX_NAME}: holds a list, wants an object"]),
    (lambda d: (d / INDEX_NAME).write_text("{}"), [f"{INDEX_NAME}: weight_map: wants an object"]),
    (lambda d: (d / INDEX_NAME).write_text('{"weight_map": {"a": 1}}'), [f"{INDEX_NAME}: weight_map: wants"]),
    (lambda d: (d / INDEX_NAME).unlink(), [f"has {FIRST}, {SECOND} and no {INDEX_NAME}"]),
    (lambda d: [(d / name).unlink() for name in (INDEX_NAME, FIRST)], [f"has {SECOND} and no {INDEX_NAME}"]),
    (lambda d: [path.unlink() for path in list(d.iterdir())], [r"no *.safetensors"]),
    (lambda d: (d / "config.json").write_text("{"), ["config.json: Expecting property name"]),
])  # fmt: skip
def test_bad_directory_gives_its_error(damage: Any, messages: list[str], good: Path) -> None:
    damage(good)
    with pytest.raises(ConversionError) as error:
        TensorReader(good)
    assert str(good) in str(error.value)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth"])
def test_pickle_weights_are_refused_and_never_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    with pytest.raises(ConversionError, match=f"weights only as pickle .{name}., which is never opened"):
        TensorReader(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    assert TensorReader(tmp_path).shapes() == {"x": (1,)}  # beside safetensors they do not matter


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="none: No such file or directory"):
        TensorReader(tmp_path / "none")


def as_nobody(code: str, folder: Path) -> str:
    """Last line of standard error of a child that, where this is root, gives that up before it runs the code."""
    start = "import os, sys\nfrom pathlib import Path\nfrom gspo_megatron.convert.hf_io import TensorReader\n"
    drop = "if os.geteuid() == 0: os.setegid(65534); os.seteuid(65534)\n"
    arguments = [sys.executable, "-c", start + drop + code, str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def test_no_permission_is_named() -> None:
    code = "TensorReader(Path(sys.argv[1]))"
    with open_folder() as folder:
        good = make_good(folder)
        for file in good.iterdir():
            file.chmod(0o644)
        assert as_nobody(code, good) == ""
        (good / SECOND).chmod(0)
        assert f"{good / SECOND}: Permission denied" in as_nobody(code, good)
        good.chmod(0)
        assert as_nobody(code, good).endswith(f"{good}: Permission denied")


@pytest.mark.parametrize("box", [((2, 5), (0, 4)), ((0, 0), (1, 3)), ((6, 7), (3, 4)), ((0, 7), (0, 4))])
def test_box_is_that_part(box: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    whole = torch.arange(28, dtype=torch.bfloat16).view(7, 4)
    save_file({"x": whole, "scalar": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path)
    assert torch.equal(reader.read_box("x", box), whole[slices(box)])
    assert reader.read_box("scalar", ()).item() == 3.0


@pytest.mark.parametrize("box", [((0, 8), (0, 4)), ((-1, 3), (0, 4)), ((3, 2), (0, 4))])
def test_box_that_does_not_lie_inside_is_not_cut_to_fit(box: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    save_file({"x": torch.zeros(7, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match="x: box"):
        TensorReader(tmp_path).read_box("x", box)


def test_reading_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2**26, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    reader = TensorReader(tmp_path)
    before = anonymous_bytes()
    part, whole = reader.read_box("x", ((7, 2**25),)), reader.read("x")
    assert int(part.sum()) == 2**25 - 7 and int(whole.sum()) == 2**26
    assert anonymous_bytes() - before < 2**23


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("content", [None, b"{", b"[1, 2]", b"\x80\x81"])
def test_config_that_cannot_be_read_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConversionError, match=r"config\.json: "):
        read_config(tmp_path)


def test_random_weights_depend_on_the_seed() -> None:
    def draw(seed: int) -> dict[str, Tensor]:
        config = read_config(TINY)
        return dict(random_tensors(family_of(config).op_list(config), std=0.5, seed=seed))

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, tensor in first.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        else:
            assert not torch.equal(tensor, other[name])
            assert abs(float(tensor.std()) - 0.5) < 0.05 and abs(float(tensor.mean())) < 0.08, name


def test_random_biases_are_zero() -> None:
    op = fuse_qkv("m", ["q.bias", "k.bias", "v.bias"], num_heads=4, num_groups=2, head_dim=3, trailing=())
    assert all(torch.equal(t, torch.zeros(len(t))) for _, t in random_tensors([op], std=0.5, seed=1))
