"""What a recipe must hold beyond its types, before anything is started. Imports no torch."""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from math import inf
from pathlib import Path
from typing import Any

from gspo_megatron.cluster_checks import check_placement, check_push
from gspo_megatron.config import ConfigError, Recipe
from gspo_megatron.multi_turn import load_function
from gspo_megatron.objective_checks import check_mcore, check_objective

# TransformerConfig fields that this project derives from config.json, the recipe or the objective.
DERIVED_MCORE_KEYS = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
    "moe_ffn_hidden_size moe_router_topk normalization layernorm_epsilon qk_layernorm gated_linear_unit "
    "activation_func add_bias_linear add_qkv_bias init_method_std params_dtype pipeline_dtype bf16 fp16 "
    "calculate_per_token_loss tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "sequence_parallel moe_router_pre_softmax use_cpu_initialization overlap_p2p_comm batch_p2p_comm "
    "microbatch_group_size_per_vp_stage variable_seq_lengths moe_enable_routing_replay "
    "gradient_accumulation_fusion "
    # Of the model itself: the server and the export would not have them.
    "window_size window_attn_skip_freq softmax_type softmax_scale attention_output_gate qk_l2_norm qk_clip "
    "multi_latent_attention experimental_attention_variant linear_attention_freq apply_query_key_layer_scaling "
    "rotary_base rotary_interleaved rotary_percent rotary_scaling_factor rope_type no_rope_freq mrope_section "
    "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk "
    "moe_router_topk_limited_devices moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq "
    "moe_latent_size moe_apply_probs_on_input layernorm_zero_centered_gamma activation_func_clamp_value "
    "glu_linear_offset apply_residual_connection_post_layernorm heterogeneous_block_specs use_mup".split()
)
# ServerArgs fields that engine.py sets.
DERIVED_SGLANG_KEYS = frozenset(
    "model_path tokenizer_path host port device dtype random_seed weight_version api_key served_model_name "
    "load_format skip_tokenizer_init enable_fp32_lm_head enable_return_routed_experts enable_memory_saver".split()
)


