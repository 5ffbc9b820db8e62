"""The model built on the meta device: the same names, shapes and cuts from both kinds of modules and the converter."""

import importlib.util
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gspo_megatron.config import ParallelConfig, load_recipe
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import read_config
from tests.distributed.policy_worker import HF_DIR, RECIPE
from tests.distributed.spawn import spawn
from tests.models import QWEN3_30B_A3B, TINY_CONFIGS

SPECS = ("local", "transformer_engine")
TINY = read_config(HF_DIR)
VOCAB_NAMES = {"embedding.word_embeddings.weight", "output_layer.weight"}


def layout(tp=1, pp=1, cp=1, ep=1, etp=1, vpp=None):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        virtual_pipeline_model_parallel_size=vpp,
        sequence_parallel=tp > 1,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    hf: dict[str, Any]
    parallel: ParallelConfig
    world_size: int
    fields: dict[str, Any] = field(default_factory=dict)
    """TransformerConfig's, beyond what the family says."""


# Every size different, so that a shape shows which it is.
ODD = TINY | {
    "hidden_size": 40,
    "head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 12,
    "num_local_experts": 4,
    "vocab_size": 51,
}
BFLOAT16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
FAMILY_CASES = {
    "data_parallel": Case(hf=TINY, parallel=layout(), world_size=2),
    "tp2_pp2_ep2": Case(hf=TINY, parallel=layout(tp=2, pp=2, ep=2), world_size=4),
    "tp2_cp2_ep4": Case(hf=TINY, parallel=layout(tp=2, cp=2, ep=4), world_size=4),
    "tp2_ep2_etp2": Case(hf=TINY, parallel=layout(tp=2, ep=2, etp=2), world_size=4),
    "pp2_vpp2": Case(hf=TINY, parallel=layout(pp=2, vpp=2), world_size=2),
    "vocabulary_padded": Case(hf=ODD, parallel=layout(tp=2, ep=2), world_size=2),
    "tied_pp2": Case(hf=ODD | {"tie_word_embeddings": True}, parallel=layout(pp=2), world_size=2),
    "qwen3_30b_a3b": Case(hf=QWEN3_30B_A3B, parallel=layout(tp=4, pp=2, ep=8), world_size=32, fields=BFLOAT16),
    **{
        f"tiny_{name}": Case(
            hf=hf, parallel=layout(tp=2, pp=2, ep=2 if "num_experts_per_tok" in hf else 1), world_size=4
        )
        for name, hf in TINY_CONFIGS.items()
    },
}
# What other families have, straight as TransformerConfig's fields.
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "ffn_hidden_size": 28}
FIELD_CASES = {
    "dense_layers_between": Case(
        hf=ODD,
        parallel=layout(tp=2, pp=2, ep=2),
        world_size=4,
        fields={"moe_layer_freq": [0, 1, 0, 1], "ffn_hidden_size": 28},
    ),
    "shared_expert": Case(
        hf=ODD,
        parallel=layout(tp=2, ep=2, etp=2),
        world_size=4,
        fields=BFLOAT16
        | {
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
            "add_qkv_bias": True,
            "qk_layernorm": False,
        },
    ),
    "dense": Case(hf=ODD, parallel=layout(tp=2), world_size=2, fields=DENSE | {"qk_layernorm": False}),
    "every_bias": Case(hf=ODD, parallel=layout(tp=2), world_size=2, fields=DENSE | {"add_bias_linear": True}),
}
CASES = FAMILY_CASES | FIELD_CASES


def prepare(spec):
    """Make this worker a process that builds models of the spec on the meta device."""
    from gspo_megatron.mcore import cpu, te_construct

    dist.destroy_process_group()
    if spec == "transformer_engine":
        te_construct.install()
    else:
        cpu.install()


