"""Parts of config.json that are understood together: what a table of pairs cannot say.

A part reads its keys into values (TransformerConfig fields and GPTModel's arguments) and writes them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number above zero", lambda v: type(v) is int and v > 0),
    float: ("a number, zero or above", lambda v: type(v) in (int, float) and 0 <= v < math.inf),
    bool: ("true or false", lambda v: type(v) is bool),
}


def kind_problem(key: str, value: Any, kind: type) -> list[str]:
    """What is wrong with a value of config.json, as a list of at most one message."""
    wanted, is_good = _KINDS[kind]
    return [] if is_good(value) else [f"{key}={value!r}: wants {wanted}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Some keys of config.json, and the values that they make together."""

    needed: tuple[str, ...] = ()
    """Keys without which the model is not known."""
    optional: tuple[str, ...] = ()
    """Keys that are read where they are."""
    fields: tuple[str, ...] = ()
    """Values that to_mcore always makes, and to_hf reads."""
    to_mcore: Callable[[Config, list[str]], Config]
    """(config.json without nulls and with every needed key, list that takes problems) -> values."""
    to_hf: Callable[[Config], Config]
    """values -> keys of config.json."""


def _gates_to_mcore(hf: Config, problems: list[str]) -> Config:
    problems += kind_problem("norm_topk_prob", hf["norm_topk_prob"], bool)
    # softmax over the selected logits equals renormalised gates of the full softmax
    return {"moe_router_pre_softmax": not hf["norm_topk_prob"]}


GATES = Part(
    needed=("norm_topk_prob",),
    fields=("moe_router_pre_softmax",),
    to_mcore=_gates_to_mcore,
    to_hf=lambda values: {"norm_topk_prob": not values["moe_router_pre_softmax"]},
)
"""Whether the gates of the selected experts sum to 1."""


def _biases_to_mcore(hf: Config, problems: list[str]) -> Config:
    attention, mlp = hf.get("attention_bias", False), hf.get("mlp_bias", False)
    problems += kind_problem("attention_bias", attention, bool) + kind_problem("mlp_bias", mlp, bool)
    if attention != mlp:
        problems.append(
            f"attention_bias={attention}, mlp_bias={mlp}: megatron-core has biases in all linear layers or in none"
        )
    return {"add_bias_linear": attention}


BIASES = Part(
    optional=("attention_bias", "mlp_bias"),
    fields=("add_bias_linear",),
    to_mcore=_biases_to_mcore,
    to_hf=lambda values: {"attention_bias": values["add_bias_linear"], "mlp_bias": values["add_bias_linear"]},
)
"""Llama's. Llama 1 and 2 have neither key, and no biases."""


def _sparse_to_mcore(hf: Config, problems: list[str]) -> Config:
    step, dense = hf["decoder_sparse_step"], hf.get("mlp_only_layers", [])
    wrong = kind_problem("decoder_sparse_step", step, int)
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        wrong.append(f"mlp_only_layers={dense!r}: wants a list of layer numbers")
    if wrong:
        problems += wrong
        return {}
    pattern = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    if not any(pattern):
        problems.append(f"decoder_sparse_step={step}, mlp_only_layers={dense}: leave no layer with experts")
    # Never megatron-core's number, which counts from layer 0, as decoder_sparse_step does from layer step - 1.
    return {} if all(pattern) else {"moe_layer_freq": pattern}


def _sparse_to_hf(values: Config) -> Config:
    pattern = values.get("moe_layer_freq", [1] * values["num_layers"])
    step = math.gcd(*(i + 1 for i, has_experts in enumerate(pattern) if has_experts))
    dense = [i for i, has_experts in enumerate(pattern) if not has_experts and (i + 1) % step == 0]
    return {"decoder_sparse_step": step, "mlp_only_layers": dense}


SPARSE_LAYERS = Part(
    needed=("decoder_sparse_step",), optional=("mlp_only_layers",), to_mcore=_sparse_to_mcore, to_hf=_sparse_to_hf
)
"""Which layers have experts. Qwen1.5-MoE's configuration has no mlp_only_layers: none."""


def _window_fields(width: int, slides: list[bool]) -> Config:
    """transformers counts the keys that a query sees, itself included; megatron-core those to its left."""
    if not any(slides):
        return {}
    skip = {} if all(slides) else {"window_attn_skip_freq": [int(s) for s in slides]}
    return {"window_size": (width - 1, 0), **skip}


