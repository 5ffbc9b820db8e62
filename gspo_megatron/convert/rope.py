"""RoPE: config.json's rope_theta and rope_scaling (transformers 4) or rope_parameters (5) <-> GPTModel's arguments.

Formulas compared: transformers' modeling_rope_utils.py, megatron-core's rotary_pos_embedding.py (linear and Llama 3
scaling) and yarn_rotary_pos_embedding.py.
"""

from __future__ import annotations

import math

from gspo_megatron.convert.parts import Config, Part, kind_problem

# rope_type -> (keys that it must have, keys that it may have)
_SCALINGS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# megatron-core writes these into RotaryEmbedding._apply_scaling.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_KINDS = {"truncate": bool, "original_max_position_embeddings": int}
"""Of all others: float."""
# The YaRN paper's, which published configurations leave out, and which both libraries take.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0
_DEFAULT_MSCALES = (1.0, 0.0)
"""With them megatron-core's concentration factor is 0.1 ln(factor) + 1, transformers' default attention_factor."""


def rope(*, absent_theta: float | None = None, allow_partial: bool = False) -> Part:
    """The part for a family.

    Args:
        absent_theta: what configurations without rope_theta mean.
        allow_partial: partial_rotary_factor may differ from 1. (Where transformers' model ignores or breaks on it,
            it may not.)
    """

    def to_mcore(hf: Config, problems: list[str]) -> Config:
        return _to_mcore(_merged(hf, absent_theta, problems), allow_partial, problems)

    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    return Part(optional=keys, to_mcore=to_mcore, to_hf=_to_hf)


def _merged(hf: Config, absent_theta: float | None, problems: list[str]) -> Config:
    """Both spellings in one dictionary, without nulls."""
    spelled = {k: hf[k] for k in ("rope_parameters", "rope_scaling") if hf.get(k)}
    if len(spelled) > 1:
        problems.append(f"rope_parameters and rope_scaling: two spellings of the same; remove one of {spelled}")
    merged: Config = {}
    for name, given in spelled.items():
        if not isinstance(given, dict):
            problems.append(f"{name}={given!r}: wants an object")
            continue
        merged |= {k: v for k, v in given.items() if v is not None}
    if "type" in merged:
        old = merged.pop("type")
        if merged.setdefault("rope_type", old) != old:
            problems.append(f"rope type={old!r} and rope_type={merged['rope_type']!r}: two values")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in hf and merged.setdefault(key, hf[key]) != hf[key]:
            problems.append(f"{key}={hf[key]!r}, and {merged[key]!r} in {', '.join(spelled)}: two values")
    if absent_theta is not None:
        merged.setdefault("rope_theta", absent_theta)
    return merged


def _to_mcore(given: Config, allow_partial: bool, problems: list[str]) -> Config:
    rope_type = given.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in _SCALINGS:
        problems.append(f"rope_type={rope_type!r}: only {', '.join(_SCALINGS)} are implemented")
        return {}
    wrong = _key_problems(given, rope_type)
    if wrong:
        problems += wrong
        return {}
    percent = float(given.get("partial_rotary_factor", 1.0))
    if percent != 1.0 and (not allow_partial or rope_type == "yarn"):
        problems.append(f"partial_rotary_factor={percent}: only 1.0 is implemented here")
    values: Config = {"rotary_base": float(given["rope_theta"]), "rotary_percent": percent}
    if rope_type == "linear":
        values["seq_len_interpolation_factor"] = float(given["factor"])
    elif rope_type == "llama3":
        differing = [(k, v) for k, v in _LLAMA3.items() if given[k] != v]
        problems += [f"rope {k}={given[k]!r}: megatron-core has {v} written into it" for k, v in differing]
        values |= {"rope_scaling": True, "rope_scaling_factor": float(given["factor"])}
    elif rope_type == "yarn":
        values |= {"position_embedding_type": "yarn", "yarn": _yarn_to_mcore(given, problems)}
    return values


