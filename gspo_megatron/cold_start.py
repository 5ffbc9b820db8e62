"""The supervised stage before RL (paper, section 5.1: a cold-start model), through the same Megatron path.

Run by torchrun from launch.py; writes a Hugging Face directory that trainer and SGLang both load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gspo_megatron.config import ColdStartConfig, Recipe, load_recipe
from gspo_megatron.mcore.rank import run_rank
from gspo_megatron.multi_turn import function_file, load_function
from gspo_megatron.progress import StageClock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gspo_megatron.batch import TrainSequence
    from gspo_megatron.multi_turn import TurnFunction
    from gspo_megatron.prompts import PromptStream

LINE_EVERY = 50
"""Steps between lines on the console."""


def cold_start_dir(recipe: Recipe) -> Path:
    """Where the cold start of this recipe lies: named by a hash of all that decides its weights, so it is reused."""
    tree = asdict(recipe)
    parts = {k: tree[k] for k in ("seed", "model", "data", "cold_start", "parallel", "device", "optimizer")}
    del parts["optimizer"]["lr"]
    parts["trainer_ranks"] = recipe.cluster.trainer_ranks
    parts["microbatches"] = (recipe.batch.max_tokens_per_microbatch, recipe.batch.mode)
    hf_dir = Path(recipe.model.hf_dir)
    files = [hf_dir / name for name in ("config.json", "tokenizer.json")]
    if recipe.rollout.multi_turn is not None:  # its replies are in the demonstrations
        parts["multi_turn"] = recipe.rollout.multi_turn
        files.append(function_file(recipe.rollout.multi_turn))
    parts["files"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if recipe.model.load != "random":  # gigabytes: known by size and time of writing
        load = Path(recipe.model.load)
        stats = {str(file.relative_to(load)): file.stat() for file in sorted(load.rglob("*")) if file.is_file()}
        parts["weights"] = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    return Path(recipe.output_dir) / f"cold-start-{digest}"


def learning_rate(cfg: ColdStartConfig, step: int) -> float:
    """Linear warm-up, flat, linear decay to 0 over the last decay_fraction of the steps."""
    warmup = min(1.0, (step + 1) / max(cfg.warmup_steps, 1))
    decay_steps = max(1.0, cfg.decay_fraction * cfg.num_steps)
    return cfg.lr * warmup * min(1.0, (cfg.num_steps - step) / decay_steps)


def take_demonstrations(
    stream: PromptStream,
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    cfg: ColdStartConfig,
    function: TurnFunction | None = None,
) -> list[TrainSequence]:
    """One optimizer step's demonstrations, the same on every rank; function is that of rollout.multi_turn."""
    from gspo_megatron.batch import TrainSequence
    from gspo_megatron.demonstrations import demonstration

    sequences = []
    for prompt in stream.take(cfg.batch_size):
        shown = demonstration(prompt, tokenizer, rng, flawed_fraction=cfg.flawed_fraction, function=function)
        sequences.append(
            TrainSequence(
                name=f"demonstration for {prompt.text}",
                prompt_ids=prompt.token_ids,
                response_ids=shown.response_ids,
                response_mask=shown.response_mask,
            )
        )
    return sequences


def train_cold_start(recipe: Recipe, cfg: ColdStartConfig, console: Console) -> None:
    """Train and export. Collective over all ranks."""
    from gspo_megatron.batch import pack_batch
    from gspo_megatron.checkpoint import load_initial_weights
    from gspo_megatron.loss import sft_loss
    from gspo_megatron.mcore.model import build_optimizer, build_policy, export_hf
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import optimizer_step
    from gspo_megatron.prompts import PromptStream, load_tokenizer

    parallel = initialize(recipe)
    policy = build_policy(recipe, parallel)
    optimizer: Any = build_optimizer(policy, recipe, replace(recipe.optimizer, lr=cfg.lr))
    load_initial_weights(policy, optimizer, recipe, recipe.model.load)
    tokenizer = load_tokenizer(recipe.model.hf_dir)
    stream = PromptStream(recipe.data, tokenizer, split="cold_start", seed=recipe.seed)
    rng = random.Random(recipe.seed)
    function = load_function(recipe.rollout.multi_turn) if recipe.rollout.multi_turn is not None else None
    with StageClock(console, total_steps=cfg.num_steps) as clock:
        for step in range(cfg.num_steps):
            with clock.stage("cold start"):
                sequences = take_demonstrations(stream, tokenizer, rng, cfg, function)
                batch = pack_batch(
                    sequences,
                    recipe.batch.max_tokens_per_microbatch,
                    parallel.batch_layout,
                    minibatch_index=0,
                    mode=recipe.batch.mode,
                )
                result = optimizer_step(
                    policy,
                    optimizer,
                    batch,
                    sft_loss,
                    denominator=sum(s.response_length for s in sequences),
                    lr=learning_rate(cfg, step),
                    temperature=1.0,
                )
            clock.finish_step(step + 1)
            if step % LINE_EVERY == 0 or step == cfg.num_steps - 1:
                console.print(f"cold start step {step + 1:>4}/{cfg.num_steps}  loss {result.loss:.3f} nats per token")
    export_hf(policy, cold_start_dir(recipe), Path(recipe.model.hf_dir))


def main() -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    recipe = load_recipe(parser.parse_args().config)
    cfg = recipe.cold_start
    if cfg is None:
        parser.error(f"{recipe.name} has no cold_start section")
    run_rank(recipe, lambda console: train_cold_start(recipe, cfg, console))


if __name__ == "__main__":
    main()
