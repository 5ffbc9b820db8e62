"""Safetensors files: what the writer writes any reader reads; a damaged header is named before a tensor is read."""

import json
import os
import resource
import signal
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.safetensors_io import (
    SafetensorsWriter,
    TensorSpec,
    index_json,
    plan_hf_files,
    read_header,
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool)  # fmt: skip


def tensors() -> dict[str, Tensor]:
    """One tensor per dtype with odd sizes, a scalar, an empty one, one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    raw = {str(d): torch.randint(0, 2, (3, 5 * d.itemsize), generator=generator, dtype=torch.uint8) for d in DTYPES}
    found = {name: bytes_.view(dtype) for (name, bytes_), dtype in zip(raw.items(), DTYPES, strict=True)}
    found |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "transposed": torch.arange(6.0).view(2, 3).T}
    return found | {'a name with \u00e4 and "quotes"': torch.ones(1)}


def specs(found: dict[str, Tensor]) -> list[TensorSpec]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()]


def write(path: Path, found: dict[str, Tensor]) -> SafetensorsWriter:
    (file,) = plan_hf_files(specs(found))
    with SafetensorsWriter(path, file) as writer:
        for name, tensor in found.items():
            writer.write(name, tensor)
    assert path.stat().st_size == file.total_bytes
    return writer


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def test_written_file_is_read_by_the_safetensors_package_and_hashes_are_those_of_the_bytes(tmp_path: Path) -> None:
    writer = write(tmp_path / "x", tensors())
    found = load_file(tmp_path / "x")
    assert found.keys() == tensors().keys() == read_header(tmp_path / "x").keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        place = read_header(tmp_path / "x")[name]
        assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape))
        assert same_bytes(found[name], tensor), name
        data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        assert writer.tensor_hashes[name] == xxhash.xxh3_128_hexdigest(data)
    assert writer.file_hash == xxhash.xxh3_128_hexdigest((tmp_path / "x").read_bytes())


def test_file_equals_the_one_of_the_safetensors_package(tmp_path: Path) -> None:
    found = {name: torch.randn(7, 9) for name in "abc"}  # one dtype, in its order
    write(tmp_path / "ours", found)
    save_file(found, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_large_tensor_is_hashed_and_written_in_parts(tmp_path: Path) -> None:
    found = {"x": torch.randint(0, 255, (9 * 2**20 + 3,), dtype=torch.uint8), "y": torch.arange(5)}
    writer = write(tmp_path / "x", found)
    assert torch.equal(load_file(tmp_path / "x")["x"], found["x"])
    assert writer.tensor_hashes["x"] == xxhash.xxh3_128_hexdigest(found["x"].numpy().data)


def test_files_are_planned_to_the_byte_in_the_given_order(tmp_path: Path) -> None:
    plan = [("f", torch.float32, (25,)), ("b", torch.bfloat16, (50,)), ("large", torch.uint8, (500,)),
            ("d", torch.float32, ()), ("a", torch.float32, (0, 7))]  # fmt: skip
    files = plan_hf_files(plan, max_file_bytes=200)
    assert [file.name for file in files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [[name for name, _, _ in file.tensors] for file in files] == [["f", "b"], ["large"], ["d", "a"]]
    assert [file.data_bytes for file in files] == [200, 500, 4]
    assert all(len(file.header) % 8 == 0 for file in files)
    assert files[0].header[8:].decode().rstrip() == (
        '{"__metadata__":{"format":"pt"},"f":{"dtype":"F32","shape":[25],"data_offsets":[0,100]},'
        '"b":{"dtype":"BF16","shape":[50],"data_offsets":[100,200]}}'
    )
    index = json.loads(index_json(files))
    assert index["metadata"] == {"total_size": 704}
    in_file = {"a": 2, "b": 0, "d": 2, "f": 0, "large": 1}  # by name
    assert list(index["weight_map"].items()) == [(name, files[i].name) for name, i in in_file.items()]
    assert [file.name for file in plan_hf_files(plan)] == ["model.safetensors"]


@pytest.mark.parametrize(("plan", "message"), [
    ([], "no tensors to write"),
    ([("x", torch.uint8, (1,)), ("y", torch.uint8, (1,)), ("x", torch.uint8, (2,))], "x: would be written twice"),
    ([("x", torch.complex64, (1,))], "x: torch.complex64 cannot be written"),
])  # fmt: skip
@pytest.mark.parametrize("max_file_bytes", [1, 1000])
def test_plan_refuses(plan: list[TensorSpec], message: str, max_file_bytes: int) -> None:
    with pytest.raises(ConversionError, match=message):
        plan_hf_files(plan, max_file_bytes=max_file_bytes)


@pytest.mark.parametrize(("name", "tensor", "message"), [
    ("b", torch.zeros(2), r"x: got b torch.float32 \(2,\), the plan has a torch.float32 \(2,\) next"),
    ("a", torch.zeros(3), r"got a torch.float32 \(3,\), the plan has a"),
    ("a", torch.zeros(2, 1), r"got a torch.float32 \(2, 1\), the plan"),
    ("a", torch.zeros(2, dtype=torch.bfloat16), "got a torch.bfloat16"),
])  # fmt: skip
def test_writer_refuses_what_is_not_due(name: str, tensor: Tensor, message: str, tmp_path: Path) -> None:
    (file,) = plan_hf_files([("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    with pytest.raises(ConversionError, match=message), SafetensorsWriter(tmp_path / "x", file) as writer:
        writer.write(name, tensor)


def test_writer_refuses_too_many_too_few_and_an_existing_file(tmp_path: Path) -> None:
    (file,) = plan_hf_files([("a", torch.float32, (2,)), ("b", torch.float32, (2,))])
    with pytest.raises(ConversionError, match="x: 1 tensor.s. did not come, the first b"):
        with SafetensorsWriter(tmp_path / "x", file) as writer:
            writer.write("a", torch.zeros(2))
    with pytest.raises(ConversionError, match="got c .*, the plan has no more next"):
        with SafetensorsWriter(tmp_path / "y", file) as writer:
            for name in "abc":
                writer.write(name, torch.zeros(2))
    with pytest.raises(ConversionError, match="x: File exists"):
        SafetensorsWriter(tmp_path / "x", file)
    with pytest.raises(ConversionError, match="none/x: No such file or directory"):
        SafetensorsWriter(tmp_path / "none" / "x", file)


def test_error_inside_is_not_hidden_by_what_is_missing(tmp_path: Path) -> None:
    (file,) = plan_hf_files([("a", torch.float32, (2,))])
    with pytest.raises(RuntimeError, match="the source broke"), SafetensorsWriter(tmp_path / "x", file):
        raise RuntimeError("the source broke")


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As a full disk: the kernel cuts the write that passes the limit short, and refuses the next.

    Not a fixture: pytest would report the test under the limit, which its output may be above.
    """
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_names_file_tensor_and_need(tmp_path: Path) -> None:
    (file,) = plan_hf_files([("a", torch.float32, (100,)), ("b", torch.float32, (200,))])
    with pytest.raises(ConversionError, match=rf"x: b: File too large; the file needs {file.total_bytes} bytes"):
        with files_of_at_most(1000), SafetensorsWriter(tmp_path / "x", file) as writer:
            writer.write("a", torch.zeros(100))
            writer.write("b", torch.zeros(200))


