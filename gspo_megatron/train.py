"""The whole loop: prompts, rollouts, rewards, advantages, batches, GSPO steps, weight push, evaluation.

Run by torchrun from launch.py. Every rank runs `train`; rank 0 alone talks to SGLang.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo_megatron.config import Recipe, load_recipe
from gspo_megatron.engine import RolloutError
from gspo_megatron.fleet import Fleet
from gspo_megatron.mcore.rank import run_rank
from gspo_megatron.metrics import MetricsWriter, make_row, summarize_minibatch
from gspo_megatron.progress import StageClock
from gspo_megatron.sampling import Sampler, SavedGroups
from gspo_megatron.types import NonFiniteError, RolloutGroup, RolloutReport, TrainState


def train(recipe: Recipe, console: Console, *, model_dir: Path, has_servers: bool) -> None:
    """Run the recipe from the weights in model_dir. Collective over all ranks.

    Args:
        recipe: one complete run.
        console: rank 0's; quiet elsewhere.
        model_dir: Hugging Face directory or Megatron checkpoint.
        has_servers: launch.py announces SGLang servers in the run's folder; otherwise the groups in
            rollout.groups_dir are trained on.
    """
    from gspo_megatron.advantage import add_advantages
    from gspo_megatron.batch import make_batches
    from gspo_megatron.checkpoint import load_initial_weights, save_checkpoint
    from gspo_megatron.colocated import Colocated
    from gspo_megatron.loss import denominator, policy_loss
    from gspo_megatron.mcore.model import build_optimizer, build_policy, export_hf
    from gspo_megatron.mcore.offload import Offload
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step
    from gspo_megatron.reference import ReferencePolicy
    from gspo_megatron.routed_experts import RouteFormat
    from gspo_megatron.weight_sync import WeightSync

    parallel = initialize(recipe)
    policy = build_policy(recipe, parallel)
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_initial_weights(policy, optimizer, recipe, model_dir)
    state = TrainState()
    reference = ReferencePolicy(policy) if recipe.loss.kl is not None else None
    weight_sync = colocated = None
    sampler: Sampler | SavedGroups
    if has_servers:
        fleet = Fleet(recipe.run_dir / "servers") if parallel.rank == 0 else None
        if recipe.cluster.placement == "colocated":
            colocated = Colocated(policy, Offload(policy, optimizer), recipe, fleet)
        weight_sync = WeightSync(policy, recipe, fleet, colocated)
        weight_sync.push(state.weight_version)  # servers start without weights
        sampler = Sampler(recipe, fleet, on_rank_0=parallel.on_rank_0, bring_up=weight_sync.bring_up)
    else:
        sampler = SavedGroups(recipe)
    writer = MetricsWriter(recipe.run_dir) if parallel.rank == 0 else None
    loss_fn = partial(policy_loss, cfg=recipe.loss, cp_group=parallel.shared_cp_group)
    count = partial(denominator, cfg=recipe.loss, max_response_tokens=recipe.rollout.max_response_tokens)
    temperature = recipe.rollout.temperature
    routes = RouteFormat.of(policy.hf_config) if recipe.loss.routing_replay == "r3" else None
    failed_batch = recipe.run_dir / "failed_step" / f"rank_{parallel.rank}.safetensors"
    step = partial(
        optimizer_step,
        lr=recipe.optimizer.lr,
        temperature=temperature,
        old_is_rollout=recipe.loss.old_logprobs == "rollout",
        entropy_has_gradient=recipe.loss.entropy_coef > 0,
        save_failed_to=failed_batch,
    )

    with StageClock(console, total_steps=recipe.train.num_rollout_steps) as clock:
        with clock.stage("evaluate"):
            evaluation = sampler.evaluate(state)
        finish_step(state, writer, console, clock, groups=[], report=None, minibatches=[], evaluation=evaluation)

        for rollout_step in range(1, recipe.train.num_rollout_steps + 1):
            with clock.stage("rollout"):
                groups, report = sampler.collect(rollout_step)
            if colocated is not None:
                with clock.stage("take_devices"):
                    colocated.take_devices()
            if reference is not None:
                with clock.stage("reference"):
                    groups = reference.add_ref_logprobs(groups, recipe.batch, temperature=temperature)
            with clock.stage("reward"):
                groups = add_advantages(
                    groups,
                    recipe.advantage,
                    max_response_tokens=recipe.rollout.max_response_tokens,
                    kl=recipe.loss.kl,
                )
                sampler.save(groups, rollout_step)
            with clock.stage("batch"):
                batches = make_batches(groups, recipe.batch, parallel.batch_layout, routes=routes)
            with clock.stage("old_logprobs"):
                batches = add_old_logprobs(
                    policy,
                    batches,
                    temperature=temperature,
                    source=recipe.loss.old_logprobs,
                    routing_replay=recipe.loss.routing_replay,
                )
            with clock.stage("train"):
                results = [step(policy, optimizer, b, loss_fn, denominator=count(b)) for b in batches]
            with clock.stage("weight_sync"):
                state.weight_version += 1
                if weight_sync is not None:
                    weight_sync.push(state.weight_version)
            state.rollout_step, state.optimizer_step = rollout_step, state.optimizer_step + len(batches)
            with clock.stage("evaluate"):
                evaluation = sampler.evaluate(state)
            minibatches = [
                summarize_minibatch(r.per_response)
                | {"loss": r.loss, "grad_norm": r.grad_norm, "lr": r.lr, "packing_efficiency": b.packing_efficiency}
                for r, b in zip(results, batches, strict=True)
            ]
            finish_step(
                state,
                writer,
                console,
                clock,
                groups=groups,
                report=report,
                minibatches=minibatches,
                evaluation=evaluation,
            )

    if writer is not None:
        writer.close()
    sampler.close()
    if weight_sync is not None:
        weight_sync.close()
    if colocated is not None:
        colocated.take_devices()
    if state.optimizer_step:
        console.print("saving the Megatron checkpoint and the Hugging Face export")
        hf_dir = Path(recipe.model.hf_dir)
        save_checkpoint(policy, optimizer, state, recipe.run_dir / "checkpoint", companions_from=hf_dir)
    else:
        console.print("no optimizer step was taken, every response was filtered: no checkpoint; exporting the weights")
    export_hf(policy, recipe.run_dir / "hf", Path(recipe.model.hf_dir))


def finish_step(
    state: TrainState,
    writer: MetricsWriter | None,
    console: Console,
    clock: StageClock,
    *,
    groups: list[RolloutGroup],
    report: RolloutReport | None,
    minibatches: list[dict[str, float]],
    evaluation: dict[str, Any] | None,
) -> None:
    """Write the step's metrics row and its console line; rank 0 only has a writer."""
    stage_s = clock.finish_step(state.rollout_step)
    if writer is None:
        return
    row = make_row(
        state, groups=groups, report=report, minibatches=minibatches, stage_s=stage_s, evaluation=evaluation
    )
    writer.write(row)
    parts = [f"step {state.rollout_step:>4}"]
    if groups:
        parts.append(f"reward {row['reward_mean']:.3f}")
    if minibatches:  # none when every response was filtered
        clip = "/".join(f"{m['clip_fraction_responses']:.2f}" for m in minibatches)
        packed = sum(m["packing_efficiency"] for m in minibatches) / len(minibatches)
        parts += [f"clipped {clip}", f"mismatch {minibatches[0]['mismatch_abs_mean']:.1e}", f"packed {packed:.2f}"]
    if groups:
        parts.append(f"{sum(stage_s.values()):.1f} s")
    if evaluation:
        parts.append(
            f"held-out accuracy {evaluation['accuracy']:.3f} [{evaluation['low']:.3f}, {evaluation['high']:.3f}]"
        )
    console.print("  ".join(parts), soft_wrap=True)


def main() -> None:
    """Entry point of each rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--servers", action="store_true", help="the run's folder announces SGLang servers")
    args = parser.parse_args()
    recipe = load_recipe(args.config)
    body = partial(train, recipe, model_dir=args.model_dir, has_servers=args.servers)
    run_rank(recipe, body, expected_errors=(RolloutError, NonFiniteError))


if __name__ == "__main__":
    main()
