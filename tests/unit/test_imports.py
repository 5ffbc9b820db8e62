"""The layers of the package: what each module may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gspo_megatron"
MATHS = ("types", "advantage", "batch", "logprobs", "loss", "mismatch", "quantize", "convert/ops")
MATHS_FILES = [PACKAGE / f"{name}.py" for name in MATHS if (PACKAGE / f"{name}.py").is_file()]

# Importing a blocked package fails, as on a machine that does not have it.
IMPORT_WITHOUT = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked in this test", name=name)

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    importlib.import_module(module)
"""


def module_name(file):
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)


def import_without(modules, *blocked):
    code = IMPORT_WITHOUT.format(modules=modules, blocked=set(blocked))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def imported_names(file):
    """Full dotted names of everything that the file imports, functions' own imports included."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: wants absolute imports"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_packages(file):
    return {name.partition(".")[0] for name in imported_names(file)}


def test_there_is_a_maths_layer():
    assert {"types.py", "advantage.py", "batch.py", "loss.py"} <= {file.name for file in MATHS_FILES}


def test_maths_layer_loads_without_megatron_sglang_and_transformer_engine():
    modules = [module_name(file) for file in MATHS_FILES]  # in one process: each would import torch anew
    import_without(modules, "megatron", "sglang", "transformer_engine", "transformers")


@pytest.mark.parametrize("file", MATHS_FILES, ids=module_name)
def test_maths_layer_names_torch_at_most(file):
    others = imported_packages(file) - sys.stdlib_module_names - {"torch", "gspo_megatron"}
    assert not others


def test_only_mcore_imports_megatron():
    importing = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if "megatron" in imported_packages(file)}
    assert {path.parts[0] for path in importing} == {"mcore"}


def test_config_and_its_checks_load_without_torch():
    import_without(["gspo_megatron.config", "gspo_megatron.checks"], "torch")
