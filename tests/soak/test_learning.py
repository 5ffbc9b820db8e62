"""The full CPU recipe on three seeds and its control: what `make train` promises, measured."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from gspo_megatron.metrics import load_metrics

ROOT = Path(__file__).parents[2]
OUTPUT_DIR = ROOT / "runs" / "soak"
MAX_MINUTES = 20.0
MAX_PSS_GIB = 12.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 * MAX_MINUTES * 1.5)]


@dataclass(frozen=True)
class Outcome:
    """What a finished run shows."""

    before: dict
    after: dict
    minutes: float
    peak_pss_gib: float
    clipped: list[list[float]]
    """Share of responses clipped, per rollout step and minibatch."""

    @property
    def gain(self) -> float:
        return self.after["accuracy"] - self.before["accuracy"]


@cache
def run(name: str, *overrides: str) -> Outcome:
    """One run from its cold start, under the memory sampler."""
    OUTPUT_DIR.mkdir(parents=True, exist_ok=True)
    pss_path = OUTPUT_DIR / f"{name}-pss.json"
    items = [f"name={name}", f"output_dir={OUTPUT_DIR.relative_to(ROOT)}", *overrides]
    command = [sys.executable, "tools/pss.py", "--limit-gib", str(MAX_PSS_GIB), "--json", str(pss_path), "--"]
    command += [sys.executable, "-m", "gspo_megatron.launch", "--config", "recipes/gspo-tiny-moe-cpu.yaml"]
    command += [part for item in items for part in ("--set", item)]
    start_s = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    minutes = (time.monotonic() - start_s) / 60
    rows = load_metrics(OUTPUT_DIR / name / "metrics.jsonl")
    outcome = Outcome(
        before=rows[0]["evaluation"],
        after=rows[-1]["evaluation"],
        minutes=minutes,
        peak_pss_gib=json.loads(pss_path.read_text())["peak"]["pss_gib"],
        clipped=[[m["clip_fraction_responses"] for m in row["minibatches"]] for row in rows[1:]],
    )
    print(
        f"\n{name}: {outcome.before['accuracy']:.3f} -> {outcome.after['accuracy']:.3f}, {outcome.minutes:.1f} min, "
        f"{outcome.peak_pss_gib:.2f} GiB, clipped on minibatches 2 to 4 {mean_later(outcome):.3f}"
    )
    return outcome


def mean_later(outcome: Outcome) -> float:
    return fmean(share for step in outcome.clipped for share in step[1:])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gspo_improves_the_cold_start_by_twenty_points(seed: int) -> None:
    outcome = run(f"seed-{seed}", f"seed={seed}")
    assert outcome.before["num_prompts"] >= 256
    assert 0.10 <= outcome.before["accuracy"] <= 0.45
    assert outcome.gain >= 0.20
    assert outcome.before["high"] < outcome.after["low"]
    assert outcome.minutes <= MAX_MINUTES
    assert outcome.peak_pss_gib < MAX_PSS_GIB


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_clip_acts_on_later_minibatches_only(seed: int) -> None:
    outcome = run(f"seed-{seed}", f"seed={seed}")
    assert {step[0] for step in outcome.clipped} == {0.0}
    assert 0.02 <= mean_later(outcome) <= 0.50


def test_control_with_permuted_rewards_gains_less_than_five_points() -> None:
    outcome = run("control", "seed=1", "reward.permute=true")
    assert outcome.gain < 0.05
