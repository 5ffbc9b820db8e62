"""Logits of every family's models on every layout against transformers' own: float32, random weights, uneven packs."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo_megatron.convert.command import hf_to_mcore_main
from tests.distributed.family_worker import LENGTHS, Piece, make_sequences, run_models
from tests.distributed.policy_worker import HF_DIR
from tests.distributed.spawn import spawn
from tests.models import TINY_CONFIGS
from tests.tolerances import FAMILY_LOGITS

SIZES = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
}
WORLD_SIZES = {
    "tp1": 1,
    "tp1 padded": 1,
    "tp2": 2,
    "pp2 vpp2": 2,
    "ep2": 2,
    "cp2": 2,
    "ep2 etp2": 4,
    "tp2 pp2 ep2": 4,
}
"""Layout -> processes. Tensor parallel is with sequence parallel; padded: rows instead of packs."""


def is_moe(name: str) -> bool:
    return "num_experts_per_tok" in TINY_CONFIGS[name]


def models_on(layout: str) -> list[str]:
    """A dense model has no experts to cut."""
    return [name for name in TINY_CONFIGS if is_moe(name) or not layout.startswith("ep")]


CASES = [(source, layout, name) for source in ("hf", "mcore") for layout in WORLD_SIZES for name in models_on(layout)]
"""The source is a sub-folder of `folder`, with what model.load takes of every model: published or converted."""
CASES += [("fused", layout, name) for layout in ("tp1", "ep2 etp2") for name in models_on(layout) if is_moe(name)]


def layout_keys(layout: str) -> dict[str, list[str]]:
    """Recipe keys of every model."""
    words = layout.removesuffix(" padded").split()
    sizes = dict.fromkeys(SIZES, "1") | {"vpp": "null"} | {word[:-1]: word[-1] for word in words}
    common = [
        f"parallel.sequence_parallel={'true' if sizes['tp'] != '1' else 'false'}",
        f"cluster.trainer_ranks={WORLD_SIZES[layout]}",
        f"batch.mode={'padded' if layout.endswith('padded') else 'packed'}",
        "batch.max_tokens_per_microbatch=128",  # two packs, or rows two by two
    ]
    dense = sizes | {"ep": "1", "etp": "1"}
    return {
        name: [*common, *(f"{SIZES[axis]}={n}" for axis, n in (sizes if is_moe(name) else dense).items())]
        for name in models_on(layout)
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a folder per source, and in it a directory per model."""
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def want(folder: Path) -> dict[str, Tensor]:
    """transformers' logits [all tokens, V]; writes the models to the folders of the sources."""
    logits = {name: by_transformers(folder / "hf" / name, config) for name, config in TINY_CONFIGS.items()}
    (folder / "mcore").mkdir()
    for name in TINY_CONFIGS:
        convert(folder / "hf" / name, folder / "mcore" / name)
    return logits


def convert(hf_dir: Path, mcore_dir: Path) -> None:
    assert hf_to_mcore_main(["--hf-dir", str(hf_dir), "--mcore-dir", str(mcore_dir)]) == 0


@torch.no_grad()
def by_transformers(hf_dir: Path, config: dict[str, Any]) -> Tensor:
    """Save a model with random weights; its logits, of one sequence at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(2)
    hf_config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms away from 1, biases from 0
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(hf_dir)
    shutil.copy(HF_DIR / "tokenizer.json", hf_dir)
    if "num_experts_per_tok" in config:  # its experts as transformers holds them
        fused_dir = hf_dir.parents[1] / "fused" / hf_dir.name
        fused_dir.mkdir(parents=True)
        save_file({n: t.clone() for n, t in model.state_dict().items()}, fused_dir / "model.safetensors")
        shutil.copy(hf_dir / "config.json", fused_dir)
    sequences = make_sequences(config["vocab_size"])
    return torch.cat([model(torch.tensor([s.prompt_ids + s.response_ids])).logits[0] for s in sequences])


@pytest.fixture(scope="module")
def logits_on(folder: Path, want: Any) -> Any:
    """(source, layout) -> name -> logits [all tokens, V] by megatron-core."""

    @cache
    def run(source: str, layout: str) -> dict[str, Tensor]:
        overrides = {
            name: [f"model.hf_dir={folder / 'hf' / name}", f"model.load={folder / source / name}", *keys]
            for name, keys in layout_keys(layout).items()
            if (source, layout, name) in CASES
        }
        ranks = spawn(run_models, WORLD_SIZES[layout], overrides, timeout_s=180)
        return {name: merge([p for rank in ranks for p in rank[name]], TINY_CONFIGS[name]) for name in overrides}

    return run


def merge(pieces: list[Piece], config: dict[str, Any]) -> Tensor:
    """Put together from all ranks; the vocabulary's padding is cut off, and what no rank has is NaN."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    whole = torch.full((sum(LENGTHS), config["vocab_size"]), torch.nan)
    for p in pieces:
        columns = slice(p.first_column, p.first_column + p.logits_TV.shape[1])
        part = whole[starts[p.sequence_T] + p.position_T, columns]
        whole[starts[p.sequence_T] + p.position_T, columns] = p.logits_TV[:, : part.shape[1]]
    return whole


@pytest.mark.parametrize(("source", "layout", "name"), CASES)
def test_logits_are_those_of_transformers(
    source: str, layout: str, name: str, logits_on: Any, want: dict[str, Tensor]
) -> None:
    assert want[name].std() > 0.3, "the model is not uniform"
    share = (logits_on(source, layout)[name] - want[name]).abs().max() / want[name].std()
    print(f"{source} {layout} {name}: {share:.1e}")
    assert share <= FAMILY_LOGITS.atol
