"""The policy: GPTModel chunks under DistributedDataParallel, their optimizer, and their shards for conversion.

CPU: megatron-core's local modules with the project's packed attention. CUDA: Transformer Engine modules with grouped
GEMM. Both have the same checkpoint names, Transformer Engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig as McoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.parallel_state import get_data_parallel_group, is_pipeline_first_stage, is_pipeline_last_stage
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from gspo_megatron.config import OptimizerConfig, Recipe
from gspo_megatron.convert.families import family_of, table_for
from gspo_megatron.convert.family import ModelArguments
from gspo_megatron.convert.hf_io import TensorReader, read_config, write_hf_dir
from gspo_megatron.convert.mcore_io import CONTENT_METADATA
from gspo_megatron.convert.ops import (
    Box,
    ConversionError,
    TensorMap,
    check_names_and_shapes,
    slices,
)
from gspo_megatron.convert.shards import Gatherer, Shard, load_shards
from gspo_megatron.convert.to_mcore import check_weight_dtypes
from gspo_megatron.mcore.attention import PackedCoreAttention, TorchRMSNorm
from gspo_megatron.mcore.parallel import Parallel
from gspo_megatron.mcore.routing_replay import RoutingReplay

Spec = Literal["local", "transformer_engine"]
"""Whose modules a model is made of: megatron-core's own with this package's, or Transformer Engine's."""

