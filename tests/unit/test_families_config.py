"""config.json <-> megatron-core's fields and arguments: total, strict, and the same model on the way back."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from gspo_megatron.convert.families import FAMILIES, family_of
from gspo_megatron.convert.family import Family, Key, ModelArguments
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.convert.rope import rope
from tests.models import LLAMA_2_7B, LLAMA_32_1B, PUBLISHED, QWEN3_30B_A3B, QWEN25_05B, TINY_CONFIGS

CONFIGS = {**TINY_CONFIGS, **{name: config for name, (config, _) in PUBLISHED.items()}}


def mapped(config: dict[str, Any]) -> tuple[dict[str, Any], ModelArguments]:
    return family_of(config).transformer_config(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_and_there_is_the_same_model(name: str) -> None:
    family = family_of(CONFIGS[name])
    there = family.transformer_config(CONFIGS[name])
    assert family.transformer_config(family.hf_config(*there)) == there


@pytest.mark.parametrize("name", CONFIGS)
def test_config_that_comes_back_is_the_same_model_to_transformers(name: str) -> None:
    config = CONFIGS[name]
    family = family_of(config)
    assert to_transformers(family.hf_config(*family.transformer_config(config))) == to_transformers(config)


def to_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers understands, without what does not reach the forward pass."""
    from transformers import AutoConfig

    understood = AutoConfig.for_model(**deepcopy(config)).to_dict()  # it writes into nested keys
    ignored = (
        "architectures bos_token_id eos_token_id pad_token_id dtype transformers_version _name_or_path use_cache "
        "max_position_embeddings pretraining_tp output_router_logits router_aux_loss_coef is_llama_config use_mrope "
        "rope_interleaved transformers.js_config max_window_layers".split()  # layer_types has what this one says
    )
    understood = {k: v for k, v in understood.items() if k not in ignored}
    heads = understood["num_attention_heads"]
    understood["head_dim"] = understood.get("head_dim") or understood["hidden_size"] // heads
    if not understood.get("use_sliding_window", True):
        understood.pop("sliding_window")
    return understood


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_comes_back_key_for_key(name: str) -> None:
    config, _ = PUBLISHED[name]
    family = family_of(config)
    back = family.hf_config(*family.transformer_config(config))
    assert {k: v for k, v in config.items() if k in back} == {k: v for k, v in back.items() if k in config}
    of_the_maths = set(config) - set(back)
    assert of_the_maths <= set(
        "bos_token_id eos_token_id pad_token_id max_position_embeddings max_window_layers sliding_window torch_dtype "
        "transformers_version use_cache output_router_logits router_aux_loss_coef pretraining_tp use_mrope "
        "_name_or_path is_llama_config rope_interleaved transformers.js_config".split()
    )


def test_published_30b_config_is_understood_in_full() -> None:
    fields, arguments = mapped(QWEN3_30B_A3B)
    assert fields == {
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 6144,
        "num_attention_heads": 32,
        "num_query_groups": 4,
        "kv_channels": 128,
        "num_moe_experts": 128,
        "moe_ffn_hidden_size": 768,
        "moe_router_topk": 8,
        "moe_router_pre_softmax": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "init_method_std": 0.02,
    }
    assert (arguments.vocab_size, arguments.rotary_base, arguments.rotary_percent) == (151936, 1e6, 1.0)
    assert arguments.share_embeddings_and_output_weights is False and arguments.yarn is None
    assert (arguments.position_embedding_type, arguments.seq_len_interpolation_factor) == ("rope", None)


