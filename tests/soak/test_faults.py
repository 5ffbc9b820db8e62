"""The tests can fail: each patch in tests/faults is a mistake in one place, and names the test that catches it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = sorted((ROOT / "tests" / "faults").glob("*.patch"))
CAUGHT_BY = "Caught-by: "
ASSERTIONS = ("assert ", "AssertionError", "Failed: DID NOT RAISE")

pytestmark = pytest.mark.soak


def caught_by(patch: Path) -> str:
    """The test that the patch's header names."""
    _, named, empty, *_ = patch.read_text().splitlines()
    assert named.startswith(CAUGHT_BY) and not empty, f"{patch.name}: wants the mistake, {CAUGHT_BY!r}, an empty line"
    return named.removeprefix(CAUGHT_BY)


def copy_of_the_project(folder: Path) -> Path:
    for name in ("gspo_megatron", "tests", "recipes", "tools", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


def run_tests(folder: Path, nodes: list[str]) -> tuple[int, list[str], str]:
    """(tests that ran to their end, messages of those that failed, what pytest printed)."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *nodes]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    assert suite.get("errors") == suite.get("skipped") == "0", run.stdout
    return int(suite.attrib["tests"]), [f.attrib["message"] for f in suite.iter("failure")], run.stdout


def test_there_are_at_least_twelve_faults() -> None:
    assert len(FAULTS) >= 12


@pytest.mark.timeout(600)
def test_named_tests_pass_without_a_fault(tmp_path: Path) -> None:
    nodes = sorted({caught_by(patch) for patch in FAULTS})
    count, failures, printed = run_tests(copy_of_the_project(tmp_path), nodes)
    assert (count, failures) == (len(nodes), []), printed


@pytest.mark.parametrize("patch", FAULTS, ids=lambda patch: patch.stem)
def test_fault_is_caught_by_the_test_that_it_names(patch: Path, tmp_path: Path) -> None:
    folder = copy_of_the_project(tmp_path)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    count, failures, printed = run_tests(folder, [caught_by(patch)])
    assert (count, len(failures)) == (1, 1), printed
    # Wrong numbers or a check that is gone, and not a patch that only breaks the code.
    assert failures[0].startswith(ASSERTIONS), printed
