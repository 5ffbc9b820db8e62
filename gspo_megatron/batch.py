"""RolloutGroups -> one TrainBatch per optimizer step: shift, pack or pad, balance over DP, slice for CP.

Every data-parallel rank calls with the same sequences and takes its own part, so nothing is communicated. Packed:
sequences end to end, each padded to what the layout needs. Padded: rows as long as the longest sequence.

Shapes: B = responses of the microbatch, T = packed tokens on this rank, S = B + 1, L = one padded sequence.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gspo_megatron.config import BatchConfig
from gspo_megatron.routed_experts import RouteFormat, lay_out_routes
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
    pack_alignment: int = 1
    """All tokens of one rank's microbatch together are a multiple of it (FP8 matrix products)."""
    microbatch_multiple: int = 1
    """The count of microbatches is a multiple of it (interleaved pipeline schedule)."""

    @property
    def padding_multiple(self) -> int:
        """Whole sequences are padded to a multiple of it, tokens: 2 equal chunks of each sequence per CP rank."""
        return self.alignment if self.cp_size == 1 else self.cp_size * math.lcm(self.alignment, 2)

    @property
    def microbatch_padding_multiple(self) -> int:
        """Whole microbatches, of all context-parallel ranks, are padded to a multiple of it, tokens."""
        return math.lcm(self.padding_multiple, self.cp_size * self.pack_alignment)


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
    token_advantages: tuple[float, ...] | None = None
    """One per response token; None: all equal advantage."""
    response_mask: tuple[bool, ...] | None = None
    """One per response token, False on holes: context that the policy did not sample; None: no holes."""
    ref_logprobs: tuple[float, ...] | None = None
    """Nats, one per response token; of all sequences of an optimizer step or of none."""
    routed_experts: bytes | None = None
    """As Rollout's; read where routes are replayed, and then wanted."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response, holes included, tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def response_length(self) -> int:
        """Tokens that carry a loss term."""
        return len(self.response_ids) if self.response_mask is None else sum(self.response_mask)


def make_batches(
    groups: list[RolloutGroup], cfg: BatchConfig, layout: BatchLayout, *, routes: RouteFormat | None = None
) -> list[TrainBatch]:
    """This rank's batches of one rollout, one per optimizer step: the groups in order, in equal parts of whole groups.

    A filtered rollout is in no batch, and so not in N. A part with nothing but filtered rollouts is left out, so that
    the first batch is always the one that is on-policy.

    Raises:
        ValueError: the parts would be unequal, a rollout has no advantage, or what pack_batch refuses.
    """
    size, rest = divmod(len(groups), cfg.num_minibatches)
    if rest or not size:
        raise ValueError(
            f"batch.num_minibatches={cfg.num_minibatches}: does not divide the {len(groups)} groups of the rollout"
        )
    parts = [_sequences(groups[i * size : (i + 1) * size]) for i in range(cfg.num_minibatches)]
    return [
        pack_batch(part, cfg.max_tokens_per_microbatch, layout, minibatch_index=i, mode=cfg.mode, routes=routes)
        for i, part in enumerate(filter(None, parts))
    ]


def pack_batch(
    sequences: list[TrainSequence],
    max_tokens_per_microbatch: int,
    layout: BatchLayout,
    *,
    minibatch_index: int,
    mode: Literal["packed", "padded"] = "packed",
    routes: RouteFormat | None = None,
) -> TrainBatch:
    """This rank's part of one optimizer step's sequences, as microbatches.

    Packed: sequences go longest first into the emptiest of dp_size x count bins, with the smallest count that keeps
    every bin within the budget. Padded: as many rows a microbatch as the budget holds, the same number in each, since
    a pipeline's stages exchange tensors of one shape. Where a rank lacks a response a dummy stands (no response token,
    all padding, response length 0, number -1), so that all ranks run the same collectives on the same shapes.

    Args:
        sequences: of all data-parallel ranks, the same list on each.
        max_tokens_per_microbatch: tokens per rank, padding included.
        layout: this rank's place.
        minibatch_index: place of the optimizer step within its rollout.
        mode: as BatchConfig.mode.
        routes: of the model where SGLang's routes are replayed (R3), else None.

    Raises:
        ValueError: no sequences; a budget below what the layout aligns to; a sequence beyond the budget, without
            prompt, or with values that do not fit its response; reference log-probs of some sequences only; routes
            that are missing or of other tokens.
    """
    if not sequences:
        raise ValueError(f"minibatch {minibatch_index}: has no sequences")
    for sequence in sequences:
        _check_sequence(sequence, has_ref=sequences[0].ref_logprobs is not None)
        if routes is not None:
            _check_routes(sequence, routes)
    padded = [_pad_up(s.num_tokens, layout.padding_multiple) for s in sequences]
    limit = max_tokens_per_microbatch * layout.cp_size
    budget = limit - limit % layout.microbatch_padding_multiple
    _check_budget(sequences, padded, budget, max_tokens_per_microbatch, layout)
    num_rows, row_length = 1, None
    if mode == "packed":
        bins = _balance(padded, budget, layout)
    else:
        row_length = _pad_up(max(padded), layout.microbatch_padding_multiple)
        bins, num_rows = _deal(len(sequences), budget // row_length, layout)
    num_tokens = sum(s.num_tokens for s in sequences)
    return TrainBatch(
        microbatches=[_pack(sequences, own, layout, row_length, num_rows, routes) for own in _own(bins, layout)],
        num_responses=len(sequences),
        num_tokens=num_tokens,
        num_response_tokens=sum(s.response_length for s in sequences),
        minibatch_index=minibatch_index,
        packing_efficiency=num_tokens / (len(bins) * limit),
    )


def _sequences(groups: list[RolloutGroup]) -> list[TrainSequence]:
    sequences = []
    for group in groups:
        for member, rollout in enumerate(group.rollouts):
            if rollout.is_filtered:
                continue
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
                    token_advantages=rollout.token_advantages,
                    response_mask=rollout.response_mask,
                    ref_logprobs=rollout.ref_logprobs,
                    routed_experts=rollout.routed_experts,
                )
            )
    return sequences


def _check_sequence(sequence: TrainSequence, *, has_ref: bool) -> None:
    if not sequence.prompt_ids:
        raise ValueError(f"{sequence.name}: has no prompt token, so nothing predicts its first response token")
    per_token = {
        "rollout_logprobs": sequence.rollout_logprobs,
        "token_advantages": sequence.token_advantages,
        "response_mask": sequence.response_mask,
        "ref_logprobs": sequence.ref_logprobs,
    }
    for field, values in per_token.items():
        if values is not None and len(values) != len(sequence.response_ids):
            raise ValueError(
                f"{sequence.name}: has {len(values)} {field}, "
                f"wants {len(sequence.response_ids)}, one per response token"
            )
    if (sequence.ref_logprobs is not None) != has_ref:
        raise ValueError(
            f"{sequence.name}: has {'no ' if has_ref else ''}ref_logprobs, unlike the sequences before it; "
            "wants them of every sequence of an optimizer step (KL penalty) or of none"
        )


def _check_routes(sequence: TrainSequence, routes: RouteFormat) -> None:
    if sequence.routed_experts is None:
        raise ValueError(
            f"{sequence.name}: has no routed_experts, which loss.routing_replay: r3 replays; "
            "wants rollouts that were sampled with it"
        )
    got, wants = len(sequence.routed_experts), routes.num_bytes(sequence.num_tokens)
    if got != wants:
        raise ValueError(
            f"{sequence.name}: has {got} bytes of routed_experts, wants {wants} for "
            f"[tokens - 1, MoE layers, topk] = {list(routes.shape(sequence.num_tokens))}"
        )


def _check_budget(
    sequences: list[TrainSequence], padded: list[int], budget: int, max_tokens_per_microbatch: int, layout: BatchLayout
) -> None:
    if not budget:
        raise ValueError(
            f"batch.max_tokens_per_microbatch={max_tokens_per_microbatch}: tensor parallel, context parallel and FP8 "
            f"pad a rank's microbatch to a multiple of {layout.microbatch_padding_multiple // layout.cp_size} tokens; "
            "wants at least that"
        )
    for sequence, length in zip(sequences, padded, strict=True):
        if length > budget:
            wanted = _pad_up(length, layout.microbatch_padding_multiple) // layout.cp_size
            raise ValueError(
                f"{sequence.name}: {sequence.num_tokens} tokens, padded to {length}, over context_parallel_size="
                f"{layout.cp_size} ranks do not fit batch.max_tokens_per_microbatch={max_tokens_per_microbatch}; "
                f"wants at least {wanted}"
            )


def _pad_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _balance(lengths: list[int], budget: int, layout: BatchLayout) -> list[list[int]]:
    """Indices of the sequences in each of dp_size x count bins, fullest bin first."""
    step = layout.microbatch_multiple
    count = _pad_up(math.ceil(sum(lengths) / (layout.dp_size * budget)), step)
    while True:
        bins = _spread(lengths, layout.dp_size * count)
        loads = [sum(lengths[i] for i in members) for members in bins]
        if max(loads) <= budget:
            break
        count += step  # ends: with a bin for each sequence, each fits
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    return [sorted(bins[b]) for b in order]


def _deal(num_sequences: int, max_rows: int, layout: BatchLayout) -> tuple[list[list[int]], int]:
    """Indices of the sequences in each of dp_size x count bins, dealt in turn; and the rows of every bin."""
    count = _pad_up(math.ceil(num_sequences / (layout.dp_size * max_rows)), layout.microbatch_multiple)
    num_bins = layout.dp_size * count
    bins = [list(range(b, num_sequences, num_bins)) for b in range(num_bins)]
    return bins, math.ceil(num_sequences / num_bins)


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


def _pack(
    sequences: list[TrainSequence],
    members: list[int],
    layout: BatchLayout,
    row_length: int | None,
    num_rows: int,
    routes: RouteFormat | None,
) -> Microbatch:
    """The microbatch of some of the optimizer step's sequences, by their place in it; dummies fill up to num_rows."""
    multiple = layout.microbatch_padding_multiple
    # Full length, so that attention never meets an empty segment.
    dummy = TrainSequence(name="dummy", prompt_ids=(0,) * (row_length or multiple), response_ids=())
    numbers = members + [-1] * (num_rows - len(members))
    rows = [sequences[i] if i >= 0 else dummy for i in numbers]
    unpadded = [s.num_tokens for s in rows]
    if row_length is None:
        padded = [_pad_up(n, layout.padding_multiple) for n in unpadded]
        padded[-1] += -sum(padded) % multiple
    else:
        padded = [row_length] * num_rows
    laid_out = [_lay_out(s, i, length, routes) for i, (s, length) in enumerate(zip(rows, padded, strict=True))]
    for fields, number in zip(laid_out, numbers, strict=True):
        fields["is_padding_T"] |= number < 0
    fields_T = {name: torch.cat([_context_slice(fields[name], layout) for fields in laid_out]) for name in laid_out[0]}
    ref_logprobs_T, routes_T = fields_T.pop("ref_logprobs_T"), fields_T.pop("rollout_routes_T", None)
    return Microbatch(
        **fields_T,
        response_length_B=torch.tensor([s.response_length for s in rows]),
        response_number_B=torch.tensor(numbers),
        advantages_B=torch.tensor([s.advantage for s in rows], dtype=torch.float32),
        old_logprobs_T=None,
        ref_logprobs_T=None if sequences[0].ref_logprobs is None else ref_logprobs_T,
        rollout_routes_T=routes_T,
        routed_experts=None,
        row_length=row_length,
        cu_seqlens=_starts(unpadded),
        cu_seqlens_padded=_starts(padded),
        max_seqlen=max(padded),
        num_unpadded_tokens=int((~fields_T["is_padding_T"]).sum()),
    )


