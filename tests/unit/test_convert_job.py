"""A conversion as a job: nothing half-written under the final name, clear errors, the same bytes on resuming."""

import errno
import fcntl
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
from io import StringIO

import psutil
import pytest
import torch
from rich.console import Console

from gspo_megatron.convert.job import partial_dir, run_job
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.source import merge_once
from gspo_megatron.convert.to_hf import plan_to_hf
from gspo_megatron.convert.to_mcore import ToMcore, plan_to_mcore
from gspo_megatron.convert.workers import Finished, JobError, Workers
from tests.unit.conversion import (
    command,
    hashes,
    load,
    make_hf_dir,
    open_folder,
    run,
    same_bits,
    start_and_wait,
    to_mcore,
)

SMALL_FILES = 64 * 1024


def quiet():
    return Console(file=StringIO(), width=200)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "hf"
    make_hf_dir(path, num_files=3)
    return path


@pytest.fixture(scope="module")
def whole(hf_dir):
    """An uninterrupted conversion into small files."""
    target = hf_dir.parent / "whole"
    run_job(plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES), target, console=quiet())
    return target


def interrupt(hf_dir, target, *, num_files=4):
    """kill -9 after some files."""
    arguments = ("--hf-dir", hf_dir, "--mcore-dir", target, "--max-shard-size", SMALL_FILES)
    process = start_and_wait(command("convert_hf_to_mcore", *arguments), target, num_files=num_files)
    process.kill()
    process.communicate()
    assert not target.exists() and partial_dir(target).is_dir()
    return arguments


def test_bytes_do_not_depend_on_the_number_of_workers(hf_dir, whole, tmp_path):
    conversion = plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES)
    assert len(conversion.files) > 10
    outcome = run_job(conversion, tmp_path / "b", console=quiet(), num_workers=3)
    assert hashes(tmp_path / "b") == hashes(whole)
    assert not partial_dir(tmp_path / "b").exists()
    assert outcome.num_files == len(conversion.files) and outcome.num_resumed == 0
    assert outcome.num_bytes == sum(t.nbytes for t in load(hf_dir).values())


def test_resumed_output_equals_the_uninterrupted_one(hf_dir, whole, tmp_path):
    target = tmp_path / "b"
    interrupt(hf_dir, target)
    data = partial_dir(target) / "data"
    lines = (partial_dir(target) / "journal.jsonl").read_text().splitlines()
    damaged = data / json.loads(lines[1])["file"]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    untouched = data / json.loads(lines[2])["file"]
    before = untouched.stat().st_mtime_ns, untouched.stat().st_ino
    (data / "stray").write_text("not in the journal")
    with (partial_dir(target) / "journal.jsonl").open("a") as journal:
        journal.write('{"file": "iter_0000000/__99')  # torn by the kill
    outcome = run_job(plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES), target, console=quiet(), num_workers=2)
    assert 3 <= outcome.num_resumed < outcome.num_files
    files = hashes(target)
    assert files == hashes(whole)
    kept = target / untouched.relative_to(data)
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == before


def test_interrupted_export_resumes_to_the_same_bytes(whole, tmp_path):
    conversion = plan_to_hf(whole, max_file_bytes=SMALL_FILES)
    run_job(conversion, tmp_path / "whole", console=quiet())
    target = tmp_path / "c"
    arguments = ("--mcore-dir", whole, "--hf-dir", target, "--max-shard-size", SMALL_FILES)
    process = start_and_wait(command("convert_mcore_to_hf", *arguments), target, num_files=3)
    process.kill()
    process.communicate()
    assert not target.exists()
    assert run_job(conversion, target, console=quiet()).num_resumed >= 3
    assert hashes(target) == hashes(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_stops_the_workers_and_says_how_to_go_on(hf_dir, whole, tmp_path, number):
    target = tmp_path / "b"
    arguments = ("--hf-dir", hf_dir, "--mcore-dir", target, "--max-shard-size", SMALL_FILES)
    process = start_and_wait(command("convert_hf_to_mcore", *arguments), target, num_files=2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.startswith("interrupted\n") and f"{target}.partial" in stderr and "--restart" in stderr
    assert children and psutil.wait_procs(children, timeout=10)[1] == []
    assert not target.exists()
    status, stdout, stderr = to_mcore(*arguments)
    assert status == 0, stderr
    assert "files are complete" in stdout
    assert hashes(target) == hashes(whole)


def test_target_is_absent_until_all_is_there(hf_dir, whole, tmp_path, monkeypatch):
    """The last step fails, with everything but the name on the disk."""
    target, finish = tmp_path / "b", ToMcore.finish

    def finish_and_fail(conversion, directory, records):
        finish(conversion, directory, records)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ToMcore, "finish", finish_and_fail)
    conversion = plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES)
    with pytest.raises(JobError, match="b.partial/data: Input/output error"):
        run_job(conversion, target, console=quiet())
    assert [p.name for p in tmp_path.iterdir()] == ["b.partial"]
    monkeypatch.undo()
    outcome = run_job(conversion, target, console=quiet())
    assert outcome.num_resumed == outcome.num_files
    assert hashes(target) == hashes(whole)


