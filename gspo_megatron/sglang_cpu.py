"""SGLang's plug-in hook, and what lets its unmodified wheel serve on a CPU without AMX, with seeded sampling.

Source: sglang 0.5.21. On every device the hook registers the record of weight updates (sglang_checksum.py); it acts
only in servers that engine.py starts, which set GSPO_MEGATRON_DEVICE to the recipe's device.

`python -m gspo_megatron.sglang_cpu <SGLang's own arguments>` is `python -m sglang.launch_server` with two additions:
stand-ins for packages that SGLang imports there and never calls, and replacements by `plugin`, both where
GSPO_MEGATRON_DEVICE is `cpu`. SGLang spawns its scheduler and detokenizer; each spawned Python imports this module
again as its main module, and so has the stand-ins, too.

Nothing here changes a number: log-probs come from SGLang's own torch path.
Shapes: B = requests of the batch, V = vocabulary.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHECKED_VERSIONS = ("0.5.21",)
"""SGLang versions whose sources were read for every replacement below and that tests/e2e ran against."""
DEVICE_VARIABLE = "GSPO_MEGATRON_DEVICE"
LIMIT_VARIABLE = "GSPO_MEGATRON_PUSH_LIMIT_S"
"""Recipe.push_limit_s, for sglang_checksum.py; engine.py sets both."""
ENTRY_POINT_GROUP, ENTRY_POINT = "sglang.srt.plugins", "gspo_megatron.sglang_cpu:plugin"

STAND_INS = ("sgl_kernel", "torchvision")
"""sgl_kernel: SGLang's compiled ops; its wheels are CUDA builds. Imported by sglang/srt/layers (topk, MoE, hash);
without AMX every layer of a Qwen3-MoE takes SGLang's torch path.
torchvision: its wheels are bound to one torch build. Imported through transformers' AutoImageProcessor by
sglang/srt/configs (janus_pro) for image models, which this project does not serve."""


class _Absent:
    """A name of a package that is not installed: can be imported and looked into, raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(f"{self._name}.{attribute}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"{self._name} was called, but its package is not installed: gspo_megatron.sglang_cpu only lets SGLang "
            "import it; choose SGLang options that stay on its torch path, or install the package"
        )


class _StandInFinder(MetaPathFinder, Loader):
    """Finds the packages in STAND_INS and every module below them. Last in line: a real package is found first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in STAND_INS:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _Absent(module.__name__).__getattr__  # type: ignore[method-assign]
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]


def install_stand_ins() -> None:
    """Let STAND_INS be imported where they are not installed; does nothing for those that are, or a second time."""
    if any(find_spec(name) is None for name in STAND_INS):
        sys.meta_path.append(_StandInFinder())


def check_version() -> None:
    """Refuse an SGLang that the replacements were not checked with.

    Raises:
        RuntimeError: names the installed version and the checked ones.
    """
    installed = version("sglang")
    if installed not in CHECKED_VERSIONS:
        raise RuntimeError(
            f"sglang=={installed}: gspo_megatron.sglang_cpu replaces internals of {', '.join(CHECKED_VERSIONS)}; "
            "install one of these (requirements/cpu.txt), or check every replacement and add the version"
        )


def check_entry_point() -> None:
    """Refuse to serve where SGLang's schedulers would not find `plugin`.

    Raises:
        RuntimeError: the package's metadata is not installed.
    """
    found = [entry.value for entry in entry_points(group=ENTRY_POINT_GROUP)]
    if found.count(ENTRY_POINT) != 1:
        raise RuntimeError(
            f"entry-point group {ENTRY_POINT_GROUP} holds {found}, wants {ENTRY_POINT!r} once; without it SGLang "
            "ignores sampling seeds on a CPU; install this package: pip install --no-deps -e ."
        )


def murmur_hash32(seed_B: Tensor, positions_B: Tensor, col_indices_V: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of the 16 bytes (seed, position, column), as sglang/kernels/ops/sampling/murmur_hash.py.

    Args:
        seed_B: [B] uint64. One sampling seed per request.
        positions_B: [B] integer. Position of the token that is sampled.
        col_indices_V: [V] integer. Token ids.

    Returns:
        [B, V] uint32. The same bits as SGLang's kernel on a GPU.
    """
    import torch

    low = 0xFFFFFFFF
    # torch has no uint32 arithmetic on CPU; int64 wraps modulo 2**64, which leaves the low 32 bits right.
    seed = seed_B.view(torch.int64)
    blocks = (
        (seed & low)[:, None],
        ((seed >> 32) & low)[:, None],
        (positions_B.to(torch.int64) & low)[:, None],
        (col_indices_V.to(torch.int64) & low)[None, :],
    )
    h = torch.zeros_like(blocks[0])
    for block in blocks:
        k = block * 0xCC9E2D51 & low
        k = (k << 15 | k >> 17) & low
        h = h ^ k * 0x1B873593 & low
        h = (h << 13 | h >> 19) & low
        h = h * 5 + 0xE6546B64 & low
    h = h ^ 16  # length in bytes
    h = (h ^ h >> 16) * 0x85EBCA6B & low
    h = (h ^ h >> 13) * 0xC2B2AE35 & low
    return (h ^ h >> 16).to(torch.uint32)


