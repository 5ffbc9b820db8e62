"""Configurations that tests share: published ones as they are published, and tiny ones of every family.

The tiny ones have odd shapes: 12 query heads in 4 groups, a vocabulary of 71, head_dim that is not hidden / heads
where the family allows it, 6 experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3_30B_A3B_DIR = Path(__file__).parents[1] / "recipes" / "qwen3-30b-a3b"
QWEN3_30B_A3B: dict[str, Any] = json.loads((_QWEN3_30B_A3B_DIR / "config.json").read_text())
QWEN3_235B_A22B: dict[str, Any] = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN15_MOE_A27B: dict[str, Any] = json.loads("""
{
  "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
  "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
  "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
  "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": false, "output_router_logits": false,
  "router_aux_loss_coef": 0.001
}
""")
QWEN25_05B: dict[str, Any] = json.loads("""
{
  "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
  "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
  "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
  "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
  "vocab_size": 151936
}
""")
LLAMA_32_1B: dict[str, Any] = json.loads("""
{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
  "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
  "vocab_size": 128256
}
""")
LLAMA_2_7B: dict[str, Any] = json.loads("""
{
  "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
  "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000
}
""")
SMOLLM2_135M: dict[str, Any] = json.loads("""
{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
  "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152
}
""")
MIXTRAL_8X7B: dict[str, Any] = json.loads("""
{
  "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
  "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
  "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
  "use_cache": true, "vocab_size": 32000
}
""")
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235_093_634_560),
    "Qwen1.5-MoE-A2.7B": (QWEN15_MOE_A27B, 14_315_784_192),
    "Qwen2.5-0.5B": (QWEN25_05B, 494_032_768),
    "Llama-3.2-1B": (LLAMA_32_1B, 1_235_814_400),
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
}
"""config.json and the number of parameters that the model card or its index gives."""

_DENSE: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_MOE: dict[str, Any] = _DENSE | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Of these two families transformers has no head_dim: it is hidden / heads.
_QWEN2: dict[str, Any] = {k: v for k, v in _DENSE.items() if k != "head_dim"} | {"hidden_size": 72}
_QWEN2_MOE: dict[str, Any] = {k: v for k, v in _MOE.items() if k != "head_dim"} | {
    "model_type": "qwen2_moe",
    "hidden_size": 72,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 28,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MOE | {"model_type": "qwen3_moe"},
    "qwen3_moe_sparse": _MOE
    | {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
    "qwen3_moe_mlp_only": _MOE | {"model_type": "qwen3_moe", "mlp_only_layers": [0], "rope_parameters": _YARN},
    "qwen3_moe_window": _MOE | {"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 7},
    "qwen3": _DENSE | {"model_type": "qwen3", "rope_parameters": _YARN | {"attention_factor": 1.25}},
    "qwen3_tied_window": _DENSE
    | {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
    },
    "llama": _DENSE | {"model_type": "llama", "rope_parameters": _LLAMA3},
    "llama_tied": {k: v for k, v in _DENSE.items() if k != "head_dim"}
    | {"model_type": "llama", "hidden_size": 96, "tie_word_embeddings": True, "rope_parameters": _LINEAR},
    "llama_biases": _DENSE
    | {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": _YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    },
    "qwen2": _QWEN2 | {"model_type": "qwen2"},
    "qwen2_tied_window": _QWEN2
    | {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": _ALTERNATING,
    },
    "qwen2_moe": _QWEN2_MOE,
    "qwen2_moe_sparse": _QWEN2_MOE
    | {
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": _ALTERNATING,
    },
    "mixtral": {k: v for k, v in _DENSE.items() if k != "head_dim"}
    | {"model_type": "mixtral", "hidden_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2},
    "mixtral_tied_window": _DENSE
    | {
        "model_type": "mixtral",
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
        "sliding_window": 5,
        "rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    },
}
"""config.json of models that transformers builds in a moment; the keys that these leave out are neutral."""