def test_both_spellings_of_transformers_give_the_same_arguments() -> None:
    newer = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "rope_scaling", "num_experts")}
    newer |= {"num_local_experts": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert mapped(newer) == mapped(QWEN3_30B_A3B)
    other = newer | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert mapped(other)[1].rotary_base == 5e5
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    older = mapped(QWEN3_30B_A3B | {"rope_scaling": yarn})
    assert older == mapped(newer | {"rope_parameters": yarn | {"rope_theta": 1e6}})
    assert older[1].yarn is not None and older[1].position_embedding_type == "yarn"


def test_fields_of_what_a_config_may_say() -> None:
    fields, _ = mapped(QWEN3_30B_A3B | {"norm_topk_prob": False})
    assert fields["moe_router_pre_softmax"] is True, "gates that are not renormalised come from the full softmax"
    fields, _ = mapped(TINY_CONFIGS["qwen3_moe_sparse"])
    assert (fields["moe_layer_freq"], fields["ffn_hidden_size"]) == ([0, 1, 0, 1], 52)
    assert mapped(TINY_CONFIGS["qwen2_moe_sparse"])[0]["moe_layer_freq"] == [0, 1, 0, 0]
    assert mapped(TINY_CONFIGS["qwen3_moe_mlp_only"])[0]["moe_layer_freq"] == [0, 1, 1, 1]
    assert "moe_layer_freq" not in mapped(TINY_CONFIGS["qwen3_moe"])[0]
    fields, _ = mapped(TINY_CONFIGS["qwen3_tied_window"])
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((6, 0), [0, 0, 1, 1])
    fields, _ = mapped(TINY_CONFIGS["qwen2_tied_window"])
    assert (fields["window_size"], fields["window_attn_skip_freq"]) == ((4, 0), [1, 0, 1, 0])
    for name in ("qwen3_moe_window", "mixtral_tied_window"):
        fields, _ = mapped(TINY_CONFIGS[name])
        assert "window_size" in fields and "window_attn_skip_freq" not in fields
    fields, _ = mapped(TINY_CONFIGS["mixtral"])
    assert (fields["moe_ffn_hidden_size"], fields["moe_router_pre_softmax"], fields["num_moe_experts"]) == (
        52,
        False,
        6,
    )
    fields, _ = mapped(TINY_CONFIGS["qwen2_moe"])
    assert (fields["add_qkv_bias"], fields["moe_shared_expert_gate"]) == (True, True)
    assert fields["moe_shared_expert_intermediate_size"] == 28
    assert mapped(TINY_CONFIGS["llama_biases"])[0]["add_bias_linear"] is True
    _, arguments = mapped(LLAMA_32_1B)
    assert (arguments.rope_scaling, arguments.rope_scaling_factor, arguments.rotary_base) == (True, 32.0, 5e5)
    _, arguments = mapped(TINY_CONFIGS["llama_tied"])
    assert (arguments.rope_scaling, arguments.seq_len_interpolation_factor) == (False, 3.0)


def test_published_meaning_of_absent_keys() -> None:
    older = {k: v for k, v in LLAMA_2_7B.items() if k != "num_key_value_heads"}
    fields, arguments = mapped(older)
    assert (fields["num_query_groups"], fields["kv_channels"], fields["add_bias_linear"]) == (32, 128, False)
    assert arguments.rotary_base == 10000.0
    fields, _ = mapped(QWEN25_05B)
    assert (fields["kv_channels"], fields["add_qkv_bias"]) == (64, True)


def yarn(**given: Any) -> dict[str, Any]:
    return QWEN3_30B_A3B | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768} | given
    }


