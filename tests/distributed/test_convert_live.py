"""Weights on live ranks: in, out, to a Megatron checkpoint and to a Hugging Face directory, on three layouts, bitwise.

The vocabulary is odd, so that tensor parallelism pads it.
"""

import json
import shutil
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.convert.families import family_of
from gspo_megatron.convert.hf_io import COMPANIONS, TensorReader, read_config
from gspo_megatron.convert.manifest import read_manifest, verify_files
from gspo_megatron.convert.ops import ConversionError
from gspo_megatron.loss import sft_loss
from gspo_megatron.types import TrainState
from tests.distributed.policy_worker import HF_DIR, build, hf_tensors, tiny_tensors
from tests.distributed.spawn import spawn

VOCAB = 47
BUCKET_BYTES = 100_000
"""Above the largest tensor, 36,864 bytes."""
ONE = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]
EP2 = ["cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2"]
TP2_ETP2 = [
    *("cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=2"),
    *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
]


def zero(policy: Any) -> None:
    """So that only a load can bring the weights back."""
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter.zero_()


def raised(fn: Any, *args: Any) -> str:
    """Type and message of what fn raises."""
    try:
        fn(*args)
    except (ConversionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def step_of_zero(policy: Any, optimizer: Any) -> None:
    """An optimizer step with learning rate 0: the weights become the optimizer's copies of them."""
    from gspo_megatron.optimize import optimizer_step

    sequences = [TrainSequence(name="one", prompt_ids=(2, 3), response_ids=(4, 5, 6, 7))] * 2
    batch = pack_batch(sequences, 64, policy.parallel.batch_layout, minibatch_index=0)
    optimizer_step(policy, optimizer, batch, sft_loss, denominator=8, lr=0.0, temperature=1.0)


def write_all(rank: int, folder: Path) -> dict[str, Any]:
    """Gather; write checkpoint and export, each a second time onto the first."""
    _, policy, optimizer = build([f"model.hf_dir={folder / 'model'}", *EP2])
    from gspo_megatron.checkpoint import save_checkpoint
    from gspo_megatron.mcore.model import export_hf, load_hf_weights

    step_of_zero(policy, optimizer)  # without a step there is no optimizer state to save
    state = TrainState(rollout_step=3, optimizer_step=12, weight_version=4)
    results = {"gathered": hf_tensors(policy)}
    save = partial(save_checkpoint, policy, optimizer, state, companions_from=folder / "model")
    save(folder / "checkpoint")
    export_hf(policy, folder / "hf", folder / "model")
    results["second_save"] = raised(save, folder / "checkpoint")
    results["second_export"] = raised(export_hf, policy, folder / "hf", folder / "model")
    misfit = tiny_tensors(policy.ops)
    misfit["model.norm.weight"] = torch.zeros(95)
    results["misfit"] = raised(load_hf_weights, policy, optimizer, misfit, "misfit")
    results["after"] = hf_tensors(policy)
    return results


def count_elements(rank: int, folder: Path, layout: list[str]) -> tuple[int, int, list[int], list[str]]:
    """What this rank reads of a directory; what it has of the vocabulary and all else; bytes of its buckets; tensors
    of a bucket that are others when the next one has been gathered."""
    _, policy, _ = build([f"model.hf_dir={folder / 'model'}", *layout])
    from gspo_megatron.convert.ops import extent
    from gspo_megatron.convert.shards import Gatherer, load_shards

    reader, read = TensorReader(folder / "hf"), [0]

    def read_box(name: str, box: Any) -> Tensor:
        read[0] += prod(extent(box))
        return reader.read_box(name, box)

    load_shards(policy.shards(), policy.ops, read_box)
    has_padding = "sequence_parallel=true" in " ".join(layout) and rank == 1
    owned = sum(p.numel() for _, p in policy.parameters()) - has_padding * 2 * 96  # a row of embedding and head
    sizes, changed = [], []
    before: list[tuple[str, Tensor, Tensor]] = []
    for bucket in Gatherer(policy.shards(), policy.ops).buckets(BUCKET_BYTES):
        sizes.append(sum(t.nbytes for _, t in bucket))
        changed += [name for name, tensor, copy in before if not torch.equal(tensor, copy)]
        before = [(name, tensor, tensor.clone()) for name, tensor in bucket]
    return read[0], owned, sizes, changed


def load_all(rank: int, folder: Path, layout: list[str]) -> dict[str, Any]:
    """Gather what build loaded; load the other layout's checkpoint, then its export, and gather each."""
    _, policy, optimizer = build([f"model.hf_dir={folder / 'model'}", *layout])
    from gspo_megatron.checkpoint import load_weights
    from gspo_megatron.mcore.model import load_hf_weights

    embedding = dict(policy.parameters())["embedding.word_embeddings.weight"].detach()
    first_row = policy.parallel.tp_rank * len(embedding)
    results = {"gathered": hf_tensors(policy), "padding_rows": embedding[VOCAB - first_row :].clone()}
    zero(policy)
    load_weights(policy, optimizer, folder / "checkpoint")
    results["from_checkpoint"] = hf_tensors(policy)
    zero(policy)
    load_hf_weights(policy, optimizer, TensorReader(folder / "hf"), "export")
    results["from_export"] = hf_tensors(policy)
    results["half_written"] = raised(load_weights, policy, optimizer, folder / "half_written")
    return results


def load_and_step(rank: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights loaded twice as large and from the checkpoint, a step after each; the optimizer copies bfloat16 ones."""
    _, policy, optimizer = build([f"model.hf_dir={folder / 'model'}", "model.dtype=bfloat16", *ONE])
    from gspo_megatron.checkpoint import load_weights
    from gspo_megatron.mcore.model import load_hf_weights

    load_hf_weights(policy, optimizer, {n: 2 * t for n, t in tiny_tensors(policy.ops).items()}, "doubled")
    step_of_zero(policy, optimizer)
    doubled = hf_tensors(policy)
    load_weights(policy, optimizer, folder / "checkpoint")
    step_of_zero(policy, optimizer)
    return doubled, hf_tensors(policy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model directory; the ranks write beside it."""
    folder = tmp_path_factory.mktemp("live")
    shutil.copytree(HF_DIR, folder / "model")
    config = read_config(HF_DIR) | {"vocab_size": VOCAB, "dtype": "bfloat16"}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> list[dict[str, Any]]:
    results = spawn(write_all, 2, folder, timeout_s=120)
    half_written = shutil.copytree(folder / "checkpoint", folder / "half_written")
    (Path(half_written) / "manifest.json").unlink()
    return results


@pytest.fixture(scope="module", params=["one_process", "tp2_sp_etp2"])
def loaded(request: pytest.FixtureRequest, folder: Path, written: Any) -> list[dict[str, Any]]:
    layout = ONE if request.param == "one_process" else TP2_ETP2
    return spawn(load_all, 1 if layout is ONE else 2, folder, layout, timeout_s=120)


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Tensor]:
    config = read_config(folder / "model")
    return tiny_tensors(family_of(config).op_list(config))


def assert_bitwise(actual: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert actual.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(actual[name], tensor), name


def test_gathered_weights_are_those_loaded(written: list[dict[str, Any]], want: dict[str, Tensor]) -> None:
    assert_bitwise(written[0]["gathered"], want)
    assert written[1]["gathered"] == {}, "only rank 0 receives"


@pytest.mark.parametrize("layout", [EP2, TP2_ETP2], ids=["ep2", "tp2_sp_etp2"])
def test_rank_reads_what_it_owns_and_rank_0_holds_a_bucket(written: Any, folder: Path, layout: list[str]) -> None:
    ranks = spawn(count_elements, 2, folder, layout, timeout_s=120)
    for read, owned, _, changed in ranks:
        assert read == owned
        assert changed == []
    sizes = ranks[0][2]
    assert max(sizes) <= BUCKET_BYTES and len(sizes) > 10
    assert set(ranks[1][2]) == {0} and len(ranks[1][2]) == len(sizes), "the others take part and hold nothing"


def test_export_is_the_weights(written: list[dict[str, Any]], folder: Path, want: dict[str, Tensor]) -> None:
    reader = TensorReader(folder / "hf")
    assert_bitwise({name: reader.read(name) for name in reader.shapes()}, want)
    assert read_config(folder / "hf")["vocab_size"] == VOCAB
    assert read_config(folder / "hf")["dtype"] == "float32", "of the weights; the model's config.json says bfloat16"


def test_checkpoint_has_the_names_of_transformer_engine(written: Any, folder: Path) -> None:
    found = FileSystemReader(folder / "checkpoint").read_metadata().state_dict_metadata
    tensors = {name: tuple(m.size) for name, m in found.items() if isinstance(m, TensorStorageMetadata)}
    weights = {name: shape for name, shape in tensors.items() if not name.startswith("optimizer.")}
    config = read_config(folder / "model")
    ops = family_of(config).op_list(config)
    assert weights.keys() == {op.mcore_name for op in ops}
    for name, shape in {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (96,),
        "decoder.layers.0.self_attention.linear_qkv.weight": (192, 96),
        "decoder.layers.3.self_attention.k_layernorm.weight": (24,),
        "decoder.layers.3.pre_mlp_layernorm.weight": (96,),
        "decoder.layers.3.mlp.router.weight": (8, 96),
        "decoder.layers.3.mlp.experts.experts.linear_fc1.weight": (8, 192, 96),
        "decoder.layers.3.mlp.experts.experts.linear_fc2.weight": (8, 96, 96),
        "decoder.final_layernorm.weight": (96,),
        "output_layer.weight": (VOCAB, 96),
    }.items():
        assert weights[name] == shape, name
    state = json.loads((folder / "checkpoint" / "train_state.json").read_text())
    assert state == {"rollout_step": 3, "optimizer_step": 12, "weight_version": 4}


def test_checkpoint_has_a_manifest_of_all_its_files_and_what_goes_back(written: Any, folder: Path) -> None:
    manifest = read_manifest(folder / "checkpoint" / "manifest.json")
    verify_files(folder / "checkpoint", manifest)
    found = {str(f.relative_to(folder / "checkpoint")) for f in (folder / "checkpoint").rglob("*") if f.is_file()}
    assert found == {*manifest.files, "manifest.json"}
    data_files = {"__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"}
    companions = {f"hf/{f.name}" for f in (folder / "model").iterdir() if f.name in COMPANIONS}
    assert manifest.files.keys() == data_files | companions | {"train_state.json"}
    assert read_config(folder / "checkpoint" / "hf")["vocab_size"] == VOCAB


def test_every_rank_refuses_to_write_over_what_exists(written: list[dict[str, Any]], folder: Path) -> None:
    for what, name in (("second_save", "checkpoint"), ("second_export", "hf")):
        assert f"{folder / name}: exists" in written[0][what]
        assert written[1][what].startswith("OtherRankFailed")
    assert sorted(f.name for f in folder.iterdir()) == ["checkpoint", "half_written", "hf", "model"]


def test_weights_that_do_not_fit_are_refused_before_a_byte_moves(
    written: list[dict[str, Any]], want: dict[str, Tensor]
) -> None:
    for results in written:
        assert "model.norm.weight has shape (95,), config.json wants (96,)" in results["misfit"]
    assert_bitwise(written[0]["after"], want)


def test_another_layout_loads_checkpoint_and_export(loaded: list[dict[str, Any]], want: dict[str, Tensor]) -> None:
    assert_bitwise(loaded[0]["gathered"], want)
    assert_bitwise(loaded[0]["from_checkpoint"], want)
    assert_bitwise(loaded[0]["from_export"], want)
    assert loaded[-1]["padding_rows"].shape == (len(loaded) - 1, 96), "tensor parallel pads 47 to 48"
    assert loaded[-1]["padding_rows"].count_nonzero() == 0


def test_optimizer_goes_on_from_the_weights_loaded(written: Any, folder: Path, want: dict[str, Tensor]) -> None:
    ((doubled, from_checkpoint),) = spawn(load_and_step, 1, folder, timeout_s=120)
    assert_bitwise(doubled, {name: (2 * tensor).bfloat16() for name, tensor in want.items()})
    assert_bitwise(from_checkpoint, {name: tensor.bfloat16() for name, tensor in want.items()})


def test_half_written_checkpoint_is_refused_on_every_rank(loaded: list[dict[str, Any]], folder: Path) -> None:
    want = f"ConversionError: {folder / 'half_written'}: not a finished checkpoint; it has no manifest.json"
    for results in loaded:
        assert results["half_written"].startswith(want)
