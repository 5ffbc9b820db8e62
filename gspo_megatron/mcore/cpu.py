"""What lets megatron-core run without CUDA, over gloo. Active exactly when the recipe says `device: cpu`, and in the
processes that only build models on the meta device (meta.py).

It replaces what needs CUDA, never what computes: no number that a GPU run produces depends on this file. Call
`install()` before the first `import megatron.core`; each replacement names the upstream place that it serves
(paths below megatron/core). To be removed piece by piece as upstream takes a device argument.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device as torch_device

CHECKED_VERSIONS = ("0.19.2",)
"""megatron-core releases that these replacements were run with."""
_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Apply every replacement once per process; a second call does nothing.

    Raises:
        RuntimeError: the installed megatron-core was never checked with this file, or was imported before it.
    """
    global _installed
    if _installed:
        return
    found = version("megatron-core")
    if found not in CHECKED_VERSIONS:
        raise RuntimeError(
            f"megatron-core {found}: device: cpu was checked with {', '.join(CHECKED_VERSIONS)} only; "
            "install requirements/cpu.txt, or run the tests and add the version to mcore/cpu.py"
        )
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before mcore.cpu.install(); import it after")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # children too
    _replace_cuda_api()
    _replace_tensor_api()
    _replace_uneven_all_gather()
    _import_megatron()
    _replace_megatron_functions()
    _installed = True


class _Stream:
    """A CUDA stream on a device that runs everything in order (token dispatcher, DDP)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or _Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything has run."""
        return True


class _Event:
    """A CUDA event: remembers when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Everything has run."""
        return True

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds between the two."""
        return (other._time_s - self._time_s) * 1e3


def _replace_cuda_api() -> None:
    """torch.cuda functions that upstream calls whatever the device."""
    cuda: Any = torch.cuda
    stream = _Stream()
    torch_device._device_constructors()  # caches the real factories; torch.device("meta") needs them
    # `device=torch.cuda.current_device()`: distributed/param_and_grad_buffer.py, transformer/moe/router.py, ...
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *args: None
    # transformer/moe/token_dispatcher.py, distributed/distributed_data_parallel.py
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args: stream
    cuda.stream = lambda *args: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    for name in ("synchronize", "empty_cache", "_lazy_init"):
        setattr(cuda, name, lambda *args: None)
    cuda._lazy_call = lambda fn, **kwargs: fn()  # tensor_parallel/random.py
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *args: 0)
    # tensor_parallel/random.py: the CUDA generator is the CPU generator
    generator = torch.default_generator
    cuda.manual_seed = lambda seed: generator.manual_seed(int(seed)) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state) and None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The same tensor factory with device="cuda" answered on the CPU and no pinned memory."""

    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _replace_tensor_api() -> None:
    """Tensor factories and methods with a literal "cuda": optimizer/*.py, models/common/embeddings/*.py."""
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "empty_like", "full_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, *args: None
    torch.nn.Module.cuda = lambda self, *args: self  # type: ignore[method-assign]
    plain_to, plain_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return plain_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # optimizer.py, distrib_optimizer.py, clip_grads.py compare type() with 'torch.cuda.FloatTensor'.
        answer = plain_type(self, *args, **kwargs)
        if isinstance(answer, str) and answer.startswith("torch.") and not answer.startswith("torch.cuda."):
            return "torch.cuda." + answer.removeprefix("torch.")
        return answer

    tensor.to, tensor.type = to, type_


def _replace_uneven_all_gather() -> None:
    """gloo refuses the uneven list form, which the EP x ETP dispatcher uses (transformer/moe/token_dispatcher.py)."""
    even_all_gather = dist.all_gather

    def rows(tensor: torch.Tensor) -> int:
        return tensor.shape[0] if tensor.dim() else 0

    def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        counts = [rows(t) for t in tensor_list]
        if async_op or len(set(counts)) <= 1:
            return even_all_gather(tensor_list, tensor, group=group, async_op=async_op)
        received = tensor.new_empty((sum(counts), *tensor.shape[1:]))
        sent = tensor.contiguous().repeat((len(counts),) + (1,) * (tensor.dim() - 1))
        dist.all_to_all_single(received, sent, counts, [rows(tensor)] * len(counts), group=group)
        for target, part in zip(tensor_list, received.split(counts), strict=True):
            target.copy_(part)

    dist.all_gather = all_gather


def _import_megatron() -> None:
    """Import with jit.py's fuser as the identity: compiling takes minutes of C++ on a CPU and fuses nothing."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="megatron")
    plain_compile = torch.compile
    torch.compile = lambda fn: fn  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
        import megatron.core.tensor_parallel.random
        import megatron.core.transformer.moe.token_dispatcher  # noqa: F401
    finally:
        torch.compile = plain_compile


def _replace_megatron_functions() -> None:
    """Functions of megatron-core that reach into CUDA's generators or ask `is_cuda`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # tensor_parallel/random.py indexes torch.cuda.default_generators, empty here.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.default_generator.get_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.default_generator.set_state(state)

    # token_dispatcher.py turns the all-to-all splits into numpy only for CUDA tensors.
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu
    # filesystem_async.py: the default is a multiprocessing.Manager, 360 MB per rank; the writers are threads.
    filesystem_async._results_queue = queue.Queue()
