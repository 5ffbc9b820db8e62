"""Log-probs and entropy against the definitions on whole float64 logits under autograd: values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gspo_megatron import logprobs
from gspo_megatron.logprobs import linear_logprobs
from tests.tolerances import BFLOAT16_HEAD_GRADIENT, BITWISE, FLOAT32_HEAD, assert_close

TOKENS, HIDDEN, VOCAB, PADDED = 50, 16, 37, 48
WIDE = 300
"""A vocabulary of three blocks when blocks are as small as they get: 128, 128 and 44 rows."""


def reference(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The definitions, in the type of the input; weight_VH without padding."""
    log_p_TV = (hidden_TH @ weight_VH.t() / temperature).log_softmax(dim=1)
    return log_p_TV.gather(1, labels_T[:, None])[:, 0], -(log_p_TV.exp() * log_p_TV).sum(dim=1)


def make_inputs(std: float, vocab: int = VOCAB, padded: int = PADDED) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight (logits of this std), labels with the first and last id, and weights of a scalar."""
    generator = torch.Generator().manual_seed(3)
    hidden_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight_VH = std / HIDDEN**0.5 * torch.randn(padded, HIDDEN, generator=generator)
    labels_T = torch.randint(vocab, (TOKENS,), generator=generator)
    labels_T[:2] = torch.tensor([0, vocab - 1])
    return hidden_TH, weight_VH, labels_T, torch.randn(2, TOKENS, generator=generator)


def ours(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    temperature: float,
    vocab_size: int = VOCAB,
    fp32: bool = True,
) -> tuple[Tensor, Tensor]:
    return linear_logprobs(
        hidden_TH, weight_VH, labels_T, temperature=temperature, vocab_size=vocab_size, fp32_matmul=fp32
    )


def value_and_gradients(function, hidden: Tensor, weight: Tensor, labels: Tensor, weights_2T: Tensor, *args):
    """[2, T] log-probs and entropy, and the two gradients of their weighted sum."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values_2T = torch.stack(function(hidden, weight, labels, *args))
    gradients = torch.autograd.grad((values_2T * weights_2T.to(values_2T.dtype)).sum(), (hidden, weight))
    return values_2T.detach(), *gradients


def want_of(hidden: Tensor, weight: Tensor, labels: Tensor, weights_2T: Tensor, temperature: float, vocab=VOCAB):
    """The same by the definitions in float64; the weight's gradient is zero in padding."""
    values, for_hidden, for_weight = value_and_gradients(
        reference, hidden.double(), weight[:vocab].double(), labels, weights_2T, temperature
    )
    padding = torch.zeros(len(weight) - vocab, weight.shape[1], dtype=torch.float64)
    return values, for_hidden, torch.cat([for_weight, padding])


def assert_all_close(got, want, tolerance=FLOAT32_HEAD) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_values_and_gradients_equal_float64(temperature: float) -> None:
    inputs = make_inputs(std=3.0)
    got = value_and_gradients(ours, *inputs, temperature)
    assert all(x.dtype == torch.float32 for x in got)
    assert_all_close(got, want_of(*inputs, temperature))


@pytest.mark.parametrize("only", [0, 1])
def test_each_of_the_two_results_has_its_own_gradient(only: int) -> None:
    *inputs, weights_2T = make_inputs(std=2.0)
    weights_2T[1 - only] = 0.0
    want = want_of(*inputs, weights_2T, 0.7)
    assert all(x.abs().max() > 0.1 for x in want)
    assert_all_close(value_and_gradients(ours, *inputs, weights_2T, 0.7), want)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_uses_adds_no_gradient(used: int) -> None:
    hidden, weight, labels, weights_2T = make_inputs(std=2.0)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    result_T = ours(hidden, weight, labels, 1.3)[used]
    got = torch.autograd.grad((result_T * weights_2T[used]).sum(), (hidden, weight))
    weights_2T[1 - used] = 0.0
    assert_all_close(got, want_of(hidden, weight, labels, weights_2T, 1.3)[1:])


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_leaves_the_other_its_own(frozen: str) -> None:
    hidden, weight, labels, weights_2T = make_inputs(std=2.0)
    _, *want = value_and_gradients(ours, hidden, weight, labels, weights_2T, 1.0)
    trained = weight if frozen == "hidden" else hidden
    trained.requires_grad_()
    (torch.stack(ours(hidden, weight, labels, 1.0)) * weights_2T).sum().backward()
    assert_close(trained.grad, want[frozen == "hidden"], BITWISE)
    assert (hidden if frozen == "hidden" else weight).grad is None


