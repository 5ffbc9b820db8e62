"""A weight push over gloo to a real SGLang server, beside a bare broadcast of the same bytes.

Qwen3-30B-A3B with its true shapes, cut to a few layers, bfloat16: two trainer ranks (expert parallel 2) push to one
server, which has them in its parameters and has verified them when the push returns. Beside it rank 0 broadcasts the
same bytes, a bucket at a time, to a process that does nothing else, from memory of the model's size to memory of the
model's size. The two are timed in turn, and the limit holds for the median of their ratios. A first push, which
builds the process group, is left out.

Of the push's seconds those of the broadcasts themselves are printed, and what the server takes after the last one.
Gathering a bucket from the ranks and its checksums go on beside the bucket before; so do not add them up.

Exit status 1 if the limit is broken.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gspo_megatron.config import Recipe, load_recipe
from gspo_megatron.convert.hf_io import read_config
from gspo_megatron.convert.safetensors_io import spec_bytes
from gspo_megatron.engine import Engine, take_port
from gspo_megatron.fleet import Fleet, Server, announce

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / "recipes" / "qwen3-30b-a3b"
HOST = "127.0.0.1"
SPEED_LIMIT = 0.6
"""Of the bare broadcast's bytes per second."""
RANKS = 2
LIMIT_S = 600.0


def make_recipe(folder: Path, num_layers: int) -> Recipe:
    """The CPU recipe with a model directory of that many layers."""
    hf_dir = folder / "model"
    shutil.copytree(ROOT / "recipes" / "tiny-moe", hf_dir)  # for its tokenizer, which nobody reads
    config = read_config(MODEL_DIR) | {"num_hidden_layers": num_layers}
    (hf_dir / "config.json").write_text(json.dumps(config, indent=2))
    return load_recipe(
        ROOT / "recipes" / "gspo-tiny-moe-cpu.yaml",
        [
            *(f"model.hf_dir={hf_dir}", "model.dtype=bfloat16", f"output_dir={folder}"),
            *(f"cluster.trainer_ranks={RANKS}", f"parallel.expert_model_parallel_size={RANKS}"),
            *(f"cluster.probe_timeout_s={LIMIT_S}", f"cluster.collective_timeout_s={2 * LIMIT_S}"),
            "rollout.sglang={max_total_tokens: 64, mem_fraction_static: 0.5, context_length: 64}",
        ],
    )


def build(recipe: Recipe) -> Any:
    """A policy that has weights and nothing else: no gradients, no optimizer."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.convert.families import table_for
    from gspo_megatron.mcore.model import Policy, config_fields, gpt_chunks, make_config
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.mcore.routing_replay import RoutingReplay

    class WeightsOnly(Policy):
        """Without DistributedDataParallel, whose parameters may have to be waited for."""

        def finish_param_sync(self) -> None:
            """They are there."""

    parallel = initialize(recipe)
    hf_config = read_config(Path(recipe.model.hf_dir))
    fields, arguments = config_fields(hf_config, recipe)
    config = make_config(fields | {"perform_initialization": False}, arguments, "local")
    chunks = gpt_chunks(config, arguments, "local")
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.uniform_(-0.1, 0.1)
    return WeightsOnly(
        chunks=chunks,
        config=config,
        parallel=parallel,
        hf_config=hf_config,
        ops=table_for(hf_config, ()),
        vocab_size=arguments.vocab_size,
        fp32_lm_head=recipe.model.fp32_lm_head,
        routing_replay=RoutingReplay(chunks, config, tp_rank=parallel.tp_rank),
    )


def bare_group(rank: int, port: int) -> Any:
    """Of the trainer's rank 0 and the receiver."""
    store = dist.TCPStore(HOST, port, 2, rank == 0, timeout=timedelta(seconds=LIMIT_S))
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))


def broadcast_bare(group: Any, buckets: Sequence[torch.Tensor]) -> float:
    """Seconds of a broadcast of each bucket, until the receiver has all."""
    start_s = time.perf_counter()
    for bucket in buckets:
        group.broadcast(bucket, 0).wait()
    group.barrier().wait()
    return time.perf_counter() - start_s


def memory_for(sizes: list[int]) -> Sequence[torch.Tensor]:
    """Buckets, all of whose pages are there."""
    return torch.ones(sum(sizes), dtype=torch.uint8).split(sizes)