@functools.cache
def upstream_fields(dist_name: str, pattern: str) -> frozenset[str]:
    """Annotated class fields in upstream's installed source files, read without importing them.

    Args:
        dist_name: distribution, as pip names it.
        pattern: glob of the files, relative to site-packages.

    Raises:
        ConfigError: the distribution is not installed, or its fields are elsewhere.
    """
    try:
        root = Path(str(distribution(dist_name).locate_file("")))
    except PackageNotFoundError as error:
        raise ConfigError(f"{dist_name} is not installed; install requirements/cpu.txt or gpu.txt") from error
    bodies = [
        node.body
        for file in sorted(root.glob(pattern))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    names = frozenset(
        n.target.id for body in bodies for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    )
    if not names:
        raise ConfigError(f"{dist_name}: no fields in {pattern}; this version is not the pinned one")
    return names


def _check_passed_through(
    section: str, given: dict[str, Any], derived: frozenset[str], known: frozenset[str]
) -> list[str]:
    problems = []
    for key in given:
        if key in derived:
            problems.append(f"{section}.{key}: is derived from the recipe; remove it")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            problems.append(f"{section}.{key}: upstream has no such key; nearest is {near[0]}")
    return problems


def check_recipe(recipe: Recipe) -> list[str]:
    """Every problem of a well-typed recipe."""
    problems = _check_ranges(recipe)
    if not problems:
        problems = _check_parallel(recipe) + _check_sizes(recipe) + _check_sampling(recipe) + _check_model(recipe)
        problems += check_objective(recipe) + check_mcore(recipe) + check_placement(recipe)
        problems += check_push(recipe) + _check_turns(recipe)
    mcore = upstream_fields("megatron-core", "megatron/core/transformer/transformer_config.py")
    mcore |= upstream_fields("megatron-core", "megatron/core/model_parallel_config.py")
    problems += _check_passed_through("model.mcore", recipe.model.mcore, DERIVED_MCORE_KEYS, mcore)
    tp_size = recipe.rollout.sglang.get("tp_size", 1)
    if type(tp_size) is not int or tp_size < 1 or (recipe.device == "cpu" and tp_size > 1):
        problems.append(f"rollout.sglang.tp_size={tp_size!r}: wants a whole number, and 1 with device: cpu")
    last_port = recipe.cluster.server_port + recipe.cluster.rollout_servers - 1
    if last_port > 65535:
        problems.append(f"cluster.server_port={recipe.cluster.server_port}: leaves no port for every server")
    sglang = upstream_fields("sglang", "sglang/srt/arg_groups/fields/*.py")
    problems += _check_passed_through("rollout.sglang", recipe.rollout.sglang, DERIVED_SGLANG_KEYS, sglang)
    return problems


# Closed ranges of plain numbers, by recipe key. `rollout.group_size`: one response has no group to beat.
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),
    **dict.fromkeys(
        (
            "parallel.tensor_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
            "parallel.virtual_pipeline_model_parallel_size",
            "parallel.context_parallel_size",
            "parallel.expert_model_parallel_size",
            "parallel.expert_tensor_parallel_size",
            "cluster.trainer_ranks",
            "cluster.rollout_servers",
            "cluster.start_timeout_s",
            "cluster.collective_timeout_s",
            "cluster.probe_timeout_s",
            "cold_start.num_steps",
            "cold_start.batch_size",
            "rollout.num_prompts",
            "rollout.max_response_tokens",
            "rollout.request_timeout_s",
            "rollout.turn_timeout_s",
            "rollout.max_concurrency",
            "batch.num_minibatches",
            "batch.max_tokens_per_microbatch",
            "train.num_rollout_steps",
            "evaluate.num_prompts",
            "evaluate.num_samples",
            "evaluate.every",
        ),
        (1, inf),
    ),
    **dict.fromkeys(
        (
            "cold_start.lr",
            "cold_start.warmup_steps",
            "cluster.max_policy_lag",
            "cluster.max_restarts",
            "rollout.max_retries",
            "rollout.min_response_tokens",
            "rollout.max_turns",
            "rollout.oversample_prompts",
            "rollout.max_prompts_per_step",
            "advantage.eps",
            "optimizer.lr",
            "optimizer.adam_eps",
            "optimizer.weight_decay",
            "optimizer.clip_grad",
            "advantage.overlong_buffer_tokens",
            "loss.kl.coef",
            "loss.entropy_coef",
            "loss.correction.low",
        ),
        (0, inf),
    ),
    **dict.fromkeys(
        (
            "cold_start.decay_fraction",
            "cold_start.flawed_fraction",
            "optimizer.adam_beta1",
            "optimizer.adam_beta2",
        ),
        (0, 1),
    ),
    "cluster.server_port": (0, 65535),
    "cluster.weight_port": (0, 65535),
    "rollout.group_size": (2, inf),
    "rollout.temperature": (0.01, 10),
    "evaluate.temperature": (0.01, 10),
    "advantage.ddof": (0, 1),
}


def _check_ranges(recipe: Recipe) -> list[str]:
    problems = []
    for key, (low, high) in _RANGES.items():
        value: Any = recipe
        for name in key.split("."):
            value = value if value is None else getattr(value, name)  # an absent section has no problem here
        if value is not None and not (low <= value <= high and value < inf):
            wants = f"at least {low}" if high == inf else f"{low} to {high}"
            problems.append(f"{key}={value}: wants {wants}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", recipe.name):
        problems.append(f"name={recipe.name!r}: wants letters, digits, '.', '_' and '-'; it names a folder")
    return problems


def _check_parallel(recipe: Recipe) -> list[str]:
    p, ranks = recipe.parallel, recipe.cluster.trainer_ranks
    problems = []
    dense = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    expert = p.expert_tensor_parallel_size * p.expert_model_parallel_size * p.pipeline_model_parallel_size
    for what, size in (("tensor x pipeline x context", dense), ("expert x expert-tensor x pipeline", expert)):
        if ranks % size:
            problems.append(f"cluster.trainer_ranks={ranks}: is not a multiple of {what} parallel = {size}")
    if p.virtual_pipeline_model_parallel_size is not None and p.pipeline_model_parallel_size == 1:
        problems.append("parallel.virtual_pipeline_model_parallel_size: wants pipeline parallel > 1, or null")
    if p.tensor_model_parallel_size > 1 and not p.sequence_parallel:
        problems.append("parallel.sequence_parallel: must be true with tensor parallel > 1 (megatron-core's MoE)")
    if p.overlap_param_gather and not (p.use_distributed_optimizer and p.overlap_grad_reduce):
        problems.append(
            "parallel.overlap_param_gather: wants use_distributed_optimizer, whose parameters it gathers, and "
            "overlap_grad_reduce"
        )
    return problems


