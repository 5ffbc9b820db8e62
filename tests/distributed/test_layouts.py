"""Layout parity: six objectives give on every layout the numbers of one process without parallelism or packing.

Compared per layout and objective: the loss, each response's log s and clip decision, and of the whole model the
reduced gradient, Adam's moments and the updated weights. The differences are printed as a table (RESULTS.md has it).
"""

import json
import shutil
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gspo_megatron.convert.ops import slices
from tests.distributed.layout_worker import ARMS, LR, Case, make_sequences, run_case
from tests.distributed.policy_worker import HF_DIR
from tests.distributed.spawn import spawn
from tests.tolerances import LAYOUT_GRADIENT, LAYOUT_LOSS, LAYOUT_WEIGHTS

SIZES = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "cp": "parallel.context_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "etp": "parallel.expert_tensor_parallel_size",
    "tokens": "batch.max_tokens_per_microbatch",
}
WORDS = {
    "packed": ("batch.mode=packed",),
    "padded": ("batch.mode=padded",),
    "allgather": ("model.mcore.moe_token_dispatcher_type=allgather",),
    "distopt": ("parallel.use_distributed_optimizer=true",),
    "overlap": ("parallel.overlap_grad_reduce=true",),
    "gather": ("parallel.overlap_param_gather=true",),
    "recompute": (
        "model.mcore.recompute_granularity=full",
        "model.mcore.recompute_method=uniform",
        "model.mcore.recompute_num_layers=1",
    ),
    "tied": (),
}
"""Words of a layout's name -> recipe keys; `tied` chooses another config.json."""

# Processes, then the layout. tokens: per microbatch and rank; fewer give more microbatches.
LAYOUTS = """
1 packed tokens=512
1 packed tokens=80 recompute
1 padded tokens=512
1 padded tokens=128
2 tp=2 tokens=512
2 tp=2 etp=2 tokens=128
2 tp=2 tokens=128 padded
2 tp=2 tokens=512 tied
2 pp=2 tokens=104
2 pp=2 tokens=256 tied
2 pp=2 tokens=128 padded
2 pp=2 vpp=2 tokens=256
2 pp=2 vpp=2 tokens=80 recompute
4 pp=4 tokens=80
4 pp=4 tokens=128 recompute
2 ep=2 tokens=256
2 ep=2 tokens=256 allgather padded
4 ep=4 tokens=128
4 ep=4 tokens=128 allgather padded
4 pp=2 ep=2 tokens=128 allgather padded
4 tp=2 ep=2 etp=2 tokens=256
2 cp=2 tokens=256
2 cp=2 tokens=64 padded
4 cp=4 tokens=128
2 dp=2 tokens=128
2 dp=2 tokens=128 padded
4 dp=4 tokens=128
2 dp=2 tokens=128 distopt
2 dp=2 tokens=80 distopt overlap gather
2 dp=2 tokens=80 overlap
4 dp=2 pp=2 tokens=80 distopt overlap gather
4 tp=2 cp=2 tokens=128
4 tp=2 pp=2 tokens=128 recompute
4 pp=2 cp=2 tokens=80
4 pp=2 vpp=2 ep=2 tokens=80 distopt
4 dp=2 ep=2 cp=2 tokens=80 distopt overlap gather padded
8 tp=2 pp=2 vpp=2 cp=2 ep=2 tokens=80 distopt
8 dp=2 tp=2 pp=2 ep=4 tokens=128 distopt overlap gather recompute
""".strip().splitlines()


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """config.json of a smaller model with an odd vocabulary, which tensor parallelism pads; untied and tied heads."""
    found = {}
    for name in ("untied", "tied"):
        folder = tmp_path_factory.mktemp(name)
        config = json.loads((HF_DIR / "config.json").read_text())
        config |= {"hidden_size": 32, "head_dim": 8, "moe_intermediate_size": 16, "intermediate_size": 16}
        config |= {"vocab_size": 47, "tie_word_embeddings": name == "tied"}
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copy(HF_DIR / "tokenizer.json", folder)
        found[name] = str(folder)
    return found


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines that are printed when the module is done."""
    lines: list[str] = []
    yield lines
    heading = "| processes, layout | microbatches | loss | gradient / largest | moments / largest | weights / lr |"
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", heading, "|---|---|---|---|---|---|", *lines, sep="\n")


def overrides_of(layout: str, hf_dir: str) -> tuple[int, tuple[str, ...]]:
    """(processes, recipe keys) of a line of LAYOUTS."""
    count, *words = layout.split()
    sizes = dict(word.split("=") for word in words if "=" in word)
    keys = {SIZES[name]: size for name, size in sizes.items() if name != "dp"}
    keys = {"parallel.expert_model_parallel_size": "1", "parallel.use_distributed_optimizer": "false"} | keys
    flags = [f"{key}={value}" for key, value in keys.items()]
    flags += [f"cluster.trainer_ranks={count}", f"model.hf_dir={hf_dir}", "model.load=random"]
    flags += ["parallel.sequence_parallel=true"] if "tp" in sizes else []
    flags += [flag for word in words if "=" not in word for flag in WORDS[word]]
    return int(count), tuple(flags)


@cache
def one_process(hf_dir: str) -> dict[str, Any]:
    """The reference: every sequence a microbatch of its own."""
    _, keys = overrides_of("1 padded tokens=40", hf_dir)
    return assembled(spawn(run_case, 1, Case(overrides=keys), timeout_s=240))


@cache
def one_process_with_microbatches_of(hf_dir: str, mode: str, padding_multiple: int, count: int) -> dict[str, Any]:
    """The auxiliary losses' reference: they are a microbatch's own, so it has the layout's microbatches."""
    _, keys = overrides_of(f"1 {mode} tokens=100000", hf_dir)
    old = {"free": one_process(hf_dir)["gspo"]["current"]}
    case = Case(overrides=keys, arms=("gspo_aux",), old=old, alike=(padding_multiple, count))
    return assembled(spawn(run_case, 1, case, timeout_s=240))


