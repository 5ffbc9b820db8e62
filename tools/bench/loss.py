"""What the objectives cost: each loss, forward and backward, as a share of the optimizer step that it belongs to.

The step is the real one of a recipe's model on this machine, one process; the limit is 1 %.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gspo_megatron.mcore import cpu

LIMIT = 0.01
REPEATS = 7


def main() -> int:
    """Print the table; 1 if an objective is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, default=Path("recipes/gspo-tiny-moe-cpu.yaml"), help="a recipe for CPU")
    args = parser.parse_args()
    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        step_s, losses_s, what = measure(args.config)
        dist.destroy_process_group()
    table = Table("objective", "loss, ms", "step, ms", "share", "limit", title=what)
    for name, loss_s in losses_s.items():
        share = loss_s / step_s
        style = None if share <= LIMIT else "red"
        table.add_row(name, f"{1e3 * loss_s:.2f}", f"{1e3 * step_s:.0f}", f"{share:.2%}", f"{LIMIT:.0%}", style=style)
    Console().print(table)
    return int(max(losses_s.values()) > LIMIT * step_s)


def measure(config: Path) -> tuple[float, dict[str, float], str]:
    """Seconds of the optimizer step, seconds of each loss over the same microbatches, and what was measured."""
    from gspo_megatron.batch import TrainSequence, pack_batch
    from gspo_megatron.config import load_recipe
    from gspo_megatron.loss import OBJECTIVES, policy_loss
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_initial_weights
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    one = ["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"]
    recipe = load_recipe(config, one)
    policy = build_policy(recipe, initialize(recipe))
    optimizer: Any = build_optimizer(policy, recipe, recipe.optimizer)
    load_initial_weights(policy, optimizer, recipe)
    rng = random.Random(1)
    count = recipe.rollout.num_prompts * recipe.rollout.group_size // recipe.batch.num_minibatches
    vocab, longest = policy.vocab_size, recipe.rollout.max_response_tokens
    sequences = [
        TrainSequence(
            name=str(i),
            prompt_ids=tuple(rng.choices(range(vocab), k=longest)),
            response_ids=tuple(rng.choices(range(vocab), k=rng.randint(1, longest))),
            rollout_logprobs=None,
            advantage=rng.uniform(-1.0, 1.0),
        )
        for i in range(count)
    ]
    batch = pack_batch(
        sequences, recipe.batch.max_tokens_per_microbatch, policy.parallel.batch_layout, minibatch_index=0
    )
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute")
    step = partial(
        optimizer_step,
        policy,
        optimizer,
        batch,
        partial(policy_loss, cfg=recipe.loss),
        denominator=count,
        lr=1.0e-6,
        temperature=1.0,
    )
    configs = {name: replace(recipe.loss, name=name, tau_positive=1.0, tau_negative=1.05) for name in OBJECTIVES}

    def run_loss(cfg: Any) -> None:
        for m in batch.microbatches:
            assert m.old_logprobs_T is not None
            logprobs_T = (m.old_logprobs_T + 1.0e-3).requires_grad_()
            policy_loss(logprobs_T, m.old_logprobs_T, m, cfg).loss_sum.backward()

    # In turn, so that other work on the machine falls on all alike.
    taken: dict[str, list[float]] = {name: [] for name in ("step", *configs)}
    for _ in range(REPEATS):
        taken["step"].append(seconds(step))
        for name, cfg in configs.items():
            taken[name].append(seconds(partial(run_loss, cfg)))
    best = {name: statistics.median(values) for name, values in taken.items()}
    what = f"{recipe.name}: {count} responses, {batch.num_tokens} tokens, {len(batch.microbatches)} microbatches"
    return best.pop("step"), best, f"{what}, {torch.get_num_threads()} threads"


def seconds(fn: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
