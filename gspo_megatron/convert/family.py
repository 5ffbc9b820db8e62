"""A model family: its config.json <-> megatron-core's arguments, and its table of tensors.

A family is data: pairs of a config.json key and a field, values that never change, and the parts of rope.py and
parts.py. The mapping is total: a key of config.json is mapped, or known not to change the forward pass, or held to the
one value that is implemented; any other is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from gspo_megatron.convert.layers import MoeNames, attention, dense_mlp, embedding, final_norm, head, moe_mlp
from gspo_megatron.convert.ops import ConversionError, TensorMap
from gspo_megatron.convert.parts import Config, Part, kind_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """What GPTModel takes beside its TransformerConfig, under its own names."""

    vocab_size: int
    """Rows of the embedding, without padding."""
    share_embeddings_and_output_weights: bool
    rotary_base: float
    position_embedding_type: str = "rope"
    """rope or yarn."""
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    """Linear RoPE scaling: positions are divided by it."""
    rope_scaling: bool = False
    """Llama 3's scaling, with rope_scaling_factor."""
    rope_scaling_factor: float = 8.0
    yarn: dict[str, Any] | None = None
    """GPTModel reads these from its config object by getattr; TransformerConfig does not declare them."""


_ARGUMENTS = frozenset(f.name for f in fields(ModelArguments))


class Key(NamedTuple):
    """Where a key's value goes, as it is."""

    field: str
    kind: type = int
    """int: above zero. float: also takes a whole number. bool."""
    also: str | None = None
    """A second field with the same value."""


KEYS: Mapping[str, Key] = {
    "vocab_size": Key("vocab_size"),
    "hidden_size": Key("hidden_size"),
    "intermediate_size": Key("ffn_hidden_size"),
    "num_hidden_layers": Key("num_layers"),
    "num_attention_heads": Key("num_attention_heads"),
    "num_key_value_heads": Key("num_query_groups"),
    "head_dim": Key("kv_channels"),
    "rms_norm_eps": Key("layernorm_epsilon", float),
    "initializer_range": Key("init_method_std", float),
    "tie_word_embeddings": Key("share_embeddings_and_output_weights", bool),
}
"""Of every family."""
MOE_KEYS: Mapping[str, Key] = {
    "num_experts": Key("num_moe_experts"),
    "num_experts_per_tok": Key("moe_router_topk"),
    "moe_intermediate_size": Key("moe_ffn_hidden_size"),
}
CONSTANTS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}
"""Fields that a family sets for all its models."""
ONLY: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
"""Keys with one implemented value, which they have where they are absent."""

MAX_LAYERS = 10_000
MAX_PIECES = 2**18
"""Of all layers, key-value heads and experts: tables grow with them. Kimi K2 has 61 layers of 384 experts, 27,000."""

_OFF = {"num_nextn_predict_layers": 0, "use_mrope": False, "rope_interleaved": False}
_HINTS = {
    "num_nextn_predict_layers": "; multi-token prediction (MTP) layers are not implemented, and not dropped in "
    "silence: to go without, set it to 0 and remove their tensors",
}
_IGNORED_BY_REASON = {
    "tokens of the tokenizer and of generation": "bos_token_id eos_token_id pad_token_id unk_token_id "
    "sep_token_id use_cache",
    "who wrote the file, and in which precision": "dtype torch_dtype transformers_version _name_or_path "
    "_model_name_or_path unsloth_version unsloth_fixed",
    "of transformers' own outputs and of other heads": "id2label label2id problem_type return_dict "
    "output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder",
    "losses are the recipe's": "output_router_logits router_aux_loss_coef",
    "no implemented RoPE depends on the longest sequence": "max_position_embeddings",
    "splits matrix products, whose result is the same": "pretraining_tp",
    "read where tensors are read": "quantization_config",
    "SmolLM2 says where it came from and where it runs": "is_llama_config transformers.js_config",
}
_IGNORED = frozenset(key for keys in _IGNORED_BY_REASON.values() for key in keys.split())


