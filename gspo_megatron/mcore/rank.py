"""One trainer rank's process: what must happen before Megatron is imported, and how the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console

from gspo_megatron.config import ConfigError, Recipe
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.process import die_with_parent

ERROR_PREFIX = "error: "
"""launch.py shows the first line of the log that starts so."""


class OtherRankFailed(RuntimeError):
    """Another rank raised in Parallel.on_rank_0 or on_every_rank; it reports the cause, this one only stops too."""


def run_rank(
    recipe: Recipe, body: Callable[[Console], None], *, expected_errors: Sequence[type[Exception]] = ()
) -> None:
    """Run body; a failure ends the process with status 1.

    Only rank 0's console writes. Every error is one line on stderr that launch.py can show; one that is not expected
    has its traceback before it, and a rank that only stops because another failed says nothing.

    Args:
        recipe: decides the device.
        body: takes the console; imports Megatron inside.
        expected_errors: beyond ConfigError and ConversionError.
    """
    die_with_parent()  # torchrun ends its ranks unless it is killed itself
    if recipe.device == "cpu":
        from gspo_megatron.mcore import cpu

        cpu.install()
        torch.set_num_threads(1)  # ranks and server share the cores; one thread also fixes the order of sums
    rank = int(os.environ["RANK"])
    console = Console(quiet=rank != 0, highlight=False)
    known: tuple[type[Exception], ...] = (ConfigError, ConversionError, *expected_errors)
    sys.excepthook = _print_unexpected
    try:
        body(console)
    except OtherRankFailed:
        os._exit(1)  # without the process group's clean-up: others may be in a collective, and torchrun ends them
    except known as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _print_unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An unexpected error: its traceback, then the line that launch.py shows."""
    sys.__excepthook__(kind, error, trace)
    print(f"{ERROR_PREFIX}{kind.__name__}: {error}", file=sys.stderr, flush=True)
