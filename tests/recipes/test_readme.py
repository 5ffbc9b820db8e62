"""What README.md and CONTRIBUTING.md tell people to type exists."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
FOLDERS = "docs|gspo_megatron|recipes|requirements|slurm|tests|tools"


def code_in(text):
    """Fenced blocks and inline code, where commands are."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return "\n".join(fenced + inline)


def missing_commands(text):
    """Make targets, modules, files and links in a document that do not exist."""
    code = code_in(text)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    paths = set(re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*)", code)) | set(
        re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    )
    modules = set(re.findall(r"python3? -m ([\w.]+)", code))
    return (
        [f"make {name}" for name in sorted(set(re.findall(r"\bmake ([a-z][a-z-]*)", code)) - targets)]
        + [f"python -m {name}" for name in sorted(modules) if find_spec(name) is None]
        + [path for path in sorted(paths) if not (ROOT / path.rstrip(".")).exists()]
    )


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_file_and_link_exists(name):
    assert missing_commands((ROOT / name).read_text()) == []


def test_readme_shows_the_two_commands():
    code = code_in((ROOT / "README.md").read_text())
    assert "make train" in code
    assert "make test" in code


def test_a_command_that_does_not_exist_is_found():
    text = "`make trian`\n```\npython -m gspo_megatron.lunch --config recipes/no.yaml\nmake test\n```\n[x](docs/no.md)"
    assert missing_commands(text) == [
        "make trian",
        "python -m gspo_megatron.lunch",
        "docs/no.md",
        "recipes/no.yaml",
    ]
