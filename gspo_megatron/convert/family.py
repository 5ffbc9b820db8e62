"""A model family: its config.json <-> megatron-core arguments, and its table of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo_megatron.convert.ops import TensorMap

Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """What GPTModel takes beside its TransformerConfig, under its own names."""

    vocab_size: int
    """Rows of the embedding, without padding."""
    share_embeddings_and_output_weights: bool
    position_embedding_type: str = "rope"
    """rope or yarn."""
    rotary_base: int = 10000
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    """Linear RoPE scaling: positions are divided by it."""
    rope_scaling: bool = False
    """Llama 3's scaling, with rope_scaling_factor."""
    rope_scaling_factor: float = 8.0
    yarn: dict[str, Any] | None = None
    """GPTModel reads these from its config object by getattr; TransformerConfig does not declare them."""


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face."""

    model_type: str
    map_config: Callable[[Config], tuple[Config, ModelArguments]]
    table: Callable[[Config, bool], list[TensorMap]]

    def transformer_config(self, hf: Config) -> tuple[Config, ModelArguments]:
        """Map config.json to TransformerConfig fields and model arguments; total and strict.

        Raises:
            ConversionError: a key that changes the maths is not understood, or has a value that is not implemented.
        """
        return self.map_config(hf)

    def op_list(self, hf: Config, *, fused_experts: bool = False) -> list[TensorMap]:
        """Every tensor of the model, once.

        Args:
            hf: config.json.
            fused_experts: the Hugging Face side is what transformers holds in memory (experts.gate_up_proj
                [E, 2 F, H], experts.down_proj [E, H, F]) rather than what is published, a tensor per expert.
        """
        return self.table(hf, fused_experts)
