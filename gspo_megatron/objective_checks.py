"""Which objectives a recipe may name with which keys, which megatron-core settings break them, and what to warn of."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from gspo_megatron.config import LossConfig, Recipe

MAX_SEQUENCE_CLIP = 0.01
"""A sequence-level ratio is a mean over the response: at long responses a wider band never clips."""
LONG_RESPONSE_TOKENS = 1000


def check_objective(recipe: Recipe) -> list[str]:
    """Problems of the loss section and of what it needs from the others."""
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
    if loss.name in (*SEQUENCE_RATIO, "gmpo") and loss.aggregation not in (None, "sequence_mean"):
        problems.append(
            f"loss.aggregation={loss.aggregation}: {loss.name} is a mean over responses (Eq. 5); this weighs them by "
            "length; use null, or another loss.name"
        )
    if loss.name in ("dr_grpo", "minirl") and recipe.advantage.std:
        problems.append(f"advantage.std=True: {loss.name} is published with r - mean; set it to false")
    return problems + _check_turn_rewards(recipe) + _check_correction(loss) + _check_routing_replay(recipe)


SEQUENCE_RATIO = ("gspo", "gspo_token")
"""Objectives whose ratio is one number per response."""
RESPONSE_ADVANTAGE = ("gspo", "gmpo")
"""Objectives that know no advantage but the response's own."""
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


def _check_turn_rewards(recipe: Recipe) -> list[str]:
    """Rewards of turns need turns, an objective that reads them, and the task's own rewards beside them."""
    if not recipe.advantage.turn_rewards:
        return []
    problems = []
    if recipe.rollout.multi_turn is None:
        problems.append("advantage.turn_rewards=True: rollout.multi_turn is null, so there are none; set it to false")
    if recipe.loss.name in RESPONSE_ADVANTAGE:
        problems.append(
            f"advantage.turn_rewards=True: {recipe.loss.name} reads one advantage per response; use "
            "loss.name: gspo_token or another objective that reads them per token"
        )
    if recipe.reward.permute:
        problems.append("advantage.turn_rewards=True: reward.permute leaves them alone; set one of them to false")
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
    elif not (c.low or 0.0) < 1.0 <= c.high < inf:
        problems.append(f"loss.correction.low={c.low}, high={c.high}: want low < 1 <= high: equal policies have 1")
    return problems


_CAPTURED = "captures the router, which then keeps doing what it did at its capture"
_UNREPLAYABLE: dict[str, tuple[Any, str]] = {
    "moe_router_fusion": (False, "takes the fused router, which never asks for the recorded experts"),
    "cuda_graph_impl": ("none", _CAPTURED),
    "enable_cuda_graph": (False, _CAPTURED),
    "external_cuda_graph": (False, _CAPTURED),
}
"""Keys of model.mcore under which megatron-core 0.19.2 chooses experts past the replay, other than by default."""

_LOADED = "brings back keys and values without the routes that belong to them"
_UNRECORDED: dict[str, tuple[Any, str]] = {
    "enable_two_batch_overlap": (False, "lets one half of a batch overwrite the other's routes"),
    "disaggregation_mode": ("null", _LOADED),
    "enable_hierarchical_cache": (False, _LOADED),
    "enable_lmcache": (False, _LOADED),
    "enable_flexkv": (False, _LOADED),
    "enable_unified_cache_external_linker": (False, _LOADED),
    "radix_cache_backend": (None, _LOADED),
}
"""Keys of rollout.sglang under which SGLang 0.5.21 returns other routes than a token's, other than by default."""


def _check_routing_replay(recipe: Recipe) -> list[str]:
    """What recorded routes cannot be combined with."""
    replay = recipe.loss.routing_replay
    if replay == "none":
        return []
    refused = [("model.mcore", recipe.model.mcore, _UNREPLAYABLE)]
    if replay == "r3":
        refused.append(("rollout.sglang", recipe.rollout.sglang, _UNRECORDED))
    problems = [
        f"{section}.{key}={given[key]}: with loss.routing_replay: {replay} it {reason}"
        for section, given, keys in refused
        for key, (default, reason) in keys.items()
        if given.get(key, default) != default
    ]
    chunk = recipe.rollout.sglang.get("chunked_prefill_size")
    if replay == "r3" and isinstance(chunk, int) and chunk < 1:
        problems.append(
            f"rollout.sglang.chunked_prefill_size={chunk}: with loss.routing_replay: r3 SGLang keeps room for the "
            "routes of one chunk and dies of a longer prompt; wants a number of tokens, or leave it out"
        )
    if replay == "r2" and recipe.loss.old_logprobs == "rollout":
        problems.append(
            "loss.old_logprobs=rollout: leaves loss.routing_replay: r2 no old-log-prob pass to record; "
            "wants recompute, or routing_replay: r3 or none"
        )
    return problems


# Keys of model.mcore -> is this value refused, and why.
_REFUSED_MCORE: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
        (bool, "noise in the forward pass: pi_theta and pi_old would differ at equal weights; leave it out"),
    ),
    **dict.fromkeys(
        ("moe_router_force_load_balancing", "moe_router_force_biased"),
        (bool, "routes at random, anew in every pass: pi_theta and pi_old would differ at equal weights"),
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


def check_mcore(recipe: Recipe) -> list[str]:
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
    is_gathering = mcore.get("moe_token_dispatcher_type") == "allgather" and p.expert_model_parallel_size > 1
    if is_gathering and recipe.batch.mode == "packed":
        problems.append(
            "model.mcore.moe_token_dispatcher_type=allgather: takes equally many tokens from every rank, but packs "
            "differ; use alltoall, or batch.mode: padded"
        )
    if "quantile_balancing" in kinds:
        problems.append("model.mcore.moe_router_load_balancing_type=quantile_balancing: refuses padding; use none")
    if "sinkhorn" in kinds:
        problems.append(
            "model.mcore.moe_router_load_balancing_type=sinkhorn: routes a token by what else is in the microbatch, "
            "so that log-probs depend on packing; use aux_loss, or none"
        )
    if mcore.get("recompute_granularity") == "full" and not (
        mcore.get("recompute_method") and mcore.get("recompute_num_layers")
    ):
        problems.append(
            "model.mcore.recompute_granularity=full: wants recompute_method (uniform, block) and recompute_num_layers"
        )
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
    if recipe.model.dtype == "bfloat16" and mcore.get("moe_router_dtype", "fp32") not in ("fp32", "fp64"):
        warnings.append(
            f"model.mcore.moe_router_dtype={mcore['moe_router_dtype']}: a bfloat16 router turns near ties from pass "
            "to pass; leave it at fp32"
        )
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if mcore.get(key):
            warnings.append(f"model.mcore.{key}={mcore[key]}: an auxiliary loss pulls beside the objective")
    if loss.routing_replay == "r3" and recipe.cluster.max_policy_lag and recipe.rollout.pause_mode != "in_place":
        warnings.append(
            f"rollout.pause_mode={recipe.rollout.pause_mode}: a push computes the routes of running responses anew, "
            "so that tokens sampled before it replay routes of newer weights; in_place keeps each token's own"
        )
    if recipe.device == "cuda" and not recipe.rollout.sglang.get("enable_deterministic_inference"):
        warnings.append(
            "rollout.sglang.enable_deterministic_inference is not set: SGLang ignores sampling seeds on CUDA without "
            "it, so that a run cannot be repeated token for token"
        )
    if loss.kl is not None and loss.kl.place == "loss" and loss.kl.estimator == "k1":
        warnings.append("loss.kl: k1 in the loss has an expected gradient of zero; k2 has that of KL(pi || ref)")
    return warnings