def _check_sizes(recipe: Recipe) -> list[str]:
    r, b = recipe.rollout, recipe.batch
    problems = []
    if r.num_prompts % b.num_minibatches:
        problems.append(
            f"batch.num_minibatches={b.num_minibatches}: does not divide rollout.num_prompts={r.num_prompts}"
        )
    whole = b.max_tokens_per_microbatch * recipe.parallel.context_parallel_size
    if whole <= r.max_response_tokens:
        problems.append(
            f"batch.max_tokens_per_microbatch={b.max_tokens_per_microbatch}: over context_parallel_size="
            f"{recipe.parallel.context_parallel_size} ranks holds no prompt with a response of "
            f"rollout.max_response_tokens={r.max_response_tokens}"
        )
    if recipe.advantage.overlong_buffer_tokens > r.max_response_tokens:
        problems.append(
            f"advantage.overlong_buffer_tokens={recipe.advantage.overlong_buffer_tokens}: is above "
            f"rollout.max_response_tokens={r.max_response_tokens}"
        )
    if recipe.cold_start is None and recipe.model.load == "random":
        problems.append("cold_start: null with model.load random would train noise; give cold_start or weights")
    return problems


def _check_turns(recipe: Recipe) -> list[str]:
    """Whether there is the function that answers turns, and what makes no sense without it."""
    r = recipe.rollout
    problems = []
    if r.multi_turn is not None:
        try:
            load_function(r.multi_turn)
        except ConfigError as error:
            problems.append(str(error))
        return problems
    if r.max_turns:
        problems.append(f"rollout.max_turns={r.max_turns}: has no effect without rollout.multi_turn; set it to 0")
    if recipe.cold_start is not None and recipe.data.reasoning_gym == "chain_sum":
        problems.append("rollout.multi_turn: null, but demonstrations of chain_sum call a calculator; name one")
    return problems


def _check_sampling(recipe: Recipe) -> list[str]:
    r = recipe.rollout
    problems = []
    if r.min_response_tokens > r.max_response_tokens:
        problems.append(
            f"rollout.min_response_tokens={r.min_response_tokens}: is above "
            f"rollout.max_response_tokens={r.max_response_tokens}, so every response would be filtered"
        )
    for key, value in (("oversample_prompts", r.oversample_prompts), ("max_prompts_per_step", r.max_prompts_per_step)):
        if value and not r.dynamic_sampling:
            problems.append(f"rollout.{key}={value}: has no effect without rollout.dynamic_sampling; set it to 0")
    if r.max_prompts_per_step and r.max_prompts_per_step < r.num_prompts + r.oversample_prompts:
        problems.append(
            f"rollout.max_prompts_per_step={r.max_prompts_per_step}: wants at least num_prompts + oversample_prompts, "
            f"{r.num_prompts + r.oversample_prompts}"
        )
    if r.dynamic_sampling and recipe.reward.permute:
        problems.append(
            "rollout.dynamic_sampling: chooses groups by their rewards, and reward.permute gives the rewards to other "
            "responses afterwards; set one of them to false"
        )
    if r.pause_mode == "in_place":
        if r.flush_cache:  # without a lag, too: health probes, and what dynamic sampling gave up
            problems.append(
                "rollout.flush_cache=True: SGLang refuses it while requests run, as they do with pause_mode in_place; "
                "set it to false"
            )
        if recipe.cluster.max_policy_lag and r.sglang.get("disable_overlap_schedule") is not True:
            problems.append(
                "rollout.pause_mode=in_place: with SGLang's overlap schedule the token that is under way at a push is "
                "of the old weights and carries the new weight_version; set rollout.sglang.disable_overlap_schedule "
                "to true"
            )
    return problems


def is_hf_weights(folder: Path) -> bool:
    """Whether model.load names a Hugging Face directory."""
    return any(folder.glob("*.safetensors"))


def is_mcore_checkpoint(folder: Path) -> bool:
    """Whether model.load names a torch_dist checkpoint, or the folder that holds its iterations."""
    return any((folder / name).is_file() for name in (".metadata", "latest_checkpointed_iteration.txt"))


