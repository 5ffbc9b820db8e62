"""Vocabulary-parallel log-probs over gloo equal those of one process, in values and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron import logprobs
from gspo_megatron.logprobs import linear_logprobs
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_HEAD_GRADIENT, FLOAT32_LOGPROB, assert_close

TOKENS, HIDDEN = 40, 16
VOCABULARIES = {"full": (48, 48), "padding_on_the_last_rank": (37, 48), "last_rank_is_all_padding": (20, 48)}


def values_and_gradients(case: str, tp_rank: int, tp_size: int, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """[2, T] log-probs and entropy; gradients of their weighted sum to this rank's hidden rows and columns."""
    logprobs.BLOCK_BYTES = 4 * TOKENS * 7
    vocab_size, padded = VOCABULARIES[case]
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight_VH = torch.randn(padded, HIDDEN, generator=generator)
    weight_VH[vocab_size:] = torch.nan
    labels_T = torch.randint(vocab_size, (TOKENS,), generator=generator)
    labels_T[:2] = torch.tensor([0, vocab_size - 1])
    weights_2T = torch.randn(2, TOKENS, generator=generator)
    if sequence_parallel:
        hidden_TH = hidden_TH.chunk(tp_size)[tp_rank]
    leaves = hidden_TH.clone().requires_grad_(), weight_VH.chunk(tp_size)[tp_rank].clone().requires_grad_()
    pair = linear_logprobs(
        *leaves,
        labels_T,
        temperature=0.7,
        vocab_size=vocab_size,
        fp32_matmul=False,
        tp_group=dist.group.WORLD if tp_size > 1 else None,
        sequence_parallel=sequence_parallel,
    )
    values_2T = torch.stack(pair)
    return values_2T.detach(), *torch.autograd.grad((values_2T * weights_2T).sum(), leaves)


CASES = [(case, sequence_parallel) for case in VOCABULARIES for sequence_parallel in (False, True)]


def on_rank(rank: int) -> dict[tuple[str, bool], tuple[Tensor, ...]]:
    return {case: values_and_gradients(case[0], rank, 2, case[1]) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, bool], tuple[Tensor, ...]]]:
    return spawn(on_rank, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process(case: tuple[str, bool], ranks: list[dict[tuple[str, bool], tuple]]) -> None:
    values, hidden_grad, weight_grad = values_and_gradients(case[0], 0, 1, False)
    assert torch.equal(ranks[0][case][0], ranks[1][case][0]), "every rank holds the same values"
    assert_close(ranks[0][case][0], values, FLOAT32_LOGPROB)
    assert_close(torch.cat([r[case][2] for r in ranks]), weight_grad, FLOAT32_HEAD_GRADIENT)
    for r, want in zip(ranks, hidden_grad.chunk(2) if case[1] else (hidden_grad, hidden_grad), strict=True):
        assert_close(r[case][1], want, FLOAT32_HEAD_GRADIENT)


def test_padding_gets_no_gradient_on_any_rank(ranks: list[dict[tuple[str, bool], tuple]]) -> None:
    assert ranks[1]["full", False][2].count_nonzero() > 0
    assert ranks[1]["padding_on_the_last_rank", True][2][37 - 24 :].count_nonzero() == 0
    assert ranks[1]["last_rank_is_all_padding", False][2].count_nonzero() == 0
