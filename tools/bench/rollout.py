"""The rollout client beside SGLang's own serving benchmark: output tokens per second of the same server.

Both send the same payload: token ids in, log-probs out, no streaming, 256 requests at a time. Every response has the
same length: the served model is the recipe's with random weights and no token that ends a response. They take turns;
the limit is on the ratio of their medians. The client checks every answer, the benchmark reads it. A third line is the
client as a run uses it, with the members of a group in one request.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gspo_megatron.config import Recipe, load_recipe
from gspo_megatron.engine import Engine
from gspo_megatron.fleet import Fleet, Server, announce
from gspo_megatron.prompts import load_tokenizer
from gspo_megatron.rollout import Client, Vocabulary
from gspo_megatron.sglang_cpu import DEVICE_VARIABLE
from gspo_megatron.types import Prompt

ROOT = Path(__file__).parents[2]
LIMIT = 0.95
CONCURRENCY = 256
NUM_RESPONSES, GROUP_SIZE = 2048, 8
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64
START_BENCHMARK = """
import runpy
import gspo_megatron.sglang_cpu  # lets what SGLang imports for images be imported
runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
"""
SERVER = [
    f"rollout.sglang.max_total_tokens={2 * CONCURRENCY * (PROMPT_TOKENS + RESPONSE_TOKENS)}",
    f"rollout.sglang.max_running_requests={CONCURRENCY}",
]


def main() -> int:
    """Print the table; 1 if the client is below the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=ROOT / "recipes" / "gspo-tiny-moe-cpu.yaml", help="for CPU")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    recipe = load_recipe(args.config, SERVER)
    names = ("SGLang's benchmark", "client, one response a request", f"client, groups of {GROUP_SIZE}")
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        model_dir = endless_model(Path(recipe.model.hf_dir), folder / "model")
        engine = Engine.start(recipe, model_dir=model_dir, port=0, log_path=folder / "log", load_format="dummy")
        try:
            engine.wait_ready(recipe.cluster.start_timeout_s)
            for _ in range(args.rounds):
                speeds[names[0]].append(benchmark(engine.url, model_dir, folder / "result.json"))
                for name, group_size in zip(names[1:], (1, GROUP_SIZE), strict=True):
                    speeds[name].append(asyncio.run(sample(recipe, engine.url, folder, group_size)))
        finally:
            engine.stop()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    table = Table("who", "output tokens per second, each round", "median", "ratio", "limit")
    for name, values in speeds.items():
        ratio = medians[name] / medians[names[0]]
        limit = f"{LIMIT}" if name == names[1] else ""
        table.add_row(name, " ".join(f"{v:.0f}" for v in values), f"{medians[name]:.0f}", f"{ratio:.2f}", limit)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(medians[names[1]] < LIMIT * medians[names[0]])


def endless_model(hf_dir: Path, folder: Path) -> Path:
    """The directory's model without a token that ends a response."""
    shutil.copytree(hf_dir, folder, ignore=shutil.ignore_patterns("generation_config.json", "*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    return folder


def benchmark(url: str, model_dir: Path, result_path: Path) -> float:
    """Output tokens per second by `python -m sglang.benchmark.serving`."""
    result_path.unlink(missing_ok=True)
    options = {
        "backend": "sglang",
        "base-url": url,
        "model": model_dir,
        "dataset-name": "random-ids",
        "random-input-len": PROMPT_TOKENS,
        "random-output-len": RESPONSE_TOKENS,
        "random-range-ratio": 1.0,
        "num-prompts": NUM_RESPONSES,
        "max-concurrency": CONCURRENCY,
        "temperature": 1.0,
        "output-file": result_path,
    }
    flags = ["--disable-stream", "--return-logprob", "--tokenize-prompt", "--flush-cache", "--disable-tqdm"]
    command = [sys.executable, "-c", START_BENCHMARK, *flags]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / '.venv' / 'soak'}", DEVICE_VARIABLE: "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"sglang.benchmark.serving ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    result = json.loads(result_path.read_text())
    if result["completed"] != NUM_RESPONSES:
        raise SystemExit(f"sglang.benchmark.serving completed {result['completed']} of {NUM_RESPONSES} requests")
    return float(result["output_throughput"])


async def sample(recipe: Recipe, url: str, folder: Path, group_size: int) -> float:
    """Output tokens per second by the client."""
    announce(folder / "servers", Server(name="server_0", url=url, incarnation=0))
    fleet = Fleet(folder / "servers")
    fleet.confirm(fleet.announced(), 0)
    rollout = replace(
        recipe.rollout, max_response_tokens=RESPONSE_TOKENS, max_concurrency=CONCURRENCY // group_size
    )
    tokenizer = load_tokenizer(recipe.model.hf_dir)
    size = len(tokenizer)
    vocabulary = Vocabulary(
        size=size,
        stop_token_ids=frozenset(),
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        encode=tokenizer.encode,
    )
    rng = random.Random(1)
    prompts = [
        Prompt(
            prompt_id=str(i),
            text="",
            token_ids=tuple((start + j) % size for j in range(PROMPT_TOKENS)),
            expected="",
            entry={},
        )
        for i, start in enumerate(rng.choices(range(size), k=NUM_RESPONSES // group_size))
    ]
    async with Client(fleet, replace(recipe, rollout=rollout), vocabulary) as client:
        start_s = time.perf_counter()
        seeds = range(group_size)
        groups = await asyncio.gather(*(client.sample_group(p, seeds, temperature=1.0) for p in prompts))
        seconds = time.perf_counter() - start_s
    return sum(len(rollout.response_ids) for group in groups for rollout in group.rollouts) / seconds


if __name__ == "__main__":
    sys.exit(main())
