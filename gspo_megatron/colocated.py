"""Colocated servers: trainer and SGLang share devices and take turns, so that nothing is on a device twice.

| turn     | the trainer's memory                                       | a server's memory on the device |
|----------|------------------------------------------------------------|---------------------------------|
| train    | device: weights, optimizer state, gradients                | none, it sleeps                 |
| push     | host: weights, optimizer state; device: buckets            | weights                         |
| generate | host: weights, optimizer state                             | weights, keys and values        |

1. take_devices, after the rollouts. The servers pause and release everything; then the trainer comes back from the
   host. Servers cannot give memory while a request runs: collect and evaluate have ended theirs, and a pause sends a
   health probe, or what was not aborted yet, back to the queue.
2. leave_devices, after the optimizer steps. The trainer goes to the host, and its gradients are given up.
3. The push wakes the servers' weights, then fills them bucket by bucket from the host's copies. Weights are never on a
   device twice, which they would be if the trainer sent them from there. That also is why a server that was
   restarted can be pushed to while the others generate.
4. Verified, keys and values wake, and the server goes on.

A run starts in the train turn: supervisor.py puts the servers to sleep before it announces them. One that is lost is
started again only when the trainer is away (fleet.are_devices_held), for it boots with everything that it needs; the
trainer does not come back before all are there and asleep.

Left on the devices in every turn, for which rollout.sglang.mem_fraction_static has to leave room: CUDA's contexts,
communicators, small buffers, and the servers' CUDA graphs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp

from gspo_megatron.config import Recipe
from gspo_megatron.convert.shards import Shard
from gspo_megatron.engine import ALL_MEMORY, RolloutError, ServerClient
from gspo_megatron.fleet import REREAD_S, Fleet, Server

if TYPE_CHECKING:
    from gspo_megatron.mcore.model import Policy
    from gspo_megatron.mcore.offload import Offload


class Colocated:
    """Whose turn it is. Every rank holds one; rank 0's alone talks to servers."""

    def __init__(self, policy: Policy, offload: Offload, recipe: Recipe, fleet: Fleet | None) -> None:
        """In the train turn.

        Args:
            policy: as offload's.
            offload: its memory is on the device.
            recipe: cluster's limits.
            fleet: rank 0's, all of its servers announced and asleep; None elsewhere.
        """
        self._policy, self._offload, self._fleet = policy, offload, fleet
        cluster = recipe.cluster
        self._timeout_s = cluster.probe_timeout_s
        self._return_limit_s = min(recipe.return_limit_s, cluster.collective_timeout_s)
        servers = [] if fleet is None else fleet.hold_devices()
        self._names = {server.name for server in servers}
        self._asleep: dict[Server, set[str]] = {server: set(ALL_MEMORY) for server in servers}

    @property
    def is_trainers_turn(self) -> bool:
        """Whether the trainer's memory is on the devices."""
        return self._offload.is_on_device

    def shards(self) -> list[Shard]:
        """This rank's shards as they are while the trainer is away: data is the host's copy."""
        return [replace(shard, data=self._offload.on_host(shard.data)) for shard in self._policy.shards()]

    def take_devices(self) -> None:
        """Put the servers to sleep, then bring the trainer back; nothing where it is there. Collective over all ranks.

        Raises:
            RolloutError: a server is lost and not back in time, so that its memory may be in use.
        """
        if self.is_trainers_turn:
            return
        self._policy.parallel.on_rank_0(self._put_servers_to_sleep)
        self._policy.parallel.on_every_rank(self._offload.to_device)

    def leave_devices(self) -> None:
        """Move the trainer to the host; nothing where it is there. Collective over all ranks."""
        if not self.is_trainers_turn:
            return
        self._policy.parallel.on_every_rank(self._offload.to_host)
        if self._fleet is not None:
            self._fleet.free_devices()

    def is_asleep(self, server: Server) -> bool:
        """Whether a server lacks some of its memory. On rank 0."""
        return bool(self._asleep.get(server))

    async def wake(self, server: Server, client: ServerClient, tags: Sequence[str]) -> None:
        """Give a server the memory of those tags that sleep; the trainer is away.

        Raises:
            RolloutError: it did not answer.
        """
        assert self._fleet is not None and not self.is_trainers_turn
        asleep = self._asleep.get(server, set())
        waking = [tag for tag in tags if tag in asleep]
        if waking:
            await client.resume_memory_occupation(waking)
            asleep.difference_update(waking)
        if not asleep:
            self._fleet.set_asleep(server, False)

    def _put_servers_to_sleep(self) -> None:
        assert self._fleet is not None
        deadline = time.monotonic() + self._return_limit_s
        while (problems := self._try_to_put_to_sleep(self._fleet)) and time.monotonic() < deadline:
            self._fleet.free_devices()
            time.sleep(REREAD_S)
        if problems:
            raise RolloutError(
                f"the trainer did not get its devices back from the servers within {self._return_limit_s:g} s "
                f"(cluster.start_timeout_s + probe_timeout_s): {'; '.join(problems)}"
            )

    def _try_to_put_to_sleep(self, fleet: Fleet) -> list[str]:
        """What stands against it; none: all servers of the run are asleep, and none can be started."""
        servers = fleet.hold_devices()
        missing = sorted(self._names - {server.name for server in servers})
        if missing:
            return [f"{name}: lost and not back" for name in missing]
        failures = asyncio.run(self._sleep(servers))
        for server, reason in failures.items():
            fleet.reject(server, f"does not release its memory: {reason}", needs_restart=True)
        if not failures and fleet.hold_devices() != servers:  # one was withdrawn meanwhile, and may be booting
            return ["a server is being restarted"]
        return [f"{server.name}: {reason}" for server, reason in failures.items()]

    async def _sleep(self, servers: list[Server]) -> dict[Server, str]:
        """Why servers did not go to sleep."""
        async with aiohttp.ClientSession() as session:
            results = await asyncio.gather(*(self._sleep_one(server, session) for server in servers))
        return {server: reason for server, reason in zip(servers, results, strict=True) if reason is not None}

    async def _sleep_one(self, server: Server, session: aiohttp.ClientSession) -> str | None:
        assert self._fleet is not None
        client = ServerClient(session, server.url, timeout_s=self._timeout_s)
        asleep = self._asleep.setdefault(server, set())
        self._fleet.set_asleep(server, True)
        try:
            await client.pause_generation("retract")
            awake = [tag for tag in ALL_MEMORY if tag not in asleep]
            if awake:
                await client.release_memory_occupation(awake)
                asleep.update(awake)
        except RolloutError as error:
            return str(error)
        return None
