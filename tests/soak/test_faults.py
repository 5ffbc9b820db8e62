"""The tests can fail: each patch in tests/faults is a mistake that others made, and names the test that catches it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = sorted((ROOT / "tests" / "faults").glob("*.patch"))
CAUGHT_BY = "Caught-by: "

pytestmark = pytest.mark.soak


def caught_by(patch: Path) -> str:
    """The test that the patch's header names."""
    lines = [line for line in patch.read_text().splitlines() if line.startswith(CAUGHT_BY)]
    assert len(lines) == 1, f"{patch.name}: wants one line that starts with {CAUGHT_BY!r}"
    return lines[0].removeprefix(CAUGHT_BY)


def run_test(folder: Path, node: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", node]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def copy_of_the_project(tmp_path: Path) -> Path:
    for name in ("gspo_megatron", "tests", "recipes", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    return tmp_path


def test_there_are_at_least_twelve_faults() -> None:
    assert len(FAULTS) >= 12


@pytest.mark.parametrize("patch", FAULTS, ids=lambda patch: patch.stem)
def test_fault_is_caught_by_the_test_that_it_names(patch: Path, copy_of_the_project: Path) -> None:
    node = caught_by(patch)
    sound = run_test(copy_of_the_project, node)
    assert sound.returncode == 0, sound.stdout
    subprocess.run(["git", "apply", str(patch)], cwd=copy_of_the_project, check=True)
    faulty = run_test(copy_of_the_project, node)
    assert faulty.returncode == 1 and " failed" in faulty.stdout, faulty.stdout
    assert "error" not in faulty.stdout.splitlines()[-1], faulty.stdout
