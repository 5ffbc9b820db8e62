#!/usr/bin/env python
"""Check that a Megatron checkpoint holds exactly the weights of a Hugging Face directory.

Hashes of every file and tensor against the manifest, names, shapes, and each tensor bit for bit. --logits runs both
models on fixed tokens, transformers' and Megatron's, one after the other, and compares them layer by layer in float32
and bfloat16; that takes memory for one model in float32.

Exit status 0 when all is equal, 2 when not, 1 when a file could not be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gspo_megatron.convert.command import print_error
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.verify import bytes_to_read, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-dir", type=Path, required=True, help="Hugging Face directory, source or target")
    parser.add_argument("--mcore-dir", type=Path, required=True, help="Megatron checkpoint, the other one")
    parser.add_argument("--logits", action="store_true", help="compare with transformers, layer by layer")
    args = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False)
    try:
        with _progress(console) as progress:
            task = progress.add_task("verifying", total=bytes_to_read(args.hf_dir, args.mcore_dir))
            found = verify(args.hf_dir, args.mcore_dir, progress=lambda n: progress.advance(task, n))
        rounded = f", {found.num_rounded:,} of them in another dtype, as was asked" if found.num_rounded else ""
        console.print(
            f"equal: {found.model_type}, {found.num_tensors:,} tensors, {found.num_parameters:,} parameters, bit for "
            f"bit{rounded}; {found.num_files} files of {args.mcore_dir} ({found.num_bytes / 2**30:.2f} GiB) match its "
            "manifest",
            soft_wrap=True,
        )
        if args.logits:
            from gspo_megatron.mcore.layer_outputs import compare_logits

            compare_logits(args.hf_dir, args.mcore_dir, console)
    except ConversionError as error:
        print_error(error)
        return 2
    except OSError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _progress(console: Console) -> Progress:
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)),
        *(TransferSpeedColumn(), TimeRemainingColumn()),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


if __name__ == "__main__":
    sys.exit(main())