@pytest.mark.parametrize(
    ("base", "edit", "message"),
    [
        ({}, {"n_shared_experts": 1}, "n_shared_experts=1: not understood"),
        ({}, {"logit_scale": None}, "logit_scale=None: not understood"),
        ({}, {"attention_bias": True}, "attention_bias=True: only False is implemented"),
        ({}, {"attention_dropout": 0.1}, "attention_dropout=0.1: only 0.0 is implemented"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu': only 'silu' is implemented"),
        ({}, {"architectures": ["Qwen3MoeForTokenClassification"]}, "only ['Qwen3MoeForCausalLM'] is implemented"),
        ({}, {"num_nextn_predict_layers": 1}, "=1: only 0 is implemented; multi-token prediction (MTP) layers"),
        ({}, {"hidden_size": "2048"}, "hidden_size='2048': wants a whole number above zero"),
        ({}, {"num_hidden_layers": 0}, "num_hidden_layers=0: wants a whole number above zero"),
        ({}, {"head_dim": 128.0}, "head_dim=128.0: wants a whole number above zero"),
        ({}, {"rms_norm_eps": True}, "rms_norm_eps=True: wants a number"),
        ({}, {"tie_word_embeddings": 1}, "tie_word_embeddings=1: wants true or false"),
        ({}, {"norm_topk_prob": "yes"}, "norm_topk_prob='yes': wants true or false"),
        ({}, {"num_local_experts": 64}, "num_experts=128, num_local_experts=64: two values"),
        ({}, {"num_key_value_heads": 5}, "num_attention_heads=32: wants a multiple of num_key_value_heads=5"),
        ({}, {"num_experts_per_tok": 129}, "num_experts_per_tok=129: there are 128 experts"),
        ({}, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 with renormalised gates"),
        ({}, {"decoder_sparse_step": 0}, "decoder_sparse_step=0: wants a whole number above zero"),
        ({}, {"decoder_sparse_step": 49}, "decoder_sparse_step=49, mlp_only_layers=[]: leave no layer with experts"),
        ({}, {"mlp_only_layers": 3}, "mlp_only_layers=3: wants a list of layer numbers"),
        (
            {},
            {"use_sliding_window": True, "max_window_layers": 0},
            "sliding_window=None: wants a whole number above zero",
        ),
        (
            {},
            {"use_sliding_window": True, "sliding_window": 8},
            "max_window_layers=48: wants 0; transformers 5 slides",
        ),
        ({}, {"use_sliding_window": None, "sliding_window": 8}, "use_sliding_window: missing beside sliding_window=8"),
        ({}, {"layer_types": ["sliding_attention"] * 48}, "layer_types has sliding_attention, use_sliding_window"),
        ({}, {"layer_types": ["full_attention"] * 47}, "wants full_attention or sliding_attention for each layer"),
        ({}, {"rope_theta": None}, "rope_theta: missing"),
        ({}, {"rope_theta": "1e6"}, "rope rope_theta='1e6': wants a number"),
        ({}, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=1000000.0, and 500000.0 in rope_parameters: two"),
        ({}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: only 1.0"),
        ({}, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: only 1.0"),
        ({}, {"rope_parameters": {"full_attention": {}}}, "rope full_attention={}: not understood with rope_type="),
        (
            {},
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic': only default, linear, llama3",
        ),
        ({}, {"rope_scaling": {"type": "linear"}}, "rope factor: missing, rope_type='linear' needs it"),
        ({}, {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor=0.5: wants 1 or above"),
        (
            {},
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}},
            "rope type='yarn' and rope_type='linear': two values",
        ),
        ({}, {"rope_scaling": "yarn"}, "rope_scaling='yarn': wants an object"),
        (yarn(), {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters and rope_scaling: two spellings"),
        (yarn(original_max_position_embeddings=None), {}, "rope original_max_position_embeddings: missing"),
        (yarn(original_max_position_embeddings=0.5), {}, "original_max_position_embeddings=0.5: wants a whole number"),
        (yarn(low_freq_factor=1.0), {}, "rope low_freq_factor=1.0: not understood with rope_type='yarn'"),
        (yarn(truncate=0), {}, "rope truncate=0: wants true or false"),
        (yarn(beta_fast="32"), {}, "rope beta_fast='32': wants a number"),
        (yarn(factor=1.0, attention_factor=1.5), {}, "rope attention_factor=1.5: megatron-core has none but 1 with"),
        (
            LLAMA_32_1B,
            {"rope_scaling": LLAMA_32_1B["rope_scaling"] | {"original_max_position_embeddings": 4096}},
            "rope original_max_position_embeddings=4096: megatron-core has 8192 written into it",
        ),
        (LLAMA_32_1B, {"mlp_bias": True}, "attention_bias=False, mlp_bias=True: megatron-core has biases in all"),
        (LLAMA_32_1B, {"sliding_window": 8}, "sliding_window=8: not understood"),
        (LLAMA_32_1B, {"rope_interleaved": True}, "rope_interleaved=True: only False is implemented"),
        (
            QWEN25_05B,
            {"use_sliding_window": True, "max_window_layers": None},
            "max_window_layers=None: wants the number",
        ),
        (PUBLISHED["Mixtral-8x7B"][0], {"router_jitter_noise": 0.01}, "router_jitter_noise=0.01: only 0.0"),
        (PUBLISHED["Mixtral-8x7B"][0], {"sliding_window": 0}, "sliding_window=0: wants a whole number above zero"),
        (PUBLISHED["Qwen1.5-MoE-A2.7B"][0], {"use_sliding_window": True}, "layer_types: missing; versions of"),
    ],
)
def test_config_that_means_another_model_is_refused(base: dict[str, Any], edit: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError) as error:
        mapped((base or QWEN3_30B_A3B) | edit)
    title, *problems = str(error.value).splitlines()
    assert title == "config.json:" and len(problems) == 1, problems
    assert message in problems[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_without_a_key_that_decides_the_model_is_refused(name: str) -> None:
    config, _ = PUBLISHED[name]
    dense = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    dense += ["rms_norm_eps", "initializer_range", "tie_word_embeddings"]
    if config["model_type"] != "llama":
        dense += ["num_key_value_heads", "rope_theta"]
    if config["model_type"].startswith("qwen3"):
        dense.append("head_dim")
    moe = ["num_experts_per_tok", "num_experts", "num_local_experts", "norm_topk_prob", "moe_intermediate_size"]
    moe += ["decoder_sparse_step", "shared_expert_intermediate_size"]
    for key in [*dense, *(k for k in moe if k in config)]:
        with pytest.raises(ConversionError, match=rf"config.json:\n  {key}: missing[^\n]*$"):
            mapped({k: v for k, v in config.items() if k != key})
        with pytest.raises(ConversionError, match=rf"  {key}: missing"):
            mapped(config | {key: None})


def test_all_problems_of_a_config_come_at_once() -> None:
    config = QWEN3_30B_A3B | {"attention_bias": True, "n_shared_experts": 1, "vocab_size": -1}
    del config["head_dim"]
    with pytest.raises(ConversionError) as error:
        mapped(config)
    assert len(str(error.value).splitlines()) == 5


def test_unknown_architecture_is_refused_by_name() -> None:
    for config in ({"model_type": "gpt2"}, {}):
        with pytest.raises(ConversionError, match="model_type=.*: known are llama, mixtral, qwen2, qwen2_moe, qwen3"):
            family_of(config)
    with pytest.raises(ConversionError, match="model_type='qwen3': only 'qwen3_moe' is implemented"):
        FAMILIES["qwen3_moe"].transformer_config(QWEN3_30B_A3B | {"model_type": "qwen3"})


def test_fields_that_the_family_has_not_are_refused_on_the_way_back() -> None:
    family = FAMILIES["qwen3_moe"]
    fields, arguments = family.transformer_config(QWEN3_30B_A3B)
    for edit, message in (
        ({"qk_layernorm": False}, "qk_layernorm=False: the family has True"),
        ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function='sigmoid': the family has None"),
        ({"window_size": (4, 0), "window_attn_skip_freq": [1] + [0] * 47}, "window_attn_skip_freq=.*: the family has"),
    ):
        with pytest.raises(ConversionError, match=message):
            family.hf_config(fields | edit, arguments)
    with pytest.raises(ConversionError, match="qwen3_moe's megatron-core fields:\n  kv_channels: missing$"):
        family.hf_config({k: v for k, v in fields.items() if k != "kv_channels"}, arguments)
    with pytest.raises(ConversionError, match="rotary_percent=0.5|partial_rotary_factor=0.5"):
        family.hf_config(fields, replace(arguments, rotary_percent=0.5))


def test_further_family_is_its_differences() -> None:
    """A routed scaling factor and rotation of a part of the head, which the six families have not."""
    mine = FAMILIES["qwen3_moe"]
    family = Family(
        model_type="further",
        architecture="FurtherForCausalLM",
        keys={**mine.keys, "routed_scaling_factor": Key("moe_router_topk_scaling_factor", float)},
        parts=(rope(allow_partial=True), *mine.parts[1:]),
        constants=mine.constants,
        aliases=mine.aliases,
    )
    config = TINY_CONFIGS["qwen3_moe"] | {"model_type": "further", "routed_scaling_factor": 2.5}
    fields, arguments = family.transformer_config(config | {"partial_rotary_factor": 0.5})
    assert (fields["moe_router_topk_scaling_factor"], arguments.rotary_percent) == (2.5, 0.5)
    back = family.hf_config(fields, arguments)
    assert (back["routed_scaling_factor"], back["partial_rotary_factor"]) == (2.5, 0.5)
    with pytest.raises(ConversionError, match="partial_rotary_factor=0.5: only 1.0"):
        family.transformer_config(
            config
            | {"rope_parameters": TINY_CONFIGS["qwen3_moe_mlp_only"]["rope_parameters"], "partial_rotary_factor": 0.5}
        )