def _key_problems(given: Config, rope_type: str) -> list[str]:
    needed, optional = _SCALINGS[rope_type]
    known = {"rope_theta", "partial_rotary_factor", *needed, *optional}
    numbers = {k: v for k, v in given.items() if k != "rope_type"}
    problems = [f"rope {k}={v!r}: not understood with {rope_type=}" for k, v in numbers.items() if k not in known]
    if "rope_theta" not in given:
        problems.append("rope_theta: missing, at the top or in rope_parameters")
    problems += [f"rope {k}: missing, {rope_type=} needs it" for k in needed if k not in given]
    for key in sorted(known & numbers.keys()):
        problems += kind_problem(f"rope {key}", numbers[key], _KINDS.get(key, float))
    if not problems and given.get("factor", 1.0) < 1:
        problems.append(f"rope factor={given['factor']}: wants 1 or above")
    return problems


def _yarn_to_mcore(given: Config, problems: list[str]) -> Config:
    factor = float(given["factor"])
    mscales = _DEFAULT_MSCALES
    if "attention_factor" in given:
        mscales = (_mscale_of(factor, given["attention_factor"], problems), 0.0)
    elif given.get("mscale") and given.get("mscale_all_dim"):  # transformers ignores either without the other
        mscales = (float(given["mscale"]), float(given["mscale_all_dim"]))
    return {
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": int(given["original_max_position_embeddings"]),
        "yarn_beta_fast": float(given.get("beta_fast") or _BETA_FAST),
        "yarn_beta_slow": float(given.get("beta_slow") or _BETA_SLOW),
        "yarn_mscale": mscales[0],
        "yarn_mscale_all_dim": mscales[1],
        "yarn_correction_range_round_to_int": given.get("truncate", True),
    }


def _concentration(factor: float, mscale: float) -> float:
    """_yarn_get_mscale of megatron-core and get_mscale of transformers, operation by operation."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mscale_of(factor: float, attention_factor: float, problems: list[str]) -> float:
    """The mscale whose concentration is attention_factor, taken to the 15 digits in which it is written back."""
    if factor > 1:
        return (_to_15_digits(attention_factor) - 1.0) / (0.1 * math.log(factor))
    if attention_factor != 1:
        problems.append(f"rope {attention_factor=}: megatron-core has none but 1 with {factor=}")
    return _DEFAULT_MSCALES[0]


def _to_15_digits(number: float) -> float:
    """So many survive the arithmetic to mscale and back; a float32 cosine takes 8 of them."""
    return float(f"{number:.15g}")


def _to_hf(values: Config) -> Config:
    """As transformers 4 and published configurations spell it, which transformers 5 reads too."""
    scaling: Config | None = None
    if values["position_embedding_type"] == "yarn":
        scaling = _yarn_to_hf(values["yarn"])
    elif values["rope_scaling"]:
        scaling = {"rope_type": "llama3", "factor": values["rope_scaling_factor"], **_LLAMA3}
    elif values["seq_len_interpolation_factor"] is not None:
        scaling = {"rope_type": "linear", "factor": values["seq_len_interpolation_factor"]}
    partial = {} if values["rotary_percent"] == 1.0 else {"partial_rotary_factor": values["rotary_percent"]}
    return {"rope_theta": values["rotary_base"], "rope_scaling": scaling, **partial}


def _yarn_to_hf(yarn: Config) -> Config:
    factor, mscale, mscale_all_dim = (yarn[f"yarn_{k}"] for k in ("rotary_scaling_factor", "mscale", "mscale_all_dim"))
    scaling: Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": yarn["yarn_original_max_position_embeddings"],
    }
    if yarn["yarn_beta_fast"] != _BETA_FAST:
        scaling["beta_fast"] = yarn["yarn_beta_fast"]
    if yarn["yarn_beta_slow"] != _BETA_SLOW:
        scaling["beta_slow"] = yarn["yarn_beta_slow"]
    if mscale_all_dim:
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    elif mscale != _DEFAULT_MSCALES[0]:
        scaling["attention_factor"] = _to_15_digits(_concentration(factor, mscale))
    if not yarn["yarn_correction_range_round_to_int"]:
        scaling["truncate"] = False
    return scaling
