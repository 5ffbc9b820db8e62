"""Runs of the shortened recipe on two servers that suffer faults, and what must hold of each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gspo_megatron.metrics import load_metrics
from gspo_megatron.types import RolloutGroup, load_groups
from tests.chaos.proxy import Fault
from tests.e2e.launching import MARK, launch, still_running

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE = 3, 16, 8
"""As the shortened recipe has them."""
TWO_SERVERS = [
    "cluster.rollout_servers=2",
    "cluster.probe_timeout_s=20",
    "rollout.request_timeout_s=15",
]
LIMIT_S = 480.0
ERROR_LIMIT_S = 60.0
"""From a fault to the end of a run that cannot go on."""
FILTERED = ("num_overlong", "num_too_short", "num_stale", "num_zero_spread", "num_surplus")


@dataclass(frozen=True, kw_only=True)
class Suffered:
    """How a run ended."""

    dir: Path
    returncode: int
    text: str
    hits: list[dict[str, Any]]
    """The faults as they happened: `time_s`, `do`, names of the servers that it `hurt`."""
    ended_s: float

    @property
    def rows(self) -> list[dict[str, Any]]:
        return load_metrics(self.dir / "metrics.jsonl")

    def groups(self, step: int) -> list[RolloutGroup]:
        return load_groups(self.dir / "rollouts" / f"step_{step:05d}.jsonl")

    def count(self, do: str, server: str) -> int:
        """How often it was done to a server."""
        return sum(hit["do"] == do and server in hit["hurt"] for hit in self.hits)

    def token_ids(self) -> list[list[list[tuple[int, ...]]]]:
        """Response ids of the first NUM_STEPS steps."""
        return [[[r.response_ids for r in g.rollouts] for g in self.groups(s)] for s in range(1, NUM_STEPS + 1)]


def suffer(
    output_dir: Path, name: str, faults: Sequence[Fault], *overrides: str, only: str | None = None
) -> Suffered:
    """Run with these faults; nothing of the run is left afterwards."""
    faults_path, hits_path = output_dir / f"{name}.faults.json", output_dir / f"{name}.hits.jsonl"
    faults_path.write_text(json.dumps([asdict(fault) for fault in faults]))
    hits_path.touch()
    mark = str(output_dir / name)
    launched = launch(
        output_dir,
        name,
        *TWO_SERVERS,
        *overrides,
        only=only,
        module=("tests.chaos.launch", str(faults_path), str(hits_path)),
        environment={MARK: mark},
    )
    done = launched.wait(timeout_s=LIMIT_S)
    ended_s = time.time()
    assert not still_running(mark), "an orphan"
    hits = [json.loads(line) for line in hits_path.read_text().splitlines()]
    return Suffered(dir=output_dir / name, returncode=done.returncode, text=done.text, hits=hits, ended_s=ended_s)


def assert_complete(
    run: Suffered, *, num_steps: int = NUM_STEPS, num_prompts: int = NUM_PROMPTS, max_policy_lag: int = 0
) -> None:
    """It ended well, with every response of every step accounted for and no token from wrong weights.

    No server was taken down because another one failed.
    """
    assert run.returncode == 0, run.text
    restarted = set(re.findall(r"SGLang server (\S+) \(\S+\) is restarted", run.text))
    rejected = set(re.findall(r"(\S+) \(\S+\): takes no more requests", run.text))
    hit = {name for fault in run.hits for name in fault["hurt"]}
    assert restarted | rejected <= hit, run.text
    rows = [row for row in run.rows if row["rollout"]]
    assert len(rows) == num_steps
    for step, row in enumerate(rows, start=1):
        report, groups = row["rollout"], run.groups(step)
        assert [len(group.rollouts) for group in groups] == [GROUP_SIZE] * num_prompts
        assert report["num_asked"] == report["num_used"] == num_prompts * GROUP_SIZE
        assert [report[name] for name in FILTERED] == [0] * len(FILTERED)
        versions = {v for group in groups for rollout in group.rollouts for v in rollout.weight_versions}
        assert versions <= set(range(max(0, step - 1 - max_policy_lag), step)), f"step {step}: {versions}"
        assert report["policy_lag_max"] <= max_policy_lag


def assert_stopped(run: Suffered) -> str:
    """It ended in time with one error, which is returned."""
    assert run.returncode == 1, run.text
    assert run.text.count("error: ") == 1, run.text
    assert "Traceback" not in run.text
    assert run.ended_s - run.hits[0]["time_s"] < ERROR_LIMIT_S
    return run.text[run.text.index("error: ") :]