def meta_model_of(case, spec, rank):
    from gspo_megatron.mcore.meta import meta_model
    from gspo_megatron.mcore.model import config_fields

    recipe = replace(load_recipe(RECIPE, [f"model.hf_dir={HF_DIR}"]), parallel=case.parallel)
    fields, arguments = config_fields(case.hf, recipe)
    return meta_model(fields | case.fields, arguments, spec=spec, rank=rank, world_size=case.world_size)


def build_all(_, spec):
    """{case: [set of (mcore_name, global_shape, offset, shape, dtype, is_owner), per rank]}."""
    prepare(spec)
    from gspo_megatron.mcore.meta import meta_shards

    cuts = defaultdict(list)
    for name, case in CASES.items():
        for rank in range(case.world_size):
            with meta_model_of(case, spec, rank) as chunks:
                assert {p.device.type for chunk in chunks for p in chunk.parameters()} == {"meta"}
                found = [
                    (s.mcore_name, s.global_shape, s.global_offset, tuple(s.data.shape), s.data.dtype, s.is_owner)
                    for s in meta_shards(chunks)
                ]
            assert len(set(found)) == len(found)
            cuts[name].append(set(found))
    return dict(cuts)


@pytest.fixture(scope="module")
def built():
    return {spec: spawn(build_all, 1, spec, timeout_s=240, fresh=spec == "transformer_engine")[0] for spec in SPECS}


def global_shapes(cuts):
    shapes = defaultdict(set)
    for name, global_shape, *_ in set().union(*cuts):
        shapes[name].add(global_shape)
    assert {name: found for name, found in shapes.items() if len(found) > 1} == {}
    return {name: found.pop() for name, found in shapes.items()}


