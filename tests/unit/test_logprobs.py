"""Log-probs and entropy against torch's float64 log_softmax under autograd: values and gradients.

Most tests take the identity for hidden states, so that the weight is the transposed logits and gets their gradient.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron import logprobs
from gspo_megatron.logprobs import linear_logprobs
from tests.tolerances import BFLOAT16_GRADIENT, FLOAT32_HEAD_GRADIENT, FLOAT32_LOGPROB, assert_close

TOKENS, VOCAB, PADDED = 50, 37, 48
HIDDEN = 24


@pytest.fixture(autouse=True, params=[5, 1000])
def columns_per_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with blocks that cut the vocabulary unevenly, and with one block."""
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 4 * TOKENS * request.param)


def reference(logits_TV: Tensor, labels_T: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The definitions, in the type of the input."""
    log_p_TV = (logits_TV[:, :vocab_size] / temperature).log_softmax(dim=1)
    p_TV = log_p_TV.exp()
    terms_TV = torch.where(p_TV > 0, p_TV * log_p_TV.clamp(min=-1e9), 0.0)  # p log p is 0 at p = 0
    return log_p_TV.gather(1, labels_T[:, None])[:, 0], -terms_TV.sum(dim=1)


def make_inputs(std: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels that include the first and last id, and the two weights per token that make a scalar."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = std * torch.randn(TOKENS, PADDED, generator=generator)
    labels_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels_T[:2] = torch.tensor([0, VOCAB - 1])
    return logits_TV, labels_T, torch.randn(2, TOKENS, generator=generator)


def value_and_gradient(function, logits_TV: Tensor, weights_2T: Tensor, *args) -> tuple[Tensor, Tensor]:
    """[2, T] log-probs and entropy, and the gradient of their weighted sum."""
    logits_TV = logits_TV.clone().requires_grad_()
    values_2T = torch.stack(function(logits_TV, *args))
    (gradient_TV,) = torch.autograd.grad((values_2T * weights_2T.to(values_2T.dtype)).sum(), logits_TV)
    return values_2T.detach(), gradient_TV


def ours(logits_TV: Tensor, labels_T: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    identity_TH = torch.eye(len(logits_TV), dtype=logits_TV.dtype)
    return linear_logprobs(
        identity_TH, logits_TV.t(), labels_T, temperature=temperature, vocab_size=vocab_size, fp32_matmul=False
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients_equal_float64(temperature: float) -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=3.0)
    values, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, temperature, VOCAB)
    want_values, want_gradient = value_and_gradient(
        reference, logits_TV.double(), weights_2T, labels_T, temperature, VOCAB
    )
    assert values.dtype == gradient.dtype == torch.float32
    assert_close(values, want_values, FLOAT32_LOGPROB)
    assert_close(gradient, want_gradient, FLOAT32_LOGPROB)


@pytest.mark.parametrize("only", [0, 1])
def test_each_of_the_two_results_has_its_own_gradient(only: int) -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=2.0)
    weights_2T[1 - only] = 0.0
    _, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, 0.7, VOCAB)
    _, want = value_and_gradient(reference, logits_TV.double(), weights_2T, labels_T, 0.7, VOCAB)
    assert want.abs().max() > 0.1
    assert_close(gradient, want, FLOAT32_LOGPROB)


def test_entropy_that_nobody_uses_adds_no_gradient() -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=2.0)
    leaf = logits_TV.clone().requires_grad_()
    logprobs_T, _ = ours(leaf, labels_T, 1.0, VOCAB)
    (gradient,) = torch.autograd.grad((logprobs_T * weights_2T[0]).sum(), leaf)
    weights_2T[1] = 0.0
    _, want = value_and_gradient(reference, logits_TV.double(), weights_2T, labels_T, 1.0, VOCAB)
    assert_close(gradient, want, FLOAT32_LOGPROB)


def test_padding_columns_have_probability_zero_and_gradient_zero() -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=2.0)
    plain_values, plain_gradient = value_and_gradient(ours, logits_TV[:, :VOCAB], weights_2T, labels_T, 1.0, VOCAB)
    for padding in (0.0, 1e4, -torch.inf, torch.nan):
        logits_TV[:, VOCAB:] = padding  # what it holds must not matter
        values, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, 1.0, VOCAB)
        assert_close(values, plain_values, FLOAT32_LOGPROB)
        assert_close(gradient[:, :VOCAB], plain_gradient, FLOAT32_LOGPROB)
        assert gradient[:, VOCAB:].count_nonzero() == 0


def test_input_is_left_as_it_is() -> None:
    logits_TV, labels_T, _ = make_inputs(std=2.0)
    before = logits_TV.clone()
    ours(logits_TV, labels_T, 1.0, VOCAB)
    assert torch.equal(logits_TV, before)


def test_extreme_logits_stay_finite_and_right() -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=1.0)
    logits_TV = 1e4 * logits_TV.sign()
    logits_TV[::5] += 1e4
    values, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, 1.0, VOCAB)
    want_values, want_gradient = value_and_gradient(reference, logits_TV.double(), weights_2T, labels_T, 1.0, VOCAB)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert values[0].min() < -1e4
    assert_close(values, want_values, FLOAT32_LOGPROB)
    assert_close(gradient, want_gradient, FLOAT32_LOGPROB)


def test_equal_logits_give_the_uniform_distribution() -> None:
    logprobs_T, entropy_T = ours(torch.zeros(3, 8), torch.tensor([0, 3, 7]), 1.0, 8)
    assert_close(logprobs_T, [-2.0794415416798357] * 3, FLOAT32_LOGPROB)
    assert_close(entropy_T, [2.0794415416798357] * 3, FLOAT32_LOGPROB)


def test_bfloat16_logits_are_taken_exactly_and_get_a_bfloat16_gradient() -> None:
    logits_TV, labels_T, weights_2T = make_inputs(std=3.0)
    logits_TV = logits_TV.bfloat16()
    values, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, 1.3, VOCAB)
    want_values, want_gradient = value_and_gradient(ours, logits_TV.float(), weights_2T, labels_T, 1.3, VOCAB)
    assert values.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    assert torch.equal(values, want_values)
    assert torch.equal(gradient, want_gradient.bfloat16())


def head_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight with garbage in its padding rows, labels, and the weights of the scalar."""
    generator = torch.Generator().manual_seed(8)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight_VH = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype)
    weight_VH[VOCAB:] = torch.nan
    labels_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden_TH, weight_VH, labels_T, torch.randn(2, TOKENS, generator=generator)