def test_tensor_is_written_without_a_copy(tmp_path: Path) -> None:
    tensor = torch.ones(16 * 2**20, dtype=torch.uint8)
    (file,) = plan_hf_files(specs({"x": tensor}))
    tracemalloc.start()
    try:
        with SafetensorsWriter(tmp_path / "x", file) as writer:
            writer.write("x", tensor)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2, 1], "data_offsets": [8, 12]}}  # fmt: skip


def raw_file(path: Path, header: Any, data_bytes: int = 12) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))


def changed(name: str, **entry: Any) -> dict[str, Any]:
    return {**GOOD, name: {**GOOD[name], **entry}}


def test_good_header_is_read_whatever_the_order_and_the_metadata(tmp_path: Path) -> None:
    raw_file(tmp_path / "x", {"__metadata__": {"k": "v"}, "b": GOOD["b"], "a": GOOD["a"]})
    found = {name: (place.dtype, place.shape) for name, place in read_header(tmp_path / "x").items()}
    assert found == {"a": (torch.float32, (2,)), "b": (torch.bfloat16, (2, 1))}


@pytest.mark.parametrize(("header", "data_bytes", "message"), [
    (GOOD, 11, "x: b: ends at byte 12, the file's data at 11; truncated"),
    (GOOD, 5, "x: a: ends at byte 8, the file's data at 5; truncated"),
    (GOOD, 13, "x: corrupt: the last tensor ends at byte 12, the file's data at 13"),
    (changed("b", data_offsets=[9, 13]), 13, "x: b: corrupt header: starts at byte 9, wants 8"),
    (changed("b", data_offsets=[4, 8]), 8, "x: b: corrupt header: starts at byte 4, wants"),
    (changed("a", data_offsets=[8, 0]), 12, r"x: a: has -8 bytes, F32 of shape \[2\] wants 8"),
    (changed("b", shape=[3]), 12, r"x: b: has 4 bytes, BF16 of shape \[3\] wants 6"),
    (changed("b", shape=[-2, -1]), 12, r"x: b: corrupt header: shape \[-2, -1\]"),
    (changed("b", shape=2), 12, "x: b: corrupt header: shape 2"),
    (changed("b", shape=[True, 2]), 12, r"x: b: corrupt header: shape \[True, 2\]"),
    (changed("b", data_offsets=[8]), 12, r"x: b: corrupt header: .* data_offsets \[8\]"),
    (changed("b", dtype="F4"), 12, "x: b: dtype 'F4' is not understood; known are F64, F32"),
    (changed("b", extra=1), 12, "x: b: corrupt header: is .* wants dtype, shape and data_offsets"),
    ({**GOOD, "b": 3}, 12, "x: b: corrupt header: is 3"),
    ([1], 0, "x: corrupt header: holds a list, wants an object"),
    (b"{", 0, "x: corrupt header: Expecting property name"),
    (b"\xff\xfe", 0, "x: corrupt header: .*codec can't decode"),
    (b"[" * 100_000, 0, "x: corrupt header: nested too deeply"),
    (b'{"a": 1, "a": 2}', 0, "x: corrupt header: a occurs twice"),
])  # fmt: skip
def test_damaged_header_is_named(header: Any, data_bytes: int, message: str, tmp_path: Path) -> None:
    raw_file(tmp_path / "x", header, data_bytes)
    with pytest.raises(ConversionError, match=message):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("size", [0, 4, 8, 20])
def test_file_cut_short_in_its_header_is_named(size: int, tmp_path: Path) -> None:
    raw_file(tmp_path / "x", GOOD)
    os.truncate(tmp_path / "x", size)
    with pytest.raises(ConversionError, match=f"x: {size} bytes cannot hold the header.*truncated or not"):
        read_header(tmp_path / "x")


def test_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConversionError, match="folder: Is a directory"):
        read_header(tmp_path / "folder")
    with pytest.raises(ConversionError, match="nothing: No such file or directory"):
        read_header(tmp_path / "nothing")
