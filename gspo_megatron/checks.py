"""What a recipe must hold beyond its types, before anything is started. Imports no torch."""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from math import inf
from pathlib import Path
from typing import Any

from gspo_megatron.config import ConfigError, LossConfig, Recipe

MAX_SEQUENCE_CLIP = 0.01
"""A sequence-level ratio is a mean over the response: at long responses a wider band never clips."""
LONG_RESPONSE_TOKENS = 1000

# TransformerConfig fields that this project derives from config.json, the recipe or the objective.
DERIVED_MCORE_KEYS = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels num_moe_experts "
    "moe_ffn_hidden_size moe_router_topk normalization layernorm_epsilon qk_layernorm gated_linear_unit "
    "activation_func add_bias_linear add_qkv_bias init_method_std params_dtype pipeline_dtype bf16 fp16 "
    "calculate_per_token_loss tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "virtual_pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "sequence_parallel moe_router_pre_softmax use_cpu_initialization overlap_p2p_comm batch_p2p_comm "
    "microbatch_group_size_per_vp_stage variable_seq_lengths moe_enable_routing_replay".split()
)
# ServerArgs fields that engine.py sets.
DERIVED_SGLANG_KEYS = frozenset(
    "model_path tokenizer_path host port device dtype random_seed weight_version api_key served_model_name "
    "load_format skip_tokenizer_init enable_fp32_lm_head".split()
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
        problems = _check_parallel(recipe) + _check_sizes(recipe) + _check_objective(recipe) + _check_model(recipe)
        problems += _check_mcore(recipe)
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
            "cold_start.num_steps",
            "cold_start.batch_size",
            "rollout.num_prompts",
            "rollout.max_response_tokens",
            "rollout.request_timeout_s",
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
            "rollout.max_retries",
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
    if recipe.cluster.max_policy_lag != 0:
        problems.append(f"cluster.max_policy_lag={recipe.cluster.max_policy_lag}: only 0 (synchronous) is built")
    return problems


def _check_sizes(recipe: Recipe) -> list[str]:
    r, b = recipe.rollout, recipe.batch
    problems = []
    if r.num_prompts % b.num_minibatches:
        problems.append(
            f"batch.num_minibatches={b.num_minibatches}: does not divide rollout.num_prompts={r.num_prompts}"
        )
    if b.max_tokens_per_microbatch < r.max_response_tokens:
        problems.append(
            f"batch.max_tokens_per_microbatch={b.max_tokens_per_microbatch}: holds no response of "
            f"rollout.max_response_tokens={r.max_response_tokens}"
        )
    if recipe.advantage.overlong_buffer_tokens > r.max_response_tokens:
        problems.append(
            f"advantage.overlong_buffer_tokens={recipe.advantage.overlong_buffer_tokens}: is above "
            f"rollout.max_response_tokens={r.max_response_tokens}"
        )
    if recipe.cold_start is None and recipe.model.init == "random":
        problems.append("cold_start: null with model.init random would train noise; give cold_start or weights")
    return problems


def _check_objective(recipe: Recipe) -> list[str]:
    problems = []
    r, loss = recipe.rollout, recipe.loss
    if r.top_p != 1.0 or r.top_k != -1:
        problems.append(
            f"rollout.top_p={r.top_p}, top_k={r.top_k}: must be 1.0 and -1; "
            "a truncated support shifts the rollout's log-probs against the trainer's"
        )
    problems += _check_bounds(loss)
    wide = max(loss.clip_low or 0.0, loss.clip_high or 0.0) > MAX_SEQUENCE_CLIP
    if loss.name in SEQUENCE_RATIO and wide and r.max_response_tokens > LONG_RESPONSE_TOKENS:
        if not loss.allow_wide_clip:
            problems.append(
                f"loss.clip_low={loss.clip_low}, clip_high={loss.clip_high}: above {MAX_SEQUENCE_CLIP} a "
                f"sequence-level ratio of {r.max_response_tokens}-token responses never clips; the paper has 3.0e-4 "
                "and 4.0e-4 (or set loss.allow_wide_clip)"
            )
    if loss.name in SEQUENCE_RATIO and loss.aggregation not in (None, "sequence_mean"):
        problems.append(
            f"loss.aggregation={loss.aggregation}: {loss.name} is a mean over responses (Eq. 5); this weighs them by "
            "length; use null, or another loss.name"
        )
    if loss.name in ("dr_grpo", "minirl") and recipe.advantage.std:
        problems.append(f"advantage.std=True: {loss.name} is published with r - mean; set it to false")
    return problems + _check_correction(loss) + _check_routing_replay(recipe)


SEQUENCE_RATIO = ("gspo", "gspo_token")
"""Objectives whose ratio is one number per response."""
_BOUNDS = {"cispo": ("clip_high",), "sapo": ("tau_positive", "tau_negative")}
"""The keys that bound an objective's ratio; clip_low and clip_high for the others."""


def _check_bounds(loss: LossConfig) -> list[str]:
    """Each objective has the bounds of its equation, and no other."""
    problems = []
    wanted = _BOUNDS.get(loss.name, ("clip_low", "clip_high"))
    values = {
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "tau_positive": loss.tau_positive,
        "tau_negative": loss.tau_negative,
    }
    for key, value in values.items():
        below_one = key.startswith("clip") and loss.name != "cispo"  # cispo's is a cap on the weight
        if key not in wanted and value is not None:
            problems.append(f"loss.{key}={value}: {loss.name} has no such bound; set it to null")
        elif key in wanted and (value is None or not 0.0 < value < (1.0 if below_one else inf)):
            limit = "a value in (0, 1)" if below_one else "a number above 0"
            problems.append(f"loss.{key}={value}: wants {limit}")
    return problems


def _check_correction(loss: LossConfig) -> list[str]:
    c = loss.correction
    if c is None:
        return []
    problems = []
    if loss.old_logprobs == "rollout":
        problems.append("loss.correction: with old_logprobs: rollout every weight is 1; set it to null")
    if loss.name == "minirl":
        problems.append("loss.correction: minirl's own weight is pi_theta / mu already; set it to null")
    two_sided = c.name in ("icepop", "geometric_rejection")
    if two_sided != (c.low is not None):
        problems.append(f"loss.correction.low={c.low}: {c.name} wants {'a number' if two_sided else 'null'}")
    elif not (c.low or 0.0) < c.high < inf:
        problems.append(f"loss.correction.high={c.high}: wants a number above {c.low or 0.0}")
    return problems


# model.mcore keys under which megatron-core 0.19.2 chooses experts past the replay (transformer/moe/router.py,
# moe_utils.py), the values that do so (None: every one but the default), the default, and the reason.
_CAPTURED = "captures the router, which then keeps doing what it did at its capture"
_UNREPLAYABLE: dict[str, tuple[tuple[Any, ...] | None, Any, str]] = {
    "moe_router_fusion": (None, False, "takes the fused router, which never asks for the recorded experts"),
    "moe_router_load_balancing_type": (
        ("sinkhorn",),
        "aux_loss",
        "chooses experts by code of its own, which never asks for the recorded ones",
    ),
    "cuda_graph_impl": (None, "none", _CAPTURED),
    "enable_cuda_graph": (None, False, _CAPTURED),
    "external_cuda_graph": (None, False, _CAPTURED),
}


def _check_routing_replay(recipe: Recipe) -> list[str]:
    """What recorded routes cannot be combined with."""
    if recipe.loss.routing_replay == "none":
        return []
    problems = []
    for key, (refused, default, reason) in _UNREPLAYABLE.items():
        value = recipe.model.mcore.get(key, default)
        if value != default if refused is None else value in refused:
            problems.append(f"model.mcore.{key}={value}: with loss.routing_replay: r2 it {reason}")
    if recipe.loss.old_logprobs == "rollout":
        problems.append(
            "loss.old_logprobs=rollout: leaves loss.routing_replay: r2 no old-log-prob pass to record; "
            "wants recompute, or routing_replay: none"
        )
    return problems


# Keys of model.mcore -> is this value refused, and why.
_REFUSED_MCORE: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
        (bool, "noise in the forward pass: pi_theta and pi_old would differ at equal weights; leave it out"),
    ),
    "moe_expert_capacity_factor": (
        lambda v: v is not None,
        "drops tokens by what else is in the microbatch, so that log-probs depend on packing; leave it out",
    ),
    "defer_embedding_wgrad_compute": (
        bool,
        "megatron-core collects the output layer's inputs in its own forward, which chunked log-probs replace",
    ),
    **dict.fromkeys(
        ("overlap_moe_expert_parallel_comm", "num_microbatches_with_partial_activation_checkpoints"),
        (bool, "schedules a microbatch in pieces, which the log-prob pass is not written for; leave it out"),
    ),
    "moe_router_enable_expert_bias": (
        bool,
        "megatron-core updates the bias with a mask of the wrong shape where there is padding; leave it out",
    ),
    "mtp_num_layers": (bool, "multi-token prediction is not trained here; leave it out"),
}