def _check_model(recipe: Recipe) -> list[str]:
    """The model directory, and whether the layout divides the model."""
    hf_dir = Path(recipe.model.hf_dir)
    if not hf_dir.is_dir():
        return [f"model.hf_dir={recipe.model.hf_dir}: no such directory"]
    missing = [name for name in ("config.json", "tokenizer.json") if not (hf_dir / name).is_file()]
    problems = [f"model.hf_dir={hf_dir}: has no {name}" for name in missing]
    load = Path(recipe.model.load)
    if recipe.model.load != "random" and not (is_hf_weights(load) or is_mcore_checkpoint(load)):
        problems.append(
            f"model.load={load}: neither a Hugging Face directory with *.safetensors nor a Megatron checkpoint; "
            "random draws weights"
        )
    if problems:
        return problems
    try:
        config = json.loads((hf_dir / "config.json").read_text())
    except ValueError as error:
        return [f"model.hf_dir={hf_dir}: config.json is not JSON ({error})"]
    if not isinstance(config, dict):
        return [f"model.hf_dir={hf_dir}: config.json holds no object"]
    problems = _check_layout(recipe, config) + _check_attention(recipe, config)
    return problems + _check_stop_tokens(recipe, config) + _check_routes(recipe, config)


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Their names in config.json, family by family."""


def _check_layout(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """Whether the layout divides what it cuts; the converter says whether config.json is understood at all."""
    p = recipe.parallel
    stages = p.pipeline_model_parallel_size * (p.virtual_pipeline_model_parallel_size or 1)
    tp, ep, etp = (
        ("tensor_model_parallel_size", p.tensor_model_parallel_size),
        ("expert_model_parallel_size", p.expert_model_parallel_size),
        ("expert_tensor_parallel_size", p.expert_tensor_parallel_size),
    )
    cuts = [
        *((ep, name) for name in _NUM_EXPERTS),
        (etp, "moe_intermediate_size"),
        (tp, "num_attention_heads"),
        (tp, "num_key_value_heads"),
        (tp, "shared_expert_intermediate_size"),
        (("pipeline_model_parallel_size x virtual", stages), "num_hidden_layers"),
    ]
    problems = []
    is_dense = not any(name in config for name in _NUM_EXPERTS)
    if is_dense or config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        cuts.append((tp, "intermediate_size"))
    if is_dense:
        problems += [
            f"parallel.{key}={size}: {config.get('model_type')} has no experts; set it to 1"
            for key, size in (ep, etp)
            if size > 1
        ]
    elif "moe_intermediate_size" not in config:
        cuts.append((etp, "intermediate_size"))
    for (key, size), name in cuts:
        count = config.get(name)
        if isinstance(count, int) and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            problems.append(f"parallel.{key}={size}: does not divide {name}={count}; use one of {fitting}")
    return problems


def _check_stop_tokens(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    size = config.get("vocab_size")
    wrong = [i for i in recipe.rollout.stop_token_ids if not (isinstance(size, int) and 0 <= i < size)]
    return [f"rollout.stop_token_ids: has {wrong}, wants ids in [0, vocab_size={size})"] if wrong else []


def _check_routes(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """Whether the model has routes to replay, and SGLang records them."""
    replay, model_type = recipe.loss.routing_replay, config.get("model_type")
    if replay != "none" and not any(name in config for name in _NUM_EXPERTS):
        return [f"loss.routing_replay={replay}: {model_type} has no experts; wants none"]
    if replay == "r3" and model_type == "mixtral":
        return [
            "loss.routing_replay=r3: SGLang 0.5.21 records mixtral's routes without their layer (models/mixtral.py); "
            "wants r2 or none"
        ]
    return []


def _check_attention(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """What Transformer Engine's attention and rotary embedding do not take, or silently leave out."""
    problems = []
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    is_yarn = isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type"))
    if is_yarn and recipe.model.mcore.get("apply_rope_fusion"):
        problems.append(
            "model.mcore.apply_rope_fusion: the fused kernel leaves out YaRN's attention factor on packed sequences; "
            "remove it"
        )
    is_used = config.get("use_sliding_window", config.get("model_type") == "mixtral")  # the others default to False
    has_window = is_used and config.get("sliding_window") is not None
    cp_size, exchange = recipe.parallel.context_parallel_size, recipe.model.mcore.get("cp_comm_type")
    if recipe.device == "cuda" and cp_size > 1 and has_window and exchange != "a2a":
        problems.append(
            f"parallel.context_parallel_size={cp_size}: with sliding_window={config['sliding_window']} Transformer "
            f"Engine wants model.mcore.cp_comm_type a2a, got {exchange}"
        )
    return problems
