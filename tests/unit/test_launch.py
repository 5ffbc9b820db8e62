"""The launcher: what it says of a bad recipe, what it leaves beside a run, how it finds why a trainer ended."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from gspo_megatron.config import load_recipe
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.engine import take_port
from gspo_megatron.launch import (
    RunError,
    cause_of,
    check_weights,
    git_state,
    main,
    prepare_run_dir,
    provenance,
    watch,
)
from gspo_megatron.process import Torchrun, trainer_environment

ROOT = Path(__file__).parents[2]
RECIPE = "recipes/gspo-tiny-moe-cpu.yaml"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--config", "recipes/absent.yaml"], ["recipes/absent.yaml: No such file or directory"]),
        (
            ["--config", RECIPE, "--set", "optimizer.learning_rat=1.0"],
            ["1 problem(s)", "optimizer.learning_rat: unknown key; nearest is optimizer.clip_grad"],
        ),
        (
            ["--config", RECIPE, "--set", "rollout.groupsize=8"],
            ["1 problem(s)", "rollout.groupsize: unknown key; nearest is rollout.group_size"],
        ),
        (
            ["--config", RECIPE, "--set", "optimizer.lr=3e-4"],
            ["1 problem(s)", "optimizer.lr='3e-4': is text, wants a number; YAML needs a point before the exponent"],
        ),
        (
            ["--config", RECIPE, "--set", "model.hf_dir=recipes/absent"],
            ["1 problem(s)", "model.hf_dir=recipes/absent: no such directory"],
        ),
    ],
)
def test_bad_recipe_is_one_message_and_status_2(
    arguments: list[str], wanted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--set", f"output_dir={tmp_path / 'runs'}"] if len(arguments) > 2 else []
    assert main([*arguments, *output]) == 2
    out, err = capsys.readouterr()
    first, *rest = err.splitlines()
    assert first.startswith("error: recipes/") and out == ""
    assert len(rest) == len(wanted) - 1
    for line, want in zip([first, *rest], wanted, strict=True):
        assert want in line
    assert not (tmp_path / "runs").exists(), "nothing was started or written"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], "rollout.groups_dir: --only train wants a folder of saved groups"),
        (["rollout.groups_dir={runs}/gspo-tiny-moe-cpu/rollouts"], "lies in this run's own folder"),
        (["rollout.groups_dir={runs}/other/rollouts"], "other/rollouts: has no step_00001.jsonl"),
    ],
)
def test_only_train_wants_the_groups_of_another_run(
    overrides: list[str], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [f"output_dir={tmp_path}", *(o.format(runs=tmp_path) for o in overrides)]
    assert main(["--config", RECIPE, "--only", "train", *(part for i in items for part in ("--set", i))]) == 2
    assert wanted in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SGLANG_IS_FLASHINFER_AVAILABLE", "NVTE_FLASH_ATTN"])
def test_foreign_variables_are_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "0")
    assert main(["--config", RECIPE, "--set", f"output_dir={tmp_path}"]) == 2
    assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_model_that_is_not_implemented_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(Path("recipes/tiny-moe/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["--config", RECIPE, "--set", f"model.hf_dir={tmp_path}", "--dry-run"]) == 2
    assert f"model.hf_dir={tmp_path}: config.json: model_type='bert'" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}])
def test_model_that_sglang_would_serve_as_another_is_refused(
    keys: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("recipes/tiny-moe/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    shutil.copy("recipes/tiny-moe/tokenizer.json", tmp_path)
    arguments = ["--config", RECIPE, "--set", f"model.hf_dir={tmp_path}", "--dry-run"]
    assert main(arguments) == 2
    assert "has layers without experts (decoder_sparse_step, mlp_only_layers)" in capsys.readouterr().err
    assert main([*arguments, "--only", "train"]) == 0


def test_weights_that_do_not_fit_are_refused_before_a_server_starts(tmp_path: Path) -> None:
    shutil.copytree("recipes/tiny-moe", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConversionError, match="model.safetensors"):
        check_weights(tmp_path / "hf", Path("recipes/tiny-moe"))
    save_file({"model.norm.weight": torch.ones(96)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConversionError, match="missing model.embed_tokens.weight"):
        check_weights(tmp_path / "hf", Path("recipes/tiny-moe"))


def test_dry_run_checks_the_recipe_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", RECIPE, "--set", f"output_dir={tmp_path / 'runs'}", "--dry-run"]) == 0
    assert "valid" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_older_runs_of_the_name_are_moved_aside_whole(tmp_path: Path) -> None:
    recipe = load_recipe(Path(RECIPE), [f"output_dir={tmp_path}", "name=again"])
    said = io.StringIO()
    for number in range(3):
        config_path = prepare_run_dir(recipe, Console(file=said, width=500))
        (recipe.run_dir / "mark").write_text(str(number))
    marks = {folder.name: (folder / "mark").read_text() for folder in tmp_path.iterdir()}
    assert marks == {"again": "2", "again.1": "0", "again.2": "1"}
    assert load_recipe(config_path) == recipe
    assert f"{tmp_path / 'again'} exists; moved to {tmp_path / 'again.2'}" in said.getvalue()


def test_git_state_is_the_commit_and_whether_files_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) == {"commit": "unknown: not a git checkout"}
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "name")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "name@example.org")
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    clean = git_state(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"]) and clean["has_local_changes"] is False
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {**clean, "has_local_changes": True}
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {"commit": "unknown: git did not answer"}


def test_provenance_names_commit_and_versions() -> None:
    found = provenance()
    assert found["commit"] == git_state(ROOT)["commit"]
    assert found["python"] == sys.version.split()[0]
    for name in ("torch", "megatron-core", "sglang", "transformers"):
        assert re.match(r"\d+\.\d+", found[name])


# What torchrun of torch 2.13 writes when rank 1 raised; rank 0 is told to end.
RAISED = """\
[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
{rank_1}
W1130 18:51:48.350000 25317 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 25323 closing signal
E1130 18:51:48.371000 25317 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
gspo_megatron.train FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-30_18:51:48
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {other_exit}
  error_file: <N/A>
  traceback : {other}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_18:51:48
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 25324)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
TRACEBACK = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 5, in <module>
[rank1]:     raise {error}"""
ENDED_BY_TORCHRUN = {"other_exit": "-15 (pid: 25323)  (SIGTERM)", "other": "Signal 15 (SIGTERM) received by PID 25323"}


@pytest.fixture
def cause_in(tmp_path: Path) -> Callable[[str], str]:
    def cause(log: str) -> str:
        path = tmp_path / "trainer.log"
        path.write_text(log)
        return cause_of(path)

    return cause


def test_error_line_is_the_cause_with_its_indented_lines(cause_in: Callable[[str], str]) -> None:
    error = "error: config.json:\n  model_type: not understood\n  rope: not understood\nsome warning\n  indented"
    log = RAISED.format(rank_1=error, **ENDED_BY_TORCHRUN)
    assert cause_in(log) == "config.json:\n  model_type: not understood\n  rope: not understood"


def test_first_error_line_wins_over_those_that_follow_from_it(cause_in: Callable[[str], str]) -> None:
    error = "error: KeyError: 'a'"
    log = f"{error}\n{TRACEBACK.format(error='RuntimeError')}\nerror: RuntimeError: Connection closed by peer"
    assert cause_in(RAISED.format(rank_1=log, **ENDED_BY_TORCHRUN)) == "KeyError: 'a'"


def test_failed_import_is_the_cause(cause_in: Callable[[str], str]) -> None:
    error = "ModuleNotFoundError: No module named 'megatron'"
    log = f"Traceback (most recent call last):\n  File\n{error}"
    assert cause_in(RAISED.format(rank_1=log, **ENDED_BY_TORCHRUN)) == error


def test_killed_rank_is_the_cause_even_where_another_failed_first(cause_in: Callable[[str], str]) -> None:
    closed = "error: RuntimeError: Connection closed by peer"
    killed = {"other_exit": "-9", "other": "Signal 9 (SIGKILL) received by PID 25323"}
    said = cause_in(RAISED.format(rank_1=closed, **killed))
    assert said == "Signal 9 (SIGKILL) received by PID 25323; RuntimeError: Connection closed by peer"


def test_error_line_that_torch_has_prefixed_is_the_cause(cause_in: Callable[[str], str]) -> None:
    log = f"{TRACEBACK.format(error='KeyError')}\n[rank1]: KeyError: 'a'\n[rank1]: error: KeyError: 'a'"
    assert cause_in(RAISED.format(rank_1=log, **ENDED_BY_TORCHRUN)) == "KeyError: 'a'"


def test_cause_of_a_silent_log_says_that_little(cause_in: Callable[[str], str]) -> None:
    assert cause_in("") == "it printed no error"
    assert cause_in("a warning\n") == "it printed no error"


KILLS_ITSELF = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
STUBBORN = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""
# device cuda, so that the rank does not spend seconds on megatron-core, which nothing here needs
WAITS = f"""
import os, sys, time
from dataclasses import replace
from pathlib import Path
from gspo_megatron.config import load_recipe
from gspo_megatron.mcore.rank import run_rank