def assembled(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's numbers with every rank's shards put together; replicas must agree bit for bit."""
    for arm, numbers in ranks[0].items():
        numbers["tensors"] = {
            kind: whole_tensors([s for rank in ranks for s in rank[arm]["tensors"][kind]])
            for kind in numbers["tensors"]
        }
    return ranks[0]


def whole_tensors(shards: list[Any]) -> dict[str, Tensor]:
    whole = {s.mcore_name: torch.full(s.global_shape, torch.nan) for s in shards}
    for s in shards:
        if s.is_owner:
            whole[s.mcore_name][slices(s.box)] = s.boxed
    for s in shards:
        assert torch.equal(whole[s.mcore_name][slices(s.box)], s.boxed), f"replicas of {s.mcore_name}"
    assert all(t.isfinite().all() for t in whole.values()), "a shard is missing, or a number is not finite"
    return whole


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any element, as a share of the largest element of all."""
    assert actual.keys() == expected.keys()
    # Padding rows of the vocabulary exist under tensor parallelism only, and must be zero.
    rows = {name: min(len(actual[name]), len(t)) for name, t in expected.items()}
    assert not any(actual[name][n:].any() for name, n in rows.items())
    top = max(float(t.abs().max()) for t in expected.values())
    return max(float((actual[n][: rows[n]] - t[: rows[n]]).abs().max()) for n, t in expected.items()) / top


def largest_weight_difference(actual: Any, expected: Any) -> float:
    """Largest difference of an updated weight whose gradient is not noise, as a share of the learning rate."""
    grad, weights = expected["grad"], expected["weights"]
    noise = LAYOUT_WEIGHTS.rtol * max(float(g.abs().max()) for g in grad.values())
    worst = 0.0
    for name, weight in weights.items():
        n = min(len(weight), len(actual["weights"][name]))
        difference = (actual["weights"][name][:n] - weight[:n]).abs()
        worst = max(worst, float(torch.where(grad[name][:n].abs() > noise, difference, 0.0).max()))
    return worst / LR


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_numbers_of_one_process(
    layout: str, hf_dirs: dict[str, str], table: list[str]
) -> None:
    hf_dir = hf_dirs["tied" if "tied" in layout else "untied"]
    reference = one_process(hf_dir)
    old = {"free": reference["gspo"]["current"]} | {r: reference[f"gspo_{r}"]["current"] for r in ("r2", "r3")}
    count, keys = overrides_of(layout, hf_dir)
    actual = assembled(spawn(run_case, count, Case(overrides=keys, old=old), timeout_s=240))
    row = {"loss": 0.0, "gradient": 0.0, "moments": 0.0, "weights": 0.0}
    for arm in ARMS:
        got, want = actual[arm], reference[arm]
        if arm == "gspo_aux":
            mode = "padded" if "padded" in layout else "packed"
            microbatches = got["num_microbatches"] * got["dp_size"]
            want = one_process_with_microbatches_of(hf_dir, mode, got["padding_multiple"], microbatches)[arm]
        for name, value in want["per_response"].items():
            if name in ("clipped_tokens", "outside_tokens", "clamped_tokens", "length"):
                assert torch.equal(got["per_response"][name], value), (arm, name)
        assert float((got["per_response"]["log_ratio"] - want["per_response"]["log_ratio"]).abs().max()) < 1e-5
        a, e = got["tensors"], want["tensors"]
        differences = {
            "loss": abs(got["loss"] - want["loss"]),
            "gradient": largest_difference(a["grad"], e["grad"]),
            "moments": max(largest_difference(a[k], e[k]) for k in ("exp_avg", "exp_avg_sq")),
            "weights": largest_weight_difference(a, e),
        }
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        row = {name: max(value, differences[name]) for name, value in row.items()}
    table.append(
        f"| {layout} | {actual['gspo']['num_microbatches']} | {row['loss']:.1e} | {row['gradient']:.1e} "
        f"| {row['moments']:.1e} | {row['weights']:.1e} |"
    )
    assert row["loss"] <= LAYOUT_LOSS.atol
    assert row["gradient"] <= LAYOUT_GRADIENT.atol
    assert row["moments"] <= LAYOUT_GRADIENT.atol
    assert row["weights"] <= LAYOUT_WEIGHTS.atol


def test_batch_decides_what_the_layouts_could_get_wrong(hf_dirs: dict[str, str]) -> None:
    reference = one_process(hf_dirs["untied"])
    assert len(LAYOUTS) >= 30
    gspo = reference["gspo"]["per_response"]
    assert (gspo["length"] == 0).sum() == 1
    assert (gspo["advantage"] == 0).sum() >= 2
    assert any(not all(s.response_mask) for s in make_sequences() if s.response_mask)
    log_s = gspo["log_ratio"][gspo["length"] > 0]
    for bound in (4.0e-4, -3.0e-4):
        assert (log_s - bound).abs().min() > 1e-5
    between = (log_s.abs() > 3.1e-4) & (log_s.abs() < 3.9e-4)
    assert between.sum() >= 3
    assert 0 < (gspo["clipped_tokens"] > 0).sum() < len(log_s)
    grpo = reference["grpo"]["per_response"]
    assert 0 < grpo["clipped_tokens"].sum() < grpo["length"].sum()
    assert reference["gspo_r2"]["num_flips"] > 100, "replay must change routes that the new routers would choose"
    pairs = zip(reference["gspo_r3"]["current"], reference["gspo"]["current"], strict=True)
    moved = sorted(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))
    assert moved[len(moved) // 2] > 1e-3, "random experts must change the log-probs"
    token = reference["gspo_token"]["per_response"]
    assert ((token["clipped_tokens"] > 0) & (token["clipped_tokens"] < token["length"])).any()
