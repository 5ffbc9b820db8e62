"""Megatron shards -> Hugging Face named buckets -> running SGLang servers; each push is verified before it counts.

One attempt, on the servers that it is for: pause generation and set their version to NO_VERSION, so that nothing
they say counts; bring all tensors (transports.py); compare what each of a server's ranks received with what was sent,
name by name (sglang_checksum.py); set the version and resume. A server that fails is rejected (fleet.py), and the
attempt is made again with the others. Every wait has a limit: no longer than a health probe may take, so that the
supervisor of the servers and the trainer agree on what hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from gspo_megatron.config import Recipe
from gspo_megatron.convert.fp8_io import Fp8Export, fp8_config
from gspo_megatron.convert.shards import Gatherer
from gspo_megatron.engine import ALL_MEMORY, WEIGHTS, RolloutError, ServerClient
from gspo_megatron.fleet import NO_VERSION, Fleet, Server
from gspo_megatron.sglang_checksum import UNFILLED
from gspo_megatron.transports import Broadcast, Bucket, BucketStream, Disk, Ipc, PushFailed, Targets, Transport

if TYPE_CHECKING:
    from gspo_megatron.colocated import Colocated
    from gspo_megatron.mcore.model import Policy

logger = logging.getLogger(__name__)

BUCKET_BYTES = 512 * 2**20
"""Bytes of one bucket, or the largest tensor. Rank 0 holds two, and a third where the bytes of the one sent have to be
brought in a row; a server holds five messages (transports.MESSAGE_BYTES, or a larger tensor). On a CPU they keep that
memory between pushes."""
PAUSE_LIMIT_S = 15.0
"""A server that is asked to pause answers between two batches."""
TICK_S = 5.0
"""Rank 0 waits this long for a server before it lets the other ranks, which wait in a collective, look up."""
MAX_ATTEMPTS = 8
"""Failed ones of one push."""
SHOWN = 5
"""Tensors that a message names."""


class WeightSync:
    """The way of the policy's weights to the servers. All ranks hold one and call its methods together."""

    def __init__(
        self, policy: Policy, recipe: Recipe, fleet: Fleet | None, colocated: Colocated | None = None
    ) -> None:
        """Exchange the shards' addresses. Collective over the default group.

        Args:
            policy: whose weights are pushed.
            recipe: its cluster and rollout sections are used.
            fleet: the servers, on rank 0; None on the others, and on rank 0 of a run without servers.
            colocated: where servers share the trainer's devices.
        """
        self._policy, self._fleet, self._colocated = policy, fleet, colocated
        cluster = recipe.cluster
        self._limit_s = recipe.push_limit_s
        self._pause_limit_s = min(self._limit_s, PAUSE_LIMIT_S)
        self._wait_s = recipe.return_limit_s
        self._pause_mode, self._flush_cache = recipe.rollout.pause_mode, recipe.rollout.flush_cache
        shards = policy.shards() if colocated is None else colocated.shards()
        self._gatherer = Gatherer(shards, policy.ops, device=policy.parallel.device)
        self._fp8 = None
        specs, quantization_config = self._gatherer.specs, None
        if recipe.rollout.serve_fp8:
            quantization_config = fp8_config(specs)
            self._fp8 = Fp8Export(specs, quantization_config)
            specs = self._fp8.specs
        self._transport: Transport
        if cluster.weight_transport == "broadcast":
            plan = self._gatherer.plan(BUCKET_BYTES)
            if self._fp8 is not None:
                plan = [self._fp8.specs_of(specs) for specs in plan]
            self._transport = Broadcast(recipe, plan, device=policy.parallel.device, limit_s=self._limit_s)
        elif cluster.weight_transport == "ipc":
            self._transport = Ipc(
                recipe, self._gatherer.specs, bucket_bytes=BUCKET_BYTES, device=policy.parallel.device
            )
        else:
            companions_from = Path(recipe.model.hf_dir)
            self._transport = Disk(
                recipe.run_dir, specs, companions_from=companions_from, quantization_config=quantization_config
            )
        self._has_servers = policy.parallel.on_rank_0(lambda: fleet is not None)
        self._weight_version = NO_VERSION
        self._targets: list[Server] = []
        self._paused: set[Server] = set()
        self._failed: dict[Server, str] = {}
        self._num_failed_attempts = 0
        self._num_reached = 0
        self._deadline_s = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        """Of rank 0, summed over all pushes: gather, checksum (both beside the rest), broadcast or write, load,
        verify, total."""

    def push(self, weight_version: int) -> int:
        """Send every tensor to every server and verify it there. Collective over the default group.

        Returns when every announced server that did not fail meanwhile has the weights; there is at least one.

        Args:
            weight_version: what the servers report from now on.

        Returns:
            weight_version.

        Raises:
            RolloutError: on rank 0: no server took the weights; names each and says why. OtherRankFailed on the
                others.
        """
        if not self._has_servers:
            return weight_version
        self._weight_version = weight_version
        if self._fleet is not None:
            self._fleet.begin_push(weight_version)
        self._run(self._choose_all)
        return weight_version

    def bring_up(self) -> None:
        """Bring the current weights to the servers that lack them; the others go on. Collective, as push.

        A server that fails is rejected, so that it comes again, or is restarted.

        Raises:
            RolloutError: the trainer's own part failed.
        """
        if self._has_servers and self._weight_version != NO_VERSION:
            self._run(self._choose_wanting)

    def close(self) -> None:
        """Leave the servers. Rank 0 only has work to do."""
        fleet = self._fleet
        if fleet is None or self._weight_version == NO_VERSION:
            return

        async def leave() -> None:
            async with _session() as session:
                await self._transport.leave(Targets(session, fleet.ready(), limit_s=self._pause_limit_s))

        asyncio.run(leave())

    def _run(self, choose: Callable[[], bool | None]) -> None:
        """Attempts until choose finds nothing more to do. Rank 0 decides, all ranks gather."""
        parallel = self._policy.parallel
        if self._colocated is not None:
            self._colocated.leave_devices()
        else:
            self._policy.finish_param_sync()
        self._failed, self._num_failed_attempts, self._num_reached = {}, 0, 0
        self._deadline_s = time.monotonic() + self._wait_s
        start_s = time.perf_counter()
        try:
            while (is_chosen := parallel.on_rank_0(choose)) is not False:
                if is_chosen is None:
                    continue
                if parallel.rank != 0:
                    for _ in self._buckets():
                        pass
                parallel.on_rank_0(self._attempt)
        finally:
            if self._paused:  # after an error
                asyncio.run(self._resume(self._paused))
        self.seconds["total"] += time.perf_counter() - start_s

    def _buckets(self) -> Iterator[Bucket]:
        return self._transport.buckets(self._hf_buckets())

    def _hf_buckets(self) -> Iterator[Bucket]:
        for bucket in self._gatherer.buckets(BUCKET_BYTES):
            yield bucket if self._fp8 is None else list(self._fp8.tensors(bucket))

    def _choose_all(self) -> bool | None:
        """Targets of the next attempt of a push; False: done; None: no server is there as yet."""
        assert self._fleet is not None
        if self._num_reached:
            return False
        if self._num_failed_attempts >= MAX_ATTEMPTS:
            raise RolloutError(f"no weight push in {MAX_ATTEMPTS} attempts: {self._reasons()}")
        tick_s = min(time.monotonic() + TICK_S, self._deadline_s)
        while not (announced := self._fleet.announced()):
            if time.monotonic() > self._deadline_s:
                raise RolloutError(f"no server to push weights to within {self._wait_s:g} s{self._reasons()}")
            if time.monotonic() > tick_s:
                return None
            time.sleep(0.2)
        self._deadline_s = time.monotonic() + self._wait_s
        self._targets = [server for server in announced if server not in self._failed] or announced
        return True

    def _choose_wanting(self) -> bool:
        assert self._fleet is not None
        self._targets = [server for server in self._fleet.wanting() if server not in self._failed]
        return bool(self._targets)

    def _reasons(self) -> str:
        return "".join(f"\n  {s.name} ({s.url}): {reason}" for s, reason in self._failed.items())

    def _attempt(self) -> None:
        """On rank 0: one attempt on the targets. Those that fail are rejected."""
        assert self._fleet is not None
        stream = BucketStream(self._buckets(), self.seconds)
        try:
            asyncio.run(self._push_to_targets(stream))
        except PushFailed as failure:
            self._num_failed_attempts += 1
            self._reject(failure.reasons)
            asyncio.run(self._clean_up(failure))
        finally:
            stream.drain()

    def _reject(self, reasons: dict[Server, str]) -> None:
        assert self._fleet is not None
        self._failed = {**reasons, **self._failed}  # the first reason of a server is nearest to the cause
        for server, reason in reasons.items():
            self._fleet.reject(server, f"weight push: {reason}")

    async def _push_to_targets(self, stream: BucketStream) -> None:
        assert self._fleet is not None
        async with _session() as session:
            targets = Targets(session, self._targets, limit_s=self._limit_s)
            await self._transport.prepare(targets, stream)
            self._paused |= set(self._targets)
            self._fleet.set_paused(self._targets, True)
            await Targets(session, self._targets, limit_s=self._pause_limit_s).all(self._pause)
            await self._wake(targets, WEIGHTS)
            await self._transport.deliver(targets, stream)
            start_s = time.perf_counter()
            sent = stream.checksums.resolve()

            async def finish(server: ServerClient, _place: int) -> None:
                if self._flush_cache:
                    await server.flush_cache()
                check_received(await server.received_weights(), sent)
                await server.update_weight_version(self._weight_version)
                if (reported := await server.weight_version()) != self._weight_version:
                    raise RolloutError(f"reports weight_version {reported} after a push of {self._weight_version}")

            await targets.all(finish)
            await self._wake(targets, *ALL_MEMORY)
            self.seconds["verify"] += time.perf_counter() - start_s
        failed = await self._resume(self._paused)
        reached = [server for server in self._targets if server not in failed]
        self._num_reached = len(reached)
        self._fleet.confirm(reached, self._weight_version)
        self._reject(failed)

    async def _wake(self, targets: Targets, *tags: str) -> None:
        """Give colocated servers memory that they released to sleep."""
        colocated = self._colocated
        if colocated is not None:
            await targets.all(lambda server, place: colocated.wake(targets.servers[place], server, tags))

    async def _pause(self, server: ServerClient, _place: int) -> None:
        await server.pause_generation(self._pause_mode)
        await server.update_weight_version(NO_VERSION)  # its schedulers answer this one

    async def _clean_up(self, failure: PushFailed) -> None:
        """Leave the other servers paused for the next attempt; let go of those that failed."""
        answering = [s for s in self._targets if not (failure.are_silent and s in failure.reasons)]
        async with _session() as session:
            await self._transport.leave(Targets(session, answering, limit_s=self._pause_limit_s))
        await self._resume(failure.reasons)

    async def _resume(self, servers: Collection[Server]) -> dict[Server, str]:
        """Let those of the servers that are paused generate again; returns why some do not.

        A server without all of its memory stays paused: it would end with the first request.
        """
        assert self._fleet is not None
        paused = sorted(self._paused.intersection(servers), key=lambda server: server.name)
        self._paused.difference_update(paused)
        chosen = [s for s in paused if self._colocated is None or not self._colocated.is_asleep(s)]
        async with _session() as session:
            try:
                targets = Targets(session, chosen, limit_s=self._pause_limit_s)
                await targets.all(lambda server, _place: server.continue_generation())
            except PushFailed as failure:
                return failure.reasons
            finally:
                self._fleet.set_paused(paused, False)
        return {}


def _session() -> aiohttp.ClientSession:
    """A connection for each request: SGLang closes one that is idle for 5 s, and a request that meets that is lost."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))


def check_received(ranks: list[dict[str, str]], sent: dict[str, str]) -> None:
    """Compare what each rank of a server received with what was sent.

    Args:
        ranks: as ServerClient.received_weights.
        sent: checksum of each tensor.

    Raises:
        RolloutError: names tensors that differ, did not arrive, were not sent, and parameters that got nothing.
    """
    for rank, received in enumerate(ranks):
        missing = [f"{name} did not arrive" for name in sent if name not in received]
        differ = [f"{name} differs" for name, value in sent.items() if received.get(name, value) != value]
        surplus = [name for name in received if name not in sent]
        surplus = [name if name.startswith(UNFILLED) else f"{name} was not sent" for name in surplus]
        problems = differ + missing + surplus
        if problems:
            more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            raise RolloutError(f"rank {rank}: {', '.join(problems[:SHOWN])}{more}")
