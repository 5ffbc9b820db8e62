"""RolloutGroups -> one TrainBatch per optimizer step: shift, pack, balance over DP, slice for CP.

Every data-parallel rank calls with the same sequences and takes its own part, so nothing is communicated.

Shapes: B = responses of the microbatch, T = packed tokens on this rank, S = B + 1, L = one padded sequence.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo_megatron.config import BatchConfig
from gspo_megatron.types import Microbatch, RolloutGroup, TrainBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLayout:
    """This rank's place in the axes that divide data, and the padding they need."""

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    alignment: int
    """A sequence's slice on one rank is padded to a multiple of it, tokens (TP size under sequence parallel)."""

    @property
    def padding_multiple(self) -> int:
        """Whole sequences are padded to a multiple of it, tokens: 2 equal chunks of each sequence per CP rank."""
        return self.alignment if self.cp_size == 1 else self.cp_size * math.lcm(self.alignment, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSequence:
    """One prompt with one response, as the trainer sees it: a scored rollout or a demonstration."""

    name: str
    """For messages."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """May be empty: its term is 0 and it counts in N."""
    rollout_logprobs: tuple[float, ...] | None = None
    """Nats, one per response token; None for a demonstration, packed as 0."""
    advantage: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and response, tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def make_batches(groups: list[RolloutGroup], cfg: BatchConfig, layout: BatchLayout) -> list[TrainBatch]:
    """This rank's batches of one rollout, one per optimizer step: the groups in order, in equal parts of whole groups.

    Raises:
        ValueError: the parts would be unequal, a rollout has no advantage, or what pack_batch refuses.
    """
    size, rest = divmod(len(groups), cfg.num_minibatches)
    if rest or not size:
        raise ValueError(
            f"batch.num_minibatches={cfg.num_minibatches}: does not divide the {len(groups)} groups of the rollout"
        )
    parts = [groups[i * size : (i + 1) * size] for i in range(cfg.num_minibatches)]
    return [
        pack_batch(_sequences(part), cfg.max_tokens_per_microbatch, layout, minibatch_index=i)
        for i, part in enumerate(parts)
    ]


def pack_batch(
    sequences: list[TrainSequence],
    max_tokens_per_microbatch: int,
    layout: BatchLayout,
    *,
    minibatch_index: int,
) -> TrainBatch:
    """This rank's part of one optimizer step's sequences, packed into microbatches.

    Sequences go longest first into the emptiest of dp_size x count bins, with the smallest count that keeps every
    bin within the budget. A rank without a response in some microbatch gets one dummy sequence there (no response
    token, no unpadded token, response length 0), so that all ranks run the same collectives.

    Args:
        sequences: of all data-parallel ranks, the same list on each.
        max_tokens_per_microbatch: packed tokens per rank, padding included.
        layout: this rank's place.
        minibatch_index: place of the optimizer step within its rollout.

    Raises:
        ValueError: no sequences, a sequence beyond the budget, without prompt, or whose log-probs do not fit.
    """
    if not sequences:
        raise ValueError(f"minibatch {minibatch_index}: has no sequences")
    for sequence in sequences:
        _check_sequence(sequence)
    padded = [_pad_up(s.num_tokens, layout.padding_multiple) for s in sequences]
    budget = max_tokens_per_microbatch * layout.cp_size
    for sequence, length in zip(sequences, padded, strict=True):
        if length > budget:
            raise ValueError(
                f"{sequence.name}: {sequence.num_tokens} tokens, padded to {length}, over context_parallel_size="
                f"{layout.cp_size} ranks do not fit batch.max_tokens_per_microbatch={max_tokens_per_microbatch}; "
                f"wants at least {-(-length // layout.cp_size)}"
            )
    bins = _balance(padded, budget, layout.dp_size)
    num_tokens = sum(s.num_tokens for s in sequences)
    return TrainBatch(
        microbatches=[_pack({i: sequences[i] for i in members}, layout) for members in _own(bins, layout)],
        num_responses=len(sequences),
        num_tokens=num_tokens,
        num_response_tokens=sum(len(s.response_ids) for s in sequences),
        minibatch_index=minibatch_index,
        packing_efficiency=num_tokens / (len(bins) * budget),
    )


def _sequences(groups: list[RolloutGroup]) -> list[TrainSequence]:
    sequences = []
    for group in groups:
        for member, rollout in enumerate(group.rollouts):
            name = f"prompt {group.prompt.prompt_id}, member {member}"
            if rollout.advantage is None:
                raise ValueError(f"{name}: has no advantage; call add_advantages before make_batches")
            sequences.append(
                TrainSequence(
                    name=name,
                    prompt_ids=group.prompt.token_ids,
                    response_ids=rollout.response_ids,
                    rollout_logprobs=rollout.rollout_logprobs,
                    advantage=rollout.advantage,
                )
            )
    return sequences


def _check_sequence(sequence: TrainSequence) -> None:
    if not sequence.prompt_ids:
        raise ValueError(f"{sequence.name}: has no prompt token, so nothing predicts its first response token")
    if sequence.rollout_logprobs is not None and len(sequence.rollout_logprobs) != len(sequence.response_ids):
        raise ValueError(
            f"{sequence.name}: has {len(sequence.rollout_logprobs)} rollout_logprobs, "
            f"wants {len(sequence.response_ids)}, one per response token"
        )


def _pad_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _balance(lengths: list[int], budget: int, dp_size: int) -> list[list[int]]:
    """Indices of the sequences in each of dp_size x count bins, fullest bin first."""
    count = max(1, math.ceil(sum(lengths) / (dp_size * budget)))
    while True:
        bins = _spread(lengths, dp_size * count)
        loads = [sum(lengths[i] for i in members) for members in bins]
        if max(loads) <= budget:
            break
        count += 1  # ends: with a bin for each sequence, each fits
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    return [sorted(bins[b]) for b in order]


def _spread(lengths: list[int], num_bins: int) -> list[list[int]]:
    """Longest first, each into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], b))
    return bins