def test_existing_target_is_refused_and_left_alone(hf_dir, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("keep")
    with pytest.raises(ConversionError, match=r"b: exists; remove it or name another"):
        run_job(plan_to_mcore(hf_dir), tmp_path / "b", console=quiet())
    assert [p.name for p in tmp_path.rglob("*")] == ["b", "mine"]


def test_target_without_parent_is_refused(hf_dir, tmp_path):
    with pytest.raises(ConversionError, match="there is no folder"):
        run_job(plan_to_mcore(hf_dir), tmp_path / "a" / "b", console=quiet())
    assert list(tmp_path.iterdir()) == []


def test_folder_without_permission_is_refused(hf_dir):
    conversion = plan_to_mcore(hf_dir)
    is_root = os.geteuid() == 0  # who may write everywhere
    with open_folder() as folder:
        folder.chmod(0o555)
        try:
            if is_root:
                os.seteuid(65534)
            with pytest.raises(ConversionError, match=f"{folder / 'b'}: no permission to write in {folder}"):
                run_job(conversion, folder / "b", console=quiet())
        finally:
            if is_root:
                os.seteuid(0)
        assert list(folder.iterdir()) == []


def test_small_disk_is_refused_before_anything_is_written(hf_dir, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(JobError, match=r"b: needs 68 MiB of disk space, 10 MiB are free"):
        run_job(plan_to_mcore(hf_dir), tmp_path / "b", console=quiet())
    assert list(tmp_path.iterdir()) == []


def test_refused_write_names_the_file_and_is_resumed_after(hf_dir, whole, tmp_path):
    """A limit on the size of a file stands for the full disk: the write fails in the same place."""
    target = tmp_path / "b"
    arguments = ("--hf-dir", hf_dir, "--mcore-dir", target, "--max-shard-size", SMALL_FILES)
    limit = 200 * 1024  # experts' files are larger

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    status, _, stderr = run("convert_hf_to_mcore", *arguments, preexec_fn=limited)
    assert status == 1
    assert stderr.startswith(f"error: {target}.partial/data/iter_0000000/__") and "File too large" in stderr
    assert "Traceback" not in stderr and not target.exists()
    status, stdout, stderr = to_mcore(*arguments)
    assert status == 0 and "files are complete" in stdout, stderr
    assert hashes(target) == hashes(whole)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_names_the_file(hf_dir, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount a file system")
    try:
        free = shutil.disk_usage(tmp_path)  # what was free when the conversion began
        monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(JobError, match=r"small/b.partial/data/iter_0000000/__.*No space left on device"):
            run_job(plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES), small / "b", console=quiet())
        assert [p.name for p in small.iterdir()] == ["b.partial"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_changed_source_or_options_are_not_mixed_with_what_was_begun(hf_dir, tmp_path):
    source, target = tmp_path / "hf", tmp_path / "b"
    shutil.copytree(hf_dir, source)
    interrupt(source, target)
    with pytest.raises(ConversionError, match=r"options max_shard_bytes: was 65536, is 1073741824"):
        run_job(plan_to_mcore(source), target, console=quiet())
    os.utime(source / "model-00002-of-00003.safetensors", ns=(1, 1))
    with pytest.raises(ConversionError) as caught:
        run_job(plan_to_mcore(source, max_file_bytes=SMALL_FILES), target, console=quiet())
    message = str(caught.value)
    assert "--restart" in message and "source model-00002-of-00003.safetensors: was" in message
    assert "model-00001" not in message and not target.exists()
    outcome = run_job(
        plan_to_mcore(source, max_file_bytes=SMALL_FILES), target, console=quiet(), restart=True, num_workers=2
    )
    assert outcome.num_resumed == 0 and target.is_dir()


def test_source_truncated_before_resuming_is_an_error(hf_dir, tmp_path):
    source, target = tmp_path / "hf", tmp_path / "b"
    shutil.copytree(hf_dir, source)
    arguments = interrupt(source, target)
    file = source / "model-00003-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    status, _, stderr = to_mcore(*arguments)
    assert status == 2 and stderr.startswith(f"error: {file}: ") and "truncated" in stderr
    assert "Traceback" not in stderr and not target.exists()


def test_second_conversion_into_one_target_is_refused(hf_dir, tmp_path):
    target = tmp_path / "b"
    interrupt(hf_dir, target)
    before = hashes(partial_dir(target))
    with (partial_dir(target) / "journal.jsonl").open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another conversion is writing .*b.partial"):
            run_job(plan_to_mcore(hf_dir), target, console=quiet())
    assert hashes(partial_dir(target)) == before


def test_running_conversion_holds_the_lock(hf_dir, tmp_path):
    target = tmp_path / "b"
    arguments = ("--hf-dir", hf_dir, "--mcore-dir", target, "--max-shard-size", SMALL_FILES)
    process = start_and_wait(command("convert_hf_to_mcore", *arguments), target, num_files=1)
    process.send_signal(signal.SIGSTOP)
    try:
        status, _, stderr = to_mcore(*arguments)
    finally:
        process.kill()
        process.communicate()
    assert status == 2 and stderr.startswith(f"error: {target}: another conversion is writing")


def first_finished(events):
    """Index of the first file that is finished; the only worker waits for its next order then."""
    return next(event.index for event in events if isinstance(event, Finished))


def test_killed_worker_is_an_error_that_names_the_file(hf_dir, tmp_path):
    conversion = plan_to_mcore(hf_dir, max_file_bytes=SMALL_FILES)
    with Workers(conversion, tmp_path, num_workers=1) as workers:
        events = workers.write(range(len(conversion.files)))
        index = first_finished(events)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        with pytest.raises(JobError, match=f"{conversion.files[index + 1].name}: .*killed by SIGKILL.*memory"):
            list(events)
    assert multiprocessing.active_children() == []


def test_source_that_shrinks_while_it_is_read_is_an_error_that_names_the_file(hf_dir, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(hf_dir, source)
    conversion = plan_to_mcore(source, max_file_bytes=SMALL_FILES)
    with Workers(conversion, tmp_path, num_workers=1) as workers:
        events = workers.write(range(len(conversion.files)))
        first_finished(events)
        for file in source.glob("*.safetensors"):
            os.truncate(file, 4096)
        with pytest.raises((ConversionError, JobError), match=r"(killed by SIGBUS.*|safetensors: .*)shortened"):
            list(events)


def test_dtype_converts_every_tensor_and_default_keeps_each(tmp_path):
    tensors = make_hf_dir(tmp_path / "a", num_hidden_layers=1)
    run_job(plan_to_mcore(tmp_path / "a", dtype=torch.bfloat16), tmp_path / "b", console=quiet())
    run_job(plan_to_hf(tmp_path / "b"), tmp_path / "c", console=quiet())
    assert same_bits(load(tmp_path / "c"), {name: t.to(torch.bfloat16) for name, t in tensors.items()})
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"
    run_job(plan_to_hf(tmp_path / "b", dtype=torch.float32), tmp_path / "d", console=quiet())
    assert same_bits(load(tmp_path / "d"), {name: t.to(torch.bfloat16).float() for name, t in tensors.items()})
    assert json.loads((tmp_path / "d" / "config.json").read_text())["dtype"] == "float32"


def test_totality_lists_what_is_missing_twice_or_surplus():
    record = {"dtype": "float32", "shape": [1], "num_bytes": 4, "hash": "0", "file": ""}
    with pytest.raises(ConversionError) as caught:
        merge_once(
            [{"t": {"a": record, "b": record}}, {"t": {"b": record, "d": record}}], "t", ["a", "b", "c"], "here"
        )
    assert str(caught.value).splitlines() == [
        "here (3 problem(s))",
        "  b: twice",
        "  c: not at all",
        "  d: not asked for",
    ]