def _lay_out(sequence: TrainSequence, index: int, length: int, routes: RouteFormat | None) -> dict[str, Tensor]:
    """The [L] fields of one whole padded sequence; position t predicts token t + 1."""
    n, first = sequence.num_tokens, len(sequence.prompt_ids) - 1
    tokens, labels, response_index = torch.zeros(3, length, dtype=torch.int64)
    tokens[:n] = torch.tensor(sequence.prompt_ids + sequence.response_ids)
    labels[: n - 1] = tokens[1:n]
    response_index[:n] = index
    position = torch.arange(length)
    mask = torch.zeros(length, dtype=torch.bool)
    mask[first : n - 1] = True if sequence.response_mask is None else torch.tensor(sequence.response_mask).bool()

    def per_token(values: tuple[float, ...] | None, otherwise: float) -> Tensor:
        """What responses bring is only read where the mask is: a hole may hold anything."""
        field = torch.full((length,), otherwise)
        if values is not None:
            field[first : n - 1] = torch.tensor(values, dtype=torch.float32)
        return torch.where(mask, field, 0.0)

    fields = {
        "tokens_T": tokens,
        "labels_T": labels,
        "position_ids_T": position,
        "response_mask_T": mask,
        "response_index_T": response_index,
        "rollout_logprobs_T": per_token(sequence.rollout_logprobs, 0.0),
        "ref_logprobs_T": per_token(sequence.ref_logprobs, 0.0),
        "advantages_T": per_token(sequence.token_advantages, sequence.advantage),
        "is_padding_T": position >= n,
    }
    if routes is not None:
        fields["rollout_routes_T"] = lay_out_routes(sequence.routed_experts, n, length, routes)
    return fields


def _context_slice(field_L: Tensor, layout: BatchLayout) -> Tensor:
    """[L / cp_size]: chunks cp_rank and 2 cp_size - 1 - cp_rank of 2 cp_size, which balances causal attention."""
    if layout.cp_size == 1:
        return field_L
    chunks = field_L.chunk(2 * layout.cp_size)
    return torch.cat([chunks[layout.cp_rank], chunks[2 * layout.cp_size - 1 - layout.cp_rank]])


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
