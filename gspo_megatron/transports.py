"""How the buckets of a weight push reach SGLang servers: a collective broadcast, files, or CUDA IPC.

Source: sglang 0.5.21: `/init_weights_update_group` and `/update_weights_from_distributed` (load_format
flattened_bucket), `/update_weights_from_disk`, `/update_weights_from_tensor`. All of it runs on rank 0, but for what
a Transport's docstring calls collective.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import shutil
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from gspo_megatron.checksum import Checksums, bytes_of
from gspo_megatron.config import Recipe
from gspo_megatron.convert.hf_io import write_hf_dir
from gspo_megatron.convert.safetensors_io import TensorSpec, spec_bytes
from gspo_megatron.convert.shards import few_at_once, runs
from gspo_megatron.engine import RolloutError, ServerClient
from gspo_megatron.fleet import Server
from gspo_megatron.sglang_checksum import BROKE, send_plan
from gspo_megatron.threads import in_daemon_thread

T = TypeVar("T")
Bucket = list[tuple[str, Tensor]]

MESSAGE_BYTES = 64 * 2**20
"""Of one broadcast, and what its last tensor goes beyond it."""
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""Read when a group is made. Left to itself, torch's watchdog ends this process when a server of the group is lost; it
also sleeps four times the second value first, and whoever destroys the group waits for it."""
STALL_S = 10.0
"""What gloo gives one message: a server that does not take it breaks the group, which frees the others. Less than a
server may take to be paused, which the next attempt begins with."""
FOREVER_S = 86_400.0
"""Of one request: what watches it has a limit of its own."""
SETTLE_S = 5.0
"""When a collective broke, servers that wait in it get this long to notice and say so."""


class PushFailed(Exception):
    """Some servers did not take a push; it can be tried again with the others."""

    def __init__(self, reasons: Mapping[Server, str], *, are_silent: bool) -> None:
        super().__init__("; ".join(f"{server.name} ({server.url}): {reasons[server]}" for server in reasons))
        self.reasons = dict(reasons)
        self.are_silent = are_silent
        """They gave no answer; else they refused."""


class CollectiveBroke(RolloutError):
    """A server's part in a collective failed, most likely for another one's."""


