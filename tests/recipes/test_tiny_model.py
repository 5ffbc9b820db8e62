"""The committed tiny model: what the tool writes, and what transformers reads from it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

REPO = Path(__file__).parents[2]
HF_DIR = REPO / "recipes" / "tiny-moe"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def test_tool_writes_the_committed_bytes_and_no_weights(tmp_path):
    tool = REPO / "tools" / "make_tiny_model.py"
    subprocess.run([sys.executable, str(tool), "--out-dir", str(tmp_path)], check=True, timeout=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert sorted(path.name for path in HF_DIR.iterdir()) == FILES
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (HF_DIR / name).read_bytes(), name


def test_config_is_the_recipes_model():
    config = AutoConfig.from_pretrained(HF_DIR)
    assert config.model_type == "qwen3_moe"
    assert config.architectures == ["Qwen3MoeForCausalLM"]
    assert config.rope_parameters == {"rope_theta": 1.0e6, "rope_type": "default"}
    want = {
        "vocab_size": 48,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "initializer_range": 0.05,
        "rms_norm_eps": 1.0e-6,
        "hidden_act": "silu",
        "router_aux_loss_coef": 0.0,
        "dtype": torch.float32,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {name: getattr(config, name) for name in want} == want


def test_model_has_a_million_parameters():
    # Per layer: attention 96 (96 + 48 + 48 + 96), QK-norm 2 x 24, experts 8 x 3 x 96 x 96, router, norms 2 x 96.
    layer = 96 * 288 + 48 + 8 * 3 * 96 * 96 + 8 * 96 + 2 * 96
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(AutoConfig.from_pretrained(HF_DIR))
    assert sum(p.numel() for p in model.parameters()) == 4 * layer + 2 * 48 * 96 + 96 == 1_008_672


@pytest.mark.parametrize("load", [AutoTokenizer.from_pretrained, PreTrainedTokenizerFast.from_pretrained])
def test_tokenizer_has_one_id_per_character_and_plain_concatenation(load):
    tokenizer = load(HF_DIR)
    assert len(tokenizer) == AutoConfig.from_pretrained(HF_DIR).vocab_size == 48
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    characters = [tokenizer.decode([i]) for i in range(2, 48)]
    assert sorted(characters) == sorted("0123456789abcdefghijklmnopqrstuvwxyz,>- .+*/=:")
    text = "".join(characters) + "  a , b . c - 7 : = >  "
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert ids[:46] == list(range(2, 48))
    assert tokenizer.decode(ids) == text


def test_eos_decodes_to_nothing_when_special_tokens_are_skipped():
    tokenizer = AutoTokenizer.from_pretrained(HF_DIR)
    assert tokenizer.decode([4, 38, 1], skip_special_tokens=True) == "2,"
    assert tokenizer.decode([4, 38, 1]) == "2,<|eos|>"


def test_generation_config_truncates_nothing():
    config = GenerationConfig.from_pretrained(HF_DIR)
    assert (config.eos_token_id, config.pad_token_id, config.temperature) == (1, 0, 1.0)
    assert (config.top_k, config.top_p, config.min_p) == (None, None, None)
