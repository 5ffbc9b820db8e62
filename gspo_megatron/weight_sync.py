"""Megatron shards -> Hugging Face named buckets -> running SGLang servers, over a collective broadcast.

Source: sglang 0.5.21, `/init_weights_update_group`, `/update_weights_from_distributed` (load_format flattened_bucket).
The broadcast group has this trainer's rank 0 as rank 0 and each server's processes after it: gloo on CPU, NCCL on GPU.
"""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
import torch.distributed as dist
from torch import Tensor

from gspo_megatron.config import Recipe
from gspo_megatron.convert.shards import Gatherer
from gspo_megatron.engine import RolloutError, ServerClient, take_port

if TYPE_CHECKING:
    from gspo_megatron.mcore.model import Policy

BUCKET_BYTES = 512 * 2**20
"""Bytes of one broadcast; what trainer rank 0 and each server hold beside their weights."""
GROUP_NAME = "gspo_megatron_weights"


class WeightSync:
    """The way of the policy's weights to the servers. All ranks hold one and call push together."""

    def __init__(self, policy: Policy, recipe: Recipe, server_urls: Sequence[str]) -> None:
        """Exchange the shards' addresses; rank 0 joins a broadcast group with the servers. Collective.

        Raises:
            RolloutError: a server did not join in time.
        """
        self._policy = policy
        self._urls = list(server_urls)
        self._timeout_s = recipe.cluster.collective_timeout_s
        self._gatherer = Gatherer(policy.shards(), policy.ops)
        self._group: Any = None
        if self._urls:
            policy.parallel.on_rank_0(lambda: self._connect(recipe))

    def push(self, weight_version: int) -> int:
        """Send every tensor, set the version, confirm it. Collective over the default group.

        No request runs when it is called: training is synchronous, so no token can mix two versions.

        Args:
            weight_version: what the servers report from now on.

        Returns:
            weight_version.

        Raises:
            RolloutError: a server refused, or reports another version afterwards.
        """
        if not self._urls:
            return weight_version
        self._policy.finish_param_sync()
        if self._policy.parallel.rank != 0:
            for _ in self._gatherer.buckets(BUCKET_BYTES):
                pass
        return self._policy.parallel.on_rank_0(lambda: self._send(weight_version))

    def close(self) -> None:
        """Leave the broadcast group; rank 0 only has work to do."""
        if self._group is not None:
            asyncio.run(self._on_all(lambda s: s.destroy_weights_update_group(group_name=GROUP_NAME)))
            self._group = None

    def _connect(self, recipe: Recipe) -> None:
        # Imported here: SGLang takes seconds, and only rank 0 needs its way of making a group.
        from sglang.srt.utils.common import init_custom_process_group

        host = recipe.cluster.host
        port = take_port(host, 0)
        world_size = 1 + recipe.ranks_per_server * len(self._urls)
        backend = "nccl" if recipe.device == "cuda" else "gloo"

        timeout = datetime.timedelta(seconds=self._timeout_s)
        # Not by init_method: under torchrun that would look for torchrun's own store at this address.
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout)

        def join() -> None:
            self._group = init_custom_process_group(
                backend=backend,
                store=dist.PrefixStore(GROUP_NAME, store),
                world_size=world_size,
                rank=0,
                group_name=GROUP_NAME,
                timeout=timeout,
            )

        async def servers_join(server: ServerClient) -> None:
            await server.init_weights_update_group(
                master_address=host,
                master_port=port,
                rank_offset=1 + recipe.ranks_per_server * self._urls.index(server.url),
                world_size=world_size,
                group_name=GROUP_NAME,
                backend=backend,
            )

        asyncio.run(self._on_all(servers_join, beside=join))

    def _send(self, weight_version: int) -> int:
        buckets = self._gatherer.buckets(BUCKET_BYTES)
        try:
            asyncio.run(self._on_all(lambda s: s.begin_weight_update()))
            pending: list[tuple[str, Tensor]] = []
            for bucket in buckets:
                if pending:
                    self._broadcast(pending, None)
                pending = bucket
            self._broadcast(pending, weight_version)  # the last bucket carries the version
            asyncio.run(self._on_all(lambda s: s.end_weight_update()))
            asyncio.run(self._on_all(lambda s: self._confirm(s, weight_version)))
        finally:
            for _ in buckets:  # after an error: the other ranks are still sending, and must get to the end
                pass
        return weight_version

    def _broadcast(self, bucket: list[tuple[str, Tensor]], weight_version: int | None) -> None:
        """One bucket as the bytes of its tensors, one after the other (SGLang's FlattenedTensorBucket)."""
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])

        async def receive(server: ServerClient) -> None:
            await server.update_weights_from_distributed(
                names=[name for name, _ in bucket],
                dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                shapes=[list(tensor.shape) for _, tensor in bucket],
                group_name=GROUP_NAME,
                weight_version=weight_version,
                load_format="flattened_bucket",
            )

        asyncio.run(self._on_all(receive, beside=lambda: dist.broadcast(flat, src=0, group=self._group)))

    async def _confirm(self, server: ServerClient, weight_version: int) -> None:
        await server.flush_cache()
        reported = await server.weight_version()
        if reported != weight_version:
            raise RolloutError(f"{server.url}: reports weight_version {reported} after a push of {weight_version}")

    async def _on_all(
        self, call: Callable[[ServerClient], Awaitable[None]], *, beside: Callable[[], Any] | None = None
    ) -> None:
        """call on every server at once, with a blocking function beside it; the first error wins."""
        async with aiohttp.ClientSession() as session:
            servers = [ServerClient(session, url, timeout_s=self._timeout_s) for url in self._urls]
            work = [call(server) for server in servers]
            await asyncio.gather(*work, *([] if beside is None else [_in_daemon_thread(beside)]))


def _in_daemon_thread(fn: Callable[[], Any]) -> asyncio.Future[None]:
    """Run a blocking function; unlike asyncio's own threads it is not waited for when another call has failed."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def report(succeeded: bool) -> None:
        if done.cancelled():
            return
        if succeeded:
            done.set_result(None)
        else:
            done.set_exception(RolloutError("the trainer's side of a weight push failed; its traceback is in the log"))

    def body() -> None:
        succeeded = False
        try:
            fn()
            succeeded = True
        finally:
            if not loop.is_closed():  # closed: another call has failed, and nobody waits for this one
                loop.call_soon_threadsafe(report, succeeded)

    threading.Thread(target=body, daemon=True).start()
    return done