def receive(port: int, sizes: list[int], repeats: int) -> None:
    """The process that only receives."""
    torch.set_num_threads(1)
    group, buckets = bare_group(1, port), memory_for(sizes)
    for _ in range(repeats):
        broadcast_bare(group, buckets)


def train_rank(rank: int, recipe: Recipe, ports: tuple[int, int], repeats: int, results: Queue[Any]) -> None:
    """One trainer rank; rank 0 puts a row of each push and broadcast into results."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": HOST, "MASTER_PORT": str(ports[0])}
    policy = build(recipe)
    from gspo_megatron import weight_sync as module

    fleet = Fleet(recipe.run_dir / "servers") if rank == 0 else None
    weight_sync = module.WeightSync(policy, recipe, fleet)
    sizes = [sum(map(spec_bytes, bucket)) for bucket in weight_sync._gatherer.plan(module.BUCKET_BYTES)]
    group = None
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        receiver = context.Process(target=receive, args=(ports[1], sizes, repeats + 1), daemon=True)
        receiver.start()
        group, buckets = bare_group(0, ports[1]), memory_for(sizes)
    for version in range(repeats + 1):
        weight_sync.seconds.clear()
        weight_sync.push(version)
        row = dict(weight_sync.seconds)
        if group is not None:
            row["bare"] = broadcast_bare(group, buckets)
            if version:
                results.put(row)
        dist.barrier()
    weight_sync.close()
    if rank == 0:
        results.put(sizes)
        receiver.join()
    dist.destroy_process_group()


def measure(recipe: Recipe, repeats: int, console: Console) -> tuple[list[dict[str, float]], list[int]]:
    """Start the server, then the ranks; rows and bucket sizes."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    log_path = recipe.run_dir / "server.log"
    engine = Engine.start(
        recipe, model_dir=Path(recipe.model.hf_dir), port=0, log_path=log_path, weight_version=-1, load_format="dummy"
    )
    ports = take_port(HOST, 0), take_port(HOST, 0)
    ranks = [
        context.Process(target=train_rank, args=(rank, recipe, ports, repeats, results)) for rank in range(RANKS)
    ]
    try:
        with console.status("starting the server"):
            engine.wait_ready(LIMIT_S)
        announce(recipe.run_dir / "servers", Server(name="server_0", url=engine.url, incarnation=0))
        for rank in ranks:
            rank.start()
        with console.status("pushing"):
            rows = [results.get(timeout=LIMIT_S) for _ in range(repeats)]
            sizes = results.get(timeout=LIMIT_S)
        for rank in ranks:
            rank.join(LIMIT_S)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
        engine.stop()
    return rows, sizes


def report(rows: list[dict[str, float]], sizes: list[int], console: Console) -> bool:
    """Print the table; whether the limit is kept."""
    gigabytes = sum(sizes) / 1e9
    names = ("bare", "total", "broadcast", "load", "verify", "gather", "checksum")
    titles = ("bare", "push", "broadcast", "load", "verify", "gather", "checksum", "to bare")
    table = Table(*titles, title=f"seconds of {gigabytes:.2f} GB in {len(sizes)} buckets, limit {SPEED_LIMIT} of bare")
    for row in rows:
        table.add_row(*(f"{row[name]:.2f}" for name in names), f"{row['bare'] / row['total']:.2f}")
    medians = {name: statistics.median(row[name] for row in rows) for name in names}
    ratio = statistics.median(row["bare"] / row["total"] for row in rows)
    table.add_section()
    table.add_row(*(f"{medians[name]:.2f}" for name in names), f"{ratio:.2f}")
    console.print(table)
    outside_s = medians["total"] - medians["broadcast"]
    console.print(
        f"{gigabytes / medians['total']:.2f} GB/s, bare {gigabytes / medians['bare']:.2f} GB/s: {ratio:.2f} of "
        f"it, limit {SPEED_LIMIT}; {outside_s:.2f} s outside the broadcasts",
        soft_wrap=True,
    )
    return ratio >= SPEED_LIMIT


def main() -> int:
    """Print the table; 1 if the limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers of the model (2)")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="pushes that are timed (9)")
    args = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(prefix="push-") as folder:
        rows, sizes = measure(make_recipe(Path(folder), args.layers), args.repeats, console)
    return int(not report(rows, sizes, console))


if __name__ == "__main__":
    sys.exit(main())