def _check_mcore(recipe: Recipe) -> list[str]:
    """What megatron-core 0.19.2 takes and computes wrongly, or in a way that RL cannot use."""
    mcore, p = recipe.model.mcore, recipe.parallel
    problems = [
        f"model.mcore.{key}={mcore[key]}: {why}"
        for key, (is_refused, why) in _REFUSED_MCORE.items()
        if key in mcore and is_refused(mcore[key])
    ]
    balancing = mcore.get("moe_router_load_balancing_type", "none")
    kinds = balancing if isinstance(balancing, list) else [balancing]
    dense = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    if "global_aux_loss" in kinds and recipe.cluster.trainer_ranks > dense:
        problems.append(
            "model.mcore.moe_router_load_balancing_type=global_aux_loss: its gradient depends on the data-parallel "
            "size; use aux_loss, or none"
        )
    if "quantile_balancing" in kinds:
        problems.append("model.mcore.moe_router_load_balancing_type=quantile_balancing: refuses padding; use none")
    if "seq_aux_loss" in kinds and recipe.batch.mode == "packed":
        problems.append(
            "model.mcore.moe_router_load_balancing_type=seq_aux_loss: takes a whole pack for one sequence; "
            "use aux_loss, or batch.mode: padded"
        )
    if recipe.device == "cpu":
        modules = mcore.get("recompute_modules") or []
        if mcore.get("recompute_granularity") == "selective" and "layernorm" in modules:
            problems.append("model.mcore.recompute_modules: layernorm wants Transformer Engine; device: cpu has none")
        problems += [
            f"model.mcore.{key}={mcore[key]}: wants Transformer Engine, which device: cpu lacks"
            for key in ("fp8", "fp4")
            if mcore.get(key)
        ]
    return problems


