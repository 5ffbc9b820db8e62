"""One trainer rank's process: what must happen before Megatron is imported, and how the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich.console import Console

from gspo_megatron.config import ConfigError, Recipe
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.process import die_with_parent

ERROR_PREFIX = "error: "
"""launch.py shows the first line of the log that starts so."""


def run_rank(
    recipe: Recipe, body: Callable[[Console], None], *, expected_errors: Sequence[type[Exception]] = ()
) -> None:
    """Run body and exit the process with its status.

    Only rank 0's console writes. An expected error becomes one line on stderr, anything else a traceback.

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
    try:
        body(console)
    except known as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        # Leave without the process group's clean-up: the other ranks may be in a collective. torchrun ends them.
        os._exit(1)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
