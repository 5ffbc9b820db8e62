"""Every tolerance of the tests, with its reason. Loosening one needs the cause."""

from typing import Any, NamedTuple

import torch


class Tolerance(NamedTuple):
    """Limits as torch.testing.assert_close takes them."""

    rtol: float
    atol: float
    reason: str


EXPORT_LOGPROBS = Tolerance(0.0, 1e-4, "float32 log-probs of three implementations; measured 1e-6")
SMOLLM2_LOGPROBS = Tolerance(0.0, 2e-4, "float32 log-probs of 30 layers by two implementations")
BITWISE = Tolerance(0.0, 0.0, "the same operations in the same order")
FLOAT64 = Tolerance(1e-12, 1e-14, "the same formula in float64: rounding of a few operations")
FLOAT64_SUM = Tolerance(1e-11, 1e-13, "sums of up to 4,096 float64 terms in another order")
FLOAT64_DIFFERENCE = Tolerance(1e-9, 1e-7, "exp(19) amplifies the rounding of a log-ratio; per_response is float32")
FLOAT32_LOG_RATIO = Tolerance(1e-5, 5e-7, "log-probs of 1 to 3 nats in float32 (1.2e-7 each), log-ratios of 1e-3")
FLOAT32_LOGPROB = Tolerance(1e-6, 3e-6, "float32 log-softmax of logits of +-12, themselves rounded by 1e-6")
FLOAT32_HEAD = Tolerance(2e-6, 5e-6, "as FLOAT32_LOGPROB, and the logits are float32 sums of H products of up to 10")
BFLOAT16_HEAD_GRADIENT = Tolerance(
    0.01, 0.02, "one bfloat16 rounding (2^-9) of each block's part and of the sum; gradients of up to 10"
)
PARITY_FORMULA = Tolerance(5e-7, 1e-7, "the same formula in float32, a few operations in another order")
PARITY_LOGPROBS = Tolerance(0.0, 5e-6, "float32 log-probs of a 4-layer model by two implementations; measured 2e-6")
FAMILY_LOGITS = Tolerance(
    0.0, 2e-5, "share of the logits' standard deviation; float32 logits of 4-layer models, measured 7e-6"
)
FLOAT32_LOSS = Tolerance(1e-5, 1e-6, "ratio near 1 in float32 (1.2e-7), times advantage, a few of them summed")
FLOAT32_GRADIENT = Tolerance(2e-5, 2e-7, "float32 sums of a batch in another order; gradients of 1e-2, measured 7e-8")
LAYOUT_LOSS = Tolerance(0.0, 1e-6, "a sum of 14 terms of about 1 over N, float32, in another order")
LAYOUT_GRADIENT = Tolerance(0.0, 1e-5, "share of the largest element of all; float32 sums in another order")
LAYOUT_WEIGHTS = Tolerance(1e-5, 0.01, "shares of lr, where |g| is above 1e-5 of the largest: Adam divides by |g|")
GPU_BFLOAT16_LOGPROBS = Tolerance(
    0.0, 0.1, "mean |d| of bfloat16 (2^-9 per rounding, a router's near tie may turn); the CPU's bfloat16 has 0.03"
)
GPU_FLOAT32_LOGPROBS = Tolerance(0.0, 0.02, "as above; Transformer Engine multiplies float32 in TF32 (2^-11)")
GPU_BFLOAT16_GRADIENT = Tolerance(0.0, 0.15, "|d|/|g| of the whole gradient, bfloat16; the CPU's bfloat16 has 0.056")
GPU_FLOAT32_GRADIENT = Tolerance(0.0, 0.05, "|d|/|g| of the whole gradient, TF32 against float32")
GPU_FLOAT32_HEAD = Tolerance(0.0, 1e-5, "|d|/|x|, float32 sums of 256 products; torch multiplies float32 in float32")
GPU_BFLOAT16_HEAD = Tolerance(0.0, 0.02, "|d|/|x|, bfloat16 logits of 5 (2^-9 each) under exp, and rounded gradients")
GPU_EXPERT_PARALLEL = Tolerance(1e-3, 1e-3, "TF32 kernels chosen for half as many rows; float32 sums in another order")


def assert_close(actual: Any, expected: Any, tolerance: Tolerance) -> None:
    """torch.testing.assert_close with values compared as float64."""
    actual, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
