"""Mixtral 8x7B and 8x22B: w1 is the gate, w3 up, w2 down. Source: transformers' MixtralConfig, MixtralForCausalLM."""

from __future__ import annotations

from gspo_megatron.convert.family import CONSTANTS, KEYS, ONLY, Family, Key, hidden_over_heads
from gspo_megatron.convert.layers import MoeNames
from gspo_megatron.convert.parts import MIXTRAL_WINDOW
from gspo_megatron.convert.rope import rope

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys={
        **KEYS,
        "intermediate_size": Key("ffn_hidden_size", also="moe_ffn_hidden_size"),
        "num_local_experts": Key("num_moe_experts"),
        "num_experts_per_tok": Key("moe_router_topk"),
    },
    aliases={"num_experts": "num_local_experts"},
    absent={"head_dim": hidden_over_heads},
    constants={**CONSTANTS, "moe_router_pre_softmax": False},  # gates are always renormalised
    only={**ONLY, "router_jitter_noise": 0.0},
    parts=(rope(), MIXTRAL_WINDOW),
    moe_names=MoeNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