# What has no CPU implementation, switched off; none of it changes the maths.
_CPU_CONFIG = {
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
_CUDA_CONFIG = {
    "moe_grouped_gemm": True,
    # Without it experts' outputs are summed by atomic additions, in an order that changes from call to call: the ratio
    # of the first minibatch would not be exactly 1.
    "moe_permute_fusion": True,
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
}
DEVICE_FIELDS: dict[Spec, dict[str, Any]] = {"local": _CPU_CONFIG, "transformer_engine": _CUDA_CONFIG}
_EXTRA_STATE = "_extra_state"
"""In the name of what Transformer Engine keeps beside parameters: FP8 scales."""
EXPORT_BUCKET_BYTES = 512 * 2**20
"""What rank 0 holds of the weights while it writes them, or the largest tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The model on this rank."""

    chunks: list[Any]
    """DistributedDataParallel modules: one, or one per virtual pipeline stage."""
    config: TransformerConfig
    parallel: Parallel
    hf_config: dict[str, Any]
    """config.json of model.hf_dir."""
    ops: list[TensorMap]
    """The family's table, Hugging Face <-> Megatron."""
    vocab_size: int
    """Without padding."""
    fp32_lm_head: bool
    """The output layer multiplies in float32."""
    routing_replay: RoutingReplay
    """The chunks' routers; free unless loss.routing_replay is r2 or r3 and a pass records or replays."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """The function of the same name, of the parameters that the last optimizer step left."""
        self.finish_param_sync()
        return sharded_state_dict(unwrap_model(self.chunks))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy what dist_checkpointing loaded for sharded_state_dict into the parameters.

        Raises:
            ConversionError: lists parameters that the state lacks, and entries that no parameter takes.
        """
        for i, chunk in enumerate(unwrap_model(self.chunks)):
            missing, unexpected = chunk.load_state_dict(state[f"chunk{i}"], strict=False)
            problems = [f"missing {name}" for name in missing if _EXTRA_STATE not in name]
            problems += [f"unexpected {name}" for name in unexpected]
            if problems:
                raise ConversionError("checkpoint does not fit the model:\n" + "\n".join(f"  {p}" for p in problems))

    def shards(self) -> list[Shard]:
        """This rank's parameters with their place in the global tensors; data is a view of the parameter."""
        return shards(self.sharded_state_dict())

    def finish_param_sync(self) -> None:
        """Make every rank's parameters those of the last optimizer step. Collective over data parallel.

        Under overlap_param_gather they arrive during the next forward pass; every other reader calls this first.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Named parameters of this rank's chunks."""
        for chunk in unwrap_model(self.chunks):
            yield from chunk.named_parameters()


def sharded_state_dict(chunks: list[GPTModel]) -> dict[str, Any]:
    """megatron-core's own description of this rank's parameters, layout-free names.

    Without `_extra_state`: it is empty outside FP8, and Transformer Engine has it on modules where the CPU's have none
    (norms), so a checkpoint that held it would load on the device that wrote it only.
    """
    states = [chunk.sharded_state_dict(metadata=checkpoint_metadata()) for chunk in chunks]
    return {
        f"chunk{i}": {name: value for name, value in state.items() if _EXTRA_STATE not in name}
        for i, state in enumerate(states)
    }


def shards(state: dict[str, Any]) -> list[Shard]:
    """The tensors of a sharded_state_dict, each with its place in the global one; data is a view of the parameter."""
    apply_factories(state)
    return [
        Shard(
            mcore_name=t.key,
            data=t.data,
            global_shape=tuple(t.global_shape),
            global_offset=tuple(t.global_offset),
            is_owner=is_main_replica(t.replica_id),
        )
        for t in nested_values(state)
        if isinstance(t, ShardedTensor) and t.data is not None
    ]


def checkpoint_metadata() -> dict[str, Any]:
    """What sharded_state_dict asks: the checkpoints' own metadata, and the group that only a live rank has."""
    return {**CONTENT_METADATA, "dp_cp_group": get_data_parallel_group(with_context_parallel=True)}


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Smallest multiple of the tensor-parallel size that holds the vocabulary."""
    return -(-vocab_size // tp_size) * tp_size


def fixed_fields(dtype: torch.dtype) -> dict[str, Any]:
    """TransformerConfig's fields that are the same for every model and layout."""
    return {
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "gradient_accumulation_fusion": False,  # the native output layer would need apex
        "moe_router_dtype": "fp32",  # near ties would turn in bfloat16; model.mcore may say otherwise
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,
    }


def config_fields(hf_config: dict[str, Any], recipe: Recipe) -> tuple[dict[str, Any], ModelArguments]:
    """TransformerConfig's fields from config.json, the recipe's layout and its pass-through keys.

    Without DEVICE_FIELDS, which go below them.
    """
    fields, arguments = family_of(hf_config).transformer_config(hf_config)
    p = recipe.parallel
    interleaved = p.virtual_pipeline_model_parallel_size is not None
    fields |= fixed_fields(getattr(torch, recipe.model.dtype))
    fields |= {
        # packs differ in length
        "variable_seq_lengths": p.pipeline_model_parallel_size > 1 and recipe.batch.mode == "packed",
        "tensor_model_parallel_size": p.tensor_model_parallel_size,
        "pipeline_model_parallel_size": p.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": p.virtual_pipeline_model_parallel_size,
        "context_parallel_size": p.context_parallel_size,
        "expert_model_parallel_size": p.expert_model_parallel_size,
        "expert_tensor_parallel_size": p.expert_tensor_parallel_size,
        "sequence_parallel": p.sequence_parallel,
        "moe_enable_routing_replay": recipe.loss.routing_replay != "none",
        # interleaving without overlap is silently wrong in megatron-core 0.19.2; its guard is in megatron.training
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }
    return {**fields, **recipe.model.mcore}, arguments


def make_config(fields: dict[str, Any], arguments: ModelArguments, spec: Spec) -> TransformerConfig:
    """TransformerConfig of config_fields, and what GPTModel reads from it that it does not declare: YaRN's numbers."""
    config = TransformerConfig(**{**DEVICE_FIELDS[spec], **fields})
    for name, value in (arguments.yarn or {}).items():
        setattr(config, name, value)
    return config


def build_policy(recipe: Recipe, parallel: Parallel) -> Policy:
    """Build this rank's chunks; the weights are whatever the constructors leave. Collective (DDP buffers)."""
    hf_config = read_config(Path(recipe.model.hf_dir))
    fields, arguments = config_fields(hf_config, recipe)
    spec: Spec = "local" if recipe.device == "cpu" else "transformer_engine"
    config = make_config(fields, arguments, spec)
    modules = gpt_chunks(config, arguments, spec)
    if parallel.device.type == "cuda":
        modules = [m.cuda(parallel.device) for m in modules]
    if config.bf16:
        modules = [Float16Module(config, m) for m in modules]
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=recipe.parallel.use_distributed_optimizer,
        overlap_grad_reduce=recipe.parallel.overlap_grad_reduce,
        overlap_param_gather=recipe.parallel.overlap_param_gather,
        check_for_nan_in_grad=False,  # optimize.py checks the reduced norm on all ranks at once
    )
    chunks = [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=m, disable_bucketing=i > 0)
        for i, m in enumerate(modules)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    no_sync = [c.no_sync for c in chunks]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return Policy(
        chunks=chunks,
        config=config,
        parallel=parallel,
        hf_config=hf_config,
        ops=table_for(hf_config, ()),
        vocab_size=arguments.vocab_size,
        fp32_lm_head=recipe.model.fp32_lm_head,
        routing_replay=RoutingReplay(modules, config, tp_rank=parallel.tp_rank),
    )


