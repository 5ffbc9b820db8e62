"""torch_dist files: every dtype and rank there and back, chunks of any writer, what is refused, and memory."""

import io
import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gspo_megatron.convert.manifest import (
    DTYPES,
    FileRecord,
    Manifest,
    TensorRecord,
    hash_file,
    read_manifest,
    tensor_record,
    verify_files,
    write_manifest,
)
from gspo_megatron.convert.mcore_io import (
    COMMON_FILE,
    DataFile,
    DataFileWriter,
    McoreCheckpoint,
    common_state,
    data_file_name,
    plan_chunks,
    write_checkpoint_metadata,
)
from gspo_megatron.convert.ops import ConversionError, slices, whole

NAME = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"


def arange(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).remainder(64).to(dtype).reshape(shape)


def write(folder, *files, manifest=True):
    """Write a checkpoint; each file is a dict of tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    done = []
    for i, tensors in enumerate(files):
        with DataFileWriter(folder / data_file_name(i)) as writer:
            for name, t in tensors.items():
                writer.write_tensor(name, tuple(t.shape), t.dtype, lambda box, t=t: t[slices(box)] if box else t)
        done.append(writer.result)
    write_checkpoint_metadata(folder, done, common_state(iteration=7))
    if manifest:
        renew_manifest(folder, {n: r for f in done for n, r in f.tensors.items()})
    return done


def renew_manifest(folder, tensors=None):
    files = {f.name: hash_file(f) for f in sorted(folder.iterdir()) if f.name != "manifest.json"}
    write_manifest(folder / "manifest.json", Manifest(kind="mcore", files=files, tensors=tensors or {}))


def same(a, b):
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_every_dtype_and_rank_comes_back_and_upstream_reads_the_same(tmp_path, dtype):
    tensors = {f"t{len(shape)}": arange(shape, dtype) for shape in [(), (5,), (7, 3), (3, 4, 5), (2, 3, 2, 2)]}
    write(tmp_path, tensors)
    with McoreCheckpoint(tmp_path) as checkpoint:
        assert dict(checkpoint.tensors) == {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
        for name, tensor in tensors.items():
            assert same(checkpoint.read(name), tensor), name
        rows = checkpoint.read_box("t3", ((1, 3), (2, 4), (0, 5)))
        assert same(rows, tensors["t3"][1:3, 2:4])
        assert checkpoint.common["iteration"] == 7
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert all(metadata.state_dict_metadata[n].properties.dtype == dtype for n in tensors)


@pytest.mark.parametrize(
    ("shape", "max_bytes", "want"),
    [
        ((), 8, [()]),
        ((5,), 40, [((0, 5),)]),
        ((5, 2), 16, [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]),
        ((2, 2), 4, [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((1, 2), (0, 1)), ((1, 2), (1, 2))]),
        ((2, 3, 2), 1000, [((0, 1), (0, 3), (0, 2)), ((1, 2), (0, 3), (0, 2))]),
        ((1, 3, 2), 16, [((0, 1), (0, 2), (0, 2)), ((0, 1), (2, 3), (0, 2))]),
    ],
)
def test_chunks_follow_each_other_row_by_row(shape, max_bytes, want):
    assert plan_chunks(shape, torch.float32, max_bytes=max_bytes) == want
    whole_tensor = arange(shape) if shape else torch.tensor(0.0)
    pieces = [whole_tensor[slices(box)].reshape(-1) for box in want]
    assert torch.equal(torch.cat(pieces), whole_tensor.reshape(-1))


def test_records_are_those_of_the_bytes_and_survive_json(tmp_path):
    expert = arange((4, 3, 2), torch.bfloat16)
    (data_file,) = write(tmp_path, {NAME: expert.transpose(1, 2)})  # not contiguous: rows are still logical ones
    raw = expert.transpose(1, 2).contiguous().view(torch.uint8).numpy().tobytes()
    record = data_file.tensors[NAME]
    assert record == TensorRecord("bfloat16", (4, 2, 3), 48, xxhash.xxh3_128(raw).hexdigest(), "__1_0.distcp")
    assert record == tensor_record(expert.transpose(1, 2), "__1_0.distcp")
    on_disk = (tmp_path / "__1_0.distcp").read_bytes()
    assert data_file.record == FileRecord(len(on_disk), xxhash.xxh3_128(on_disk).hexdigest())
    assert [i.box for i in data_file.items] == [((e, e + 1), (0, 2), (0, 3)) for e in range(4)]
    assert all(i.offset % 64 == 0 for i in data_file.items)
    assert DataFile.from_json(json.loads(json.dumps(asdict(data_file)))) == data_file


def test_bytes_do_not_depend_on_order_of_arrival_or_on_a_journal(tmp_path):
    files = {"a": arange((3, 4))}, {"b": arange((2, 2, 2))}
    done = write(tmp_path / "one", *files)
    write(tmp_path / "two", *files)
    journal = [DataFile.from_json(json.loads(json.dumps(asdict(f)))) for f in reversed(done)]
    write_checkpoint_metadata(tmp_path / "two", journal, common_state(iteration=7))
    assert read_manifest(tmp_path / "one/manifest.json") == read_manifest(tmp_path / "two/manifest.json")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_view_of_a_large_tensor_is_written_alone(tmp_path):
    large = arange((1000, 100))
    (data_file,) = write(tmp_path, {"part": large[10:12]})
    assert data_file.record.num_bytes < 4000
    assert torch.serialization.get_crc32_options(), "torch's own setting is not the writer's to keep"
    assert same(McoreCheckpoint(tmp_path).read("part"), large[10:12])


def test_one_chunk_is_mapped_and_writing_into_it_leaves_the_file(tmp_path):
    write(tmp_path, {NAME: arange((4, 8, 8))})
    before = (tmp_path / "__1_0.distcp").read_bytes()
    checkpoint = McoreCheckpoint(tmp_path)
    expert = checkpoint.read_box(NAME, ((2, 3), (0, 4), (0, 8)))
    maps = Path("/proc/self/maps").read_text().splitlines()
    (place,) = [line for line in maps if "__1_0.distcp" in line]
    start, stop = (int(a, 16) for a in place.split()[0].split("-"))
    assert start <= expert.data_ptr() < stop
    checkpoint.close()
    expert.add_(1)
    assert same(expert, arange((4, 8, 8))[2:3, :4] + 1)
    assert (tmp_path / "__1_0.distcp").read_bytes() == before


def chunk_by_chunk(folder, shape, boxes, tensor, name="w", *, copy=True):
    """As ranks of another layout write: one file a rank, each with one box of one tensor, unaligned."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
    )

    folder.mkdir()
    storage, chunks = {}, []
    for i, box in enumerate(boxes):
        out = io.BytesIO(b"x" * (i + 1))
        out.seek(i + 1)
        torch.save(tensor[slices(box)].clone() if copy else tensor[slices(box)], out)
        (folder / f"__{i}_0.distcp").write_bytes(out.getvalue())
        start, size = torch.Size([a for a, _ in box]), torch.Size([b - a for a, b in box])
        chunks.append(ChunkStorageMetadata(start, size))
        info = _StorageInfo(f"__{i}_0.distcp", i + 1, len(out.getvalue()) - i - 1)
        storage[MetadataIndex(name, start, i)] = info
    entry = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), chunks)
    metadata = Metadata({name: entry}, storage_data=storage, storage_meta=StorageMeta(checkpoint_id=folder))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