def hidden_over_heads(hf: Config) -> int:
    """head_dim of configurations that have none."""
    return int(hf["hidden_size"]) // int(hf["num_attention_heads"])


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture of Hugging Face."""

    model_type: str
    architecture: str
    keys: Mapping[str, Key]
    """config.json key -> field."""
    parts: tuple[Part, ...]
    constants: Mapping[str, Any]
    """Field -> its value in every model."""
    only: Mapping[str, Any] = field(default_factory=lambda: ONLY)
    """config.json key -> the value that is implemented."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """config.json key -> what published configurations mean that lack it; a function is called with config.json."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spelling -> spelling in `keys`."""
    attention: Callable[[Config, str, str], list[TensorMap]] = attention
    moe_names: MoeNames = MoeNames()

    def transformer_config(self, hf: Config) -> tuple[Config, ModelArguments]:
        """Map config.json to TransformerConfig fields and model arguments; total and strict.

        Args:
            hf: config.json.

        Raises:
            ConversionError: a key that changes the maths is missing, is not understood, or has a value that is not
                implemented.
        """
        problems: list[str] = []
        hf = self._with_absent(hf, problems)
        values = dict(self.constants)
        for key, (name, _, also) in self.keys.items():
            values |= {n: hf[key] for n in (name, also) if n is not None}
        _raise_config(_count_problems(values))
        for part in self.parts:
            values |= part.to_mcore(hf, problems)
        _raise_config(problems + _size_problems(values))
        arguments = ModelArguments(**{k: v for k, v in values.items() if k in _ARGUMENTS})
        return {k: v for k, v in values.items() if k not in _ARGUMENTS}, arguments

    def hf_config(self, fields: Config, arguments: ModelArguments) -> Config:
        """The way back: the keys of config.json that decide the maths, as published configurations spell them.

        Args:
            fields: as transformer_config gives them, all of them and no other.
            arguments: as transformer_config gives them.

        Raises:
            ConversionError: fields that this family has not.
        """
        values = {**fields, **asdict(arguments)}
        needed = {*self.constants, *(k.field for k in self.keys.values()), *(f for p in self.parts for f in p.fields)}
        _raise_config([f"{name}: missing" for name in sorted(needed - values.keys())], self._where)
        hf = {"architectures": [self.architecture], "model_type": self.model_type, **self.only}
        hf |= {key: values[pair.field] for key, pair in self.keys.items()}
        for part in self.parts:
            hf |= part.to_hf(values)
        again_fields, again_arguments = self.transformer_config(hf)
        again = {**again_fields, **asdict(again_arguments)}
        problems = [
            f"{name}={values.get(name)!r}: the family has {again.get(name)!r}"
            for name in sorted(values.keys() | again.keys())
            if values.get(name) != again.get(name)
        ]
        _raise_config(problems, self._where)
        return hf

    def op_list(self, hf: Config, *, fused_experts: bool = False) -> list[TensorMap]:
        """Every tensor of the model, once.

        Args:
            hf: config.json.
            fused_experts: the Hugging Face side is what transformers holds in memory (experts.gate_up_proj
                [E, 2 F, H], experts.down_proj [E, H, F]) rather than what is published, a tensor per expert.

        Raises:
            ConversionError: as transformer_config.
        """
        config, arguments = self.transformer_config(hf)
        hidden, vocab = config["hidden_size"], arguments.vocab_size
        is_tied = arguments.share_embeddings_and_output_weights
        pattern = config.get("moe_layer_freq", ["num_moe_experts" in config] * config["num_layers"])
        ops = [embedding(vocab, hidden, is_tied=is_tied)]
        for layer, is_moe in enumerate(pattern):
            m, h = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            ops += self.attention(config, m, h)
            if is_moe:
                ops += moe_mlp(config, m, h, names=self.moe_names, fused_experts=fused_experts)
            else:
                ops += dense_mlp(config, m, h)
        return [*ops, final_norm(hidden), *([] if is_tied else [head(vocab, hidden)])]

    @property
    def _where(self) -> str:
        return f"{self.model_type}'s megatron-core fields"

    def _with_absent(self, given: Config, problems: list[str]) -> Config:
        """config.json without nulls and other spellings, and with what absent keys mean.

        Raises:
            ConversionError: keys that are missing, not understood, or of a wrong value.
        """
        needed = (*self.keys, *(k for p in self.parts for k in p.needed))
        only = {**_OFF, **self.only, "model_type": self.model_type, "architectures": [self.architecture]}
        known = {*needed, *only, *self.aliases, *(k for p in self.parts for k in p.optional), *_IGNORED}
        problems += [f"{k}={v!r}: not understood" for k, v in given.items() if k not in known]
        hf = {k: v for k, v in given.items() if v is not None}
        for other, key in self.aliases.items():
            if other in hf and hf.setdefault(key, hf[other]) != hf[other]:
                problems.append(f"{key}={hf[key]!r}, {other}={hf[other]!r}: two values for one thing")
        problems += [
            f"{k}={hf[k]!r}: only {v!r} is implemented{_HINTS.get(k, '')}"
            for k, v in only.items()
            if k in hf and hf[k] != v
        ]
        problems += [f"{k}: missing" for k in needed if k not in hf and k not in self.absent]
        for key, pair in self.keys.items():
            problems += kind_problem(key, hf[key], pair.kind) if key in hf else []
        _raise_config(problems)
        meant = {k: v(hf) if callable(v) else v for k, v in self.absent.items() if k not in hf}
        return {**hf, **meant}


def _count_problems(values: Config) -> list[str]:
    """Counts that lists are as long as, before there are any."""
    layers, experts, groups = (values.get(k, 0) for k in ("num_layers", "num_moe_experts", "num_query_groups"))
    if layers <= MAX_LAYERS and layers * (experts + groups) <= MAX_PIECES:
        return []
    return [
        f"num_hidden_layers={layers}, with {groups} num_key_value_heads and {experts} experts: no such model is "
        f"known; at most {MAX_LAYERS} layers, and {MAX_PIECES} key-value heads and experts of all layers, are taken"
    ]


def _size_problems(values: Config) -> list[str]:
    """Sizes that fit no model."""
    problems = []
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    if heads % groups:
        problems.append(f"num_attention_heads={heads}: wants a multiple of num_key_value_heads={groups}")
    topk, num_experts = values.get("moe_router_topk", 0), values.get("num_moe_experts", 0)
    if topk > num_experts:
        problems.append(f"num_experts_per_tok={topk}: there are {num_experts} experts")
    if topk == 1 and not values.get("moe_router_pre_softmax", True):
        problems.append("num_experts_per_tok=1 with renormalised gates: they are all 1; megatron-core refuses it")
    return problems


def _raise_config(problems: list[str], where: str = "config.json") -> None:
    if problems:
        raise ConversionError(f"{where}:\n" + "\n".join(f"  {p}" for p in problems))
