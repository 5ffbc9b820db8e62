"""The reference policy of a KL penalty: the weights that RL started from, and the log-probs they give.

The weights wait in host memory and take the policy's place in its own parameters for a forward pass. It routes freely,
also where the policy replays routes: what it thinks of a response must not depend on who sampled it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.batch import TrainSequence, pack_batch
from gspo_megatron.config import BatchConfig
from gspo_megatron.mcore.model import Policy
from gspo_megatron.optimize import compute_logprobs
from gspo_megatron.types import Rollout, RolloutGroup, TrainBatch


class ReferencePolicy:
    """Holds a copy of the policy's weights as they are now."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = _copy(policy)

    def add_ref_logprobs(
        self, groups: list[RolloutGroup], cfg: BatchConfig, *, temperature: float
    ) -> list[RolloutGroup]:
        """The groups with ref_logprobs on every rollout. Collective over all ranks.

        Args:
            groups: the same on every rank.
            cfg: token budget and mode of the microbatches.
            temperature: divides the logits, as in sampling.
        """
        sequences = [
            TrainSequence(
                name=f"prompt {group.prompt.prompt_id}, member {member}",
                prompt_ids=group.prompt.token_ids,
                response_ids=rollout.response_ids,
            )
            for group in groups
            for member, rollout in enumerate(group.rollouts)
        ]
        batch = pack_batch(
            sequences,
            cfg.max_tokens_per_microbatch,
            self._policy.parallel.batch_layout,
            minibatch_index=0,
            mode=cfg.mode,
        )
        with self._in_place():
            logprobs = compute_logprobs(self._policy, batch, temperature=temperature)
        values = iter(_gather_responses(self._policy, batch, logprobs, sequences))

        def filled(rollout: Rollout) -> Rollout:
            return replace(rollout, ref_logprobs=next(values))

        return [replace(group, rollouts=tuple(filled(r) for r in group.rollouts)) for group in groups]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        current = _copy(self._policy)
        try:
            _paste(self._policy, self._weights)
            yield
        finally:
            _paste(self._policy, current)


@torch.no_grad()
def _copy(policy: Policy) -> list[Tensor]:
    policy.finish_param_sync()
    return [p.to("cpu", copy=True) for _, p in policy.parameters()]


@torch.no_grad()
def _paste(policy: Policy, weights: list[Tensor]) -> None:
    for (_, parameter), weight in zip(policy.parameters(), weights, strict=True):
        parameter.copy_(weight)


def _gather_responses(
    policy: Policy, batch: TrainBatch, logprobs: list[Tensor], sequences: list[TrainSequence]
) -> list[tuple[float, ...]]:
    """Each sequence's response log-probs from the ranks that hold its tokens. Collective over the default group."""
    p = policy.parallel
    mine = None
    if p.is_last_stage and p.tp_rank == 0:
        mine = [
            (m.response_number_B[m.response_index_T[kept_T]], m.position_ids_T[kept_T], logprobs_T.cpu()[kept_T])
            for m, logprobs_T in zip(batch.microbatches, logprobs, strict=True)
            for kept_T in [m.response_mask_T]
        ]
    everyone: list[Any] = [None] * p.world_size
    dist.all_gather_object(everyone, mine)
    filled = [torch.full((len(s.response_ids),), torch.nan) for s in sequences]
    for numbers, positions, values in (part for parts in everyone if parts is not None for part in parts):
        for number in numbers.unique().tolist():
            here = numbers == number
            first = len(sequences[number].prompt_ids) - 1  # this position predicts the first response token
            filled[number][positions[here] - first] = values[here]
    return [tuple(values.tolist()) for values in filled]
