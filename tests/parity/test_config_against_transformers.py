"""What megatron-core computes from the mapped configuration against what transformers does from config.json."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.convert.families import family_of
from tests.distributed.spawn import spawn
from tests.models import LLAMA_32_1B, QWEN3_30B_A3B, TINY_CONFIGS
from tests.tolerances import PARITY_FORMULA, assert_close

LENGTH = 24
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPE_CONFIGS: dict[str, dict[str, Any]] = {
    **TINY_CONFIGS,
    "published_default": QWEN3_30B_A3B,
    "published_llama3": LLAMA_32_1B,
    "published_yarn": QWEN3_30B_A3B | {"rope_scaling": _YARN},
    "yarn_by_attention_factor": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"attention_factor": 0.8}},
    "yarn_by_mscales": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn_by_one_mscale": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"mscale": 0.707}},
    "yarn_by_betas": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"beta_fast": 24.0, "beta_slow": 2.0}},
    "yarn_without_truncation": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"truncate": False}},
    "yarn_of_nothing": QWEN3_30B_A3B | {"rope_scaling": _YARN | {"factor": 1.0}},
}
WINDOW_CONFIGS = [name for name in TINY_CONFIGS if "window" in name or name == "qwen2_moe_sparse"]


def by_megatron(rank: int) -> dict[str, Any]:
    """Angles of positions and the factor of cosine and sine; window masks of the layers; gates of each expert."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
        _yarn_get_concentration_factor,
    )
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention

    ropes, masks, gates = {}, {}, {}
    for name, config in ROPE_CONFIGS.items():
        fields, a = family_of(config).transformer_config(config)
        TransformerConfig(**fields)  # its own checks
        common = {"kv_channels": fields["kv_channels"], "rotary_base": a.rotary_base, "use_cpu_initialization": True}
        if a.position_embedding_type == "yarn":
            assert a.yarn is not None
            given = {key.removeprefix("yarn_").removeprefix("rotary_"): value for key, value in a.yarn.items()}
            angles, factor = YarnRotaryEmbedding(rotary_percent=a.rotary_percent, **common, **given)(LENGTH)
            names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
            assert factor == _yarn_get_concentration_factor(*(a.yarn[n] for n in names))
        else:
            scaling = {n: getattr(a, n) for n in ("rope_scaling", "rope_scaling_factor")}
            interpolation = a.seq_len_interpolation_factor
            embedding = RotaryEmbedding(
                rotary_percent=a.rotary_percent, seq_len_interpolation_factor=interpolation, **common, **scaling
            )
            angles, factor = embedding(LENGTH), 1.0
        ropes[name] = angles[:, 0, 0], factor
    for name, config in TINY_CONFIGS.items():
        fields, _ = family_of(config).transformer_config(config)
        window, skip = fields.get("window_size"), fields.get("window_attn_skip_freq")
        layers = [is_layer_window_attention(window, skip, n + 1) for n in range(fields["num_layers"])]
        masks[name] = [~get_sliding_window_causal_mask(LENGTH, LENGTH, window) if is_in else None for is_in in layers]
        if "num_moe_experts" in fields:
            topk, pre_softmax = fields["moe_router_topk"], fields["moe_router_pre_softmax"]
            gates[name], _ = topk_routing_with_score_function(router_logits(), topk, use_pre_softmax=pre_softmax)
    return {"ropes": ropes, "masks": masks, "gates": gates}


def router_logits() -> Tensor:
    return torch.randn(50, 6, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def megatron() -> dict[str, Any]:
    (result,) = spawn(by_megatron, 1)
    return result


def transformers_config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**deepcopy(config))


@pytest.mark.parametrize("name", ROPE_CONFIGS)
def test_rotation_is_that_of_transformers(megatron: dict[str, Any], name: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers_config(ROPE_CONFIGS[name])
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":  # each model has this formula in its own file
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        inv_freq, want_factor = 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0
    else:
        inv_freq, want_factor = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles, factor = megatron["ropes"][name]
    want = torch.outer(torch.arange(LENGTH, dtype=torch.float32), inv_freq)
    assert_close(angles, torch.cat((want, want), dim=-1), PARITY_FORMULA)
    assert factor == pytest.approx(want_factor, rel=1e-14, abs=0)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_window_of_each_layer_is_that_of_transformers(megatron: dict[str, Any], name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = transformers_config(TINY_CONFIGS[name])
    config._attn_implementation = "eager"
    seen: list[Tensor] = []
    model = AutoModelForCausalLM.from_config(config)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    model(torch.ones(1, LENGTH, dtype=torch.int64))
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for visible, mask in zip(megatron["masks"][name], seen, strict=True):
        want = mask[0, 0] == 0
        assert torch.equal(causal if visible is None else visible, want)
    assert any(m is not None for m in megatron["masks"][name]) == (name in WINDOW_CONFIGS)


@pytest.mark.parametrize("name", [n for n, config in TINY_CONFIGS.items() if "num_experts_per_tok" in config])
def test_gates_are_those_of_transformers(megatron: dict[str, Any], name: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(transformers_config(TINY_CONFIGS[name]))
    router = next(layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts"))
    router.hidden_dim, router.weight = 6, torch.nn.Parameter(torch.eye(6))  # logits are the input
    _, scores, chosen = router(router_logits())
    want = torch.zeros(50, 6).scatter(1, chosen, scores.detach())
    assert_close(megatron["gates"][name], want, PARITY_FORMULA)