GRID = [((a, a + 2), (b, b + 3)) for a in (0, 2) for b in (0, 3)]


def test_chunks_of_any_grid_are_put_together(tmp_path):
    tensor = arange((4, 6), torch.bfloat16)
    checkpoint = McoreCheckpoint(chunk_by_chunk(tmp_path / "c", (4, 6), GRID, tensor), require_manifest=False)
    assert same(checkpoint.read("w"), tensor)
    assert same(checkpoint.read_box("w", ((1, 3), (2, 4))), tensor[1:3, 2:4])
    inside = checkpoint.read_box("w", ((1, 2), (1, 3)))
    assert same(inside, tensor[1:2, 1:3])
    assert inside.data_ptr() % 2 == 0, "a kernel may assume aligned elements"


def test_chunks_of_uneven_sizes_and_views_of_a_storage_are_read(tmp_path):
    tensor = arange((5, 4, 3)).transpose(1, 2)
    boxes = [((0, 3), (0, 3), (0, 4)), ((3, 4), (0, 3), (0, 4)), ((4, 5), (0, 3), (0, 4))]
    folder = chunk_by_chunk(tmp_path / "c", (5, 3, 4), boxes, tensor, copy=False)
    checkpoint = McoreCheckpoint(folder, require_manifest=False)
    assert same(checkpoint.read("w"), tensor)
    for rows in ((2, 3), (2, 4), (4, 5)):
        assert same(checkpoint.read_box("w", (rows, (1, 3), (2, 4))), tensor[slice(*rows), 1:3, 2:4])