def _own(bins: list[list[int]], layout: BatchLayout) -> list[list[int]]:
    """This data-parallel rank's bins: with the fullest first, the ranks run alike loads at once."""
    return bins[layout.dp_rank :: layout.dp_size]


def _pack(members: dict[int, TrainSequence], layout: BatchLayout) -> Microbatch:
    """The microbatch of some of the optimizer step's sequences, by their place in it."""
    is_dummy = not members
    if is_dummy:
        # Full length, so that attention never meets an empty segment.
        members = {-1: TrainSequence(name="dummy", prompt_ids=(0,) * layout.padding_multiple, response_ids=())}
    sequences = list(members.values())
    unpadded = [s.num_tokens for s in sequences]
    padded = [_pad_up(n, layout.padding_multiple) for n in unpadded]
    rows = [_lay_out(s, index, length) for index, (s, length) in enumerate(zip(sequences, padded, strict=True))]
    packed = {name: torch.cat([_context_slice(row[name], layout) for row in rows]) for name in rows[0]}
    if is_dummy:
        packed["is_padding_T"] = torch.ones_like(packed["is_padding_T"])
    return Microbatch(
        **packed,
        response_length_B=torch.tensor([len(s.response_ids) for s in sequences]),
        response_number_B=torch.tensor(list(members)),
        advantages_B=torch.tensor([s.advantage for s in sequences], dtype=torch.float32),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        routed_experts=None,
        row_length=None,
        cu_seqlens=_starts(unpadded),
        cu_seqlens_padded=_starts(padded),
        max_seqlen=max(padded),
        num_unpadded_tokens=int((~packed["is_padding_T"]).sum()),
    )


def _lay_out(sequence: TrainSequence, index: int, length: int) -> dict[str, Tensor]:
    """The [L] fields of one whole padded sequence; position t predicts token t + 1."""
    n, first = sequence.num_tokens, len(sequence.prompt_ids) - 1
    tokens, labels, response_index = torch.zeros(3, length, dtype=torch.int64)
    tokens[:n] = torch.tensor(sequence.prompt_ids + sequence.response_ids)
    labels[: n - 1] = tokens[1:n]
    response_index[:n] = index
    position = torch.arange(length)
    mask = (position >= first) & (position < n - 1)
    rollout_logprobs = torch.zeros(length)
    if sequence.rollout_logprobs is not None:
        rollout_logprobs[first : n - 1] = torch.tensor(sequence.rollout_logprobs)
    return {
        "tokens_T": tokens,
        "labels_T": labels,
        "position_ids_T": position,
        "response_mask_T": mask,
        "response_index_T": response_index,
        "rollout_logprobs_T": rollout_logprobs,
        "advantages_T": torch.where(mask, sequence.advantage, 0.0),
        "is_padding_T": position >= n,
    }


def _context_slice(field_L: Tensor, layout: BatchLayout) -> Tensor:
    """[L / cp_size]: chunks cp_rank and 2 cp_size - 1 - cp_rank of 2 cp_size, which balances causal attention."""
    if layout.cp_size == 1:
        return field_L
    chunks = field_L.chunk(2 * layout.cp_size)
    return torch.cat([chunks[layout.cp_rank], chunks[2 * layout.cp_size - 1 - layout.cp_rank]])


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
