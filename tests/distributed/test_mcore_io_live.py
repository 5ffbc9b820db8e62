"""Files written here load into the real model through megatron-core's loader on any layout, and its files here.

The vocabulary is odd, so that tensor parallelism pads it.
"""

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.convert.families import table_for
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.convert.manifest import Manifest, hash_file, write_manifest
from gspo_megatron.convert.mcore_io import (
    CONTENT_METADATA,
    DataFileWriter,
    McoreCheckpoint,
    common_state,
    data_file_name,
    write_checkpoint_metadata,
)
from gspo_megatron.convert.ops import ConversionError, slices, whole
from gspo_megatron.loss import sft_loss
from tests.distributed.policy_worker import HF_DIR, build, tiny_tensors
from tests.distributed.spawn import spawn

VOCAB = 47
TP2_ETP2 = (
    *("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
    *("parallel.expert_model_parallel_size=1", "parallel.expert_tensor_parallel_size=2"),
)
LAYOUTS = {
    "tp1": ("cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"),
    "tp2_sp_etp2": ("cluster.trainer_ranks=2", *TP2_ETP2),
    "ep2": ("cluster.trainer_ranks=2", "parallel.expert_model_parallel_size=2"),
    "pp2": (
        *("cluster.trainer_ranks=2", "parallel.pipeline_model_parallel_size=2"),
        "parallel.expert_model_parallel_size=1",
    ),
}


def raised(fn: Any, *args: Any) -> str:
    """Type and message of what fn raises."""
    try:
        fn(*args)
    except (ConversionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def on_layout(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """Load the converted file with megatron-core's loader and with read_weights; save in three ways."""
    _, policy, optimizer = build([f"model.hf_dir={folder / 'model'}", *LAYOUTS[name]])
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.utils import unwrap_model

    from gspo_megatron.mcore.model import checkpoint_metadata
    from gspo_megatron.mcore.torch_dist import read_weights, write_shards

    ours = str(folder / "ours" / "iter_0000003")
    want = {n: p.detach().clone() for n, p in policy.parameters()}

    def differing(load: Any) -> list[str]:
        with torch.no_grad():
            for _, parameter in policy.parameters():
                parameter.fill_(-7.0)
        load()
        return [n for n, p in policy.parameters() if not torch.equal(p, want[n])]

    def upstream() -> None:
        state = {"model": policy.sharded_state_dict()}
        loaded = dist_checkpointing.load(state, ours, strict=StrictHandling.RAISE_ALL)
        policy.load_state_dict(loaded["model"])

    results = {
        "num_parameters": len(want),
        "upstream_differs": differing(upstream),
        "read_weights_differs": differing(lambda: read_weights(policy, folder / "ours")),
        "damaged": raised(read_weights, policy, folder / "damaged"),
        "surplus": raised(read_weights, policy, folder / "surplus"),
        "evil": raised(read_weights, policy, folder / "evil"),
        "common": dist_checkpointing.load_common_state_dict(ours),
        "content_metadata": dist_checkpointing.load_content_metadata(ours),
        "live_metadata": {k: v for k, v in checkpoint_metadata().items() if k != "dp_cp_group"},
    }

    def empty(kind: str) -> Path:
        path = folder / kind / name
        policy.parallel.on_rank_0(lambda: path.mkdir(parents=True))
        return path

    # Without a step there is no optimizer state to save; with learning rate 0 it leaves the weights.
    from gspo_megatron.optimize import optimizer_step

    sequences = [TrainSequence(name="one", prompt_ids=(2, 3), response_ids=(4, 5, 6, 7))] * 4
    batch = pack_batch(sequences, 64, policy.parallel.batch_layout, minibatch_index=0)
    optimizer_step(policy, optimizer, batch, sft_loss, denominator=16, lr=0.0, temperature=1.0)
    write_shards(policy, optimizer, empty("with_optimizer"))
    weights = empty("weights")
    dist_checkpointing.save({"model": policy.sharded_state_dict()}, str(weights))
    # Megatron-LM's habit: layers stacked, extra state of every module, its arguments
    stacked = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(unwrap_model(policy.chunks))}
    arguments = Namespace(attention_backend=AttnBackend.flash, params_dtype=torch.bfloat16)
    dist_checkpointing.save({**stacked, "iteration": 5, "args": arguments}, str(empty("stacked")))
    for key, path in (("ours_tensors", ours), ("weights_tensors", str(weights))):
        found = dist_checkpointing.load_tensors_metadata(path)
        results[key] = {n: (tuple(t.global_shape), str(t.dtype)) for n, t in found.items()}
    return results


class Evil:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def write_ours(folder: Path, tensors: dict[str, Tensor], **more_common: Any) -> None:
    """Convert the weights into two data files."""
    folder.mkdir(parents=True)
    done = []
    for i, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        with DataFileWriter(folder / data_file_name(i)) as writer:
            for name in names:
                t = tensors[name]
                writer.write_tensor(name, tuple(t.shape), t.dtype, lambda box, t=t: t[slices(box)])
        done.append(writer.result)
    write_checkpoint_metadata(folder, done, common_state(iteration=3) | more_common)
    files = {path.name: hash_file(path) for path in folder.iterdir()}
    write_manifest(folder / "manifest.json", Manifest(kind="mcore", files=files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the model directory; conversions and saves go beside it."""
    folder = tmp_path_factory.mktemp("mcore_io")
    shutil.copytree(HF_DIR, folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps(read_config(HF_DIR) | {"vocab_size": VOCAB}))
    return folder


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Tensor]:
    """The weights under Megatron's names."""
    ops = table_for(read_config(folder / "model"), ())
    hf = tiny_tensors(ops)
    return {op.mcore_name: op.read_mcore(whole(op.shape), lambda n, box: hf[n][slices(box)]) for op in ops}


def largest_file(folder: Path) -> Path:
    """The first that ranks share out to verify."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def written(folder: Path, want: dict[str, Tensor]) -> None:
    write_ours(folder / "ours" / "iter_0000003", want)
    (folder / "ours" / "latest_checkpointed_iteration.txt").write_text("3\n")
    shutil.copytree(folder / "ours" / "iter_0000003", folder / "damaged")
    data = bytearray(largest_file(folder / "damaged").read_bytes())
    data[len(data) // 2] ^= 1
    largest_file(folder / "damaged").write_bytes(data)
    write_ours(folder / "evil", want, args=Evil(folder / "executed"))
    write_ours(folder / "surplus", want | {"decoder.layers.4.mlp.router.weight": torch.zeros(8, 96)})


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, folder: Path, written: None) -> tuple[str, list[dict[str, Any]]]:
    world_size = 1 if request.param == "tp1" else 2
    return request.param, spawn(on_layout, world_size, folder, request.param, timeout_s=120)


def test_common_state_that_would_run_code_is_refused_and_does_not(
    layout: tuple[str, list[dict[str, Any]]], folder: Path
) -> None:
    assert any("ConversionError" in results["evil"] and "mkdir" in results["evil"] for results in layout[1])
    assert not (folder / "executed").exists()


def test_upstreams_strict_loader_fills_the_model_bitwise(layout: tuple[str, list[dict[str, Any]]]) -> None:
    for results in layout[1]:
        assert results["num_parameters"] > 20
        assert results["upstream_differs"] == []
        assert results["read_weights_differs"] == []


def test_upstream_reads_common_state_and_content_metadata(layout: tuple[str, list[dict[str, Any]]]) -> None:
    for results in layout[1]:
        assert results["common"] == common_state(iteration=3)
        assert results["content_metadata"] == CONTENT_METADATA == results["live_metadata"]


def test_upstream_saving_the_same_model_has_the_same_tensors(layout: tuple[str, list[dict[str, Any]]]) -> None:
    for results in layout[1]:
        ours, saved = results["ours_tensors"], results["weights_tensors"]
        if layout[0] == "tp2_sp_etp2":  # the live model's vocabulary is padded
            ours = {n: ((48, 96), d) if shape == (VOCAB, 96) else (shape, d) for n, (shape, d) in ours.items()}
        assert ours == saved


@pytest.mark.parametrize("kind", ["with_optimizer", "weights", "stacked"])
def test_files_of_megatron_core_are_read_bitwise(
    layout: tuple[str, list[dict[str, Any]]], kind: str, folder: Path, want: dict[str, Tensor]
) -> None:
    with McoreCheckpoint(folder / kind / layout[0], require_manifest=False) as checkpoint:
        assert checkpoint.tensors.keys() == want.keys()
        assert checkpoint.is_stacked == (kind == "stacked")
        assert bool(checkpoint.optimizer_names) == (kind == "with_optimizer")
        assert checkpoint.unknown_names == ()
        assert kind != "with_optimizer" or checkpoint.common["content_metadata"] == CONTENT_METADATA
        if kind == "stacked":
            assert (checkpoint.common["iteration"], checkpoint.common["args"].params_dtype) == (5, torch.bfloat16)
        for name, tensor in want.items():
            found = checkpoint.read(name)
            if found.shape != tensor.shape:
                assert (name.partition(".")[0], len(found)) in (("embedding", 48), ("output_layer", 48))
                assert found[VOCAB:].count_nonzero() == 0
            assert torch.equal(found[: len(tensor)], tensor), name


def test_damaged_file_and_another_model_are_refused_on_every_rank(
    layout: tuple[str, list[dict[str, Any]]], folder: Path
) -> None:
    damaged = sorted(results["damaged"] for results in layout[1])
    assert damaged[0].startswith(f"ConversionError: {folder / 'damaged'}: files do not fit the manifest")
    assert f"{largest_file(folder / 'damaged')}: has xxh3_128" in damaged[0]
    assert all(message.startswith("OtherRankFailed: ranks") for message in damaged[1:])
    for results in layout[1]:
        assert "\n  surplus decoder.layers.4.mlp.router.weight (8, 96)" in results["surplus"]
