"""Vocabulary-parallel log-probs over gloo equal those of one process, in values and gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron import logprobs
from gspo_megatron.logprobs import linear_logprobs
from tests.distributed.spawn import spawn
from tests.tolerances import BFLOAT16_HEAD_GRADIENT, BITWISE, FLOAT32_HEAD, assert_close

TOKENS, HIDDEN = 40, 16
VOCABULARIES = {
    "full": (400, 400),
    "padding_on_the_last_rank": (337, 400),
    "last_rank_is_all_padding": (150, 400),
}
KINDS = {
    "float32": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16_multiplied_in_float32": (torch.bfloat16, True),
}
CASES = [(v, k, sp) for v in VOCABULARIES for k in KINDS for sp in (False, True)]


def values_and_gradients(case: tuple[str, str, bool], rank: int, tp_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """[2, T] log-probs and entropy; gradient of their weighted sum for this rank's hidden states and weight rows."""
    vocabulary, kind, sequence_parallel = case
    vocab_size, padded = VOCABULARIES[vocabulary]
    dtype, fp32_matmul = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight_VH = (0.7 * torch.randn(padded, HIDDEN, generator=generator)).to(dtype)
    weight_VH[vocab_size:] = torch.nan  # what padding holds must not matter
    labels_T = torch.randint(vocab_size, (TOKENS,), generator=generator)
    labels_T[:2] = torch.tensor([0, vocab_size - 1])
    weights_2T = torch.randn(2, TOKENS, generator=generator)
    if sequence_parallel:
        hidden_TH = hidden_TH.chunk(tp_size)[rank]
    hidden_TH = hidden_TH.clone().requires_grad_()
    weight_VH = weight_VH.chunk(tp_size)[rank].clone().requires_grad_()
    pair = linear_logprobs(
        hidden_TH,
        weight_VH,
        labels_T,
        temperature=0.7,
        vocab_size=vocab_size,
        fp32_matmul=fp32_matmul,
        tp_group=dist.group.WORLD if tp_size > 1 else None,
        sequence_parallel=sequence_parallel,
    )
    values_2T = torch.stack(pair)
    gradients = torch.autograd.grad((values_2T * weights_2T).sum(), (hidden_TH, weight_VH))
    return values_2T.detach(), *gradients


def no_tokens(sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    hidden_TH, weight_VH = torch.zeros(0, HIDDEN, requires_grad=True), torch.ones(200, HIDDEN, requires_grad=True)
    logprobs_T, _ = linear_logprobs(
        hidden_TH,
        weight_VH,
        torch.zeros(0, dtype=torch.int64),
        temperature=1.0,
        vocab_size=400,
        fp32_matmul=True,
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
    )
    return torch.autograd.grad(logprobs_T.sum(), (hidden_TH, weight_VH))


def collectives(sequence_parallel: bool) -> list[str]:
    """Names of the collectives of a forward pass, then "backward", then those of a backward pass."""
    calls: list[str] = []
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    originals = {name: getattr(dist, name) for name in names}

    def recording(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in names:
            setattr(dist, name, recording(name))
        hidden_TH = torch.ones(TOKENS // 2 if sequence_parallel else TOKENS, HIDDEN, requires_grad=True)
        logprobs_T, _ = linear_logprobs(
            hidden_TH,
            torch.ones(200, HIDDEN),
            torch.zeros(TOKENS, dtype=torch.int64),
            temperature=1.0,
            vocab_size=400,
            fp32_matmul=True,
            tp_group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
        )
        calls.append("backward")
        logprobs_T.sum().backward()
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return calls


def on_rank(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {f"calls {sp}": collectives(sp) for sp in (False, True)}
    results |= {f"no tokens {sp}": no_tokens(sp) for sp in (False, True)}
    logprobs.BLOCK_BYTES = 1  # two blocks a rank
    return results | {case: values_and_gradients(case, rank, 2) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return spawn(on_rank, 2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process(case: tuple[str, str, bool], ranks: list[dict[Any, Any]]) -> None:
    values, for_hidden, for_weight = values_and_gradients(case, 0, 1)
    gradient_tolerance = FLOAT32_HEAD if case[1] == "float32" else BFLOAT16_HEAD_GRADIENT
    got = [r[case] for r in ranks]
    assert values.isfinite().all() and for_hidden.abs().max() > 0.1 and for_weight.abs().max() > 0.1
    assert torch.equal(got[0][0], got[1][0]), "every rank holds the same values"
    assert_close(got[0][0], values, FLOAT32_HEAD)
    if case[2]:
        assert_close(torch.cat([g[1] for g in got]), for_hidden, gradient_tolerance)
    else:
        assert torch.equal(got[0][1], got[1][1]), "every rank holds the whole gradient"
        assert_close(got[0][1], for_hidden, gradient_tolerance)
    assert_close(torch.cat([g[2] for g in got]), for_weight, gradient_tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_padding_gets_no_gradient_on_any_rank(kind: str, sequence_parallel: bool, ranks: list[dict[Any, Any]]) -> None:
    of_last = {v: ranks[1][v, kind, sequence_parallel][2] for v in VOCABULARIES}
    assert of_last["full"].count_nonzero() > 0
    assert of_last["padding_on_the_last_rank"][337 - 200 :].count_nonzero() == 0
    assert of_last["last_rank_is_all_padding"].count_nonzero() == 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_tokens_are_no_special_case(sequence_parallel: bool, ranks: list[dict[Any, Any]]) -> None:
    for_hidden, for_weight = ranks[0][f"no tokens {sequence_parallel}"]
    assert for_hidden.shape == (0, HIDDEN)
    assert_close(for_weight, torch.zeros(200, HIDDEN), BITWISE)


def test_forward_takes_two_reductions_and_backward_one(ranks: list[dict[Any, Any]]) -> None:
    reduce, gather, scatter = "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"
    for results in ranks:
        assert results["calls False"] == [reduce, reduce, "backward", reduce]
        assert results["calls True"] == [gather, reduce, reduce, "backward", gather, scatter]
