"""SGLang's side of a verified weight push, put into its scheduler processes by the plug-in hook (sglang_cpu.plugin).

SGLang 0.5.21 skips a tensor whose name it does not know, and `get_weights_by_name` does not exist for Qwen3-MoE; so
each tensor-parallel rank of a server keeps a record of an update, whichever way the tensors arrive:

- before it, parameters are filled with NaN, every STEP-th element of them: a server that was left with half of the
  weights can only answer NaN, which rollout.py refuses;
- a broadcast tells its tensors itself, in messages, and each is loaded as soon as it is there (Arriving);
- each tensor that the model is given is recorded with its checksum (checksum.py), under its Hugging Face name;
- after it, a parameter that still holds one of these NaN was given nothing, and is recorded as unfilled.

`/weights_checker` with the action `received` answers the record; the other actions stay SGLang's own. Parameters
that are not floating point, and those that SGLang leaves out of its own checks, are not filled.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gspo_megatron.checksum import Checksums, bytes_of
from gspo_megatron.convert.shards import MESSAGES_AHEAD, few_at_once
from gspo_megatron.sglang_cpu import LIMIT_VARIABLE

ACTION = "received"
UNFILLED = "unfilled "
"""Goes before the name of a parameter that was given nothing; the value beside it is empty."""
STEP = 16381
"""A prime, so that no row length is a multiple of it. A tensor of the checkpoint is copied as a whole, so one NaN
within it suffices; one in each 32 KiB of bfloat16 costs little beside filling all."""
SMALL = 2**20
"""Parameters up to this many elements are filled wholly: they may be made up of tensors of less than STEP."""
TWICE = "received twice"
BROKE = "the broadcast broke"
"""What a server says of tensors that did not arrive."""


class Received:
    """The record of one update of one model."""

    def __init__(self, *, is_from_disk: bool, rows: list[Tensor]) -> None:
        self.is_from_disk, self.rows = is_from_disk, rows
        self.checksums = Checksums()
        self.twice: list[str] = []
        self.unfilled: list[str] = []

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on and record each before it is loaded."""
        for name, tensor in weights:
            try:
                self.checksums.add(name, tensor)
            except ValueError:
                self.twice.append(name)
            yield name, tensor

    def answer(self) -> dict[str, str]:
        """Names and checksums, and what went wrong beside them."""
        wrong = {name: TWICE for name in self.twice} | {UNFILLED + name: "" for name in self.unfilled}
        return self.checksums.resolve() | wrong


class CopyingByMemcpy(TorchFunctionMode):
    """Copies between plain CPU tensors by memcpy.

    torch's loop reads memory that it is about to overwrite. memcpy does without where GLIBC_TUNABLES say so (engine.py
    lets it from 1 MiB on), and takes two thirds of the time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and len(args) == 2 and not kwargs:
            to, source = args
            if is_plain_copy(to, source):
                np.copyto(bytes_of(to).numpy(), bytes_of(source).numpy())
                return to
        return func(*args, **(kwargs or {}))


def is_plain_copy(to: Any, source: Any) -> bool:
    """Whether bytes of CPU memory are all that is to be copied."""
    return (
        isinstance(source, Tensor)
        and (to.dtype, to.shape, to.device.type) == (source.dtype, source.shape, source.device.type)
        and to.device.type == "cpu"
        and not (to.requires_grad or source.requires_grad)
        and to.is_contiguous()
        and source.is_contiguous()
    )


_NO_ROW = torch.empty(0, dtype=torch.uint8)
_records: WeakKeyDictionary[Any, Received] = WeakKeyDictionary()


def start(model: Any, *, is_from_disk: bool = False) -> None:
    """Begin a new record and fill the parameters with NaN."""
    if model not in _records:
        load_weights = model.load_weights

        def watched(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
            with CopyingByMemcpy():
                return load_weights(_records[model].watch(weights), *args, **kwargs)

        model.load_weights = watched
    rows = _records[model].rows if model in _records else [_NO_ROW] * (MESSAGES_AHEAD + 1)
    _records[model] = Received(is_from_disk=is_from_disk, rows=rows)
    for _, values in _marks(model):
        values.fill_(float("nan"))


def finish(model: Any) -> None:
    """Record which parameters were given nothing. Before SGLang packs them anew, which can replace them."""
    record = _records[model]
    marks = list(_marks(model))
    # One look at the device for all of them. float: isnan is not there for FP8.
    flags = [values.to(torch.float32).isnan().any() for _, values in marks]
    is_unfilled = torch.stack(flags).tolist() if flags else []
    record.unfilled = [name for (name, _), bad in zip(marks, is_unfilled, strict=True) if bad]


def _marks(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The elements of each parameter that are filled: views."""
    from sglang.srt.utils.weight_checker import _is_skip_weight_check

    for name, parameter in model.named_parameters():
        data = parameter.data
        if not data.is_floating_point() or data.numel() == 0 or _is_skip_weight_check(name, parameter):
            continue
        if data.numel() <= SMALL or not data.is_contiguous():
            yield name, data
        else:
            yield name, data.view(-1)[::STEP]


def after_begin(_result: None, updater: Any) -> None:
    """Hooked after WeightUpdater.begin_weight_update."""
    start(updater.get_model())


def before_end(updater: Any, **_options: Any) -> None:
    """Hooked before WeightUpdater.end_weight_update."""
    finish(updater.get_model())


Plan = list[list[tuple[str, str, list[int]]]]
"""Of each message its tensors, in a row: name, dtype without "torch.", shape."""


