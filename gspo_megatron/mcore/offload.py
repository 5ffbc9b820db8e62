"""The trainer's weights, optimizer state and gradient buffers: to host memory and back, for servers on its devices.

What moves is storages: each is copied to the host and cut to zero bytes, and later gets its bytes back. Every tensor
on it stays the object that it was (a parameter, the distributed optimizer's shard of it, DDP's buckets, Adam's
moments), so that neither the model nor the optimizer has to be told.

Source: megatron-core 0.19.2. DistributedDataParallel.offload_grad_buffers and restore_grad_buffers do the job for
gradients: they give the memory up and bring it back as zeros, which is what an optimizer step starts from. For the
rest core's functions do not: _ParamAndGradBuffer.offload_to_cpu knows weights of the distributed optimizer alone, and
MegatronOptimizer.offload_to_cpu copies through pageable memory that it allocates anew each time and gives each of the
optimizer's parameters a storage of its own, so that float32 weights, of which these are views, come back twice.

On the device remain what is small or not torch's: buffers of modules (rotary frequencies, FP8 scales), CUDA's context,
communicators.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from gspo_megatron.mcore.model import Policy

ALIGNMENT = 512
"""Bytes; a multiple of every dtype's size."""
_DISPATCHER_LEFTOVERS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""Of the last microbatch, kept by core's dispatcher until the next one (NVIDIA-NeMo/RL#2319)."""


class Offload:
    """Where the memory of one policy and its optimizer is: on the device at first. Each rank holds one."""

    def __init__(self, policy: Policy, optimizer: Any) -> None:
        self._policy, self._optimizer = policy, optimizer
        self._away: list[torch.UntypedStorage] = []
        self._host = _host_copies(_storages(p for _, p in policy.parameters()))
        self.is_on_device = True
        """False: the tensors have no memory, and must not be read."""

    @torch.no_grad()
    def to_host(self) -> None:
        """Leave the device: weights and optimizer state are copied, gradients are given up.

        Collective over data parallel where parameters of the last step are still to be gathered.

        Raises:
            ValueError: they are on the host.
        """
        if not self.is_on_device:
            raise ValueError("the trainer's memory is on the host already")
        self._policy.finish_param_sync()
        _drop_leftovers(self._policy)
        self._away = _storages(self._kept_tensors())
        # Adam's moments come into being with the first step.
        self._host |= _host_copies([s for s in self._away if not self._fits(s)])
        for storage in self._away:
            self._host[storage._cdata].copy_(_bytes_of(storage), non_blocking=True)
        torch.cuda.synchronize()
        for storage in self._away:
            storage.resize_(0)
        for chunk in self._policy.chunks:
            chunk.offload_grad_buffers(empty_cache=False)
        self.is_on_device = False
        gc.collect()  # cycles of autograd's hold memory of the last pass
        torch.cuda.empty_cache()

    @torch.no_grad()
    def to_device(self) -> None:
        """Come back: weights and optimizer state bit for bit, gradients zero.

        Raises:
            ValueError: they are on the device.
        """
        if self.is_on_device:
            raise ValueError("the trainer's memory is on the device already")
        for storage in self._away:
            copy = self._host[storage._cdata]
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        for chunk in self._policy.chunks:
            chunk.restore_grad_buffers()  # waits for the copies too
        self._away = []
        self.is_on_device = True

    def on_host(self, tensor: Tensor) -> Tensor:
        """The host's copy of a parameter, or of a view of one; it has the value while they are away.

        Raises:
            KeyError: no parameter has this storage.
        """
        copy = self._host[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return copy.as_strided(tensor.shape, tensor.stride(), copy.storage_offset() + tensor.storage_offset())

    def _kept_tensors(self) -> Iterator[Tensor]:
        """Parameters, the optimizer's master copies and its state, on the policy's device."""
        yield from (parameter for _, parameter in self._policy.parameters())
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for _, state in self._optimizer.state.items():
            yield from (v for v in state.values() if isinstance(v, Tensor) and v.device == self._device)

    @property
    def _device(self) -> torch.device:
        return self._policy.parallel.device

    def _fits(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._host and self._host[storage._cdata].nbytes == storage.nbytes()


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Their storages, each once."""
    return list({s._cdata: s for s in (t.untyped_storage() for t in tensors)}.values())


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A tensor of a whole storage's bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copies(storages: list[torch.UntypedStorage]) -> dict[int, Tensor]:
    """Room on the host for each storage's bytes, by the storage's address.

    It is one block, for CUDA page-locked in one call, so that copies run at the bus's speed. (pin_memory rounds up to
    a power of two; a call for each storage would meet pages that are locked already.)
    """
    *starts, num_bytes = accumulate((-(-s.nbytes() // ALIGNMENT) * ALIGNMENT for s in storages), initial=0)
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes and storages[0].device.type == "cuda":
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
    return {s._cdata: block[start : start + s.nbytes()] for s, start in zip(storages, starts, strict=True)}


def _drop_leftovers(policy: Policy) -> None:
    """What modules keep until the next pass makes it anew: routes, and Transformer Engine's FP8 copies of weights."""
    modules = [m for chunk in policy.chunks for m in chunk.modules()]
    for module in modules:
        if isinstance(module, MoELayer) and isinstance(module.token_dispatcher, MoEAlltoAllTokenDispatcher):
            for name in _DISPATCHER_LEFTOVERS:
                setattr(module.token_dispatcher, name, None)
    if policy.parallel.device.type == "cuda":
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # no CPU build imports it

        for module in modules:
            if isinstance(module, TransformerEngineBaseModule):
                module._fp8_workspaces.clear()
