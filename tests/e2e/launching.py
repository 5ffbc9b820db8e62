"""Start `gspo_megatron.launch` as a user would, on a recipe that takes seconds per stage."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SHORT = [
    "data.params.max_numbers=2",  # learned in seconds, well enough for groups whose rewards differ
    "cold_start.num_steps=80",
    "cold_start.batch_size=64",
    "cold_start.warmup_steps=10",
    "rollout.num_prompts=16",
    "train.num_rollout_steps=3",
    "evaluate.num_prompts=64",
    "evaluate.every=3",
]
"""Overrides of the CPU recipe."""


@dataclass(frozen=True)
class Done:
    """How a launch ended."""

    returncode: int
    text: str


@dataclass(frozen=True)
class Launched:
    """A running launch."""

    process: subprocess.Popen
    log_path: Path

    def wait(self, *, timeout_s: float) -> Done:
        """Wait for the end; kills the launch when it takes longer."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait(30)
            raise
        return Done(status, self.log_path.read_text())

    def tree(self) -> list[psutil.Process]:
        """The launch and all that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def launch(output_dir: Path, name: str, *overrides: str, only: str | None = None) -> Launched:
    """Start a run of the shortened recipe; stdout and stderr go to one file."""
    items = [*SHORT, f"name={name}", f"output_dir={output_dir}", *overrides]
    command = [sys.executable, "-m", "gspo_megatron.launch", "--config", "recipes/gspo-tiny-moe-cpu.yaml"]
    command += [part for item in items for part in ("--set", item)]
    command += ["--only", only] if only else []
    log_path = output_dir / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    return Launched(process, log_path)


def wait_for_line(launched: Launched, text: str, *, timeout_s: float) -> None:
    """Wait until the launch has printed text.

    Raises:
        AssertionError: it ended or took too long.
    """
    deadline = time.monotonic() + timeout_s
    while text not in launched.log_path.read_text():
        assert launched.process.poll() is None, launched.log_path.read_text()
        if time.monotonic() > deadline:
            launched.process.terminate()
            raise AssertionError(f"no {text!r} within {timeout_s} s: {launched.log_path.read_text()}")
        time.sleep(0.2)
