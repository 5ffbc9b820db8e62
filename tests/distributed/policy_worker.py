"""Build the tiny policy on a layout, with fixed weights and data; its weights in Hugging Face names."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.convert.hf_io import random_tensors
from gspo_megatron.convert.ops import TensorMap
from gspo_megatron.routed_experts import RouteFormat

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gspo-tiny-moe-cpu.yaml"
HF_DIR = ROOT / "recipes" / "tiny-moe"


def tiny_tensors(ops: list[TensorMap]) -> dict[str, Tensor]:
    """Seeded weights with norms away from 1, so that a swapped norm shows."""
    generator = torch.Generator().manual_seed(5)
    tensors = dict(random_tensors(ops, std=0.08, seed=4))
    return {n: t + 0.1 * torch.randn(t.shape, generator=generator) if t.dim() == 1 else t for n, t in tensors.items()}


def tiny_sequences(count: int = 24) -> list[TrainSequence]:
    """Uneven lengths, advantages of both signs."""
    rng = random.Random(7)
    return [
        TrainSequence(
            name=str(i),
            prompt_ids=tuple(rng.choices(range(2, 48), k=rng.randint(3, 14))),
            response_ids=tuple(rng.choices(range(2, 48), k=rng.randint(1, 15))),
            advantage=rng.uniform(-2.0, 2.0),
        )
        for i in range(count)
    ]


def with_random_routes(sequences: list[TrainSequence], routes: RouteFormat) -> list[TrainSequence]:
    """The sequences with experts that no router chose, so that any that is out of place shows."""
    generator = torch.Generator().manual_seed(13)

    def packed(num_tokens: int) -> bytes:
        tokens, layers, topk = routes.shape(num_tokens)
        noise = torch.rand(tokens, layers, routes.num_experts, generator=generator)
        return bytes(noise.argsort(dim=-1)[..., :topk].to(routes.dtype).numpy().tobytes())

    return [replace(s, routed_experts=packed(s.num_tokens)) for s in sequences]


def build(overrides: list[str]) -> tuple[Any, Any, Any]:
    """(recipe, policy, optimizer) with tiny_tensors loaded; call in a process of a gloo group."""
    from gspo_megatron.mcore import cpu

    cpu.install()
    from gspo_megatron.mcore.model import build_optimizer, build_policy, load_hf_weights
    from gspo_megatron.mcore.parallel import initialize

    recipe = load_recipe(RECIPE, [f"model.hf_dir={HF_DIR}", *overrides])
    policy = build_policy(recipe, initialize(recipe))
    optimizer = build_optimizer(policy, recipe, recipe.optimizer)
    load_hf_weights(policy, optimizer, tiny_tensors(policy.ops), "tiny_tensors")
    return recipe, policy, optimizer


def hf_tensors(policy: Any) -> dict[str, Tensor]:
    """The live weights on rank 0. Collective."""
    from gspo_megatron.convert.shards import Gatherer

    gatherer = Gatherer(policy.shards(), policy.ops)
    for row in gatherer._rows:
        row.set_(torch.full((100_000,), 255, dtype=torch.uint8))  # fresh memory may hold right values by chance
    return {name: tensor.clone() for bucket in gatherer.buckets(100_000) for name, tensor in bucket}


def hf_view_of(policy: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values per parameter (gradients, moments) in Hugging Face names: through the weights' own way out."""
    with torch.no_grad():
        for name, parameter in policy.parameters():
            parameter.copy_(values[name].view(parameter.shape))
    return hf_tensors(policy)


def checkpoint_logprobs(rank: int, checkpoint_dir: str, sequences: list[tuple[int, ...]]) -> list[Tensor]:
    """Log-probs of tokens 1.. of each sequence by a one-process policy with a checkpoint's weights."""
    recipe, policy, optimizer = build(["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"])
    from gspo_megatron.checkpoint import load_weights
    from gspo_megatron.optimize import compute_logprobs

    load_weights(policy, optimizer, Path(checkpoint_dir))
    packed = [TrainSequence(name=str(i), prompt_ids=ids[:1], response_ids=ids[1:]) for i, ids in enumerate(sequences)]
    batch = pack_batch(packed, 4096, policy.parallel.batch_layout, minibatch_index=0)
    (logprobs_T,) = compute_logprobs(policy, batch, temperature=1.0)
    (microbatch,) = batch.microbatches
    starts = microbatch.cu_seqlens_padded.tolist()
    return [logprobs_T[start : start + len(ids) - 1] for start, ids in zip(starts, sequences, strict=False)]