def send_plan(plan: Plan, group: Any, device: torch.device) -> None:
    """Tell a group what its rank 0, which is this one, is about to broadcast."""
    data = torch.frombuffer(bytearray(json.dumps(plan).encode()), dtype=torch.uint8).to(device)
    torch.distributed.broadcast(torch.tensor([data.numel()], device=device), src=0, group=group)
    torch.distributed.broadcast(data, src=0, group=group)


def receive_plan(group: Any, device: torch.device) -> Plan:
    """The other side of send_plan."""
    length = torch.zeros(1, dtype=torch.int64, device=device)
    torch.distributed.broadcast(length, src=0, group=group)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    torch.distributed.broadcast(data, src=0, group=group)
    plan: Plan = json.loads(data.cpu().numpy().tobytes())
    return plan


class Arriving:
    """The tensors of a push, each as soon as it is there, so that one is loaded while the next ones arrive.

    No more than MESSAGES_AHEAD messages and one are held. A CPU takes them in the same memory again and again and
    keeps it between pushes: there the system's zeroing of new memory takes longer than the broadcast.
    """

    def __init__(self, plan: Plan, group: Any, device: torch.device, rows: list[Tensor]) -> None:
        """Of a broadcast by a group's rank 0; rows: what an earlier push left, and is left by this one."""
        self._plan, self._group, self._device, self._rows = plan, group, device, rows
        self._is_begun = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor).

        Raises:
            RuntimeError: the broadcast broke; asked a second time.
        """
        if self._is_begun:
            raise RuntimeError("a push is loaded into one model; servers with a draft model want another transport")
        self._is_begun = True
        for work, tensors in few_at_once(partial(self._begin, i, message) for i, message in enumerate(self._plan)):
            with naming_breaks():
                work.wait()
            yield from tensors

    def _begin(self, place: int, message: list[tuple[str, str, list[int]]]) -> tuple[Any, list[tuple[str, Tensor]]]:
        kinds: list[torch.dtype] = [getattr(torch, dtype) for _, dtype, _ in message]
        sizes = [prod(shape) * kind.itemsize for kind, (_, _, shape) in zip(kinds, message, strict=True)]
        row = self._row(place, sum(sizes))
        tensors = [
            (name, piece.view(kind).view(shape))
            for (name, _, shape), kind, piece in zip(message, kinds, row.split(sizes), strict=True)
        ]
        with naming_breaks():
            return torch.distributed.broadcast(row, src=0, group=self._group, async_op=True), tensors

    def _row(self, place: int, num_bytes: int) -> Tensor:
        """Memory for a message; a GPU's comes and goes in the order of its stream."""
        if self._device.type != "cpu":
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        place %= len(self._rows)  # one more than are under way: the last tensor of the one before is still at hand
        if self._rows[place].numel() < num_bytes or _is_held(self._rows[place]):
            self._rows[place] = _NO_ROW  # before the next one is there
            self._rows[place] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._rows[place][:num_bytes]


def _is_held(row: Tensor) -> bool:
    """Whether others than its own tensor hold this memory: a model that loads a tensor later than it was given it."""
    return bool(torch._C._storage_Use_Count(row.untyped_storage()._cdata) > 2)  # the tensor, and the question


def receive_push(updater: Any, *, group_name: str, **_nothing: Any) -> Arriving:
    """Replaces WeightUpdater._receive_bucketed_weights_from_distributed, for all tensors of an update at once.

    The request says no more than the group; what comes is said there.
    """
    group = updater._model_update_group[group_name]
    device = torch.device(updater.device)
    with naming_breaks():
        plan = receive_plan(group, device)
    return Arriving(plan, group, device, _records[updater.get_model()].rows)


@contextmanager
def naming_breaks() -> Iterator[None]:
    """Say of an error of a collective that it is one."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{BROKE}: {error}") from error


def around_disk(original: Callable[..., Any], updater: Any, *args: Any, **options: Any) -> Any:
    """Hooked around WeightUpdater.update_weights_from_disk, which has no begin and end."""
    start(updater.get_model(), is_from_disk=True)
    return original(updater, *args, **options)


def after_load(_result: None, model: Any, *_args: Any) -> None:
    """Hooked after DefaultModelLoader.load_weights_only, the part of a disk update before weights are packed."""
    record = _records.get(model)
    if record is not None and record.is_from_disk:
        finish(model)


def around_checker(original: Callable[..., Any], checker: Any, action: str, *args: Any, **options: Any) -> Any:
    """Hooked around WeightChecker.handle; the answer has the form of its own `checksum`."""
    if action != ACTION:
        return original(checker, action, *args, **options)
    record = _records.get(checker._get_model())
    return {
        "checksums": record.answer() if record is not None else {},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=options["role"]).model_dump(),
    }


def with_time_limit(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Hooked around init_custom_process_group, which SGLang calls without a time limit: half an hour for gloo.

    A server that waits for another one, or for a trainer that has given up, would be lost for that long.
    """
    limit = datetime.timedelta(seconds=float(os.environ[LIMIT_VARIABLE]))
    return original(*args, **{"timeout": limit, **options})


def register() -> None:
    """Register the hooks; sglang_cpu.plugin calls it before a scheduler is set up."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.begin_weight_update", after_begin, HookType.AFTER)
    HookRegistry.register(f"{updater}.end_weight_update", before_end, HookType.BEFORE)
    receive = f"{updater}._receive_bucketed_weights_from_distributed"
    HookRegistry.register(receive, receive_push, HookType.REPLACE)
    HookRegistry.register(f"{updater}.update_weights_from_disk", around_disk, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", with_time_limit, HookType.AROUND)
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    HookRegistry.register(f"{loader}.load_weights_only", after_load, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", around_checker, HookType.AROUND)
