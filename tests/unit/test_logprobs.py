"""Log-probs and entropy against torch's float64 log_softmax under autograd: values and gradients."""

import pytest
import torch
from torch import Tensor

from gspo_megatron.logprobs import vocab_parallel_logprobs
from tests.tolerances import FLOAT32_LOGPROB, assert_close

TOKENS, VOCAB, PADDED = 50, 37, 48


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
    return vocab_parallel_logprobs(logits_TV, labels_T, temperature=temperature, vocab_size=vocab_size)


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
    logits_TV[::3, 5:9] = -torch.inf  # columns that a mask has shut
    logits_TV[::5] += 1e4
    labels_T[labels_T.clamp(5, 8) == labels_T] = 10
    values, gradient = value_and_gradient(ours, logits_TV, weights_2T, labels_T, 1.0, VOCAB)
    want_values, want_gradient = value_and_gradient(reference, logits_TV.double(), weights_2T, labels_T, 1.0, VOCAB)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert values[0].min() < -1e4
    assert_close(values, want_values, FLOAT32_LOGPROB)
    assert_close(gradient, want_gradient.nan_to_num(), FLOAT32_LOGPROB)
    assert gradient[::3, 5:9].count_nonzero() == 0


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


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature=.*wants a positive number"):
        ours(torch.zeros(1, 4), torch.tensor([0]), temperature, 4)