def test_layers_stacked_along_an_axis_appear_one_by_one(tmp_path):
    tensor = arange((2, 3, 2, 2))
    boxes = [((i, i + 1), (e, e + 1), (0, 2), (0, 2)) for i in range(2) for e in range(3)]
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    folder = chunk_by_chunk(tmp_path / "c", (2, 3, 2, 2), boxes, tensor, name)
    checkpoint = McoreCheckpoint(folder, require_manifest=False)
    names = [f"decoder.layers.{i}.mlp.experts.experts.linear_fc1.weight" for i in range(2)]
    assert dict(checkpoint.tensors) == {n: (torch.float32, (3, 2, 2)) for n in names}
    assert same(checkpoint.read(names[1]), tensor[1])
    assert same(checkpoint.read_box(names[0], ((2, 3), (1, 2), (0, 2))), tensor[0, 2:3, 1:2])


def test_missing_and_overlapping_chunks_are_refused_where_they_are_read(tmp_path):
    tensor = arange((4, 6))
    gap = McoreCheckpoint(chunk_by_chunk(tmp_path / "gap", (4, 6), GRID[:3], tensor), require_manifest=False)
    assert same(gap.read_box("w", ((0, 2), (0, 6))), tensor[:2])
    with pytest.raises(ConversionError, match=r"w \(4, 6\).* do not tile the box .* 18 of 24 elements"):
        gap.read("w")
    metadata = pickle.loads((tmp_path / "gap" / ".metadata").read_bytes())
    metadata.storage_data.popitem()
    (tmp_path / "gap" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=r"w: the chunk at \(\(2, 4\), \(0, 3\)\) is in no data file"):
        McoreCheckpoint(tmp_path / "gap", require_manifest=False)
    # as many elements as the box has, but some of them twice
    twice = [((0, 2), (0, 6)), ((1, 3), (0, 6))]
    overlap = McoreCheckpoint(chunk_by_chunk(tmp_path / "twice", (4, 6), twice, tensor), require_manifest=False)
    with pytest.raises(ConversionError, match="do not tile"):
        overlap.read("w")


def test_box_and_name_that_are_not_there_are_refused(tmp_path):
    write(tmp_path, {"a": arange((3, 4))})
    checkpoint = McoreCheckpoint(tmp_path)
    for box in (((0, 4), (0, 4)), ((0, 3),), ((2, 1), (0, 4)), ((-1, 1), (0, 4))):
        with pytest.raises(ConversionError, match=r"a \(3, 4\) has no box"):
            checkpoint.read_box("a", box)
    with pytest.raises(ConversionError, match="has no tensor b"):
        checkpoint.read("b")


@pytest.mark.parametrize("latest", ["12\n", "release\n", None])
def test_directory_habits_of_megatron_lm(tmp_path, latest):
    folder = tmp_path / {"12\n": "iter_0000012", "release\n": "release", None: "."}[latest]
    write(folder, {"a": arange((3,))})
    if latest is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    for path in (tmp_path, folder):
        assert McoreCheckpoint(path).folder == folder
        assert same(McoreCheckpoint(path).read("a"), arange((3,)))


def test_writer_refuses_what_does_not_fit(tmp_path):
    def writing(**change):
        arguments = {"name": "a", "shape": (2, 2), "dtype": torch.float32, "tensor": arange((2, 2))} | change
        with DataFileWriter(tmp_path / "__1_0.distcp") as writer:
            for _ in range(arguments.get("times", 1)):
                writer.write_tensor(
                    arguments["name"], arguments["shape"], arguments["dtype"], lambda _: arguments["tensor"]
                )

    with pytest.raises(ConversionError, match=r"a: got torch.float32 \(2, 2\), wants torch.bfloat16 \(2, 2\)"):
        writing(dtype=torch.bfloat16)
    with pytest.raises(ConversionError, match=r"a: got torch.float32 \(2, 2\), wants torch.float32 \(2, 3\)"):
        writing(shape=(2, 3))
    with pytest.raises(ConversionError, match="a would be written twice"):
        writing(times=2)
    with pytest.raises(ConversionError, match="complex64: a dtype that checkpoints here do not hold"):
        writing(dtype=torch.complex64, tensor=torch.zeros(2, 2, dtype=torch.complex64))
    data_file = DataFile("__1_0.distcp", FileRecord(0), (), {"a": tensor_record(arange((2,)))})
    with pytest.raises(ConversionError, match="written twice.*\n  a"):
        write_checkpoint_metadata(
            tmp_path, [data_file, DataFile("__2_0.distcp", FileRecord(0), (), data_file.tensors)], {}
        )