def head_gradients(function: Any, hidden_TH: Tensor, weight_VH: Tensor, weights_2T: Tensor) -> tuple[Tensor, ...]:
    """[2, T] values; gradients to hidden states and weight."""
    leaves = hidden_TH.clone().requires_grad_(), weight_VH.clone().requires_grad_()
    values_2T = torch.stack(function(*leaves))
    return values_2T.detach(), *torch.autograd.grad((values_2T * weights_2T.to(values_2T.dtype)).sum(), leaves)


def full_logits(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *, fp32_matmul: bool) -> tuple[Tensor, Tensor]:
    """All logits at once, under autograd."""
    if fp32_matmul:
        hidden_TH, weight_VH = hidden_TH.float(), weight_VH.float()
    logits_TV = hidden_TH @ weight_VH[:VOCAB].t()
    wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    return reference(logits_TV.to(wide), labels_T, 0.8, VOCAB)


def test_hidden_states_and_weight_get_the_gradient_of_the_full_logits() -> None:
    hidden_TH, weight_VH, labels_T, weights_2T = head_inputs(torch.float32)

    def blocks(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(h, w, labels_T, temperature=0.8, vocab_size=VOCAB, fp32_matmul=False)

    values, hidden_grad, weight_grad = head_gradients(blocks, hidden_TH, weight_VH, weights_2T)
    want_values, want_hidden, want_weight = head_gradients(
        lambda h, w: full_logits(h, w, labels_T, fp32_matmul=False),
        hidden_TH.double(),
        weight_VH.double(),
        weights_2T,
    )
    assert_close(values, want_values, FLOAT32_HEAD_GRADIENT)
    assert_close(hidden_grad, want_hidden, FLOAT32_HEAD_GRADIENT)
    assert_close(weight_grad[:VOCAB], want_weight[:VOCAB], FLOAT32_HEAD_GRADIENT)
    assert weight_grad[VOCAB:].count_nonzero() == 0


@pytest.mark.parametrize("fp32_matmul", [False, True])
def test_bfloat16_head_multiplies_in_its_own_type_unless_asked_for_float32(fp32_matmul: bool) -> None:
    hidden_TH, weight_VH, labels_T, weights_2T = head_inputs(torch.bfloat16)

    def blocks(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return linear_logprobs(h, w, labels_T, temperature=0.8, vocab_size=VOCAB, fp32_matmul=fp32_matmul)

    values, *grads = head_gradients(blocks, hidden_TH, weight_VH, weights_2T)
    want_values, *want_grads = head_gradients(
        lambda h, w: full_logits(h, w, labels_T, fp32_matmul=fp32_matmul), hidden_TH, weight_VH, weights_2T
    )
    assert values.dtype == torch.float32
    assert_close(values, want_values, FLOAT32_HEAD_GRADIENT)
    other, *_ = head_gradients(
        lambda h, w: full_logits(h, w, labels_T, fp32_matmul=not fp32_matmul), hidden_TH, weight_VH, weights_2T
    )
    assert (other - values).abs().max() > 1e-3, "the two products must differ for the comparison to tell them apart"
    for got, want in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.bfloat16
        got, want = got[: len(want)].nan_to_num(), want.nan_to_num()
        assert float((got - want).float().norm() / want.float().norm()) < BFLOAT16_GRADIENT.rtol


class Sizes(TorchDispatchMode):
    """Largest tensor that any operation returns, elements."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_tensor_ever_holds_the_logits_of_all_tokens_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 4 * 200 * 10)
    hidden_TH, weight_VH = torch.randn(200, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    with Sizes() as sizes:
        logprobs_T, entropy_T = linear_logprobs(
            hidden_TH, weight_VH, torch.arange(200), temperature=1.0, vocab_size=300, fp32_matmul=False
        )
        (logprobs_T + entropy_T).sum().backward()
    assert 10 * 200 <= sizes.largest < 200 * 300 / 10


def test_no_tokens_give_no_values_and_gradient_zero() -> None:
    hidden_TH, weight_VH = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    logprobs_T, entropy_T = linear_logprobs(
        hidden_TH, weight_VH, torch.zeros(0, dtype=torch.int64), temperature=1.0, vocab_size=6, fp32_matmul=False
    )
    (logprobs_T + entropy_T).sum().backward()
    assert logprobs_T.shape == entropy_T.shape == (0,)
    assert weight_VH.grad is not None and weight_VH.grad.count_nonzero() == 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden_TH, labels_T = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    for weight_VH, labels in ((torch.zeros(6, 5), labels_T), (torch.zeros(6, 4), labels_T[:2])):
        with pytest.raises(ValueError, match="want equal H, and a label for each row"):
            linear_logprobs(hidden_TH, weight_VH, labels, temperature=1.0, vocab_size=6, fp32_matmul=False)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature=.*wants a positive number"):
        ours(torch.zeros(1, 4), torch.tensor([0]), temperature, 4)
