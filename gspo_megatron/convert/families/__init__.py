"""One short file per model family; its table and mapping are read in both directions."""

from __future__ import annotations

from typing import Any

from gspo_megatron.convert.families import llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from gspo_megatron.convert.family import Family
from gspo_megatron.convert.ops import ConversionError

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe)
}


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family that config.json names.

    Raises:
        ConversionError: an unknown model_type.
    """
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ConversionError(f"config.json: model_type={model_type!r}: known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