@pytest.mark.parametrize("num_rows", [4, 4 * 2**20], ids=["at_close", "at_write"])
def test_full_disk_is_one_error_that_names_the_file(tmp_path, num_rows):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(ConversionError, match=r"/full:.* No space left on device"):
        with DataFileWriter(tmp_path / "full") as writer:
            writer.write_tensor("a", (num_rows,), torch.float32, lambda _: torch.zeros(num_rows))


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def with_metadata(folder, data):
    (folder / ".metadata").write_bytes(data)
    renew_manifest(folder)


def test_metadata_that_names_anything_else_is_refused_and_nothing_is_called(tmp_path):
    write(tmp_path, {"a": arange((3,))})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    with_metadata(tmp_path, pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=r"\.metadata: refused: names posix.system"):
        McoreCheckpoint(tmp_path)
    # a name that leads from a known class to something else
    module, name = b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.x"
    dotted = b"\x80\x04\x8c%c%b\x8c%c%b\x93." % (len(module), module, len(name), name)
    with_metadata(tmp_path, dotted)
    with pytest.raises(
        ConversionError, match="refused: names torch.distributed.checkpoint.metadata.Metadata.__init__"
    ):
        McoreCheckpoint(tmp_path)
    absurd = b"\x80\x04\x8e" + b"\xff" * 8  # a text of 2^64 - 1 bytes
    for damaged in (absurd, b"", b"\x80\x04", pickle.dumps({"state_dict_metadata": {}}), b"no pickle"):
        with_metadata(tmp_path, damaged)
        with pytest.raises(ConversionError, match=r"\.metadata: damaged, or no checkpoint metadata"):
            McoreCheckpoint(tmp_path)


def test_common_state_that_names_anything_else_is_refused(tmp_path):
    write(tmp_path, {"a": arange((3,))})
    content = io.BytesIO()
    torch.save([{"iteration": Evil()}], content)
    (tmp_path / COMMON_FILE).write_bytes(content.getvalue())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(i for i in metadata.storage_data.values() if i.relative_path == COMMON_FILE).length = len(content.getvalue())
    with_metadata(tmp_path, pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=r"__0_0.distcp: common state damaged or refused .*posix.system"):
        _ = McoreCheckpoint(tmp_path).common
    (tmp_path / COMMON_FILE).write_bytes(b"\0" * len(content.getvalue()))
    with pytest.raises(ConversionError, match="__0_0.distcp.*the manifest says"):
        _ = McoreCheckpoint(tmp_path, verify=False).common


def test_tensor_item_that_names_anything_else_is_refused(tmp_path):
    folder = chunk_by_chunk(tmp_path / "c", (2,), [((0, 2),)], arange((2,)))
    content = io.BytesIO()
    torch.save(Evil(), content)
    (folder / "__0_0.distcp").write_bytes(b"x" + content.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConversionError, match=r"__0_0.distcp: w at 1: refused: its pickle names posix.system"):
        McoreCheckpoint(folder, require_manifest=False).read("w")


def test_metadata_cannot_lead_out_of_the_folder_or_of_the_manifest(tmp_path):
    write(tmp_path / "c", {"a": arange((3,))})
    original = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    for target, message in [
        ("../secret", r"a is at byte 0 of '../secret', wants a file of the folder"),
        ("/etc/passwd", "wants a file of the folder"),
        ("__9_0.distcp", r"names data files that manifest.json does not: \['__9_0.distcp'\]"),
    ]:
        for info in original.storage_data.values():
            info.relative_path = target if info.relative_path == "__1_0.distcp" else info.relative_path
        with_metadata(tmp_path / "c", pickle.dumps(original))
        with pytest.raises(ConversionError, match=message):
            McoreCheckpoint(tmp_path / "c")
        for info in original.storage_data.values():
            info.relative_path = "__1_0.distcp" if info.relative_path == target else info.relative_path


def test_every_file_is_held_to_the_manifest(tmp_path):
    write(tmp_path, {"a": arange((3, 4))})
    for name in (".metadata", "metadata.json", "__1_0.distcp"):
        path = tmp_path / name
        good = path.read_bytes()
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        path.write_bytes(bad)
        with pytest.raises(ConversionError, match=f"{name}: (not megatron-core|not the file that|has xxh3)"):
            McoreCheckpoint(tmp_path).read("a")
        with pytest.raises(ConversionError, match=f"{name}: has xxh3_128 .*, the manifest says"):
            verify_files(tmp_path, read_manifest(tmp_path / "manifest.json"))
        path.write_bytes(good[:-1])
        with pytest.raises(ConversionError, match=f"{name}"):
            McoreCheckpoint(tmp_path).read("a")
        path.unlink()
        with pytest.raises(ConversionError, match=f"({name}: (No such file|missing)|has no {name})"):
            McoreCheckpoint(tmp_path).read("a")
        path.write_bytes(good)
    McoreCheckpoint(tmp_path).read("a")
    (tmp_path / "common.pt").write_bytes(b"")
    with pytest.raises(ConversionError, match="common.pt: not in the manifest"):
        McoreCheckpoint(tmp_path)


