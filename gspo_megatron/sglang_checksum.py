"""SGLang's side of a verified weight push, put into its scheduler processes by the plug-in hook (sglang_cpu.plugin).

SGLang 0.5.21 skips a tensor whose name it does not know, and `get_weights_by_name` does not exist for Qwen3-MoE; so
each tensor-parallel rank of a server keeps a record of an update, whichever way the tensors arrive:

- before it, parameters are filled with NaN, every STEP-th element of them: a server that was left with half of the
  weights can only answer NaN, which rollout.py refuses;
- each tensor that the model is given is recorded with its checksum (checksum.py), under its Hugging Face name;
- after it, a parameter that still holds one of these NaN was given nothing, and is recorded as unfilled.

`/weights_checker` with the action `received` answers the record; the other actions stay SGLang's own. Parameters
that are not floating point, and those that SGLang leaves out of its own checks, are not filled.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gspo_megatron.checksum import Checksums
from gspo_megatron.convert.shards import few_at_once, runs
from gspo_megatron.sglang_cpu import LIMIT_VARIABLE

ACTION = "received"
UNFILLED = "unfilled "
"""Goes before the name of a parameter that was given nothing; the value beside it is empty."""
STEP = 4093
"""A prime, so that no row length is a multiple of it. A tensor of the checkpoint is copied as a whole, so one NaN
within it suffices; one in each 8 KiB of bfloat16 costs a thousandth of filling all."""
SMALL = 2**16
"""Parameters up to this many elements are filled wholly."""
TWICE = "received twice"
BROKE = "the broadcast broke"
"""What a server says of a bucket that did not arrive."""


class Received:
    """The record of one update of one model."""

    def __init__(self, *, is_from_disk: bool, buffer: Tensor | None) -> None:
        self.is_from_disk, self.buffer = is_from_disk, buffer
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


_records: WeakKeyDictionary[Any, Received] = WeakKeyDictionary()


def start(model: Any, *, is_from_disk: bool = False) -> None:
    """Begin a new record and fill the parameters with NaN."""
    if model not in _records:
        load_weights = model.load_weights

        def watched(weights: Iterable[tuple[str, Tensor]], *args: Any, **kwargs: Any) -> Any:
            return load_weights(_records[model].watch(weights), *args, **kwargs)

        model.load_weights = watched
    buffer = _records[model].buffer if model in _records else None
    _records[model] = Received(is_from_disk=is_from_disk, buffer=buffer)
    for _, values in _marks(model):
        values.fill_(float("nan"))


def finish(model: Any) -> None:
    """Record which parameters were given nothing. Before SGLang packs them anew, which can replace them."""
    record = _records[model]
    if record.buffer is not None and record.buffer.device.type != "cpu":
        record.buffer = None
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


class Arriving:
    """The tensors of a bucket, each as soon as it is there, so that one is loaded while the next ones arrive."""

    def __init__(self, messages: list[tuple[Callable[[], Any], list[tuple[str, Tensor]]]]) -> None:
        """Of calls that begin to receive a message, and the tensors that are there when it is done."""
        self._messages, self._is_there = messages, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._is_there:  # SGLang gives a bucket to each model of the server, a draft model too
            yield from (item for _, tensors in self._messages for item in tensors)
            return
        works = few_at_once(begin for begin, _ in self._messages)
        for work, (_, tensors) in zip(works, self._messages, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{BROKE}: {error}") from error
            yield from tensors
        self._is_there = True


def receive_bucket(
    updater: Any, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
) -> Arriving:
    """Replaces WeightUpdater._receive_bucketed_weights_from_distributed: into one buffer.

    It is kept until the update ends, on a CPU for the next one. Upstream allocates each bucket twice and anew; there
    the system's zeroing of that memory takes longer than the broadcast. The tensors are views: load_weights copies
    them before the next bucket overwrites the buffer.
    """
    record = _records[updater.get_model()]
    kinds: list[torch.dtype] = [getattr(torch, dtype) for dtype in dtypes]
    sizes = [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    if record.buffer is None or record.buffer.numel() < sum(sizes):
        record.buffer = None  # before the next one is there
        record.buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=updater.device)
    flat = record.buffer[: sum(sizes)]
    pieces = zip(names, flat.split(sizes), kinds, shapes, strict=True)
    tensors = [(name, piece.view(kind).view(shape)) for name, piece, kind, shape in pieces]
    group = updater._model_update_group[group_name]

    def begin_of(run: range) -> Callable[[], Any]:
        row = flat[sum(sizes[: run.start]) : sum(sizes[: run.stop])]
        return lambda: torch.distributed.broadcast(row, src=0, group=group, async_op=True)

    return Arriving([(begin_of(run), tensors[run.start : run.stop]) for run in runs(sizes, flat.device)])


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
    HookRegistry.register(receive, receive_bucket, HookType.REPLACE)
    HookRegistry.register(f"{updater}.update_weights_from_disk", around_disk, HookType.AROUND)
    HookRegistry.register("sglang.srt.utils.common.init_custom_process_group", with_time_limit, HookType.AROUND)
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    HookRegistry.register(f"{loader}.load_weights_only", after_load, HookType.AFTER)
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", around_checker, HookType.AROUND)
