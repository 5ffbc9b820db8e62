"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B: a shared expert behind a sigmoid gate, biases on q, k and v.

Source: transformers' Qwen2MoeConfig and Qwen2MoeForCausalLM.
"""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, MOE_KEYS, Family, Key, hidden_over_heads
from gspo_megatron.convert.parts import GATES, QWEN2_MOE_WINDOW, SPARSE_LAYERS
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    keys={
        **KEYS,
        **MOE_KEYS,
        "shared_expert_intermediate_size": Key("moe_shared_expert_intermediate_size"),
        "qkv_bias": Key("add_qkv_bias", bool),
    },
    aliases={"num_local_experts": "num_experts"},
    absent={"head_dim": hidden_over_heads, "qkv_bias": True},  # the models are older than the keys
    constants={**{k: v for k, v in CONSTANTS.items() if k != "add_qkv_bias"}, "moe_shared_expert_gate": True},
    parts=(rope(), GATES, SPARSE_LAYERS, QWEN2_MOE_WINDOW),
)
