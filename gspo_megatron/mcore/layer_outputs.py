"""A Megatron checkpoint and a Hugging Face directory on the same tokens, layer by layer, on one CPU process.

For tools/verify_checkpoint.py --logits: equal tensors under equal names can still make another model, when config.json
was mapped wrongly.

Shapes: S = tokens, H = hidden, V = vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gspo_megatron.convert.families import table_for
from gspo_megatron.convert.hf_io import TensorReader, read_config
from gspo_megatron.convert.mcore_io import McoreCheckpoint
from gspo_megatron.convert.mcore_layout import HF_SUBFOLDER
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.to_mcore import read_model
from gspo_megatron.mcore import cpu

NUM_TOKENS = 64
FLOAT32_LIMIT = 1.0e-4
"""Largest |d| of any layer in float32, in standard deviations of its values. The tiny models have 2e-6."""
BFLOAT16_LIMIT = 0.1
"""Mean |d| in bfloat16, in the same unit: rounding of 2^-9 at each step; a router's near tie may turn."""


def compare_logits(hf_dir: Path, mcore_dir: Path, console: Console) -> None:
    """Print a table of differences: embedding, each layer's output, logits, in float32 and bfloat16.

    Memory: one model in float32 at a time, and the outputs of all layers.

    Raises:
        ConversionError: a layer differs by more than its limit, or the two cannot be compared.
    """
    with McoreCheckpoint(mcore_dir) as checkpoint:
        _compare(hf_dir, checkpoint, console)


def _compare(hf_dir: Path, checkpoint: McoreCheckpoint, console: Console) -> None:
    _, hf_config = read_model(hf_dir)
    _check_dtypes(hf_dir, hf_config, checkpoint)
    tokens = torch.randint(hf_config["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    table = Table("layer", "float32, max |d| / std", "bfloat16, mean |d| / std", title=f"{NUM_TOKENS} fixed tokens")
    columns: list[list[float]] = []
    names: list[str] = []
    problems: list[str] = []
    for dtype, limit in ((torch.float32, FLOAT32_LIMIT), (torch.bfloat16, BFLOAT16_LIMIT)):
        theirs = transformers_outputs(hf_dir, tokens, dtype)
        ours = megatron_outputs(checkpoint, tokens, dtype)
        names = list(theirs)
        if names != list(ours):
            raise ConversionError(f"transformers has {len(names) - 2} layers, Megatron {len(ours) - 2}")
        columns.append([])
        for name, want in theirs.items():
            if not want.isfinite().all():
                raise ConversionError(f"{hf_dir}: {name} is not finite in {dtype}: there is nothing to compare")
            error = (ours[name].float() - want.float()).abs()
            size = float((error.max() if dtype == torch.float32 else error.mean()) / want.float().std())
            columns[-1].append(size)
            if not size <= limit:  # not a number is a difference
                problems.append(f"{name}: {size:.1e} in {str(dtype).removeprefix('torch.')}, limit {limit:.0e}")
    for name, in_float32, in_bfloat16 in zip(names, *columns, strict=True):
        table.add_row(name, f"{in_float32:.1e}", f"{in_bfloat16:.1e}")
    console.print(table)
    if problems:
        raise ConversionError(
            f"{checkpoint.folder} in Megatron and {hf_dir} in transformers compute different things; the first "
            "layer that differs has the cause:\n  " + "\n  ".join(problems)
        )


def _check_dtypes(hf_dir: Path, hf_config: dict[str, Any], checkpoint: McoreCheckpoint) -> None:
    """Weights that one side has rounded make other logits."""
    if read_config(hf_dir).get("quantization_config"):
        raise ConversionError(f"{hf_dir}: --logits wants weights that are not quantised; give the other side's export")
    found = TensorReader(hf_dir).tensors()
    for op in table_for(hf_config, found):
        dtype, name = checkpoint.tensors[op.mcore_name][0], next(iter(op.hf_shapes))
        if torch.promote_types(dtype, found[name][0]) != dtype:
            raise ConversionError(
                f"{hf_dir}: {name} is {found[name][0]}, which {op.mcore_name} was rounded from to {dtype}: logits "
                "cannot be equal; export the checkpoint, and give the export"
            )


@torch.no_grad()
def transformers_outputs(hf_dir: Path, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Outputs of embedding and layers [S, H] and the logits [S, V], by name."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        hf_dir,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped kernel refuses sizes that are no multiple of 16 bytes
        local_files_only=True,
        use_safetensors=True,
    ).eval()
    layers = {"embedding": model.model.embed_tokens} | {f"layer {i}": m for i, m in enumerate(model.model.layers)}
    outputs, remove = _record(layers, lambda x: x[0])
    outputs["logits"] = model(tokens[None]).logits[0]
    remove()
    return outputs


@torch.no_grad()
def megatron_outputs(checkpoint: McoreCheckpoint, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of the checkpoint, through the modules that train on CPU. The process must be no rank of a run."""
    cpu.install()
    from gspo_megatron.mcore.model import fixed_fields, gpt_chunks, make_config, sharded_state_dict, shards

    family, hf_config = read_model(checkpoint.folder / HF_SUBFOLDER)
    fields, arguments = family.transformer_config(hf_config)
    with _one_process():
        config = make_config({**fields, **fixed_fields(dtype)}, arguments, "local")
        (model,) = gpt_chunks(config, arguments, "local")
        model = model.to(dtype).eval()
        for shard in shards(sharded_state_dict([model])):
            shard.boxed.copy_(checkpoint.read_box(shard.mcore_name, shard.box))
        layers = {"embedding": model.embedding} | {f"layer {i}": m for i, m in enumerate(model.decoder.layers)}
        outputs, remove = _record(layers, lambda x: x[:, 0])
        positions = torch.arange(len(tokens))[None]
        outputs["logits"] = model(tokens[None], positions, attention_mask=None)[0]
        remove()
    return outputs


def _record(
    layers: dict[str, torch.nn.Module], only_row: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Fill the returned dict with each layer's output in the next forward pass; and the way to stop."""
    outputs: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def keep(module: Any, inputs: Any, output: Any, name: str = name) -> None:
            outputs[name] = only_row(output[0] if isinstance(output, tuple) else output).clone()

        handles.append(layer.register_forward_hook(keep))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return outputs, remove


@contextmanager
def _one_process() -> Iterator[None]:
    """Process groups of a world of one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(0)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
