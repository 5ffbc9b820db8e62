"""One rank's model on the meta device: names, shapes and sharding of any layout, without memory, GPU or other ranks.

The modules are those that model.py trains, built by the same functions; process groups are torch's fake ones. Meant
for a child process that does nothing else. It calls `te_construct.install()` for Transformer Engine's modules or
`cpu.install()` for the local ones, before it imports this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore

from gspo_megatron.convert.family import ModelArguments
from gspo_megatron.convert.shards import Shard
from gspo_megatron.mcore import te_construct
from gspo_megatron.mcore.model import Spec, gpt_chunks, make_config, sharded_state_dict, shards

_AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_META_FIELDS: dict[Spec, dict[str, Any]] = {
    "local": {"perform_initialization": False},
    "transformer_engine": {"perform_initialization": False, "init_model_with_meta_device": True},
}


@contextmanager
def meta_model(
    fields: dict[str, Any], arguments: ModelArguments, *, spec: Spec, rank: int, world_size: int
) -> Iterator[list[GPTModel]]:
    """Build one rank's chunks, with megatron-core's parallel state of that rank until the context ends.

    Args:
        fields: TransformerConfig's, parallel sizes among them, as model.config_fields returns.
        arguments: of GPTModel.
        spec: whose modules; "transformer_engine" needs te_construct.install().
        rank: of the model to build, in [0, world_size).
        world_size: ranks of the layout.

    Yields:
        The chunks, every parameter on the meta device.

    Raises:
        RuntimeError: te_construct.install() was not called, or the process has a process group already.
    """
    if spec == "transformer_engine" and not te_construct.is_installed():
        raise RuntimeError("spec='transformer_engine' needs te_construct.install() before megatron.core is imported")
    if dist.is_initialized():
        raise RuntimeError("this process has a process group; build on the meta device in a process of its own")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    current_device = torch.cuda.current_device
    try:
        parallel_state.initialize_model_parallel(
            **{axis: fields[axis] for axis in _AXES}, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(0)
        config = make_config(fields | _META_FIELDS[spec], arguments, spec)
        # Embedding, router and rotary embedding name their device: the current one.
        torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
        with torch.device("meta"):
            chunks = gpt_chunks(config, arguments, spec)
        yield chunks
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def meta_shards(chunks: list[GPTModel]) -> list[Shard]:
    """What this rank owns of each global tensor, through the same path as a live policy's; inside meta_model."""
    return shards(sharded_state_dict(chunks))
