"""Hugging Face directories: what is written is read back, in files of the right names, and never half of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.convert import hf_io
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import TensorReader, random_tensors, read_config, write_hf_dir
from gspo_megatron.convert.ops import ConversionError, fuse_qkv, slices, stack

TINY = Path(__file__).parents[2] / "recipes" / "tiny-moe"


def tensors() -> dict[str, Tensor]:
    """Six tensors of 400 bytes, one of 4,000 and one bfloat16 scalar, in an order that is not the alphabet's."""
    generator = torch.Generator().manual_seed(0)
    small = {name: torch.randn(10, 10, generator=generator) for name in "fbdeac"}
    return {**small, "large": torch.randn(1000, generator=generator), "half": torch.tensor(1.5, dtype=torch.bfloat16)}


def files_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def assert_reads_back(folder: Path, want: dict[str, Tensor]) -> None:
    reader = TensorReader(folder)
    assert reader.shapes() == {name: tuple(tensor.shape) for name, tensor in want.items()}
    for name, tensor in want.items():
        assert reader(name).dtype == tensor.dtype
        assert torch.equal(reader(name), tensor), name


def test_small_model_is_one_file_with_its_companions(tmp_path: Path) -> None:
    write_hf_dir(tmp_path / "out", tensors().items(), TINY)
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
    write_hf_dir(out_dir, tensors().items(), tmp_path)
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
        single = tmp_path / "single" / name
        single.mkdir(parents=True)
        shutil.copy(out_dir / name, single)
        assert set(TensorReader(single).shapes()) == inside


def test_several_files_load_in_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", 2**20)
    config = read_config(TINY)
    ops = family_of(config).op_list(config)
    want = dict(random_tensors(ops, std=0.05, seed=1))
    write_hf_dir(tmp_path / "out", want.items(), TINY)
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
    views = [(name, op.read_hf(name, lambda box: whole[slices(box)])) for name in op.hf_shapes]
    write_hf_dir(tmp_path / "out", views, tmp_path)
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
        write_hf_dir(tmp_path / "out", broken(after), TINY)
    assert not (tmp_path / "out").exists()
    write_hf_dir(tmp_path / "out", tensors().items(), TINY)  # what the first left does not harm the second
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
        write_hf_dir(tmp_path / "out", source(), TINY)
    assert files_in(tmp_path / "out") == ["mine"] and consumed == []


@pytest.mark.parametrize("max_file_bytes", [100, 10_000])
def test_name_that_comes_twice_is_refused(
    max_file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_io, "MAX_FILE_BYTES", max_file_bytes)  # in another file, and in the same
    twice = [*tensors().items(), ("b", torch.zeros(3))]
    with pytest.raises(ConversionError, match="b: would be written twice"):
        write_hf_dir(tmp_path / "out", twice, TINY)
    assert not (tmp_path / "out").exists()


def test_reader_refuses_a_name_in_two_files(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"x": torch.zeros(2), f"y{i}": torch.zeros(1)}, tmp_path / f"{i}.safetensors")
    with pytest.raises(ConversionError, match=r"2\.safetensors: x occurs in another file too"):
        TensorReader(tmp_path)


def test_reader_names_a_file_cut_short_and_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"no \*\.safetensors"):
        TensorReader(tmp_path)
    save_file({"x": torch.zeros(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for size in (4, len(whole) - 10):
        (tmp_path / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ConversionError, match=r"model\.safetensors: "):
            TensorReader(tmp_path)


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
