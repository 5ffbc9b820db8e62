"""Memory and time of log-probs from hidden states, forward and backward, beside the plain way and TRL's.

plain: log_softmax of all logits in float32, then gather. TRL: the chosen logit less a logsumexp taken sequence by
sequence (float32), or log_softmax sequence by sequence (bfloat16). ours: gspo_megatron.logprobs. On CUDA also Liger's
fused linear cross entropy, where liger_kernel is installed. Every variant runs in processes of its own, in turn.
Memory is the peak above the inputs, without the weight's gradient. Exit status 1 if ours breaks a limit against plain.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gspo_megatron.logprobs import linear_logprobs

MEMORY_LIMIT = 1 / 6
TIME_LIMIT = 1.40
GRADIENT_LIMIT = 1e-5
"""float32: norm of the difference to plain / norm."""
BFLOAT16_ERROR_LIMIT = 1.25
"""bfloat16 rounds every way's gradient by 2^-9, plain's too, so there is no 1e-5 to hold: ours may be that many times
as far from the gradient of float32 products as plain is. The CPU rounds each block's product; CUDA adds in float32."""
SEQUENCES = 4
"""What TRL's way loops over."""
ROWS = 4096
"""Of the weight's gradient, for the comparison."""


def plain(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """All logits, all log-probs."""
    logits_TV = (hidden_TH @ weight_VH.t()).float()
    return logits_TV.log_softmax(dim=1).gather(1, labels_T[:, None])[:, 0]


def trl(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """All logits, log-probs of one sequence at a time."""
    logits_TV = hidden_TH @ weight_VH.t()
    pairs = list(zip(logits_TV.chunk(SEQUENCES), labels_T.chunk(SEQUENCES), strict=True))
    if logits_TV.dtype == torch.float32:
        chosen_T = logits_TV.gather(1, labels_T[:, None])[:, 0]
        return chosen_T - torch.cat([logits.logsumexp(dim=1) for logits, _ in pairs])
    rows = [logits.log_softmax(dim=1).gather(1, labels[:, None])[:, 0] for logits, labels in pairs]
    return torch.cat(rows).float()


def ours(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """In blocks of columns; computes the entropy as well."""
    logprobs_T, _ = linear_logprobs(
        hidden_TH, weight_VH, labels_T, temperature=1.0, vocab_size=len(weight_VH), fp32_matmul=False
    )
    return logprobs_T


def exact(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """ours with float32 products: what bfloat16 gradients are held against."""
    logprobs_T, _ = linear_logprobs(
        hidden_TH, weight_VH, labels_T, temperature=1.0, vocab_size=len(weight_VH), fp32_matmul=True
    )
    return logprobs_T


def liger(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor) -> Tensor:
    """The negative of Liger's summed loss: its gradient has no weight per token."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight_VH, hidden_TH, labels_T)[None]


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "TRL": trl,
    "ours": ours,
    "exact": exact,
    "Liger": liger,
}


def run_variant(args: argparse.Namespace) -> None:
    """In a process of its own: one forward and backward; results to args.out."""
    torch.manual_seed(1)
    dtype = getattr(torch, args.dtype)
    hidden_TH = torch.randn(args.tokens, args.hidden).to(args.device, dtype).requires_grad_()
    weight_VH = (0.05 * torch.randn(args.vocab, args.hidden)).to(args.device, dtype).requires_grad_()
    labels_T = torch.randint(args.vocab, (args.tokens,)).to(args.device)
    weights_T = torch.randn(args.tokens).to(args.device)
    rows = torch.randperm(args.vocab)[:ROWS]
    fn = VARIANTS[args.variant]
    # Threads and kernels are set up by a small call.
    fn(hidden_TH[:8], weight_VH[:64], labels_T[:8] % 64).sum().backward()
    hidden_TH.grad = weight_VH.grad = None
    before = reset_peak(args.device)
    start = time.perf_counter()
    out_T = fn(hidden_TH, weight_VH, labels_T)
    (out_T.sum() if args.variant == "Liger" else (out_T * weights_T).sum()).backward()
    peak = read_peak(args.device) - before  # waits for the device
    took_s = time.perf_counter() - start
    assert hidden_TH.grad is not None and weight_VH.grad is not None
    grads = {"hidden": hidden_TH.grad.float().cpu(), "weight": weight_VH.grad.cpu()[rows].float()}
    head = weight_VH.numel() * weight_VH.element_size()
    torch.save({"took_s": took_s, "peak_gib": (peak - head) / 2**30, "grads": grads}, args.out)


def reset_peak(device: str) -> int:
    """Bytes in use now; the peak counts from here."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def read_peak(device: str) -> int:
    """Highest number of bytes in use since reset_peak."""
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 1024


def measure(args: argparse.Namespace, dtype: str, console: Console) -> dict[str, Any]:
    """Best time, peak memory and gradients of each variant."""
    names = ["plain", "TRL", "ours"]
    if args.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        names.append("Liger")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats + (dtype == "bfloat16")):
            for name in names if repeat < args.repeats else ["exact"]:
                out = Path(folder) / f"{name}.pt"
                sizes = [f"--{key}={getattr(args, key)}" for key in ("tokens", "hidden", "vocab", "device")]
                command = [sys.executable, __file__, f"--variant={name}", f"--dtype={dtype}", f"--out={out}", *sizes]
                with console.status(f"{dtype}, {name}, pass {repeat + 1} of {args.repeats}"):
                    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)})
                result = torch.load(out, weights_only=True)
                console.print(f"{dtype} {name}: {result['took_s']:.1f} s, {result['peak_gib']:.2f} GiB")
                result["took_s"] = min(result["took_s"], results.get(name, result)["took_s"])
                results[name] = result
    return results


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference / norm, the larger of hidden states and weight."""
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in b)


def report(dtype: str, results: dict[str, Any], table: Table) -> dict[str, Any]:
    """Rows of the table; the numbers, with whether ours keeps the limits."""
    base, mine = results["plain"], results["ours"]
    rows: dict[str, Any] = {}
    for name, r in results.items():
        if name == "exact":
            continue
        rows[name] = {
            "took_s": r["took_s"],
            "peak_gib": r["peak_gib"],
            "time_ratio": r["took_s"] / base["took_s"],
            "memory_ratio": r["peak_gib"] / base["peak_gib"],
            "gradient_difference": None if name == "Liger" else difference(r["grads"], base["grads"]),
        }
        if "exact" in results and name != "Liger":
            rows[name]["gradient_error"] = difference(r["grads"], results["exact"]["grads"])
        x = rows[name]
        table.add_row(
            dtype,
            name,
            f"{x['took_s']:.1f}",
            f"{x['time_ratio']:.2f}x",
            f"{x['peak_gib']:.2f}",
            f"1/{1 / x['memory_ratio']:.1f}",
            "" if x["gradient_difference"] is None else f"{x['gradient_difference']:.1e}",
            f"{x['gradient_error']:.1e}" if "gradient_error" in x else "",
        )
    kept = rows["ours"]["time_ratio"] <= TIME_LIMIT and rows["ours"]["memory_ratio"] <= MEMORY_LIMIT
    if dtype == "float32":
        kept = kept and difference(mine["grads"], base["grads"]) <= GRADIENT_LIMIT
    else:
        kept = kept and rows["ours"]["gradient_error"] <= BFLOAT16_ERROR_LIMIT * rows["plain"]["gradient_error"]
    return {"dtype": dtype, "kept": kept, "variants": rows}


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="one of the two; default both")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--variant", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant:
        run_variant(args)
        return 0
    console = Console(highlight=False)
    table = Table(
        "type", "way", "seconds", "to plain", "GiB", "to plain", "gradient: to plain", "to float32 products",
        title=f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, {args.device}",
    )
    dtypes = (args.dtype,) if args.dtype else ("float32", "bfloat16")
    reports = [report(dtype, measure(args, dtype, console), table) for dtype in dtypes]
    console.print(table)
    for r in reports:
        console.print(f"{r['dtype']}: time <= {TIME_LIMIT}x, memory <= 1/{1 / MEMORY_LIMIT:.0f}: {r['kept']}")
    if args.out:
        args.out.write_text(json.dumps(reports, indent=1))
    return int(not all(r["kept"] for r in reports))


if __name__ == "__main__":
    sys.exit(main())