@pytest.mark.parametrize("block_bytes", [1, 4 * TOKENS * 256, 4 * TOKENS * 255])
def test_blocks_of_the_vocabulary_do_not_show(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(std=3.0, vocab=WIDE - 5, padded=WIDE)
    inputs[2][2:8] = torch.tensor([126, 127, 128, 255, 256, 257])  # on both sides of the borders
    inputs[1][200] += 3.0  # the largest logit is neither in the first nor in the last block
    whole = value_and_gradients(ours, *inputs, 0.8, WIDE - 5)
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", block_bytes)
    got = value_and_gradients(ours, *inputs, 0.8, WIDE - 5)
    assert not torch.equal(got[0], whole[0]), "the sums are taken in another order"
    assert_all_close(got, want_of(*inputs, 0.8, WIDE - 5))


def test_padding_rows_have_probability_zero_and_gradient_zero() -> None:
    hidden, weight, labels, weights_2T = make_inputs(std=2.0)
    plain = value_and_gradients(ours, hidden, weight[:VOCAB], labels, weights_2T, 1.0)
    for padding in (0.0, 1e4, -torch.inf, torch.nan):
        weight[VOCAB:] = padding  # what it holds must not matter
        values, for_hidden, for_weight = value_and_gradients(ours, hidden, weight, labels, weights_2T, 1.0)
        assert_all_close((values, for_hidden, for_weight[:VOCAB]), plain, BITWISE)
        assert for_weight[VOCAB:].count_nonzero() == 0


def test_inputs_are_left_as_they_are() -> None:
    inputs = make_inputs(std=2.0)
    before = [x.clone() for x in inputs]
    value_and_gradients(ours, *inputs, 0.5)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_extreme_logits_stay_finite_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 1)
    # One hidden unit is on per token, and weights are powers of two: logits of +-8192 without rounding.
    labels_T = torch.randint(WIDE, (TOKENS,), generator=torch.Generator().manual_seed(4))
    hidden = torch.eye(HIDDEN)[torch.arange(TOKENS) % HIDDEN]
    weight = 8192.0 * torch.randn(WIDE, HIDDEN, generator=torch.Generator().manual_seed(5)).sign()
    weights_2T = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(6))
    got = value_and_gradients(ours, hidden, weight, labels_T, weights_2T, 1.0, WIDE)
    assert all(x.isfinite().all() for x in got)
    assert got[0][0].min() < -1e4
    values, _, for_weight = want_of(hidden, weight, labels_T, weights_2T, 1.0, WIDE)
    assert_all_close((got[0], got[2]), (values, for_weight))


def test_a_hidden_state_that_is_not_finite_shows_in_the_values_of_its_token_only() -> None:
    hidden, weight, labels, _ = make_inputs(std=2.0)
    hidden[7, 3] = torch.nan
    for values_T in ours(hidden, weight, labels, 1.0):
        assert values_T.isnan().nonzero().tolist() == [[7]]


def test_equal_logits_give_the_uniform_distribution() -> None:
    logprobs_T, entropy_T = ours(torch.zeros(3, 2), torch.ones(8, 2), torch.tensor([0, 3, 7]), 1.0, 8)
    assert_close(logprobs_T, [-2.0794415416798357] * 3, FLOAT32_HEAD)
    assert_close(entropy_T, [2.0794415416798357] * 3, FLOAT32_HEAD)


