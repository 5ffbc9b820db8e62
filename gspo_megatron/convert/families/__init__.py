"""One short file per model family; its table and mapping are read in both directions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gspo_megatron.convert.families import llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from gspo_megatron.convert.family import Family
from gspo_megatron.convert.ops import ConversionError, TensorMap, check_table, raise_problems

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe)
}


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family that config.json names.

    Raises:
        ConversionError: an unknown model_type.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConversionError(f"config.json: model_type={model_type!r}: known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def table_for(hf_config: dict[str, Any], found: Iterable[str]) -> list[TensorMap]:
    """The table for the tensors that a directory has: its experts one by one, or fused as transformers holds them.

    Args:
        hf_config: config.json.
        found: the directory's tensor names.

    Raises:
        ConversionError: a model that is not implemented.
    """
    fused_experts = any(name.endswith(".experts.gate_up_proj") for name in found)
    table = family_of(hf_config).op_list(hf_config, fused_experts=fused_experts)
    check_table(table)
    return table


def check_same_model(ours: dict[str, Any], theirs: dict[str, Any], where: Path) -> None:
    """Two config.json say the same to Megatron, whatever else they hold.

    Raises:
        ConversionError: lists the fields that differ.
    """
    (a, a_arguments), (b, b_arguments) = (family_of(hf).transformer_config(hf) for hf in (ours, theirs))
    a, b = a | asdict(a_arguments), b | asdict(b_arguments)
    different = [f"{k}: {a.get(k)!r}, there {b.get(k)!r}" for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    raise_problems(f"{where}: its config.json describes another model", different)
