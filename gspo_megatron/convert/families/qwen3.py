"""Qwen3, dense: 0.6B (tied) to 32B (untied). Source: transformers' Qwen3Config and Qwen3ForCausalLM."""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, ONLY, Family
from gspo_megatron.convert.parts import QWEN_DENSE_WINDOW
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=KEYS,
    constants={**CONSTANTS, "qk_layernorm": True},
    only={**ONLY, "attention_bias": False},  # o_proj would have one, which megatron-core gives to the MLP too
    parts=(rope(), QWEN_DENSE_WINDOW),
)