def warnings_of(recipe: Recipe) -> list[str]:
    """What a checked recipe does that its author should know; launch.py prints them."""
    loss, mcore = recipe.loss, recipe.model.mcore
    warnings = []
    if recipe.batch.num_minibatches == 1 and loss.old_logprobs == "recompute":
        warnings.append("batch.num_minibatches=1: the ratio is 1 in the only update, so the clip can never act")
    if loss.old_logprobs == "rollout" and not loss.band_is_measured:
        warnings.append(
            "loss.old_logprobs=rollout: the mismatch between server and trainer enters the ratio; size the band from "
            "the spread of log s at optimizer.lr=0.0, then set loss.band_is_measured"
        )
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if mcore.get(key):
            warnings.append(f"model.mcore.{key}={mcore[key]}: an auxiliary loss pulls beside the objective")
    if loss.kl is not None and loss.kl.place == "loss" and loss.kl.estimator == "k1":
        warnings.append("loss.kl: k1 in the loss has an expected gradient of zero; k2 has that of KL(pi || ref)")
    return warnings


def _check_model(recipe: Recipe) -> list[str]:
    """The model directory, and whether the layout divides the model."""
    hf_dir = Path(recipe.model.hf_dir)
    if not hf_dir.is_dir():
        return [f"model.hf_dir={recipe.model.hf_dir}: no such directory"]
    missing = [name for name in ("config.json", "tokenizer.json") if not (hf_dir / name).is_file()]
    problems = [f"model.hf_dir={hf_dir}: has no {name}" for name in missing]
    if recipe.model.init == "weights" and not any(hf_dir.glob("*.safetensors")):
        problems.append(f"model.hf_dir={hf_dir}: has no *.safetensors; or set model.init to random")
    if problems:
        return problems
    try:
        config = json.loads((hf_dir / "config.json").read_text())
    except ValueError as error:
        return [f"model.hf_dir={hf_dir}: config.json is not JSON ({error})"]
    p = recipe.parallel
    stages = p.pipeline_model_parallel_size * (p.virtual_pipeline_model_parallel_size or 1)
    for key, size, name in (
        ("expert_model_parallel_size", p.expert_model_parallel_size, "num_experts"),
        ("expert_model_parallel_size", p.expert_model_parallel_size, "num_local_experts"),
        ("expert_tensor_parallel_size", p.expert_tensor_parallel_size, "moe_intermediate_size"),
        ("tensor_model_parallel_size", p.tensor_model_parallel_size, "num_attention_heads"),
        ("tensor_model_parallel_size", p.tensor_model_parallel_size, "num_key_value_heads"),
        ("pipeline_model_parallel_size x virtual", stages, "num_hidden_layers"),
    ):
        count = config.get(name) if isinstance(config, dict) else None
        if isinstance(count, int) and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            problems.append(f"parallel.{key}={size}: does not divide {name}={count}; use one of {fitting}")
    return problems
