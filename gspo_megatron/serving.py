"""The directory that a run's SGLang servers boot from."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from gspo_megatron.checks import is_hf_weights
from gspo_megatron.config import Recipe
from gspo_megatron.convert.families import table_for
from gspo_megatron.convert.fp8_io import Fp8Export, fp8_config
from gspo_megatron.convert.hf_io import TensorReader, copy_companions, read_config, write_hf_dir


def serving_dir(recipe: Recipe, model_dir: Path, *, has_weights: bool) -> Path:
    """A directory with the config.json that servers need; with rollout.serve_fp8 one that is made in the run's folder.

    Args:
        recipe: model.hf_dir, model.dtype and rollout.serve_fp8 are used.
        model_dir: where the run starts from: a Hugging Face directory or a Megatron checkpoint.
        has_weights: servers read their weights from it (model_dir is a Hugging Face directory then); otherwise the
            trainer pushes them, and a directory that is made holds none.

    Raises:
        ConversionError: weights that cannot be read or quantised; the disk is full or refuses.
    """
    source = model_dir if is_hf_weights(model_dir) else Path(recipe.model.hf_dir)
    if not recipe.rollout.serve_fp8:
        return source
    out_dir = recipe.run_dir / "serving_fp8"
    dtype = getattr(torch, recipe.model.dtype)
    if has_weights:
        reader = TensorReader(source, dtype=dtype)
        specs = [(name, *of_tensor) for name, of_tensor in reader.tensors().items()]
        config = fp8_config(specs)
        export = Fp8Export(specs, config)
        tensors = export.tensors((name, reader.read(name)) for name, _, _ in specs)
        write_hf_dir(out_dir, export.specs, tensors, companions_from=source, quantization_config=config)
        return out_dir
    table = table_for(read_config(source), ())
    config = fp8_config([(name, dtype, shape) for op in table for name, shape in op.hf_shapes.items()])
    shutil.rmtree(out_dir, ignore_errors=True)
    out_dir.mkdir(parents=True)
    copy_companions(source, out_dir, quantization_config=config)
    return out_dir
