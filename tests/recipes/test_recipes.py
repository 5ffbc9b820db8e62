"""Every recipe is valid and named after its file; every command line tool answers --help."""

import subprocess
import sys
from pathlib import Path

import pytest

from gspo_megatron.config import dump_recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))


def run(*args):
    return subprocess.run(
        [sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


def test_there_are_recipes_and_tools():
    assert RECIPES
    assert TOOLS


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_and_has_the_name_of_its_file(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_resolved_recipe_reads_back_equal(path, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_recipe(load_recipe(path)))
    assert load_recipe(resolved) == load_recipe(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_dry_runs_and_leaves_nothing(path, tmp_path):
    done = run("-m", "gspo_megatron.launch", "--config", path, "--set", f"output_dir={tmp_path / 'runs'}", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()


def test_dry_run_of_a_broken_recipe_fails_and_names_the_key(tmp_path):
    done = run("-m", "gspo_megatron.launch", "--config", RECIPES[0], "--set", "rollout.groupsize=8", "--dry-run")
    assert done.returncode != 0
    assert "rollout.groupsize: unknown key; nearest is rollout.group_size" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_tool_answers_help(path):
    done = run(path, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
