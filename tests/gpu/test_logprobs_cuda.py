"""The output layer's log-probs on CUDA: values, gradients, and the benchmark's limits."""

import subprocess
import sys

import pytest
import torch

from gspo_megatron.logprobs import linear_logprobs
from tests.gpu.conftest import ROOT
from tests.tolerances import GPU_BFLOAT16_HEAD, GPU_FLOAT32_HEAD, Tolerance, assert_close

TOKENS, HIDDEN, VOCAB = 512, 256, 20_000


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("dtype", "fp32_matmul", "tolerance"),
    [
        (torch.float32, False, GPU_FLOAT32_HEAD),
        (torch.bfloat16, False, GPU_BFLOAT16_HEAD),
        (torch.bfloat16, True, GPU_BFLOAT16_HEAD),
    ],
    ids=["fp32", "bf16", "bf16_fp32_logits"],
)
def test_values_and_gradients_are_those_of_whole_logits_in_float64(
    dtype: torch.dtype, fp32_matmul: bool, tolerance: Tolerance
) -> None:
    torch.manual_seed(1)
    hidden_TH = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype, requires_grad=True)
    weight_VH = (0.1 * torch.randn(VOCAB, HIDDEN, device="cuda")).to(dtype).requires_grad_()
    labels_T = torch.randint(VOCAB, (TOKENS,), device="cuda")
    weights_2T = torch.randn(2, TOKENS, device="cuda")
    pair = linear_logprobs(hidden_TH, weight_VH, labels_T, temperature=0.8, vocab_size=VOCAB, fp32_matmul=fp32_matmul)
    grads = torch.autograd.grad((torch.stack(pair) * weights_2T).sum(), (hidden_TH, weight_VH))
    wide = [x.detach().double().requires_grad_() for x in (hidden_TH, weight_VH)]
    log_p_TV = (wide[0] @ wide[1].t() / 0.8).log_softmax(1)
    want = log_p_TV.gather(1, labels_T[:, None])[:, 0], -(log_p_TV.exp() * log_p_TV).sum(1)
    want_grads = torch.autograd.grad((torch.stack(want) * weights_2T.double()).sum(), wide)
    if fp32_matmul:
        for got, expected in zip(pair, want, strict=True):
            assert_close((got.double() - expected).norm().cpu() / expected.norm().cpu(), 0.0, GPU_FLOAT32_HEAD)
    for got, expected in zip((*pair, *grads), (*want, *want_grads), strict=True):
        assert_close((got.double() - expected).norm().cpu() / expected.norm().cpu(), 0.0, tolerance)


@pytest.mark.gpu(1)
def test_benchmark_keeps_its_limits_on_cuda() -> None:
    command = [sys.executable, "tools/bench/logprobs.py", "--device", "cuda", "--repeats", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
