"""Both directions through files, for every family; the plans carried out in this process."""

import json
import os

import pytest
import torch
import xxhash

from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.mcore_io import (
    DataFileWriter,
    McoreCheckpoint,
    common_state,
    write_checkpoint_metadata,
)
from gspo_megatron.convert.ops import ConversionError, slices
from gspo_megatron.convert.to_hf import plan_to_hf
from gspo_megatron.convert.to_mcore import plan_to_mcore
from gspo_megatron.quantize import quantize_blockwise
from tests.models import TINY_CONFIGS
from tests.unit.conversion import load, make_hf_dir, same_bits, save

MOE = [name for name, config in TINY_CONFIGS.items() if "num_experts_per_tok" in config]


def carry_out(conversion, target):
    """What a job does, without workers."""
    target.mkdir()
    records = [conversion.write_file(i, target, lambda num_bytes: None) for i in range(len(conversion.files))]
    conversion.finish(target, json.loads(json.dumps(records)))


def convert(source, target, **options):
    carry_out(plan_to_mcore(source, **options), target)
    return json.loads((target / "iter_0000000" / "manifest.json").read_text())


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_round_trip_is_bitwise_for_every_family(name, tmp_path):
    tensors = make_hf_dir(tmp_path / "a", TINY_CONFIGS[name], num_files=3)
    count = sum(t.numel() for t in tensors.values())
    assert len(torch.cat([t.flatten() for t in tensors.values()]).unique()) == count < 2**24
    convert(tmp_path / "a", tmp_path / "b", max_file_bytes=10_000)
    carry_out(plan_to_hf(tmp_path / "b", max_file_bytes=7_000), tmp_path / "c")
    assert same_bits(load(tmp_path / "c"), tensors)
    assert (tmp_path / "c" / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()


@pytest.mark.parametrize("name", MOE)
def test_experts_in_one_tensor_come_back_as_they_are_published(name, tmp_path):
    config = TINY_CONFIGS[name]
    make_hf_dir(tmp_path / "a", config, fused_experts=True)
    convert(tmp_path / "a", tmp_path / "b")
    carry_out(plan_to_hf(tmp_path / "b"), tmp_path / "c")
    published = {n for op in family_of(config).op_list(config) for n in op.hf_shapes}
    found = load(tmp_path / "c")
    assert found.keys() == published
    assert not any(n.endswith("gate_up_proj") for n in published)
    fused = load(tmp_path / "a")
    gate_up = next(n for n in fused if n.endswith("experts.gate_up_proj"))
    prefix = next(n for n in published if n.startswith(gate_up.partition(".mlp")[0]) and ".experts.5." in n)
    prefix = prefix.partition(".experts.5.")[0] + ".experts.5."
    parts = ("w1", "w3") if config["model_type"] == "mixtral" else ("gate_proj", "up_proj")
    assert torch.equal(torch.cat([found[f"{prefix}{p}.weight"] for p in parts]), fused[gate_up][5])


def test_every_tensor_keeps_its_own_dtype(tmp_path):
    tensors = make_hf_dir(tmp_path / "a", TINY_CONFIGS["qwen3_moe"], dtype=torch.bfloat16)
    (tmp_path / "a" / "model.safetensors").unlink()
    routers = {n: t.float() + 0.125 for n, t in tensors.items() if n.endswith("mlp.gate.weight")}
    save(tmp_path / "a", tensors | routers)
    manifest = convert(tmp_path / "a", tmp_path / "b")
    assert {t["dtype"] for n, t in manifest["tensors"].items() if n.endswith("router.weight")} == {"float32"}
    carry_out(plan_to_hf(tmp_path / "b"), tmp_path / "c")
    assert same_bits(load(tmp_path / "c"), tensors | routers)
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tied_head_that_is_there_twice_is_left_out_with_a_word(tmp_path):
    tensors = make_hf_dir(tmp_path / "a", TINY_CONFIGS["llama_tied"])
    (tmp_path / "a" / "model.safetensors").unlink()
    embedding = tensors["model.embed_tokens.weight"]
    save(tmp_path / "a", tensors | {"lm_head.weight": embedding.clone()})
    conversion = plan_to_mcore(tmp_path / "a")
    assert "lm_head.weight is a copy" in conversion.notes[0]
    carry_out(conversion, tmp_path / "b")
    carry_out(plan_to_hf(tmp_path / "b"), tmp_path / "c")
    assert same_bits(load(tmp_path / "c"), tensors)
    (tmp_path / "a" / "model.safetensors").unlink()
    save(tmp_path / "a", tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(ConversionError, match="surplus lm_head.weight"):
        plan_to_mcore(tmp_path / "a")


def test_source_hashes_are_those_of_the_tensors_whatever_the_order_of_reading(tmp_path):
    """Query, key and value are read in pieces, gate and up of all experts in turn, the output in several files."""
    tensors = make_hf_dir(tmp_path / "a", TINY_CONFIGS["qwen2_moe_sparse"])
    manifest = convert(tmp_path / "a", tmp_path / "b", max_file_bytes=3_000)
    want = {n: xxhash.xxh3_128(t.numpy().tobytes()).hexdigest() for n, t in tensors.items()}
    assert {n: t["hash"] for n, t in manifest["source"]["tensors"].items()} == want
    carry_out(plan_to_hf(tmp_path / "b", max_file_bytes=3_000), tmp_path / "c")
    back = json.loads((tmp_path / "c" / "conversion_manifest.json").read_text())
    assert {n: t["hash"] for n, t in back["tensors"].items()} == want
    assert back["source"]["tensors"].keys() == manifest["tensors"].keys()


def write_as_megatron_lm(b, out, change):
    """The checkpoint again without manifest and hf/, its tensors changed."""
    folder = out / "iter_0000007"
    folder.mkdir(parents=True)
    with McoreCheckpoint(b) as checkpoint:
        tensors = {name: checkpoint.read(name).clone() for name in checkpoint.tensors}
    change(tensors)
    with DataFileWriter(folder / "__0_1.distcp") as writer:
        for name, tensor in tensors.items():
            writer.write_tensor(name, tuple(tensor.shape), tensor.dtype, lambda box, t=tensor: t[slices(box)])
    write_checkpoint_metadata(folder, [writer.result], common_state(iteration=7))
    (out / "latest_checkpointed_iteration.txt").write_text("7\n")


def test_megatron_lm_checkpoint_loses_padding_and_optimizer_and_nothing_else(tmp_path):
    tensors = make_hf_dir(tmp_path / "a", TINY_CONFIGS["mixtral"])
    convert(tmp_path / "a", tmp_path / "b")

    def change(found):
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            found[name] = torch.cat([found[name], torch.full((9, 96), -1.0)])
        found["optimizer.state.exp_avg.output_layer.weight"] = torch.ones(80, 96)

    write_as_megatron_lm(tmp_path / "b", tmp_path / "m", change)
    options = {"hf_config_dir": tmp_path / "a", "require_manifest": False}
    conversion = plan_to_hf(tmp_path / "m", **options)
    notes = "\n".join(conversion.notes)
    assert "read unverified" in notes and "embedding.word_embeddings.weight has 80 rows, the vocabulary 71" in notes
    assert "left out, no weights: 1 entries, such as optimizer.state.exp_avg" in notes
    carry_out(conversion, tmp_path / "c")
    assert same_bits(load(tmp_path / "c"), tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("decoder.final_layernorm.weight"), r"missing decoder\.final_layernorm\.weight \(96,\)"),
        (lambda t: t.update({"mtp.layers.0.weight": torch.ones(3)}), r"surplus mtp\.layers\.0\.weight \(3,\)"),
        (
            lambda t: t.update({"output_layer.weight": torch.ones(70, 96)}),
            r"output_layer\.weight has shape \(70, 96\), config\.json wants \(71, 96\)",
        ),
        (
            lambda t: t.update({"decoder.final_layernorm.weight": torch.ones(97)}),
            r"final_layernorm\.weight has shape \(97,\)",
        ),
        (
            lambda t: t.update({"output_layer.weight": torch.ones(71, 96).int()}),
            r"output_layer\.weight is torch\.int32",
        ),
    ],
    ids=["missing", "surplus", "rows", "shape", "integers"],
)
def test_checkpoint_that_does_not_fit_config_is_refused(tmp_path, change, message):
    make_hf_dir(tmp_path / "a", TINY_CONFIGS["mixtral"], num_hidden_layers=1)
    convert(tmp_path / "a", tmp_path / "b")
    write_as_megatron_lm(tmp_path / "b", tmp_path / "m", change)
    with pytest.raises(ConversionError, match=message):
        plan_to_hf(tmp_path / "m", hf_config_dir=tmp_path / "a", require_manifest=False)


