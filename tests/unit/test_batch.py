"""Packing: every response once, within the budget, aligned labels, and a loss that no packing changes."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_megatron.batch import BatchLayout, TrainSequence, make_batches, pack_batch
from gspo_megatron.config import BatchConfig, LossConfig
from gspo_megatron.loss import gspo_loss
from gspo_megatron.types import Microbatch, Prompt, Rollout, RolloutGroup, TrainBatch
from tests.tolerances import BITWISE, FLOAT64, assert_close

# Token ids say whose they are: response i has ids TOKENS_PER_SEQUENCE * (i + 1), ... in order, prompt included.
TOKENS_PER_SEQUENCE = 100
ONE_RANK = BatchLayout(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, alignment=1)


def sequence(i: int, num_prompt: int, num_response: int) -> TrainSequence:
    ids = tuple(TOKENS_PER_SEQUENCE * (i + 1) + t for t in range(num_prompt + num_response))
    return TrainSequence(
        name=f"sequence {i}",
        prompt_ids=ids[:num_prompt],
        response_ids=ids[num_prompt:],
        rollout_logprobs=tuple(-0.5 * token for token in ids[num_prompt:]),
        advantage=math.sin(i + 1.0),
    )


def layouts(dp_size: int, cp_size: int, alignment: int) -> list[BatchLayout]:
    return [
        BatchLayout(dp_rank=d, dp_size=dp_size, cp_rank=c, cp_size=cp_size, alignment=alignment)
        for d in range(dp_size)
        for c in range(cp_size)
    ]


def is_dummy(microbatch: Microbatch) -> bool:
    return microbatch.num_unpadded_tokens == 0 and not microbatch.tokens_T.any()


def test_layout_of_two_sequences_is_the_one_of_the_types() -> None:
    sequences = [sequence(0, 2, 3), sequence(1, 3, 1)]
    (m,) = pack_batch(sequences, 16, replace(ONE_RANK, alignment=4), minibatch_index=2).microbatches
    assert m.tokens_T.tolist() == [100, 101, 102, 103, 104, 0, 0, 0, 200, 201, 202, 203]
    assert m.labels_T.tolist() == [101, 102, 103, 104, 0, 0, 0, 0, 201, 202, 203, 0]
    assert m.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert m.response_mask_T.tolist() == [bool(x) for x in (0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0)]
    assert m.response_index_T.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert m.response_length_B.tolist() == [3, 1]
    assert m.rollout_logprobs_T.tolist() == [0, -51.0, -51.5, -52.0, 0, 0, 0, 0, 0, 0, -101.5, 0]
    assert_close(m.advantages_B, torch.tensor([math.sin(1.0), math.sin(2.0)], dtype=torch.float32), BITWISE)
    assert m.cu_seqlens.tolist() == [0, 5, 9] and m.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert m.cu_seqlens.dtype == m.cu_seqlens_padded.dtype == torch.int32
    assert (m.max_seqlen, m.num_unpadded_tokens, m.old_logprobs_T) == (8, 9, None)


def test_context_parallel_ranks_take_the_outer_and_the_inner_chunks() -> None:
    sequences = [sequence(0, 2, 5), sequence(1, 3, 1)]
    ranks = [
        pack_batch(sequences, 6, layout, minibatch_index=0).microbatches[0] for layout in layouts(1, 2, alignment=1)
    ]
    assert [m.tokens_T.tolist() for m in ranks] == [[100, 101, 106, 0, 200, 203], [102, 103, 104, 105, 201, 202]]
    assert [m.position_ids_T.tolist() for m in ranks] == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]
    assert [m.num_unpadded_tokens for m in ranks] == [5, 6]
    for m in ranks:
        assert m.cu_seqlens_padded.tolist() == [0, 8, 12]
        assert m.response_length_B.tolist() == [5, 1]


def test_counts_are_those_of_all_ranks() -> None:
    sequences = [sequence(0, 2, 3), sequence(1, 2, 0), replace(sequence(2, 1, 4), advantage=0.0)]
    for layout in layouts(2, 1, alignment=4):
        batch = pack_batch(sequences, 16, layout, minibatch_index=3)
        assert (batch.num_responses, batch.num_tokens, batch.minibatch_index) == (3, 12, 3)
        assert batch.packing_efficiency == 12 / (2 * 16)


def test_rank_without_a_response_gets_a_dummy_with_loss_and_gradient_zero() -> None:
    batches = [pack_batch([sequence(0, 2, 3)], 8, layout, minibatch_index=0) for layout in layouts(2, 1, alignment=4)]
    assert [is_dummy(b.microbatches[0]) for b in batches] == [False, True]
    (dummy,) = batches[1].microbatches
    assert dummy.response_length_B.tolist() == [0] and not dummy.response_mask_T.any()
    assert dummy.cu_seqlens.tolist() == dummy.cu_seqlens_padded.tolist() == [0, 4]
    logprobs_T = torch.full((4,), -1.0, requires_grad=True)
    cfg = LossConfig(name="gspo", clip_low=3e-4, clip_high=4e-4, old_logprobs="recompute")
    out = gspo_loss(logprobs_T, replace(dummy, old_logprobs_T=torch.full((4,), math.nan)), cfg)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0.0
    assert logprobs_T.grad is not None and logprobs_T.grad.tolist() == [0.0] * 4


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=24)


@settings(max_examples=120, deadline=None)
@given(
    lengths=lengths,
    budget=st.integers(40, 90),
    dp_size=st.integers(1, 4),
    cp_size=st.integers(1, 3),
    alignment=st.sampled_from([1, 2, 4]),
)
def test_every_token_is_on_exactly_one_rank_within_the_budget(
    lengths: list[tuple[int, int]], budget: int, dp_size: int, cp_size: int, alignment: int
) -> None:
    sequences = [sequence(i, p, r) for i, (p, r) in enumerate(lengths)]
    ranks = {
        (layout.dp_rank, layout.cp_rank): pack_batch(sequences, budget, layout, minibatch_index=0)
        for layout in layouts(dp_size, cp_size, alignment)
    }
    assert len({len(b.microbatches) for b in ranks.values()}) == 1
    microbatches = [m for b in ranks.values() for m in b.microbatches]
    for m in microbatches:
        assert len(m.tokens_T) <= budget and len(m.tokens_T) % alignment == 0
        assert m.max_seqlen == m.cu_seqlens_padded.diff().max()
        assert len(m.tokens_T) * cp_size == m.cu_seqlens_padded[-1]
        assert torch.equal(m.tokens_T[m.response_mask_T] + 1, m.labels_T[m.response_mask_T])
        assert torch.equal(-0.5 * m.labels_T[m.response_mask_T], m.rollout_logprobs_T[m.response_mask_T])
        assert not m.rollout_logprobs_T[~m.response_mask_T].any()
    tokens = torch.cat([m.tokens_T for m in microbatches])
    assert sorted(tokens[tokens > 0].tolist()) == sorted(t for s in sequences for t in s.prompt_ids + s.response_ids)
    trained = torch.cat([m.labels_T[m.response_mask_T] for m in microbatches])
    assert sorted(trained.tolist()) == sorted(t for s in sequences for t in s.response_ids)
    assert sum(m.num_unpadded_tokens for m in microbatches) == sum(s.num_tokens for s in sequences)
    # A response never straddles microbatches: CP rank 0 of all data-parallel ranks sees each one once.
    firsts = [m for (_, cp_rank), b in ranks.items() if cp_rank == 0 for m in b.microbatches if not is_dummy(m)]
    assert sum(len(m.response_length_B) for m in firsts) == len(sequences)
    seen = sorted(round(float(a), 5) for m in firsts for a in m.advantages_B)
    assert seen == sorted(round(s.advantage, 5) for s in sequences)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, dp_size=st.integers(1, 4))
def test_count_of_microbatches_is_near_the_least_possible(lengths: list[tuple[int, int]], dp_size: int) -> None:
    budget = 64
    layout = replace(ONE_RANK, dp_size=dp_size)
    batch = pack_batch([sequence(i, p, r) for i, (p, r) in enumerate(lengths)], budget, layout, minibatch_index=0)
    # While some bin was over the budget, the emptiest held more than half of it: no sequence is longer than that.
    total = sum(p + r for p, r in lengths)
    assert len(batch.microbatches) <= math.ceil(total / (dp_size * budget / 2))


@pytest.mark.parametrize(
    ("token_counts", "budget", "count"),
    [
        ([6, 6, 6], 10, 3),  # by the sum 2 would do
        ([2, 2, 2, 6], 6, 2),  # shortest first would take 3
        ([3, 3], 6, 1),
    ],
)
def test_count_of_microbatches_is_the_smallest_that_fits(token_counts: list[int], budget: int, count: int) -> None:
    sequences = [sequence(i, 1, n - 1) for i, n in enumerate(token_counts)]
    assert len(pack_batch(sequences, budget, ONE_RANK, minibatch_index=0).microbatches) == count


def table_gradient(sequences: list[TrainSequence], budget: int, dp_size: int, alignment: int) -> tuple[Tensor, Tensor]:
    """Loss and its gradient per token id, with log-probs looked up by token id, over every rank."""
    size = TOKENS_PER_SEQUENCE * (len(sequences) + 1)
    generator = torch.Generator().manual_seed(0)
    old = -3.0 * torch.rand(size, generator=generator, dtype=torch.float64)
    new = (old + 1e-3 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
    cfg = LossConfig(name="gspo", clip_low=1e-4, clip_high=2e-4, old_logprobs="recompute")
    loss = torch.zeros((), dtype=torch.float64)
    for layout in layouts(dp_size, 1, alignment):
        batch = pack_batch(sequences, budget, layout, minibatch_index=0)
        for m in batch.microbatches:
            out = gspo_loss(new[m.labels_T], replace(m, old_logprobs_T=old[m.labels_T]), cfg)
            loss = loss + out.loss_sum / batch.num_responses
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad


@pytest.mark.parametrize(
    ("budget", "dp_size", "alignment"), [(1000, 1, 8), (32, 1, 1), (40, 2, 4), (24, 3, 1), (24, 13, 4)]
)
def test_loss_and_gradient_of_every_token_do_not_depend_on_packing_or_order(
    budget: int, dp_size: int, alignment: int
) -> None:
    sequences = [sequence(i, 1 + i % 4, (5 * i) % 17) for i in range(12)]
    loss, grad = table_gradient(sequences, 1000, 1, 1)
    assert grad.count_nonzero() > 30 and (grad == 0).sum() > 30
    for ordered in (sequences, sequences[::-1], sequences[5:] + sequences[:5]):
        got_loss, got_grad = table_gradient(ordered, budget, dp_size, alignment)
        assert_close(got_loss, loss, FLOAT64)
        assert_close(got_grad, grad, FLOAT64)


def test_packing_is_deterministic() -> None:
    sequences = [sequence(i, 1 + i % 3, i % 5) for i in range(10)]
    layout = BatchLayout(dp_rank=1, dp_size=2, cp_rank=0, cp_size=1, alignment=1)
    first, second = (pack_batch(sequences, 12, layout, minibatch_index=0) for _ in range(2))
    for a, b in zip(first.microbatches, second.microbatches, strict=True):
        assert torch.equal(a.tokens_T, b.tokens_T)


def groups(num_groups: int, size: int = 2) -> list[RolloutGroup]:
    result = []
    for g in range(num_groups):
        prompt = Prompt(prompt_id=f"p{g}", text="", token_ids=(7, 8), expected="", entry={})
        rollouts = tuple(
            Rollout(
                response_ids=(100 + g,) * (m + 1),
                rollout_logprobs=(-1.0,) * (m + 1),
                weight_versions=(0,) * (m + 1),
                finish_reason="stop",
                text="",
                sampling_seed=0,
                advantage=0.5,
            )
            for m in range(size)
        )
        result.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return result


def responses(batch: TrainBatch) -> set[int]:
    return {int(x) for m in batch.microbatches for x in m.labels_T[m.response_mask_T]}


def test_minibatches_are_equal_parts_of_whole_groups_in_order() -> None:
    batches = make_batches(groups(6), BatchConfig(num_minibatches=3, max_tokens_per_microbatch=64), ONE_RANK)
    assert [responses(b) for b in batches] == [{100, 101}, {102, 103}, {104, 105}]
    assert [b.minibatch_index for b in batches] == [0, 1, 2]
    assert [b.num_responses for b in batches] == [4, 4, 4]
    assert [b.num_tokens for b in batches] == [14, 14, 14]


def test_demonstrations_pack_without_rollout_logprobs() -> None:
    demonstration = TrainSequence(name="d", prompt_ids=(1, 2), response_ids=(3, 4))
    (m,) = pack_batch([demonstration], 8, ONE_RANK, minibatch_index=0).microbatches
    assert m.labels_T[m.response_mask_T].tolist() == [3, 4]
    assert not m.rollout_logprobs_T.any() and m.advantages_B.tolist() == [0.0]


def test_sequence_over_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 4: 9 tokens.*max_tokens_per_microbatch=11; wants at least 12"):
        pack_batch([sequence(4, 4, 5)], 11, replace(ONE_RANK, alignment=4), minibatch_index=0)


def test_broken_contracts_are_refused() -> None:
    cfg = BatchConfig(num_minibatches=2, max_tokens_per_microbatch=64)
    with pytest.raises(ValueError, match="num_minibatches=2: does not divide the 3 groups"):
        make_batches(groups(3), cfg, ONE_RANK)
    with pytest.raises(ValueError, match="does not divide the 0 groups"):
        make_batches([], cfg, ONE_RANK)
    (a, b) = groups(2)
    unscored = replace(b, rollouts=(b.rollouts[0], replace(b.rollouts[1], advantage=None)))
    with pytest.raises(ValueError, match="prompt p1, member 1: has no advantage"):
        make_batches([a, unscored], cfg, ONE_RANK)
    with pytest.raises(ValueError, match="sequence 0: has 1 rollout_logprobs, wants 3"):
        pack_batch([replace(sequence(0, 2, 3), rollout_logprobs=(0.0,))], 64, ONE_RANK, minibatch_index=0)
    with pytest.raises(ValueError, match="sequence 0: has no prompt token"):
        pack_batch([sequence(0, 0, 3)], 64, ONE_RANK, minibatch_index=0)
    with pytest.raises(ValueError, match="minibatch 1: has no sequences"):
        pack_batch([], 64, ONE_RANK, minibatch_index=1)