class Targets:
    """The servers of one attempt. What is asked of them is asked of all at once, within a time limit."""

    def __init__(self, session: aiohttp.ClientSession, servers: Sequence[Server], *, limit_s: float) -> None:
        self.servers = list(servers)
        self.limit_s, self._session = limit_s, session
        self._clients = {s: ServerClient(session, s.url, timeout_s=FOREVER_S) for s in self.servers}

    def of(self, servers: Sequence[Server]) -> Targets:
        """Others, asked in the same way."""
        return Targets(self._session, servers, limit_s=self.limit_s)

    async def all(
        self,
        call: Callable[[ServerClient, int], Awaitable[None]],
        *,
        beside: Awaitable[object] | None = None,
        release: Callable[[], None] | None = None,
        last_sign_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Ask every server at once, with something of the trainer's own beside them.

        Args:
            call: takes the client and the place of its server.
            beside: the trainer's own part.
            release: for a collective: called when one has failed, so that nobody goes on waiting for it.
            last_sign_s: time.monotonic of the last sign of progress, from which on the time limit counts.

        Raises:
            PushFailed: names the servers that failed, of the first kind that there is: connection lost; refused; no
                answer; the collective broke. Those of a later kind wait for these, or failed for them.
            RolloutError: only the trainer's own part failed.
        """
        of_task = {asyncio.ensure_future(call(c, i)): s for i, (s, c) in enumerate(self._clients.items())}
        own = [] if beside is None else [asyncio.ensure_future(beside)]
        everything: list[asyncio.Future[Any]] = [*of_task, *own]
        if not everything:
            return
        until = asyncio.ALL_COMPLETED if release is None else asyncio.FIRST_EXCEPTION
        start_s, pending, is_over = time.monotonic(), set(everything), False
        while pending and not is_over:
            left_s = max(start_s, last_sign_s()) + self.limit_s - time.monotonic()
            if left_s <= 0.0:
                break
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=until)
            is_over = release is not None and any(future.exception() is not None for future in done)
        if not pending and all(future.exception() is None for future in everything):
            return
        if release is not None:
            release()
            if pending:
                await asyncio.wait(pending, timeout=SETTLE_S)
        lost: dict[Server, str] = {}
        refused: dict[Server, str] = {}
        silent: dict[Server, str] = {}
        broke: dict[Server, str] = {}
        for task, server in of_task.items():
            if not task.done():
                task.cancel()
                silent[server] = f"no answer within {self.limit_s:g} s"
            elif isinstance(error := task.exception(), CollectiveBroke):
                broke[server] = str(error)
            elif error is not None:
                is_answer = isinstance(error, RolloutError) and not error.retryable
                (refused if is_answer else lost)[server] = str(error)
        if release is None:
            lost, silent = lost | silent, {}
        for reasons, are_silent in ((lost, True), (refused, False), (silent, True), (broke, False)):
            if reasons:
                raise PushFailed(reasons, are_silent=are_silent)
        if not own[0].done():
            own[0].cancel()
            raise RolloutError(f"the trainer's side of a weight push was not done within {self.limit_s:g} s")
        cause = own[0].exception()
        raise RolloutError(f"the trainer's side of a weight push failed: {type(cause).__name__}: {cause}") from cause


class BucketStream:
    """The buckets of one attempt: the next one is gathered and its checksums are taken while one is sent.

    So rank 0 holds two buckets, and a third where it has to bring the bytes of the one sent in a row (FP8).
    """

    def __init__(self, buckets: Iterator[Bucket], seconds: dict[str, float]) -> None:
        self.checksums = Checksums()
        """Of all tensors so far."""
        self.seconds = seconds
        self._buckets = buckets
        self._coming: asyncio.Future[Bucket | None] | None = None
        self._lock = threading.Lock()

    def take(self) -> Bucket | None:
        """The next bucket, None after the last. Collective with the other ranks."""
        with self._lock:
            start_s = time.perf_counter()
            bucket = next(self._buckets, None)
            gathered_s = time.perf_counter()
            for name, tensor in bucket or []:
                self.checksums.add(name, tensor)
            self.seconds["gather"] += gathered_s - start_s
            self.seconds["checksum"] += time.perf_counter() - gathered_s
            return bucket

    def begin(self) -> None:
        """Ask for the first bucket, while there is still something else to do."""
        self._coming = in_daemon_thread(self.take)

    async def ahead(self) -> AsyncIterator[Bucket]:
        """All buckets, each asked for before the one before it is done with."""
        if self._coming is None:
            self.begin()
        while self._coming and (bucket := await self._coming):
            self._coming = in_daemon_thread(self.take)
            yield bucket

    def drain(self) -> None:
        """Go to the end: after an error the other ranks are still sending."""
        with self._lock:
            for _ in self._buckets:
                pass


class Transport(Protocol):
    """A way to the servers."""

    def buckets(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """What goes into a BucketStream, of the gathered Hugging Face tensors. Collective: exhaust it on all ranks."""

    async def prepare(self, targets: Targets, stream: BucketStream) -> None:
        """What can be done while the servers still generate."""

    async def deliver(self, targets: Targets, stream: BucketStream) -> None:
        """Bring all buckets into the paused servers' parameters. Raises as Targets.all."""

    async def leave(self, targets: Targets) -> None:
        """Undo, on servers that answer, what a failed or finished push left; what fails is left."""


async def _open_update(server: ServerClient, _place: int) -> None:
    try:
        await server.begin_weight_update()
    except RolloutError as error:
        if error.retryable:
            raise
        await server.end_weight_update()  # an attempt that failed left it open
        await server.begin_weight_update()


async def _close_update(server: ServerClient, _place: int) -> None:
    await server.end_weight_update()


class Broadcast:
    """A process group of this trainer's rank 0 and each server's processes after it: gloo on CPU, NCCL on GPU.

    It is built anew when the servers change. A server waits in a collective for as long as its backend likes, gloo for
    half an hour; it is freed by what rank 0 does: without the rendezvous store joining fails at once, and when the
    time limit of rank 0's own side runs out, its connections close.
    """

    def __init__(
        self, recipe: Recipe, plan: Sequence[Sequence[TensorSpec]], *, device: torch.device, limit_s: float
    ) -> None:
        """Of buckets of these tensors, on this device."""
        self._messages = [list(messages_of(bucket)) for bucket in plan]
        """Of each bucket."""
        self._host, self._port = recipe.cluster.host, recipe.cluster.weight_port
        self._ranks_per_server = recipe.ranks_per_server
        self._device, self._backend = device, "nccl" if device.type == "cuda" else "gloo"
        self._limit_s = limit_s
        self._servers: list[Server] = []
        self._name = ""
        self._groups_of: dict[Server, list[str]] = {}
        """Groups that servers hold, or may hold."""
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._is_open = False

    def buckets(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """As they are."""
        return buckets

    async def prepare(self, targets: Targets, stream: BucketStream) -> None:
        """Gather the first bucket. A group can be built only with servers that answer, which pausing them shows."""
        stream.begin()

    async def deliver(self, targets: Targets, stream: BucketStream) -> None:
        """Build the group if the servers are others than in the last push; then one request for all buckets."""
        if targets.servers != self._servers:
            await self._connect(targets)
        self._is_open = True
        await targets.all(_open_update)
        await self._send(targets, stream)
        await targets.all(_close_update)
        self._is_open = False

    async def leave(self, targets: Targets) -> None:
        """Close the update, if one is open (a server that runs would end its requests first), and leave the group."""
        self._drop()
        if self._is_open:
            with suppress(PushFailed):
                await targets.all(_close_update)
            self._is_open = False
        await self._leave_groups(targets)

    async def _leave_groups(self, targets: Targets) -> None:
        """Let servers forget every group that they were in; one that gives no answer is asked again another time."""

        async def leave(server: ServerClient, place: int) -> None:
            for name in self._groups_of.get(targets.servers[place], []):
                with suppress(RolloutError):  # it never joined
                    await server.destroy_weights_update_group(group_name=name)
            self._groups_of.pop(targets.servers[place], None)

        with suppress(PushFailed):
            await targets.all(leave)

    def _drop(self) -> None:
        self._servers, self._store = [], None
        group, self._group = self._group, None
        if group is not None:
            if self._backend == "nccl":
                group.abort()
            dist.destroy_process_group(group)

    async def _connect(self, targets: Targets) -> None:
        # Imported here: SGLang takes seconds, and only rank 0 needs its way of making a group.
        from sglang.srt.utils.common import init_custom_process_group

        holders = {*self._servers, *targets.servers}.intersection(self._groups_of)
        self._drop()
        await self._leave_groups(targets.of(list(holders)))
        self._name = name = f"weights_{uuid.uuid4().hex}"  # a server takes no name twice
        world_size = 1 + self._ranks_per_server * len(targets.servers)
        timeout = datetime.timedelta(seconds=self._limit_s)
        self._store = _listen(self._host, self._port, timeout)
        port = self._store.port

        joined: list[Any] = []

        def join() -> None:
            # A client of its own, so that the thread does not keep the store alive.
            client = dist.TCPStore(self._host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            with _environment(NCCL_ENVIRONMENT if self._backend == "nccl" else {}):
                joined.append(
                    init_custom_process_group(
                        backend=self._backend,
                        store=dist.PrefixStore(name, client),
                        world_size=world_size,
                        rank=0,
                        group_name=name,
                        timeout=timeout,
                    )
                )

        names_now = {server.name for server in targets.servers}
        for server in [old for old in self._groups_of if old.name in names_now and old not in targets.servers]:
            del self._groups_of[server]  # it was restarted
        for server in targets.servers:
            self._groups_of.setdefault(server, []).append(name)

        async def server_joins(server: ServerClient, place: int) -> None:
            try:
                await server.init_weights_update_group(
                    master_address=self._host,
                    master_port=port,
                    rank_offset=1 + self._ranks_per_server * place,
                    world_size=world_size,
                    group_name=name,
                    backend=self._backend,
                )
            except RolloutError as error:
                if error.retryable:
                    raise
                raise CollectiveBroke(str(error)) from error

        await targets.all(server_joins, beside=in_daemon_thread(join), release=self._drop)
        self._servers, self._group = targets.servers, joined.pop()
        if self._backend == "gloo":
            _set_pg_timeout(datetime.timedelta(seconds=min(STALL_S, self._limit_s / 2)), self._group)

    async def _send(self, targets: Targets, stream: BucketStream) -> None:
        """Servers load what has arrived while the rest is on its way (sglang_checksum.Arriving)."""
        seconds, sent_s = stream.seconds, time.monotonic()

        async def broadcasts() -> None:
            nonlocal sent_s
            messages = iter(self._messages)
            await in_daemon_thread(self._tell)
            async for bucket in stream.ahead():
                tensors = dict(bucket)
                rows = [row_of_bytes([tensors[name] for name, _, _ in message]) for message in next(messages)]
                start_s = time.perf_counter()
                await in_daemon_thread(partial(self._broadcast, rows))
                seconds["broadcast"] += time.perf_counter() - start_s
                sent_s = time.monotonic()

        async def receive(server: ServerClient, _place: int) -> None:
            try:
                await server.update_weights_from_distributed(group_name=self._name)
            except RolloutError as error:
                if BROKE in str(error):
                    raise CollectiveBroke(str(error)) from error
                raise

        await targets.all(receive, beside=broadcasts(), release=self._drop, last_sign_s=lambda: sent_s)
        seconds["load"] += time.monotonic() - sent_s

    def _held_group(self) -> Any:
        """For a local variable: servers are freed when nobody holds it. None would be the trainer's own group."""
        if self._group is None:
            raise RuntimeError("the group was dropped")
        return self._group

    def _tell(self) -> None:
        plan = [
            [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape in message]
            for messages in self._messages
            for message in messages
        ]
        send_plan(plan, self._held_group(), self._device)

    def _broadcast(self, rows: Sequence[Tensor]) -> None:
        """Returns when servers have all of it; a group that nobody takes it from raises within its time limit."""
        group, start_s = self._held_group(), time.perf_counter()
        for work in few_at_once(partial(dist.broadcast, row, src=0, group=group, async_op=True) for row in rows):
            if self._backend == "gloo":
                work.wait()  # no longer than the group's time limit
            while not work.is_completed():
                if time.perf_counter() > start_s + self._limit_s:
                    raise TimeoutError(f"broadcast took more than {self._limit_s:g} s")
                time.sleep(0.0005)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """These environment variables, for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _listen(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A rendezvous on this address alone; torch by itself would listen on every interface."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise RolloutError(
            f"cluster.weight_port={port}: cannot be bound on {host} ({error.strerror}); stop what listens there, or "
            "set it to another port or to 0 for a free one"
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def widest_first(items: Iterable[Any]) -> list[Any]:
    """(name, tensor) or specs in an order in which each begins, in a row, at a multiple of its element's size."""
    return sorted(items, key=lambda item: -item[1].itemsize)


def messages_of(bucket: Iterable[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """A bucket's tensors in the messages that go to the servers."""
    specs = widest_first(bucket)
    for run in runs(map(spec_bytes, specs), MESSAGE_BYTES):
        yield specs[run.start : run.stop]


def row_of_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors one after the other: their own memory where they lie so, else a copy."""
    first = tensors[0]
    start = end = first.data_ptr()
    for tensor in tensors:
        if not tensor.is_contiguous() or tensor.data_ptr() != end:
            return torch.cat([bytes_of(t) for t in tensors])
        end += tensor.nbytes
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return torch.cat([bytes_of(t) for t in tensors])
    row = torch.empty(0, dtype=torch.uint8, device=first.device)
    return row.set_(storage, start - storage.data_ptr(), (end - start,))  # type: ignore[call-overload]


class Disk:
    """A Hugging Face directory in the run's folder, which all servers must see; deleted when they have loaded it."""

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        *,
        companions_from: Path,
        quantization_config: Mapping[str, Any] | None,
    ) -> None:
        """Of tensors of these specs, with that config.json."""
        self._dir = folder.resolve() / "pushed_weights"
        self._specs = list(specs)
        self._companions_from, self._quantization_config = companions_from, quantization_config

    def buckets(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """On the CPU, as the servers read them."""
        for bucket in buckets:
            yield [(name, tensor.cpu()) for name, tensor in bucket]

    async def prepare(self, targets: Targets, stream: BucketStream) -> None:
        """Write the directory."""
        tensors = (item for bucket in iter(stream.take, None) for item in bucket)

        def write() -> None:
            shutil.rmtree(self._dir, ignore_errors=True)
            write_hf_dir(
                self._dir,
                self._specs,
                tensors,
                companions_from=self._companions_from,
                quantization_config=self._quantization_config,
            )

        start_s = time.perf_counter()
        await in_daemon_thread(write)
        stream.seconds["write"] += time.perf_counter() - start_s

    async def deliver(self, targets: Targets, stream: BucketStream) -> None:
        """One request to each server."""

        async def load(server: ServerClient, _place: int) -> None:
            await server.update_weights_from_disk(self._dir)

        start_s = time.perf_counter()
        try:
            await targets.all(load)
        finally:
            shutil.rmtree(self._dir, ignore_errors=True)
        stream.seconds["load"] += time.perf_counter() - start_s

    async def leave(self, targets: Targets) -> None:
        """Nothing is left on a server."""


class _Opened:
    """Pickles as the call that opens a rank's staging buffer."""

    def __init__(self, handle: tuple[Any, ...]) -> None:
        self._handle = handle

    def __reduce__(self) -> tuple[Any, ...]:
        return self._handle


class Ipc:
    """CUDA memory of the trainer that servers on the same devices open, so that each device gets its bytes once.

    Each rank stages a bucket in one buffer, which is shared once and kept for the run. A buffer for each bucket would
    not do: torch counts the readers of shared memory and never gives back what a lost server did not open.

    Server i (server_i) shares the devices of trainer ranks i * ranks_per_server and following, in this order
    (process.assign_devices).
    """

    def __init__(
        self, recipe: Recipe, specs: Sequence[TensorSpec], *, bucket_bytes: int, device: torch.device
    ) -> None:
        """Of buckets on this device that are no larger than bucket_bytes, or than the largest of these tensors."""
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in specs]
        self._num_bytes = min(sum(sizes), max(bucket_bytes, *sizes))
        self._ranks_per_server, self._device = recipe.ranks_per_server, device
        self._staging: Tensor | None = None
        self._handles: list[Any] = []
        self._staged: deque[list[Any]] = deque()
        self._is_delivering = False
        self._free = threading.Semaphore(0)

    def buckets(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """Copy each bucket to every rank's staging buffer when servers have loaded the one before."""
        staging = self._share_once()
        is_first = dist.get_rank() == 0
        for bucket in buckets:
            num_bytes = torch.zeros(1, dtype=torch.int64, device=self._device)
            if is_first:
                num_bytes += self._stage(bucket, staging)
            dist.broadcast(num_bytes, src=0)
            if int(num_bytes):  # 0: the attempt has failed, and nobody loads it
                dist.broadcast(staging[: int(num_bytes)], src=0)
                torch.cuda.synchronize(self._device)
                dist.barrier()  # every device has it
            yield bucket
        torch.cuda.empty_cache()

    def _share_once(self) -> Tensor:
        if self._staging is None:
            self._staging = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
            self._handles = [None] * dist.get_world_size()
            dist.all_gather_object(self._handles, self._handle_of(self._staging))
        return self._staging

    def _handle_of(self, staging: Tensor) -> tuple[Any, ...]:
        """What opens it in another process: a function and its arguments."""
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
        from torch.multiprocessing import reductions

        monkey_patch_torch_reductions()  # names the device by its UUID: a server numbers devices in its own way
        handle: tuple[Any, ...] = reductions.reduce_tensor(staging)
        return handle

    def _stage(self, bucket: Bucket, staging: Tensor) -> int:
        """On rank 0, in the stream's thread: wait for the buffer, fill it; returns its bytes, 0 after a failure."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        if self._is_delivering:
            self._free.acquire()
        if not self._is_delivering:
            return 0
        metadata, start = [], 0
        for name, tensor in widest_first(bucket):
            data = bytes_of(tensor)
            end = start + data.numel()
            staging[start:end].copy_(data)
            metadata.append(
                FlattenedTensorMetadata(
                    name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=end - start
                )
            )
            start = end
        self._staged.append(metadata)
        return start

    async def prepare(self, targets: Targets, stream: BucketStream) -> None:
        """Nothing."""

    async def deliver(self, targets: Targets, stream: BucketStream) -> None:
        """One request per bucket, with the handles of the devices that the server has."""
        await targets.all(_open_update)
        self._staged.clear()
        self._free = threading.Semaphore(1)
        self._is_delivering = True
        try:
            async for _ in stream.ahead():
                start_s = time.perf_counter()
                await self._load(targets, self._staged.popleft())
                stream.seconds["load"] += time.perf_counter() - start_s
                self._free.release()
        finally:
            self._is_delivering = False
            self._free.release()  # the stream's thread may wait
        await targets.all(_close_update)
        torch.cuda.empty_cache()

    async def _load(self, targets: Targets, metadata: list[Any]) -> None:
        from sglang.srt.utils import MultiprocessingSerializer

        async def load(server: ServerClient, place: int) -> None:
            first = self._ranks_per_server * int(targets.servers[place].name.rpartition("_")[2])
            await server.update_weights_from_tensor(
                [
                    MultiprocessingSerializer.serialize(
                        {"flattened_tensor": _Opened(handle), "metadata": metadata}, output_str=True
                    )
                    for handle in self._handles[first : first + self._ranks_per_server]
                ]
            )

        await targets.all(load)

    async def leave(self, targets: Targets) -> None:
        """Close the update."""
        with suppress(PushFailed):
            await targets.all(_close_update)
