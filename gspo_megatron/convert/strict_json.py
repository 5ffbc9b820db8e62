"""JSON files, read as nobody could misunderstand them: no key twice, regular files only."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from gspo_megatron.convert.ops import ConversionError


def parse_json(text: str) -> Any:
    """What json.loads gives.

    Raises:
        ValueError: not JSON, a key twice in one object, or nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_without_repeats)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path) -> Any:
    """The content of a file.

    Raises:
        ConversionError: it cannot be read, is not text, or as parse_json.
    """
    check_regular(path)
    try:
        return parse_json(path.read_text())
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConversionError(f"{path}: {error}") from error


def check_regular(path: Path) -> None:
    """Refuse what is no file that can be read: opening a named pipe waits for ever.

    Raises:
        ConversionError: absent, something else than a file or a link to one, or no permission.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        link = ", a link that leads nowhere; fetch it again" if path.is_symlink() else ""
        raise ConversionError(f"{path}: {error.strerror}{link}") from error
    if not stat.S_ISREG(mode):
        kind = "Is a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise ConversionError(f"{path}: {kind}; wants a file")
    if not os.access(path, os.R_OK, effective_ids=True):
        raise ConversionError(f"{path}: Permission denied; make it readable")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} occurs twice")
        found[name] = value
    return found