def test_fp8_export_quantises_what_is_stored_and_rounds_the_rest(tmp_path):
    tensors = make_hf_dir(tmp_path / "a", num_hidden_layers=1)
    convert(tmp_path / "a", tmp_path / "b")
    carry_out(plan_to_hf(tmp_path / "b", fp8=True, dtype=torch.bfloat16), tmp_path / "c")
    found = load(tmp_path / "c")
    name = "model.layers.0.self_attn.q_proj.weight"
    payload, scale_inv = quantize_blockwise(tensors[name])
    assert torch.equal(found[name].view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(found[f"{name}_scale_inv"], scale_inv)
    rounded = quantize_blockwise(tensors[name].bfloat16())[1]
    assert not torch.equal(scale_inv, rounded), "this weight tells the two orders apart"
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"].bfloat16())


def test_source_that_changes_during_its_conversion_is_refused(tmp_path):
    make_hf_dir(tmp_path / "a", num_hidden_layers=1)
    convert(tmp_path / "a", tmp_path / "b")
    for plan, file in (
        (plan_to_mcore(tmp_path / "a"), next((tmp_path / "a").glob("*.safetensors"))),
        (plan_to_hf(tmp_path / "b"), next((tmp_path / "b").rglob("*.distcp"))),
    ):
        os.utime(file, ns=(1, 1))
        with pytest.raises(ConversionError, match=rf"changed while it was converted.*\n  {file.name}"):
            carry_out(plan, tmp_path / f"out_{file.suffix}")


def test_config_of_another_model_is_refused_beside_the_carried_one(tmp_path):
    make_hf_dir(tmp_path / "a", num_hidden_layers=1)
    convert(tmp_path / "a", tmp_path / "b")
    make_hf_dir(tmp_path / "other", num_hidden_layers=1, norm_topk_prob=False)
    with pytest.raises(ConversionError, match="moe_router_pre_softmax"):
        plan_to_hf(tmp_path / "b", hf_config_dir=tmp_path / "other")


def test_what_is_not_carried_along_is_named(tmp_path):
    make_hf_dir(tmp_path / "a", num_hidden_layers=1)
    (tmp_path / "a" / "spiece.model").touch()
    assert any("not carried along: spiece.model" in note for note in plan_to_mcore(tmp_path / "a").notes)
