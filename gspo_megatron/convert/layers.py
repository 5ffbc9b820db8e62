"""The tables that families share: blocks of a decoder, Megatron's Transformer Engine names <-> Hugging Face's.

Shapes come from the TransformerConfig fields, not from config.json, whose keys differ between families. `m` and `h`
are a layer's two name prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_megatron.convert.ops import TensorMap, fuse_qkv, fuse_rows, rename, stack

Fields = dict[str, Any]


def embedding(vocab_size: int, hidden_size: int, *, is_tied: bool) -> TensorMap:
    """Token embedding; where the head is tied to it, a directory may hold the head all the same."""
    return rename(
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
        (vocab_size, hidden_size),
        is_vocab=True,
        hf_copies=("lm_head.weight",) if is_tied else (),
    )


def final_norm(hidden_size: int) -> TensorMap:
    """Norm before the head."""
    return rename("decoder.final_layernorm.weight", "model.norm.weight", (hidden_size,))


def head(vocab_size: int, hidden_size: int) -> TensorMap:
    """An untied head."""
    return rename("output_layer.weight", "lm_head.weight", (vocab_size, hidden_size), is_vocab=True)


def attention(fields: Fields, m: str, h: str) -> list[TensorMap]:
    """Grouped-query attention with its input norm; biases and q/k norms as the fields say."""
    hidden, head_dim = fields["hidden_size"], fields["kv_channels"]
    heads = {
        "num_heads": fields["num_attention_heads"],
        "num_groups": fields["num_query_groups"],
        "head_dim": head_dim,
    }
    qkv, out, hf = f"{m}self_attention.linear_qkv.", f"{m}self_attention.linear_proj.", f"{h}self_attn."
    ops = [
        rename(f"{qkv}layer_norm_weight", f"{h}input_layernorm.weight", (hidden,)),
        fuse_qkv(f"{qkv}weight", [f"{hf}{p}_proj.weight" for p in "qkv"], **heads, trailing=(hidden,)),
    ]
    if fields["add_qkv_bias"] or fields["add_bias_linear"]:
        ops.append(fuse_qkv(f"{qkv}bias", [f"{hf}{p}_proj.bias" for p in "qkv"], **heads, trailing=()))
    if fields["qk_layernorm"]:
        names = {f"{m}self_attention.{p}_layernorm.weight": f"{hf}{p}_norm.weight" for p in "qk"}
        ops += [rename(mcore_name, hf_name, (head_dim,)) for mcore_name, hf_name in names.items()]
    ops.append(rename(f"{out}weight", f"{hf}o_proj.weight", (hidden, heads["num_heads"] * head_dim)))
    if fields["add_bias_linear"]:
        ops.append(rename(f"{out}bias", f"{hf}o_proj.bias", (hidden,)))
    return ops


def dense_mlp(fields: Fields, m: str, h: str) -> list[TensorMap]:
    """SwiGLU MLP with the norm before it, which Transformer Engine fuses into linear_fc1."""
    hidden, ffn = fields["hidden_size"], fields["ffn_hidden_size"]
    ops = [
        rename(f"{m}mlp.linear_fc1.layer_norm_weight", f"{h}post_attention_layernorm.weight", (hidden,)),
        *_swiglu(f"{m}mlp.", f"{h}mlp.", hidden, ffn),
    ]
    if fields["add_bias_linear"]:
        ops.append(fuse_rows(f"{m}mlp.linear_fc1.bias", {f"{h}mlp.{p}_proj.bias": (ffn,) for p in ("gate", "up")}))
        ops.append(rename(f"{m}mlp.linear_fc2.bias", f"{h}mlp.down_proj.bias", (hidden,)))
    return ops


def _swiglu(m: str, h: str, hidden: int, ffn: int) -> list[TensorMap]:
    return [
        fuse_rows(f"{m}linear_fc1.weight", {f"{h}{p}_proj.weight": (ffn, hidden) for p in ("gate", "up")}),
        rename(f"{m}linear_fc2.weight", f"{h}down_proj.weight", (hidden, ffn)),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeNames:
    """What published checkpoints call a layer's MoE block and its parts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


def moe_mlp(fields: Fields, m: str, h: str, *, names: MoeNames, fused_experts: bool) -> list[TensorMap]:
    """Router, routed experts, shared expert where there is one, and the norm before them.

    Args:
        fields: of TransformerConfig.
        m: Megatron's prefix.
        h: Hugging Face's.
        names: of the published form.
        fused_experts: the Hugging Face side is what transformers holds in memory, which has one set of names.
    """
    hidden, num_experts = fields["hidden_size"], fields["num_moe_experts"]
    block = f"{h}mlp." if fused_experts else f"{h}{names.block}."
    ops = [
        rename(f"{m}pre_mlp_layernorm.weight", f"{h}post_attention_layernorm.weight", (hidden,)),
        rename(f"{m}mlp.router.weight", f"{block}gate.weight", (num_experts, hidden)),
        *_experts(fields, f"{m}mlp.experts.experts.", f"{block}experts.", None if fused_experts else names),
    ]
    shared_ffn = fields.get("moe_shared_expert_intermediate_size")
    if shared_ffn is not None:
        ops += _swiglu(f"{m}mlp.shared_experts.", f"{block}{names.shared}.", hidden, shared_ffn)
    if fields.get("moe_shared_expert_gate"):
        ops.append(rename(f"{m}mlp.shared_experts.gate_weight", f"{block}{names.shared_gate}.weight", (1, hidden)))
    return ops


def _experts(fields: Fields, m: str, h: str, names: MoeNames | None) -> list[TensorMap]:
    hidden, ffn, num_experts = fields["hidden_size"], fields["moe_ffn_hidden_size"], fields["num_moe_experts"]
    if names is None:
        return [
            rename(f"{m}linear_fc1.weight", f"{h}gate_up_proj", (num_experts, 2 * ffn, hidden)),
            rename(f"{m}linear_fc2.weight", f"{h}down_proj", (num_experts, hidden, ffn)),
        ]
    experts = [f"{h}{e}." for e in range(num_experts)]
    gate_up = [{f"{e}{p}.weight": (ffn, hidden) for p in (names.gate, names.up)} for e in experts]
    down = [{f"{e}{names.down}.weight": (hidden, ffn)} for e in experts]
    return [stack(f"{m}linear_fc1.weight", gate_up), stack(f"{m}linear_fc2.weight", down)]