def _slides(values: Config) -> list[bool]:
    """Which layers have a window."""
    if "window_size" not in values:
        return [False] * values["num_layers"]
    return [bool(s) for s in values.get("window_attn_skip_freq", [1] * values["num_layers"])]


def _width(values: Config) -> int:
    left, _ = values["window_size"]
    return int(left) + 1


def _mixtral_window_to_mcore(hf: Config, problems: list[str]) -> Config:
    if "sliding_window" not in hf:
        return {}
    wrong = kind_problem("sliding_window", hf["sliding_window"], int)
    problems += wrong
    return {} if wrong else _window_fields(hf["sliding_window"], [True] * hf["num_hidden_layers"])


MIXTRAL_WINDOW = Part(
    optional=("sliding_window",),
    to_mcore=_mixtral_window_to_mcore,
    to_hf=lambda values: {"sliding_window": _width(values) if any(_slides(values)) else None},
)
"""Every layer slides where there is a sliding_window."""


def _qwen_window(
    slides_of: Callable[[Config, list[str]], list[bool]], layers_to_hf: Callable[[list[bool]], Config]
) -> Part:
    """Windows behind use_sliding_window, in layers that the family chooses its own way."""

    def to_mcore(hf: Config, problems: list[str]) -> Config:
        is_used, types = hf.get("use_sliding_window", False), hf.get("layer_types", [])
        wrong = kind_problem("use_sliding_window", is_used, bool) + _layer_types_problem(hf)
        if not wrong and not is_used:
            if "sliding_attention" in types:
                wrong.append("layer_types has sliding_attention, use_sliding_window is not true")
            if "use_sliding_window" not in hf and hf.get("sliding_window"):
                wrong.append(f"use_sliding_window: missing beside sliding_window={hf['sliding_window']!r}")
        elif not wrong:
            wrong += kind_problem("sliding_window", hf.get("sliding_window"), int)
            slides = slides_of(hf, wrong)
        problems += wrong
        return _window_fields(hf["sliding_window"], slides) if is_used and not wrong else {}

    def to_hf(values: Config) -> Config:
        slides = _slides(values)
        if not any(slides):
            return {"use_sliding_window": False}
        return {"use_sliding_window": True, "sliding_window": _width(values), **layers_to_hf(slides)}

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return Part(optional=keys, to_mcore=to_mcore, to_hf=to_hf)


def _layer_types_problem(hf: Config) -> list[str]:
    types = hf.get("layer_types")
    if types is None:
        return []
    is_good = isinstance(types, list) and len(types) == hf["num_hidden_layers"]
    if is_good and set(types) <= {"full_attention", "sliding_attention"}:
        return []
    return [f"layer_types={types!r}: wants full_attention or sliding_attention for each layer"]


def _slides_from_a_layer(hf: Config, problems: list[str]) -> list[bool]:
    if "layer_types" in hf:
        return [t == "sliding_attention" for t in hf["layer_types"]]
    first = hf.get("max_window_layers")
    if type(first) is not int or first < 0:
        problems.append(f"max_window_layers={first!r}: wants the number of the first layer that slides")
        return []
    return [i >= first for i in range(hf["num_hidden_layers"])]


def _from_a_layer_to_hf(slides: list[bool]) -> Config:
    if slides == sorted(slides):
        return {"max_window_layers": slides.index(True)}
    return {"layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}


def _slides_by_type(hf: Config, problems: list[str]) -> list[bool]:
    if "layer_types" not in hf:
        problems.append("layer_types: missing; versions of transformers differ in which layers slide without it")
    return [t == "sliding_attention" for t in hf.get("layer_types", [])]


def _slides_everywhere(hf: Config, problems: list[str]) -> list[bool]:
    for key, neutral in (("max_window_layers", 0), ("layer_types", ["sliding_attention"] * hf["num_hidden_layers"])):
        if hf.get(key, neutral) != neutral:
            problems.append(f"{key}={hf[key]!r}: wants {neutral!r}; transformers 5 slides everywhere, 4 does not")
    return [True] * hf["num_hidden_layers"]


QWEN_DENSE_WINDOW = _qwen_window(_slides_from_a_layer, _from_a_layer_to_hf)
"""Qwen2's and Qwen3's: the layers of layer_types, or those from max_window_layers on."""
QWEN2_MOE_WINDOW = _qwen_window(
    _slides_by_type, lambda slides: {"layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}
)
QWEN3_MOE_WINDOW = _qwen_window(_slides_everywhere, lambda slides: {"max_window_layers": 0})
