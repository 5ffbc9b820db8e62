"""Transformer Engine's Python modules without its C++ core, for construction on the meta device and nothing else.

A model of Transformer Engine modules can then be built, named and cut on any machine (mcore/meta.py). `install()`
changes the whole process: call it in a child process that only builds, before the first `import megatron.core`.

Transformer Engine imports its extension and CUDA's libraries without a guard. To be removed when
transformer_engine.pytorch can be imported, and a module constructed with device="meta", without either.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from gspo_megatron.mcore import cpu

CHECKED_VERSIONS = ("2.16.1",)
"""transformer-engine releases that this file was run with."""
FOLDER = Path(sys.prefix) / "transformer-engine"
"""Where requirements/install.sh puts the package: megatron-core's guards let the error of a package without its core
through, so on the ordinary path it would break every import."""
_installed = False


def is_installed() -> bool:
    """Whether this process can build Transformer Engine modules."""
    return _installed


def install() -> None:
    """Make transformer_engine importable, and megatron-core after it. Once per process; a second call does nothing.

    Raises:
        RuntimeError: transformer-engine is absent or of a release never checked with this file, or megatron-core was
            imported before.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before te_construct.install(); use a process of its own")
    if FOLDER.is_dir():
        sys.path.insert(0, str(FOLDER))
    _check_version()
    _import_transformer_engine()
    # transformer_engine/pytorch/module/base.py refuses to construct without a GPU; megatron-core asks too.
    torch.cuda.is_available = lambda: True
    cpu.install()
    _installed = True


def _check_version() -> None:
    try:
        found = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        found = "absent"
    if found not in CHECKED_VERSIONS:
        raise RuntimeError(
            f"transformer-engine is {found}: construction without a GPU is checked with {', '.join(CHECKED_VERSIONS)} "
            "only; call make, or run the tests and add the version to mcore/te_construct.py"
        )


class _Absent(type):
    """One name of a module that is not here: read as an enum, each value is one more int; called, it raises."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = sum(isinstance(v, int) for v in vars(cls).values())
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{cls.__module__}.{cls.__name__} is absent: mcore/te_construct.py only constructs models")


class _AbsentModule(types.ModuleType):
    """A module that is not here; every name resolves."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Absent(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


def _import_transformer_engine() -> None:
    extension: Any = _AbsentModule("transformer_engine_torch")
    # pytorch/cpp_extensions/__init__.py takes it by `import *`, and attention's constructor asks. As gpu.txt's cuDNN.
    extension.get_cudnn_version = lambda: 92000
    sys.modules[extension.__name__] = extension
    # pytorch/export.py: the ONNX exporters need onnxscript.
    exporters = _AbsentModule("transformer_engine.pytorch.onnx_extensions")
    sys.modules[exporters.__name__] = exporters
    # transformer_engine/common/__init__.py: loads no shared library while its own wheel is being built.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    try:
        with warnings.catch_warnings():
            # The package's own, guarded import of transformer_engine.pytorch: there is no extension file to load.
            warnings.filterwarnings("ignore", "Detected a PyTorch installation", RuntimeWarning)
            common: Any = importlib.import_module("transformer_engine.common")
    finally:
        del os.environ["NVTE_PROJECT_BUILDING"]
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")