def wait(console):
    Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(60)

run_rank(replace(load_recipe(Path("{RECIPE}")), device="cuda"), wait)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Torchrun]]:
    """Runs a script on two ranks as launch.py does; stopped at the end."""
    started = []

    def run(script: str) -> Torchrun:
        (tmp_path / "rank_script.py").write_text(script)
        torchrun = Torchrun(
            "rank_script",
            [str(tmp_path)],
            num_ranks=2,
            host="127.0.0.1",
            port=take_port("127.0.0.1", 0),
            environment=trainer_environment("cpu", {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}),
            log_path=tmp_path / "logs" / "trainer.log",
        )
        started.append(torchrun)
        return torchrun

    yield run
    for torchrun in started:
        torchrun.stop()


def rank_processes(folder: Path, torchrun: Torchrun) -> list[psutil.Process]:
    """The two ranks, once each has written its process id."""
    deadline = time.monotonic() + 60
    files = [folder / str(rank) for rank in range(2)]
    while not all(file.is_file() and file.read_text() for file in files):
        assert torchrun.poll() is None, torchrun.log_path.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [psutil.Process(int(file.read_text())) for file in files]


def test_killed_rank_ends_the_run_and_is_named(start: Callable[[str], Torchrun]) -> None:
    torchrun = start(KILLS_ITSELF)
    with pytest.raises(RunError) as error:
        watch(torchrun, None)
    assert re.search(r"status 1: Signal 9 \(SIGKILL\) received by PID \d+; see .*\.log", str(error.value))


def test_stop_ends_ranks_that_do_not_listen(start: Callable[[str], Torchrun], tmp_path: Path) -> None:
    torchrun = start(STUBBORN)
    ranks = rank_processes(tmp_path, torchrun)
    torchrun.stop(limit_s=1.0)
    torchrun.stop()  # a second time is allowed
    assert torchrun.poll() is not None
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


def test_ranks_end_with_a_torchrun_that_was_killed(start: Callable[[str], Torchrun], tmp_path: Path) -> None:
    torchrun = start(WAITS)
    ranks = rank_processes(tmp_path, torchrun)
    os.kill(torchrun.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