def converter_shapes(case):
    """{mcore_name: global shape} of the family's table, the vocabulary padded as the model pads it."""
    tp_size = case.parallel.tensor_model_parallel_size
    shapes = {op.mcore_name: tuple(op.shape) for op in family_of(case.hf).op_list(case.hf)}
    return {
        name: (-(-shape[0] // tp_size) * tp_size, *shape[1:]) if name in VOCAB_NAMES else shape
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_names_and_global_shapes_are_the_converters(built, name, spec):
    assert global_shapes(built[spec][name]) == converter_shapes(FAMILY_CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_both_specs_give_each_rank_the_same_cuts(built, name):
    local, transformer_engine = (built[spec][name] for spec in SPECS)
    for rank in range(CASES[name].world_size):
        assert local[rank] == transformer_engine[rank], rank


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", CASES)
def test_owners_of_all_ranks_hold_every_element_once(built, name, spec):
    owned = Counter()
    places = Counter()
    for cuts in built[spec][name]:
        for mcore_name, _, offset, shape, _, is_owner in cuts:
            if is_owner:
                owned[mcore_name] += prod(shape)
                places[mcore_name, offset] += 1
    assert owned == {n: prod(shape) for n, shape in global_shapes(built[spec][name]).items()}
    assert set(places.values()) == {1}


@pytest.mark.parametrize("spec", SPECS)
def test_qwen3_30b_a3b_has_its_published_number_of_parameters(built, spec):
    owned = (cut for cuts in built[spec]["qwen3_30b_a3b"] for cut in cuts if cut[-1])
    assert sum(prod(shape) for _, _, _, shape, _, _ in owned) == 30_532_122_624


def test_a_dense_layer_has_its_second_norm_in_its_first_linear_layer(built):
    shapes = global_shapes(built["transformer_engine"]["dense_layers_between"])
    mlp = {
        layer: {
            n.removeprefix(f"decoder.layers.{layer}."): s
            for n, s in shapes.items()
            if n.startswith(f"decoder.layers.{layer}.") and "self_attention" not in n
        }
        for layer in range(4)
    }
    dense = {
        "mlp.linear_fc1.layer_norm_weight": (40,),
        "mlp.linear_fc1.weight": (56, 40),
        "mlp.linear_fc2.weight": (40, 28),
    }
    moe = {
        "pre_mlp_layernorm.weight": (40,),
        "mlp.router.weight": (4, 40),
        "mlp.experts.experts.linear_fc1.weight": (4, 24, 40),
        "mlp.experts.experts.linear_fc2.weight": (4, 40, 12),
    }
    assert mlp == {0: dense, 1: moe, 2: dense, 3: moe}


def test_a_shared_expert_its_gate_and_biases_have_these_names(built):
    shapes = global_shapes(built["transformer_engine"]["shared_expert"])
    assert {n.removeprefix("decoder.layers.3."): s for n, s in shapes.items() if ".layers.3." in n} == {
        "self_attention.linear_qkv.layer_norm_weight": (40,),
        "self_attention.linear_qkv.weight": (2 * (3 + 2) * 8, 40),
        "self_attention.linear_qkv.bias": (2 * (3 + 2) * 8,),
        "self_attention.linear_proj.weight": (40, 6 * 8),
        "pre_mlp_layernorm.weight": (40,),
        "mlp.router.weight": (4, 40),
        "mlp.experts.experts.linear_fc1.weight": (4, 2 * 12, 40),
        "mlp.experts.experts.linear_fc2.weight": (4, 40, 12),
        "mlp.shared_experts.linear_fc1.weight": (2 * 20, 40),
        "mlp.shared_experts.linear_fc2.weight": (40, 20),
        "mlp.shared_experts.gate_weight": (1, 40),
    }


def normalize_with_transformer_engine(_):
    prepare("transformer_engine")
    from transformer_engine.pytorch.ops.basic.rmsnorm import rmsnorm_fwd

    rmsnorm_fwd(torch.ones(2, 16), torch.ones(16), 1e-6)


def test_transformer_engine_computes_nothing():
    with pytest.raises(RuntimeError, match=r"transformer_engine_torch\.rmsnorm_fwd is absent: .* only constructs"):
        spawn(normalize_with_transformer_engine, 1, timeout_s=120, fresh=True)


def state_around_a_build(_):
    prepare("local")
    from megatron.core import parallel_state

    before = torch.cuda.current_device
    with meta_model_of(FAMILY_CASES["tp2_pp2_ep2"], "local", 3):
        inside = (
            dist.get_rank(),
            dist.get_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
    after = (dist.is_initialized(), parallel_state.is_initialized(), torch.cuda.current_device is before)
    return inside, after, importlib.util.find_spec("transformer_engine") is None


def test_parallel_state_is_that_of_the_rank_and_ends_with_the_context():
    ((inside, after, has_no_transformer_engine),) = spawn(state_around_a_build, 1, timeout_s=120)
    assert inside == (3, 4, 1, 1)
    assert after == (False, False, True)
    assert has_no_transformer_engine  # megatron-core cannot be imported beside a package without its core


def build_without_preparing(_, spec, keep_process_group):
    from gspo_megatron.mcore import cpu

    cpu.install()
    if not keep_process_group:
        dist.destroy_process_group()
    with meta_model_of(FAMILY_CASES["data_parallel"], spec, 0):
        raise AssertionError("built")


def install_too_late(_):
    from gspo_megatron.mcore import cpu, te_construct

    cpu.install()
    te_construct.install()


def install_unchecked_version(_):
    from gspo_megatron.mcore import te_construct

    te_construct.CHECKED_VERSIONS = ("2.15.0",)
    te_construct.install()


def test_a_process_that_was_not_prepared_is_refused():
    with pytest.raises(RuntimeError, match=r"needs te_construct\.install\(\) before"):
        spawn(build_without_preparing, 1, "transformer_engine", False, timeout_s=120)
    with pytest.raises(RuntimeError, match="build on the meta device in a process of its own"):
        spawn(build_without_preparing, 1, "local", True, timeout_s=120)
    with pytest.raises(RuntimeError, match="imported before te_construct"):
        spawn(install_too_late, 1, timeout_s=120)
    with pytest.raises(RuntimeError, match=r"transformer-engine is 2\.\d+\.\d+: .* is checked with 2\.15\.0 only"):
        spawn(install_unchecked_version, 1, timeout_s=120, fresh=True)