def seed_every_row(info: Any, _cls: type, batch: Any, _vocab_size: int) -> Any:
    """Give a sampling batch the seeds of its requests; hooked after SamplingBatchInfo.from_schedule_batch.

    Upstream reads the seeds only under --enable-deterministic-inference, which refuses the torch_native attention.
    A request without a seed gets a fresh one: batches with and without seeds cannot be merged upstream.
    """
    import torch

    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    fresh = torch.randint(2**62, (len(seeds),)).tolist()
    rows = [new if seed is None else seed for seed, new in zip(seeds, fresh, strict=True)]
    info.sampling_seed = torch.tensor(rows, dtype=torch.int64, device=batch.device)
    return info


def sample_whole_rows_by_token_id(
    original: Callable[..., Any],
    probs_BV: Tensor,
    top_ks_B: Tensor,
    top_ps_B: Tensor,
    min_ps_B: Tensor,
    need_min_p_sampling: bool,
    sampling_seed_B: Tensor | None,
    positions_B: Tensor,
    **options: Any,
) -> Any:
    """Keep a request's tokens apart from its neighbours; around top_k_top_p_min_p_sampling_from_probs_torch.

    Upstream takes this function for the whole batch as soon as one request is greedy or has a top-k, top-p or min-p,
    and there ties the noise to a token's rank instead of its id: the same seed then gives other tokens. SGLang's own
    warm-up and health checks are greedy. Here rows that nothing truncates are sampled as in a batch of such rows.
    """
    ids = original(
        probs_BV, top_ks_B, top_ps_B, min_ps_B, need_min_p_sampling, sampling_seed_B, positions_B, **options
    )
    if sampling_seed_B is None or options.get("return_filtered_probs"):
        return ids
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    by_token_id = sampling_from_probs_torch(probs_BV, sampling_seed=sampling_seed_B, positions=positions_B)
    is_whole = (top_ks_B >= probs_BV.shape[-1]) & (top_ps_B >= 1.0) & (min_ps_B <= 0.0)
    return by_token_id.to(ids.dtype).where(is_whole, ids)


def sleep_while_paused(scheduler: Any) -> None:
    """Let a paused server wait for its next message; hooked before Scheduler.ingest_requests.

    Upstream sleeps when it is idle (sleep_on_idle), but asks without end while it is paused: on a machine that the
    trainer shares, that takes a core from the weight push that it is paused for.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()


def _nothing_to_do(*args: object, **kwargs: object) -> None:
    """For calls that only order or speed up work of a GPU."""


def plugin() -> None:
    """SGLang's plug-in hook: it calls this in its server process and in every scheduler, before their set-up.

    Does nothing in a server that engine.py did not start. SGLang logs what a plug-in raises and goes on, so the checks
    also run in `main`, engine.py asks a started server for the same seed twice, and a weight push asks for the record.
    """
    if DEVICE_VARIABLE not in os.environ:
        return
    check_version()
    from gspo_megatron.sglang_checksum import register

    register()
    if os.environ[DEVICE_VARIABLE] == "cpu":
        _register_cpu_replacements()


def _register_cpu_replacements() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # sglang/kernels/ops/sampling/murmur_hash.py calls this op on CPU; a real sgl_kernel registers it when imported.
    import_module("sgl_kernel")
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        schema = "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor"
        torch.library.define("sgl_kernel::murmur_hash32_cpu", schema)
        torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", murmur_hash32)
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", seed_every_row, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        sample_whole_rows_by_token_id,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.ingest_requests", sleep_while_paused, HookType.BEFORE
    )
    # sglang/srt/utils/weight_checker.py waits for the GPU before it hashes the weights (/weights_checker).
    HookRegistry.register("torch.cuda.synchronize", _nothing_to_do, HookType.REPLACE)
    # --enable-return-routed-experts pins its host buffer with cudart whatever the device is.
    HookRegistry.register(
        "sglang.srt.mem_cache.pool_host.common._cuda_host_register", _nothing_to_do, HookType.REPLACE
    )


if os.environ.get(DEVICE_VARIABLE) == "cpu":
    install_stand_ins()

if __name__ == "__main__":
    check_version()
    check_entry_point()
    runpy.run_module("sglang.launch_server", run_name="__main__")
