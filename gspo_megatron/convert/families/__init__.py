"""One short operation list per model family, written once for both directions."""

from __future__ import annotations

from typing import Any

from gspo_megatron.convert.families import qwen3_moe
from gspo_megatron.convert.family import Family
from gspo_megatron.convert.ops import ConversionError

FAMILIES = {family.model_type: family for family in (qwen3_moe.FAMILY,)}


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family that config.json names.

    Raises:
        ConversionError: an unknown model_type.
    """
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ConversionError(f"config.json: model_type={model_type!r}: known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
