"""What overlap buys: the step time of an asynchronous run beside that of a synchronous one.

Both are `gspo_megatron.launch` on the same recipe with one trainer rank and one server, each pinned to a core of its
own from the first step on. The load is balanced by the length of responses and the number of prompts, so that sampling
and training take about as long; the table shows how well. max_policy_lag is 1 against 0, and all else is equal.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from gspo_megatron.metrics import load_metrics

LIMIT = 0.75
"""Of the synchronous step time."""
NUM_STEPS, NUM_WARM_STEPS = 16, 3
LOAD = [
    "cluster.trainer_ranks=1",
    "cluster.rollout_servers=1",
    "parallel.expert_model_parallel_size=1",
    "cold_start.num_steps=100",
    f"train.num_rollout_steps={NUM_STEPS}",
    f"evaluate.every={NUM_STEPS}",
    "evaluate.num_prompts=8",
    "rollout.num_prompts=64",
    "rollout.max_response_tokens=48",
    "rollout.temperature=1.5",
]
TRAINING = ("reward", "batch", "old_logprobs", "train")
START_LIMIT_S = 600.0


def main() -> int:
    """Print the table; 1 if the ratio is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("recipes/gspo-tiny-moe-cpu.yaml"), help="a recipe for CPU")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one key of the recipe")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit(f"wants two cores, may use {cores}")
    table = Table("max_policy_lag", "s per step", "waits for rollouts", "trains", "pushes", title="medians over steps")
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        for lag in (0, 1):
            steps = run(args.config, [*LOAD, *args.set], Path(folder), lag, cores[:2])
            parts = [
                statistics.median(sum(step[name] for name in names if name in step) for step in steps)
                for names in (steps[0].keys(), ("rollout",), TRAINING, ("weight_sync",))
            ]
            medians[lag] = parts[0]
            table.add_row(str(lag), *(f"{part:.2f}" for part in parts))
    ratio = medians[1] / medians[0]
    Console().print(table)
    Console().print(f"asynchronous / synchronous: {ratio:.2f} (limit {LIMIT})")
    return int(ratio > LIMIT)


def run(config: Path, overrides: list[str], folder: Path, lag: int, cores: list[int]) -> list[dict[str, float]]:
    """Seconds of each stage of the steps after the warm ones."""
    name = f"lag-{lag}"
    items = [*overrides, f"output_dir={folder}", f"name={name}", f"cluster.max_policy_lag={lag}"]
    command = [sys.executable, "-m", "gspo_megatron.launch", "--config", str(config)]
    command += [part for item in items for part in ("--set", item)]
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        pin_when_started(process, log_path, cores)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if status != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {status}:\n{log_path.read_text()[-2000:]}")
    rows = load_metrics(folder / name / "metrics.jsonl")
    return [row["stage_s"] for row in rows[1 + NUM_WARM_STEPS : -1]]  # the last one evaluates


def pin_when_started(process: subprocess.Popen[bytes], log_path: Path, cores: list[int]) -> None:
    """Pin every thread of the trainer to one core and of the server to the other, once the loop has begun."""
    deadline = time.monotonic() + START_LIMIT_S
    while "step    1" not in log_path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not get to its first step:\n{log_path.read_text()[-2000:]}")
        time.sleep(0.1)
    for child in psutil.Process(process.pid).children():
        core = cores["gspo_megatron.sglang_cpu" in " ".join(child.cmdline())]
        for member in (child, *child.children(recursive=True)):
            for thread in member.threads():
                os.sched_setaffinity(thread.id, {core})


if __name__ == "__main__":
    sys.exit(main())
