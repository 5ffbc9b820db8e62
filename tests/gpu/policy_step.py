"""One rank of GSPO steps on fixed data, on CUDA or on CPU; torchrun starts it, rank 0 saves what the tests compare."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo_megatron.batch import pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.loss import policy_loss
from gspo_megatron.routed_experts import RouteFormat
from gspo_megatron.types import TrainBatch, TrainState
from tests.distributed.policy_worker import RECIPE, hf_tensors, hf_view_of, tiny_sequences, with_random_routes


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Build, load, take job["num_steps"] steps, save a checkpoint where job["save"] says.

    Where job["leaves"] says so, the trainer's memory goes to the host and comes back before each step.
    """
    recipe = load_recipe(RECIPE, job["overrides"])
    if recipe.device == "cpu":
        from gspo_megatron.mcore import cpu

        cpu.install()
        torch.set_num_threads(1)
    from gspo_megatron.checkpoint import load_weights, save_checkpoint
    from gspo_megatron.convert.hf_io import TensorReader
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_hf_weights
    from gspo_megatron.mcore.offload import Offload
    from gspo_megatron.mcore.parallel import initialize
    from gspo_megatron.optimize import add_old_logprobs, optimizer_step

    policy = build_policy(recipe, initialize(recipe))
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, TensorReader(Path(recipe.model.hf_dir)), recipe.model.hf_dir)
    if job["load"]:
        load_weights(policy, optimizer, Path(job["load"]))
    replay = recipe.loss.routing_replay
    routes = RouteFormat.of(policy.hf_config) if replay == "r3" else None
    batch = pack_batch(
        tiny_sequences() if routes is None else with_random_routes(tiny_sequences(), routes),
        recipe.batch.max_tokens_per_microbatch,
        policy.parallel.batch_layout,
        minibatch_index=0,
        mode=recipe.batch.mode,
        routes=routes,
    )
    (batch,) = add_old_logprobs(policy, [batch], temperature=1.0, source="recompute", routing_replay=replay)
    results: dict[str, Any] = {"weights_before": hf_tensors(policy), "responses": responses(batch)}
    loss_fn = partial(policy_loss, cfg=replace(recipe.loss, clip_low=3.0e-3, clip_high=4.0e-3))
    step = partial(optimizer_step, policy, optimizer, batch, loss_fn, lr=job["lr"], temperature=1.0)
    steps, given_up_bytes = [], []
    offload = Offload(policy, optimizer)
    for _ in range(job["num_steps"]):
        if job["leaves"]:
            before = torch.cuda.memory_allocated()
            offload.to_host()
            given_up_bytes.append(before - torch.cuda.memory_allocated())
            offload.to_device()
        steps.append(step(denominator=batch.num_responses))
    if job["save"]:
        state, hf_dir = TrainState(optimizer_step=len(steps)), Path(recipe.model.hf_dir)
        save_checkpoint(policy, optimizer, state, Path(job["save"]), companions_from=hf_dir)
    results |= {
        "loss": [s.loss for s in steps],
        "grad_norm": [s.grad_norm for s in steps],
        "log_ratio": [s.per_response["log_ratio"] for s in steps],
        "clipped": [float(s.per_response["clipped_tokens"].sum()) for s in steps],
        "weights": hf_tensors(policy),
        "given_up_bytes": given_up_bytes,
        "weight_bytes": sum(p.nbytes for _, p in policy.parameters()),
    }
    if steps:  # last: it overwrites the weights
        results["grad"] = hf_view_of(policy, {n: p.main_grad for n, p in policy.parameters()})
    return results


def responses(batch: TrainBatch) -> list[dict[str, Any]]:
    """Tokens and log-probs of each of this rank's sequences; wants context parallel 1."""
    found = []
    for m in batch.microbatches:
        starts, ends = m.cu_seqlens_padded[:-1], m.cu_seqlens_padded[:-1] + m.cu_seqlens.diff()
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            mask = m.response_mask_T[start:end]
            found.append(
                {"tokens": m.tokens_T[start:end].tolist(), "mask": mask, "logprobs": m.old_logprobs_T.cpu()[start:end]}
            )
    return found


def on_cpu(value: Any) -> Any:
    """The same tree with its tensors on the CPU."""
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    if isinstance(value, list):
        return [on_cpu(item) for item in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


def main() -> None:
    """Entry point of each rank."""
    import torch.distributed as dist

    job = json.loads(Path(sys.argv[1]).read_text())
    results = run(job)
    if dist.get_rank() == 0:
        torch.save(on_cpu(results), job["out"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
