"""Start `gspo_megatron.launch` as a user would, on a recipe that takes seconds per stage."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from gspo_megatron.config import ConfigError
from gspo_megatron.engine import take_port

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
MARK = "GSPO_MEGATRON_TEST"
"""Environment variable that still_running looks for; what is started inherits it."""


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
        """Wait for the end; ends the launch when it takes longer, or the test is ended."""
        try:
            status = self.process.wait(timeout_s)
        except BaseException:
            self.process.terminate()
            self.process.wait(30)
            raise
        return Done(status, self.log_path.read_text())

    def tree(self) -> list[psutil.Process]:
        """The launch and all that it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def launch(
    output_dir: Path,
    name: str,
    *overrides: str,
    only: str | None = None,
    module: tuple[str, ...] = ("gspo_megatron.launch",),
    environment: dict[str, str] | None = None,
) -> Launched:
    """Start a run of the shortened recipe; stdout and stderr go to one file.

    Args:
        output_dir, name: of the run.
        overrides: after those of SHORT.
        only: as the command's.
        module: what is run, and arguments before the command's own.
        environment: added to this process's.
    """
    items = [*SHORT, f"name={name}", f"output_dir={output_dir}", *overrides]
    command = [sys.executable, "-m", *module, "--config", "recipes/gspo-tiny-moe-cpu.yaml"]
    command += [part for item in items for part in ("--set", item)]
    command += ["--only", only] if only else []
    log_path = output_dir / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
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


def still_running(mark: str) -> list[psutil.Process]:
    """Processes that were started with mark in the environment variable MARK, or by such ones; zombies do not run."""
    found = []
    for process in psutil.process_iter(["pid"]):
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def server_process(url: str) -> psutil.Process | None:
    """Main process of the server at a url, which this process started; None if there is none."""
    port = ["--port", url.rpartition(":")[2]]
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # or a zombie
            line = process.cmdline()
            if any(line[i : i + 2] == port for i in range(len(line))):
                return process
    return None


def listener_at(url: str) -> socket.socket:
    """A socket that takes the port of a server as soon as that is gone."""
    deadline = time.monotonic() + 10
    while True:
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(url.rpartition(":")[2])))
            listener.listen()
            return listener
        except OSError:
            listener.close()
            assert time.monotonic() < deadline
        time.sleep(0.05)


def two_ports() -> int:
    """The first of two neighbours that are free."""
    while True:
        port = take_port("127.0.0.1", 0)
        with suppress(ConfigError):
            take_port("127.0.0.1", port + 1)
            return port
