"""Qwen3-MoE: 30B-A3B, 235B-A22B. Source: transformers' Qwen3MoeConfig and Qwen3MoeForCausalLM."""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, MOE_KEYS, ONLY, Family
from gspo_megatron.convert.parts import GATES, QWEN3_MOE_WINDOW, SPARSE_LAYERS
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys={**KEYS, **MOE_KEYS},
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes it so
    constants={**CONSTANTS, "qk_layernorm": True},
    only={**ONLY, "attention_bias": False},  # o_proj would have one, which megatron-core gives to the MLP too
    parts=(rope(), GATES, SPARSE_LAYERS, QWEN3_MOE_WINDOW),
)