def test_damage_is_found_without_a_manifest_too(tmp_path):
    folder = chunk_by_chunk(tmp_path / "c", (4, 6), GRID, arange((4, 6)))
    path = folder / "__0_0.distcp"
    good = path.read_bytes()

    def read():
        return McoreCheckpoint(folder, require_manifest=False).read("w")

    path.write_bytes(good[:-1])
    with pytest.raises(ConversionError, match=r"__0_0.distcp: is cut off: w ends at byte \d+, the file at \d+"):
        read()
    path.write_bytes(good[:1] + b"\0" * (len(good) - 1))
    with pytest.raises(ConversionError, match="__0_0.distcp: w at 1: damaged, or not a tensor"):
        read()
    path.write_bytes(good.replace(b"\nFloatStorage\n", b"\nShortStorage\n"))
    with pytest.raises(ConversionError, match="__0_0.distcp: w"):
        read()
    path.unlink()
    with pytest.raises(ConversionError, match="__0_0.distcp: No such file or directory; it holds w"):
        read()
    with pytest.raises(ConversionError, match="not a finished checkpoint; it has no manifest.json"):
        McoreCheckpoint(folder)


def test_other_formats_are_refused_with_a_word(tmp_path):
    with pytest.raises(ConversionError, match="no such folder"):
        McoreCheckpoint(tmp_path / "absent")
    with pytest.raises(ConversionError, match="has no metadata.json, so it is no finished checkpoint"):
        McoreCheckpoint(tmp_path)
    for backend in ("zarr", "fsdp_dtensor"):
        (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
        with pytest.raises(ConversionError, match=f"sharded_backend is '{backend}', only 'torch_dist' is read"):
            McoreCheckpoint(tmp_path)
    (tmp_path / "metadata.json").write_text("{}")
    with pytest.raises(ConversionError, match="metadata.json: not megatron-core's description"):
        McoreCheckpoint(tmp_path)
    (tmp_path / "metadata.json").unlink()
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(ConversionError, match="legacy torch format"):
        McoreCheckpoint(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../x")
    with pytest.raises(ConversionError, match="holds '../x', wants an iteration number or 'release'"):
        McoreCheckpoint(tmp_path)


def test_manifest_comes_back_and_another_file_is_refused(tmp_path):
    record = tensor_record(arange((2, 3)), "file")
    manifest = Manifest(
        kind="hf",
        files={"file": FileRecord(3, "ab")},
        tensors={"a": record},
        source_tensors={"b": record},
        source_files={"s": FileRecord(4)},
        options={"dtype": "bfloat16"},
    )
    path = tmp_path / "manifest.json"
    write_manifest(path, manifest)
    assert read_manifest(path) == manifest
    for text in ("", "[]", "{}", path.read_text().replace("manifest/1", "manifest/2")):
        path.write_text(text)
        with pytest.raises(ConversionError, match="manifest.json"):
            read_manifest(path)


MEMORY = """
import sys, torch
from pathlib import Path
from gspo_megatron.convert.mcore_io import McoreCheckpoint
from gspo_megatron.convert.ops import whole

def anonymous():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon")) / 1024

with McoreCheckpoint(Path(sys.argv[1])) as checkpoint:
    box = checkpoint.read_box("a", whole((3, 4)))
    before = anonymous()
    rows = checkpoint.read_box("b", ((0, 1), (0, 100), (0, 2**19)))
    total = int(rows.sum(dtype=torch.int64))
    print(total, anonymous() - before)
"""


def test_reading_200_mb_adds_less_than_20_mb_of_anonymous_memory(tmp_path):
    large = torch.ones(1, dtype=torch.float32).expand(1, 100, 2**19)

    import gspo_megatron.convert.mcore_io as module

    whole_chunk = pytest.MonkeyPatch()
    whole_chunk.setattr(module, "plan_chunks", lambda shape, dtype: [whole(shape)])
    try:
        write(tmp_path, {"a": arange((3, 4)), "b": large})
    finally:
        whole_chunk.undo()
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    total, added_mib = done.stdout.split()
    assert int(total) == 100 * 2**19
    assert float(added_mib) < 20
