"""One layout's part of the families' logits test: model after model is built, loaded, and run on its sequences."""

import random
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import load_recipe
from gspo_megatron.types import Microbatch
from tests.distributed.policy_worker import RECIPE

LENGTHS = (61, 5, 38, 2, 17, 29, 11)


def make_sequences(vocab_size: int) -> list[TrainSequence]:
    """Uneven lengths, tokens of the whole vocabulary."""
    rng = random.Random(3)
    ids = [tuple(rng.choices(range(vocab_size), k=length)) for length in LENGTHS]
    return [TrainSequence(name=str(i), prompt_ids=x[:1], response_ids=x[1:]) for i, x in enumerate(ids)]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Logits that one rank has of one microbatch: the last stage's, of its tokens and its vocabulary columns."""

    sequence_T: Tensor
    """[T] int64. Place among make_sequences."""
    position_T: Tensor
    """[T] int64. Inside its sequence."""
    first_column: int
    logits_TV: Tensor
    """[T, V] float32."""


def run_models(rank: int, overrides: dict[str, list[str]]) -> dict[str, list[Piece]]:
    """This rank's pieces of every model's logits.

    Args:
        rank: of this process.
        overrides: recipe keys by model; they name the weights (model.load) and the layout.
    """
    from gspo_megatron.mcore import cpu

    cpu.install()
    from megatron.core import parallel_state

    from gspo_megatron.checkpoint import load_initial_weights
    from gspo_megatron.mcore.model import build_optimizer, build_policy
    from gspo_megatron.mcore.parallel import initialize

    pieces = {}
    for name, keys in overrides.items():
        recipe = load_recipe(RECIPE, keys)
        policy = build_policy(recipe, initialize(recipe))
        optimizer = build_optimizer(policy, recipe, recipe.optimizer)
        load_initial_weights(policy, optimizer, recipe, recipe.model.load)
        pieces[name] = run_model(policy, recipe)
        parallel_state.destroy_model_parallel()
    return pieces


def run_model(policy: Any, recipe: Any) -> list[Piece]:
    """Every microbatch through the schedule that training uses, forward only."""
    from gspo_megatron.mcore.schedule import run_processed

    batch = pack_batch(
        make_sequences(policy.vocab_size),
        recipe.batch.max_tokens_per_microbatch,
        policy.parallel.batch_layout,
        minibatch_index=0,
        mode=recipe.batch.mode,
    )

    def processor(*, hidden_states: Tensor, output_layer: Any, output_weight: Any, **_: Any) -> Tensor:
        logits_sbV, _ = output_layer(hidden_states, weight=output_weight)
        return logits_sbV.transpose(0, 1).flatten(0, 1)

    def to_piece(m: Microbatch, logits_TV: Tensor) -> Piece:
        is_real = ~m.is_padding_T
        return Piece(
            sequence_T=m.response_number_B[m.response_index_T][is_real],
            position_T=m.position_ids_T[is_real],
            first_column=policy.parallel.tp_rank * logits_TV.shape[1],
            logits_TV=logits_TV[is_real].clone(),
        )

    return run_processed(policy, batch.microbatches, processor, to_piece, forward_only=True)