def gpt_chunks(config: TransformerConfig, arguments: ModelArguments, spec: Spec) -> list[GPTModel]:
    """This rank's bare chunks, one per virtual pipeline stage. Needs megatron-core's parallel state, moves no data."""
    stages = config.virtual_pipeline_model_parallel_size or 1
    return [_chunk(config, arguments, spec, stage if stages > 1 else None) for stage in range(stages)]


def _chunk(
    config: TransformerConfig, arguments: ModelArguments, spec: Spec, vp_stage: int | None
) -> GPTModel:
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=spec == "transformer_engine",
        normalization=config.normalization,
        vp_stage=vp_stage,
    )
    return GPTModel(
        config,
        _cpu_spec(block) if spec == "local" else block,
        vocab_size=padded_vocab_size(arguments.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=1,  # only learned position embeddings read it
        pre_process=is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        parallel_output=True,
        share_embeddings_and_output_weights=arguments.share_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rotary_percent=arguments.rotary_percent,
        seq_len_interpolation_factor=arguments.seq_len_interpolation_factor,
        rope_scaling=arguments.rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        vp_stage=vp_stage,
    )


def _cpu_spec(spec: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """The local spec with packed attention, torch's RMSNorm and Transformer Engine's checkpoint names."""
    spec.layer_norm = TorchRMSNorm
    for layer in spec.layer_specs:
        modules = layer.submodules
        attention = modules.self_attention.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = TorchRMSNorm
        if attention.q_layernorm is not IdentityOp:
            attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
        attention.core_attention = PackedCoreAttention
        # Transformer Engine fuses a norm into the linear layer behind it. Behind a MoE layer's second norm is the
        # router, so that one stays a module of its own.
        modules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        if modules.mlp.func is not MoELayer:
            modules.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return spec


def build_optimizer(policy: Policy, recipe: Recipe, cfg: OptimizerConfig) -> Any:
    """megatron-core's AdamW over the policy's chunks, lr set per step by optimize.py."""
    config = McoreOptimizerConfig(
        optimizer="adam",
        lr=cfg.lr,
        weight_decay=cfg.weight_decay,
        adam_beta1=cfg.adam_beta1,
        adam_beta2=cfg.adam_beta2,
        adam_eps=cfg.adam_eps,
        clip_grad=cfg.clip_grad,
        bf16=policy.config.bf16,
        params_dtype=policy.config.params_dtype,
        use_distributed_optimizer=recipe.parallel.use_distributed_optimizer,
        overlap_param_gather=recipe.parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(config, policy.chunks)


def load_hf_weights(policy: Policy, optimizer: Any, read: TensorReader | dict[str, Tensor], where: str) -> None:
    """Fill this rank's parameters from Hugging Face tensors, and the optimizer's master copies from them.

    Args:
        policy: the model.
        optimizer: megatron-core's.
        read: tensors by Hugging Face name.
        where: for messages.

    Raises:
        ConversionError: names or shapes do not fit config.json; checked before a byte moves.
    """

    def read_box(name: str, box: Box) -> Tensor:
        return read[name][slices(box)] if isinstance(read, dict) else read.read_box(name, box)

    found = {n: tuple(t.shape) for n, t in read.items()} if isinstance(read, dict) else read.shapes()
    if not isinstance(read, dict):
        check_weight_dtypes(read.tensors(), where)  # copying converts any number without a word
    table = table_for(policy.hf_config, found)
    check_names_and_shapes(table, found, where, read_hf=read_box)
    load_shards(policy.shards(), table, read_box)
    optimizer.reload_model_params()


def export_hf(policy: Policy, out_dir: Path, companions_from: Path) -> None:
    """Write a Hugging Face directory from the live ranks. Collective over the default group.

    Raises:
        ConversionError: out_dir exists; on rank 0, OtherRankFailed on the others.
    """
    gatherer = Gatherer(policy.shards(), policy.ops)
    buckets = gatherer.buckets(EXPORT_BUCKET_BYTES)
    if policy.parallel.rank != 0:
        for _ in buckets:
            pass
    tensors = (item for bucket in buckets for item in bucket)

    def write() -> None:
        try:
            write_hf_dir(out_dir, gatherer.specs, tensors, companions_from=companions_from)
        finally:
            for _ in tensors:  # after an error: the other ranks are still sending, and must get to the end
                pass

    policy.parallel.on_rank_0(write)


def head_weight(output_layer: Any, output_weight: Tensor | None) -> Tensor:
    """[V, H] weight of the output layer on this rank: output_weight is the embedding's, where the two are tied.

    The layer is not called, so its hooks are run here: with overlap_param_gather DistributedDataParallel waits in one
    for the parameter. (The embedding's own layer waited for a tied weight.)
    """
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    return output_layer.weight if output_weight is None else output_weight
