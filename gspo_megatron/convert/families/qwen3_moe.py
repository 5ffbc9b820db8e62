"""Qwen3-MoE (30B-A3B, 235B-A22B): config.json <-> megatron-core arguments, and the operation list.

Source: transformers' Qwen3MoeConfig and Qwen3MoeForCausalLM; megatron-core's Transformer Engine checkpoint names.
"""

from __future__ import annotations

from typing import Any

from gspo_megatron.convert.family import Family, ModelArguments
from gspo_megatron.convert.ops import ConversionError, TensorMap, fuse_qkv, rename, stack

MODEL_TYPE = "qwen3_moe"

# Keys that do not change the forward pass, or that the recipe decides (dtype, auxiliary loss).
_IGNORED = frozenset(
    "architectures model_type dtype torch_dtype transformers_version use_cache bos_token_id eos_token_id pad_token_id "
    "output_router_logits router_aux_loss_coef max_window_layers sliding_window "
    "max_position_embeddings intermediate_size id2label label2id return_dict output_hidden_states "
    "output_attentions chunk_size_feed_forward is_encoder_decoder problem_type layer_types".split()
)
# Keys without which the model is not known: transformers' defaults for some of them are another model's.
_NEEDED = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim num_experts_per_tok "
    "moe_intermediate_size norm_topk_prob rms_norm_eps tie_word_embeddings initializer_range".split()
)
# transformers 4 and 5 spell these differently.
_READ = {*_NEEDED, "num_experts", "num_local_experts", "rope_theta", "rope_parameters", "rope_scaling"}
_ROPE_KEYS = {"rope_type", "rope_theta"}
# Keys with one value that this family's operation list and specification implement.
_REQUIRED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}


def _transformer_config(hf: dict[str, Any]) -> tuple[dict[str, Any], ModelArguments]:
    """Map config.json to TransformerConfig fields and model arguments; total and strict.

    Raises:
        ConversionError: a key that changes the maths is not understood, or has a value that is not implemented.
    """
    problems = [f"{k}: not understood" for k in hf if k not in _IGNORED | _READ | set(_REQUIRED)]
    problems += [f"{k}={hf[k]!r}: only {v!r} is implemented" for k, v in _REQUIRED.items() if k in hf and hf[k] != v]
    problems += [f"{k}: missing" for k in _NEEDED if k not in hf]
    if "num_experts" not in hf and "num_local_experts" not in hf:
        problems.append("num_experts or num_local_experts: missing")
    rope = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta")}
    if not rope.get("rope_theta"):
        problems.append("rope_theta: missing, at the top or in rope_parameters")
    elif rope["rope_theta"] != int(rope["rope_theta"]):
        problems.append(f"rope_theta={rope['rope_theta']}: megatron-core takes a whole number")
    if rope.get("rope_type", "default") != "default" or set(rope) - _ROPE_KEYS or hf.get("rope_scaling"):
        problems.append(f"rope scaling {hf.get('rope_scaling') or rope}: only the default RoPE is implemented")
    if hf.get("model_type") != MODEL_TYPE:
        problems.append(f"model_type={hf.get('model_type')!r}: wants {MODEL_TYPE!r}")
    if problems:
        raise ConversionError("config.json:\n" + "\n".join(f"  {p}" for p in problems))
    fields = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf["head_dim"],
        "num_moe_experts": _num_experts(hf),
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_router_topk": hf["num_experts_per_tok"],
        # softmax over the selected logits equals renormalised gates of the full softmax
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "init_method_std": hf["initializer_range"],
    }
    arguments = ModelArguments(
        vocab_size=hf["vocab_size"],
        rotary_base=int(rope["rope_theta"]),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
    )
    return fields, arguments


def _op_list(hf: dict[str, Any], fused_experts: bool) -> list[TensorMap]:
    """Every tensor of the model, once."""
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    ops = [rename("embedding.word_embeddings.weight", "model.embed_tokens.weight", (vocab, hidden), is_vocab=True)]
    for layer in range(hf["num_hidden_layers"]):
        ops += _layer(hf, f"decoder.layers.{layer}.", f"model.layers.{layer}.", fused_experts)
    ops.append(rename("decoder.final_layernorm.weight", "model.norm.weight", (hidden,)))
    if not hf["tie_word_embeddings"]:
        ops.append(rename("output_layer.weight", "lm_head.weight", (vocab, hidden), is_vocab=True))
    return ops


def _num_experts(hf: dict[str, Any]) -> int:
    return int(hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"])


def _layer(hf: dict[str, Any], m: str, h: str, fused_experts: bool) -> list[TensorMap]:
    """Operations of one layer; m and h are the two name prefixes."""
    hidden, ffn, head_dim = hf["hidden_size"], hf["moe_intermediate_size"], hf["head_dim"]
    heads, groups, num_experts = hf["num_attention_heads"], hf["num_key_value_heads"], _num_experts(hf)
    attention, qkv = f"{h}self_attn.", f"{m}self_attention.linear_qkv."
    heads_shape = {"num_heads": heads, "num_groups": groups, "head_dim": head_dim}
    experts = [f"{h}mlp.experts.{e}." for e in range(num_experts)]
    gate_up = [{f"{e}gate_proj.weight": (ffn, hidden), f"{e}up_proj.weight": (ffn, hidden)} for e in experts]
    down = [{f"{e}down_proj.weight": (hidden, ffn)} for e in experts]
    fc1, fc2 = (f"{m}mlp.experts.experts.linear_fc{i}.weight" for i in (1, 2))
    published = [stack(fc1, gate_up), stack(fc2, down)]
    fused = [
        rename(fc1, f"{h}mlp.experts.gate_up_proj", (num_experts, 2 * ffn, hidden)),
        rename(fc2, f"{h}mlp.experts.down_proj", (num_experts, hidden, ffn)),
    ]
    return [
        rename(f"{qkv}layer_norm_weight", f"{h}input_layernorm.weight", (hidden,)),
        fuse_qkv(f"{qkv}weight", [f"{attention}{p}_proj.weight" for p in "qkv"], **heads_shape, trailing=(hidden,)),
        rename(f"{m}self_attention.q_layernorm.weight", f"{attention}q_norm.weight", (head_dim,)),
        rename(f"{m}self_attention.k_layernorm.weight", f"{attention}k_norm.weight", (head_dim,)),
        rename(f"{m}self_attention.linear_proj.weight", f"{attention}o_proj.weight", (hidden, heads * head_dim)),
        rename(f"{m}pre_mlp_layernorm.weight", f"{h}post_attention_layernorm.weight", (hidden,)),
        rename(f"{m}mlp.router.weight", f"{h}mlp.gate.weight", (num_experts, hidden)),
        *(fused if fused_experts else published),
    ]


FAMILY = Family(MODEL_TYPE, _transformer_config, _op_list)
