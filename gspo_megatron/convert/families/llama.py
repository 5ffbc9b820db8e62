"""Llama 1 to 3.3, SmolLM2 and others of their shape. Source: transformers' LlamaConfig and LlamaForCausalLM."""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, Family, hidden_over_heads
from gspo_megatron.convert.parts import BIASES
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=KEYS,
    # Configurations older than these keys, Llama 1's and 2's, have neither grouped queries nor another base.
    absent={"head_dim": hidden_over_heads, "num_key_value_heads": lambda hf: hf["num_attention_heads"]},
    constants={k: v for k, v in CONSTANTS.items() if k != "add_bias_linear"},
    parts=(rope(absent_theta=10000.0), BIASES),
)
