"""Packing: every response once, within the budget, aligned labels, and a loss that no packing changes."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo_megatron.batch import BatchLayout, TrainSequence, make_batches, pack_batch
from gspo_megatron.config import BatchConfig, LossConfig
from gspo_megatron.loss import policy_loss
from gspo_megatron.types import Microbatch, Prompt, Rollout, RolloutGroup, TrainBatch
from tests.tolerances import BITWISE, FLOAT64, assert_close

# Token ids say whose they are: response i has ids TOKENS_PER_SEQUENCE * (i + 1), ... in order, prompt included.
TOKENS_PER_SEQUENCE = 100
Mode = Literal["packed", "padded"]
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


def layouts(dp_size: int, cp_size: int, alignment: int, **more: int) -> list[BatchLayout]:
    return [
        BatchLayout(dp_rank=d, dp_size=dp_size, cp_rank=c, cp_size=cp_size, alignment=alignment, **more)
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
    assert m.is_padding_T.tolist() == [bool(x) for x in (0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0)]
    a, b = m.advantages_B.tolist()
    assert m.advantages_T.tolist() == [0, a, a, a, 0, 0, 0, 0, 0, 0, b, 0]
    assert (m.row_length, m.ref_logprobs_T, m.response_number_B.tolist()) == (None, None, [0, 1])


def test_values_of_tokens_stand_where_they_are_predicted_and_holes_have_none() -> None:
    nan = math.nan
    holed = replace(
        sequence(0, 2, 4),
        response_mask=(True, False, False, True),
        token_advantages=(0.5, nan, 7.0, -1.0),
        rollout_logprobs=(-1.0, nan, -9.0, -2.0),
        ref_logprobs=(-3.0, nan, -math.inf, -4.0),
    )
    empty = replace(sequence(1, 2, 0), token_advantages=(), response_mask=(), ref_logprobs=())
    batch = pack_batch([holed, empty], 16, ONE_RANK, minibatch_index=0)
    (m,) = batch.microbatches
    assert m.response_mask_T.tolist() == [bool(x) for x in (0, 1, 0, 0, 1, 0, 0, 0)]
    assert m.response_length_B.tolist() == [2, 0]
    assert m.advantages_T.tolist() == [0, 0.5, 0, 0, -1, 0, 0, 0]
    assert m.rollout_logprobs_T.tolist() == [0, -1, 0, 0, -2, 0, 0, 0]
    assert m.ref_logprobs_T is not None and m.ref_logprobs_T.tolist() == [0, -3, 0, 0, -4, 0, 0, 0]
    # The policy reads the holes: they are context, and tokens of the step.
    assert m.tokens_T.tolist() == [100, 101, 102, 103, 104, 105, 200, 201]
    assert (batch.num_responses, batch.num_tokens, batch.num_response_tokens) == (2, 8, 2)
    assert m.advantages_B.tolist() == [pytest.approx(math.sin(1.0)), pytest.approx(math.sin(2.0))]


def test_dummy_beside_reference_logprobs_has_zeros() -> None:
    one = replace(sequence(0, 2, 2), ref_logprobs=(-1.0, -2.0))
    _, rank_1 = (pack_batch([one], 8, layout, minibatch_index=0) for layout in layouts(2, 1, alignment=1))
    ref_logprobs_T = rank_1.microbatches[0].ref_logprobs_T
    assert ref_logprobs_T is not None and not ref_logprobs_T.any()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_last_sequence_is_padded_up_to_the_alignment_of_the_microbatch(cp_size: int) -> None:
    sequences = [sequence(0, 2, 5), sequence(1, 3, 1)]
    ranks = [
        pack_batch(sequences, 40, layout, minibatch_index=0).microbatches[0]
        for layout in layouts(1, cp_size, 2, pack_alignment=16)
    ]
    for m in ranks:
        assert len(m.tokens_T) == 16
        assert m.cu_seqlens.tolist() == [0, 7, 11]
        assert m.cu_seqlens_padded.tolist() == [0, 8, 16 * cp_size] and m.max_seqlen == 16 * cp_size - 8
    # Each rank still holds two chunks of the last sequence, the outer or the inner.
    chunk = (16 * cp_size - 8) // (2 * cp_size)
    positions = [m.position_ids_T.tolist()[8 // cp_size :] for m in ranks]
    for rank, got in enumerate(positions):
        first, second = chunk * rank, chunk * (2 * cp_size - 1 - rank)
        assert got == [*range(first, first + chunk), *range(second, second + chunk)]
    assert sum(m.num_unpadded_tokens for m in ranks) == 11


def test_budget_counts_the_alignment() -> None:
    # 16 of the 30 tokens can be used: two sequences of 8, not three.
    layout = replace(ONE_RANK, pack_alignment=16)
    batch = pack_batch([sequence(i, 4, 4) for i in range(3)], 30, layout, minibatch_index=0)
    assert [len(m.tokens_T) for m in batch.microbatches] == [16, 16]
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=15: .* multiple of 16 tokens; wants"):
        pack_batch([sequence(0, 1, 1)], 15, layout, minibatch_index=0)
    with pytest.raises(ValueError, match="sequence 0: 17 tokens.*=30; wants at least 32"):
        pack_batch([sequence(0, 1, 16)], 30, layout, minibatch_index=0)


@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize("num_sequences", [1, 5, 12])
def test_count_of_microbatches_is_rounded_up_to_the_multiple(mode: Mode, num_sequences: int) -> None:
    sequences = [sequence(i, 2, 2) for i in range(num_sequences)]
    ranks = [
        pack_batch(sequences, 8, layout, minibatch_index=0, mode=mode)
        for layout in layouts(2, 1, 1, microbatch_multiple=4)
    ]
    assert {len(b.microbatches) for b in ranks} == {4}  # 2 of 4 tokens fit one: 3 would do
    numbers = [int(n) for b in ranks for m in b.microbatches for n in m.response_number_B]
    assert sorted(n for n in numbers if n >= 0) == list(range(num_sequences))
    assert ranks[0].packing_efficiency == 4 * num_sequences / (8 * 8)


def test_rows_are_as_long_as_the_longest_sequence_and_filled_up_by_dummies() -> None:
    sequences = [sequence(0, 2, 1), sequence(1, 2, 3), sequence(2, 1, 1)]
    layout = replace(ONE_RANK, alignment=2)
    batch = pack_batch(sequences, 17, layout, minibatch_index=0, mode="padded")  # two rows of 6 fit
    first, second = batch.microbatches
    assert first.tokens_T.tolist() == [100, 101, 102, 0, 0, 0, 300, 301, 0, 0, 0, 0]
    assert first.labels_T.tolist() == [101, 102, 0, 0, 0, 0, 301, 0, 0, 0, 0, 0]
    assert first.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert first.response_mask_T.tolist() == [bool(x) for x in (0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0)]
    assert first.is_padding_T.tolist() == [bool(x) for x in (0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1)]
    assert first.response_number_B.tolist() == [0, 2] and second.response_number_B.tolist() == [1, -1]
    assert second.tokens_T.tolist() == [200, 201, 202, 203, 204] + 7 * [0]
    assert second.is_padding_T.tolist() == 5 * [False] + 7 * [True]
    assert second.response_length_B.tolist() == [3, 0] and second.num_unpadded_tokens == 5
    assert first.row_length == second.row_length == 6
    assert batch.packing_efficiency == (3 + 5 + 2) / (2 * 17)
    assert (batch.num_responses, batch.num_response_tokens) == (3, 5)


def test_context_parallel_ranks_cut_each_row_as_they_cut_packed_sequences() -> None:
    sequences = [sequence(0, 2, 5), sequence(1, 3, 1)]
    ranks = [
        pack_batch(sequences, 8, layout, minibatch_index=0, mode="padded").microbatches[0]
        for layout in layouts(1, 2, alignment=1)
    ]
    assert [m.tokens_T.tolist() for m in ranks] == [
        [100, 101, 106, 0, 200, 201, 0, 0],
        [102, 103, 104, 105, 202, 203, 0, 0],
    ]
    assert [m.position_ids_T.tolist() for m in ranks] == [[0, 1, 6, 7] * 2, [2, 3, 4, 5] * 2]
    assert [m.row_length for m in ranks] == [8, 8] and [m.num_unpadded_tokens for m in ranks] == [5, 6]


def test_row_beyond_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1: 9 tokens.*max_tokens_per_microbatch=8; wants at least 9"):
        pack_batch([sequence(0, 1, 1), sequence(1, 4, 5)], 8, ONE_RANK, minibatch_index=0, mode="padded")


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
    out = policy_loss(logprobs_T, logprobs_T, replace(dummy, old_logprobs_T=torch.full((4,), math.nan)), cfg)
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
    pack_alignment=st.sampled_from([1, 8, 20]),
    multiple=st.integers(1, 3),
    mode=st.sampled_from(["packed", "padded"]),
)
def test_every_token_is_on_exactly_one_rank_within_the_budget(
    lengths: list[tuple[int, int]],
    budget: int,
    dp_size: int,
    cp_size: int,
    alignment: int,
    pack_alignment: int,
    multiple: int,
    mode: Mode,
) -> None:
    sequences = [sequence(i, p, r) for i, (p, r) in enumerate(lengths)]
    ranks = {
        (layout.dp_rank, layout.cp_rank): pack_batch(sequences, budget, layout, minibatch_index=0, mode=mode)
        for layout in layouts(dp_size, cp_size, alignment, pack_alignment=pack_alignment, microbatch_multiple=multiple)
    }
    assert len({len(b.microbatches) for b in ranks.values()}) == 1
    microbatches = [m for b in ranks.values() for m in b.microbatches]
    assert len(ranks[0, 0].microbatches) % multiple == 0
    assert len({m.row_length for m in microbatches}) == 1
    if mode == "padded":
        assert len({len(m.tokens_T) for m in microbatches}) == 1
    for m in microbatches:
        assert len(m.tokens_T) <= budget and len(m.tokens_T) % math.lcm(alignment, pack_alignment) == 0
        assert torch.equal(m.response_number_B < 0, m.response_number_B == -1)
        assert not m.response_length_B[m.response_number_B < 0].any()
        assert m.num_unpadded_tokens == (~m.is_padding_T).sum()
        assert not (m.is_padding_T & m.response_mask_T).any()
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
    assert sorted(int(n) for m in firsts for n in m.response_number_B if n >= 0) == list(range(len(sequences)))
    seen = sorted(round(float(a), 5) for m in firsts for a in m.advantages_B[m.response_number_B >= 0])
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


def table_gradient(
    sequences: list[TrainSequence],
    budget: int,
    dp_size: int,
    alignment: int,
    mode: Mode = "packed",
) -> tuple[Tensor, Tensor]:
    """Loss and its gradient per token id, with log-probs looked up by token id, over every rank."""
    size = TOKENS_PER_SEQUENCE * (len(sequences) + 1)
    generator = torch.Generator().manual_seed(0)
    old = -3.0 * torch.rand(size, generator=generator, dtype=torch.float64)
    new = (old + 1e-3 * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
    cfg = LossConfig(name="gspo", clip_low=1e-4, clip_high=2e-4, old_logprobs="recompute")
    loss = torch.zeros((), dtype=torch.float64)
    for layout in layouts(dp_size, 1, alignment):
        batch = pack_batch(sequences, budget, layout, minibatch_index=0, mode=mode)
        for m in batch.microbatches:
            out = policy_loss(new[m.labels_T], new[m.labels_T], replace(m, old_logprobs_T=old[m.labels_T]), cfg)
            loss = loss + out.loss_sum / batch.num_responses
    (grad,) = torch.autograd.grad(loss, new)
    return loss.detach(), grad


@pytest.mark.parametrize("mode", ["packed", "padded"])
@pytest.mark.parametrize(
    ("budget", "dp_size", "alignment"), [(1000, 1, 8), (32, 1, 1), (40, 2, 4), (24, 3, 1), (24, 13, 4)]
)
def test_loss_and_gradient_of_every_token_do_not_depend_on_packing_or_order(
    budget: int, dp_size: int, alignment: int, mode: Mode
) -> None:
    sequences = [sequence(i, 1 + i % 4, (5 * i) % 17) for i in range(12)]
    loss, grad = table_gradient(sequences, 1000, 1, 1)
    assert grad.count_nonzero() > 30 and (grad == 0).sum() > 30
    for ordered in (sequences, sequences[::-1], sequences[5:] + sequences[:5]):
        got_loss, got_grad = table_gradient(ordered, budget, dp_size, alignment, mode)
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


def filtered(group: RolloutGroup, *members: int) -> RolloutGroup:
    """Without an advantage: filtered before the statistics."""
    rollouts = list(group.rollouts)
    for i in members:
        rollouts[i] = replace(rollouts[i], filtered_because="overlong", advantage=None)
    return replace(group, rollouts=tuple(rollouts))


def test_filtered_rollouts_are_in_no_batch_and_a_part_without_others_is_left_out() -> None:
    a, b, c = groups(3)
    cfg = BatchConfig(num_minibatches=3, max_tokens_per_microbatch=64)
    batches = make_batches([filtered(a, 0), filtered(b, 0, 1), c], cfg, ONE_RANK)
    assert [x.minibatch_index for x in batches] == [0, 1]
    assert [x.num_responses for x in batches] == [1, 2]
    assert [x.num_tokens for x in batches] == [4, 7]
    assert [x.microbatches[0].response_length_B.tolist() for x in batches] == [[2], [1, 2]]


def test_make_batches_hands_on_the_mode_and_what_rollouts_carry() -> None:
    (group,) = groups(1)
    carried = {"token_advantages": (2.0, 3.0), "response_mask": (False, True), "ref_logprobs": (-5.0, -6.0)}
    rollouts = (replace(group.rollouts[0], ref_logprobs=(-4.0,)), replace(group.rollouts[1], **carried))
    cfg = BatchConfig(num_minibatches=1, max_tokens_per_microbatch=64, mode="padded")
    ((m,),) = (b.microbatches for b in make_batches([replace(group, rollouts=rollouts)], cfg, ONE_RANK))
    assert m.row_length == 4
    assert m.advantages_T.tolist() == [0, 0.5, 0, 0, 0, 0, 3.0, 0]
    assert m.ref_logprobs_T is not None and m.ref_logprobs_T.tolist() == [0, -4, 0, 0, 0, 0, -6, 0]


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
    for field in ("token_advantages", "response_mask", "ref_logprobs"):
        with pytest.raises(ValueError, match=f"sequence 0: has 2 {field}, wants 3, one per response token"):
            pack_batch([replace(sequence(0, 2, 3), **{field: (0, 1)})], 64, ONE_RANK, minibatch_index=0)
    with_ref, without = replace(sequence(0, 2, 1), ref_logprobs=(-1.0,)), sequence(1, 2, 1)
    with pytest.raises(ValueError, match="sequence 1: has no ref_logprobs, unlike"):
        pack_batch([with_ref, without], 64, ONE_RANK, minibatch_index=0)
    with pytest.raises(ValueError, match="sequence 0: has ref_logprobs, unlike"):
        pack_batch([without, with_ref], 64, ONE_RANK, minibatch_index=0)
    with pytest.raises(ValueError, match="sequence 0: has no prompt token"):
        pack_batch([sequence(0, 0, 3)], 64, ONE_RANK, minibatch_index=0)
    with pytest.raises(ValueError, match="minibatch 1: has no sequences"):
        pack_batch([], 64, ONE_RANK, minibatch_index=1)