def test_no_tokens_give_no_values_and_a_gradient_of_zero() -> None:
    hidden, weight, labels, weights_2T = make_inputs(std=1.0)
    got = value_and_gradients(ours, hidden[:0], weight, labels[:0], weights_2T[:, :0], 1.0)
    assert [tuple(x.shape) for x in got] == [(2, 0), (0, HIDDEN), (PADDED, HIDDEN)]
    assert got[2].count_nonzero() == 0


def test_bfloat16_is_multiplied_in_float32_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 1)
    hidden, weight, labels, weights_2T = make_inputs(std=3.0, vocab=WIDE, padded=WIDE)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    inputs = hidden, weight, labels, weights_2T
    values, *gradients = value_and_gradients(ours, *inputs, 1.3, WIDE)
    _, *exact = value_and_gradients(ours, hidden.float(), weight.float(), labels, weights_2T, 1.3, WIDE)
    want_values, *_ = want_of(*inputs, 1.3, WIDE)
    assert values.dtype == torch.float32 and all(x.dtype == torch.bfloat16 for x in gradients)
    assert_close(values, want_values, FLOAT32_HEAD)
    assert_all_close(gradients, [x.bfloat16() for x in exact], BITWISE)


def test_bfloat16_products_are_those_of_the_plain_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_p = ((hidden @ weight.t()).float() / temperature).log_softmax(dim=1)
        return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)

    hidden, weight, labels, weights_2T = make_inputs(std=3.0, vocab=WIDE, padded=WIDE)
    inputs = hidden.bfloat16(), weight.bfloat16(), labels, weights_2T
    want = value_and_gradients(plain, *inputs, 0.9)
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 1)
    values, *gradients = value_and_gradients(ours, *inputs, 0.9, WIDE, False)
    assert_close(values, want[0], FLOAT32_HEAD)
    assert all(x.dtype == torch.bfloat16 for x in gradients)
    assert_all_close(gradients, want[1:], BFLOAT16_HEAD_GRADIENT)
    in_float32, *_ = value_and_gradients(ours, *inputs, 0.9, WIDE, True)
    assert (in_float32 - values).abs().max() > 1e-3, "the logits were rounded to bfloat16"


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_block_or_the_weight(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden_size, vocab = 400, 8, 2000
    hidden, weight = torch.randn(tokens, hidden_size, dtype=dtype), torch.randn(vocab, hidden_size, dtype=dtype)
    inputs = hidden, weight, torch.randint(vocab, (tokens,)), torch.randn(2, tokens)
    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 4 * tokens * 130)
    with LargestTensor() as largest:
        value_and_gradients(ours, *inputs, 1.0, vocab)
    assert largest.elements == tokens * 128 < tokens * vocab / 10
    monkeypatch.undo()
    with LargestTensor() as largest:
        value_and_gradients(ours, *inputs, 1.0, vocab)
    assert largest.elements == tokens * vocab, "the whole vocabulary is one block by default here"


def test_the_copies_of_a_bfloat16_weight_are_those_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, hidden_size, vocab = 16, 32, 4000
    hidden, weight = (torch.randn(n, hidden_size, dtype=torch.bfloat16) for n in (tokens, vocab))
    inputs = hidden, weight, torch.randint(vocab, (tokens,)), torch.randn(2, tokens)

    class LargestFloat32(LargestTensor):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = self.elements
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not (isinstance(result, Tensor) and result.dtype == torch.float32):
                self.elements = before
            return result

    monkeypatch.setattr(logprobs, "BLOCK_BYTES", 1)
    with LargestFloat32() as largest:
        value_and_gradients(ours, *inputs, 1.0, vocab)
    assert largest.elements == 128 * hidden_size


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature=.*wants a positive number"):
        ours(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([0]), temperature, 4)


def test_rows_without_a_label_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_TH has 3 rows over its ranks, wants 2, one per label"):
        ours(torch.zeros(3, 2), torch.zeros(4, 2), torch.tensor([0, 1]), 1.0, 4)


def test_two_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_TH is torch.bfloat16, wants torch.float32"):
        ours(torch.zeros(1, 2).bfloat16(), torch.zeros(4, 2), torch.tensor([0]), 1.0, 4)
