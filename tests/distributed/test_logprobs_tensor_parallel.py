"""Vocabulary-parallel log-probs over gloo equal those of one process, in values and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.logprobs import vocab_parallel_logprobs
from tests.distributed.spawn import spawn
from tests.tolerances import FLOAT32_LOGPROB, assert_close

TOKENS = 40
VOCABULARIES = {"full": (48, 48), "padding_on_the_last_rank": (37, 48), "last_rank_is_all_padding": (20, 48)}


def values_and_gradient(case: str, tp_rank: int, tp_size: int) -> tuple[Tensor, Tensor]:
    """[2, T] log-probs and entropy; gradient of their weighted sum for this rank's columns."""
    vocab_size, padded = VOCABULARIES[case]
    generator = torch.Generator().manual_seed(3)
    logits_TV = 3.0 * torch.randn(TOKENS, padded, generator=generator)
    labels_T = torch.randint(vocab_size, (TOKENS,), generator=generator)
    labels_T[:2] = torch.tensor([0, vocab_size - 1])
    weights_2T = torch.randn(2, TOKENS, generator=generator)
    logits_TV = logits_TV.chunk(tp_size, dim=1)[tp_rank].clone().requires_grad_()
    tp_group = dist.group.WORLD if tp_size > 1 else None
    pair = vocab_parallel_logprobs(logits_TV, labels_T, temperature=0.7, vocab_size=vocab_size, tp_group=tp_group)
    values_2T = torch.stack(pair)
    (gradient_TV,) = torch.autograd.grad((values_2T * weights_2T).sum(), logits_TV)
    return values_2T.detach(), gradient_TV


def on_rank(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    return {case: values_and_gradient(case, rank, 2) for case in VOCABULARIES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[Tensor, Tensor]]]:
    return spawn(on_rank, 2)


@pytest.mark.parametrize("case", VOCABULARIES)
def test_two_ranks_equal_one_process(case: str, ranks: list[dict[str, tuple[Tensor, Tensor]]]) -> None:
    values, gradient = values_and_gradient(case, 0, 1)
    assert torch.equal(ranks[0][case][0], ranks[1][case][0]), "every rank holds the same values"
    assert_close(ranks[0][case][0], values, FLOAT32_LOGPROB)
    assert_close(torch.cat([r[case][1] for r in ranks], dim=1), gradient, FLOAT32_LOGPROB)


def test_padding_gets_no_gradient_on_any_rank(ranks: list[dict[str, tuple[Tensor, Tensor]]]) -> None:
    assert ranks[1]["full"][1].count_nonzero() > 0
    assert ranks[1]["padding_on_the_last_rank"][1][:, 37 - 24 :].count_nonzero() == 0
    assert ranks[1]["last_rank_is_all_padding"][1].count_nonzero() == 0
