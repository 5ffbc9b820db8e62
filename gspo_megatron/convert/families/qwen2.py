"""Qwen2 and Qwen2.5, dense: biases on q, k and v. Source: transformers' Qwen2Config and Qwen2ForCausalLM."""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, Family, hidden_over_heads
from gspo_megatron.convert.parts import QWEN_DENSE_WINDOW
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=KEYS,
    absent={"head_dim": hidden_over_heads},
    constants={**CONSTANTS, "add_qkv_bias": True},
    parts=(rope(), QWEN_DENSE_WINDOW),
)
