#!/usr/bin/env python
"""Write the tiny Qwen3-MoE of the CPU recipe: config.json, generation_config.json and a character tokenizer.

There are no weights: the recipe draws them from its seed. The same command writes the same bytes.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

PAD_TOKEN, EOS_TOKEN = "<|pad|>", "<|eos|>"

# number_sorting uses the digits, `a`, `d`, `,`, `>` and, below zero, `-`. The other characters are for tasks that
# spell words or arithmetic; they bring the vocabulary to 48, which tensor parallel 2, 4, 6 and 8 divide.
CHARACTERS = string.digits + string.ascii_lowercase + ",>- .+*/=:"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; decoding joins them without anything between."""
    vocab = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Qwen3-MoE's block, small: GQA, QK-norm, RoPE, softmax top-2 of 8 experts, renormalised. 1.0 M parameters."""
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="float32",
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        attention_bias=False,
        max_position_embeddings=128,
        rope_theta=1.0e6,
        rms_norm_eps=1.0e-6,
        hidden_act="silu",
        intermediate_size=96,  # of dense layers, of which there are none
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.0,
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def main() -> None:
    """Parse the command line and write the directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, default=Path("recipes/tiny-moe"), help="directory to write")
    out_dir = parser.parse_args().out_dir
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(out_dir)
    make_config(tokenizer).save_pretrained(out_dir)
    GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(out_dir)


if __name__ == "__main__":
    main()
