"""The turns of trainer and colocated servers, with two gloo ranks and a real server.

On a CPU the server answers the calls and keeps its memory; that it pauses and goes on is real, and so are the memory
of the trainer and the order of all that happens.
"""

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions, set_sharing_strategy

from gspo_megatron import weight_sync as weight_sync_module
from gspo_megatron.config import load_recipe
from gspo_megatron.engine import ALL_MEMORY, Engine, RolloutError, ServerClient, post, take_port
from gspo_megatron.fleet import (
    Fleet,
    Server,
    announce,
    are_devices_held,
    is_asleep,
    read_restart_request,
    read_servers,
    withdraw,
)
from gspo_megatron.transports import Ipc, _Opened
from gspo_megatron.weight_sync import WeightSync
from tests.distributed.policy_worker import RECIPE, build, hf_tensors
from tests.distributed.spawn import spawn
from tests.distributed.test_offload import gradients, kept_tensors
from tests.e2e.push_worker import EP2, change
from tests.e2e.test_push import exported, held
from tests.e2e.test_sglang_server import call, push

LIMITS = ("cluster.start_timeout_s=1", "cluster.probe_timeout_s=9")
PROMPT = {"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}


def generate(url: str) -> Any:
    async def ask() -> Any:
        async with aiohttp.ClientSession() as session:
            return await post(session, url + "/generate", PROMPT, timeout_s=100)

    return asyncio.run(ask())


class Recorder:
    """Rank 0's list of what happened, with whether the trainer's memory was on the device then."""

    def __init__(self, policy: Any, optimizer: Any, offload: Any) -> None:
        self.events: list[tuple[str, tuple[str, ...], bool]] = []
        self._tensors = lambda: [*gradients(policy), *kept_tensors(policy, optimizer)]
        for name in ("to_host", "to_device"):
            self._watch(offload, name)
        plain_call = ServerClient._call

        async def recorded_call(client: ServerClient, endpoint: str, **body: Any) -> Any:
            self._add(endpoint, tuple(body.get("tags", ())))
            return await plain_call(client, endpoint, **body)

        ServerClient._call = recorded_call

    def _watch(self, offload: Any, name: str) -> None:
        method = getattr(offload, name)

        def watched() -> None:
            self._add(name, ())
            method()

        setattr(offload, name, watched)

    def _add(self, name: str, tags: tuple[str, ...]) -> None:
        self.events.append((name, tags, any(t.untyped_storage().nbytes() for t in self._tensors())))


class HostIpc(Ipc):
    """Ipc with the host's shared memory in the place of CUDA's: what a server without CUDA opens in the same way."""

    def _share_once(self) -> Tensor:
        if self._staging is None:
            set_sharing_strategy("file_system")
            self._staging = torch.empty(self._num_bytes, dtype=torch.uint8)
            _, (kind, storage, metadata) = reductions.reduce_tensor(self._staging)
            untyped = _Opened(reductions.reduce_storage(storage._untyped_storage))
            typed = _Opened((reductions.rebuild_typed_storage, (untyped, storage.dtype)))
            self._handles = [(reductions.rebuild_tensor, (kind, typed, metadata))]
        return self._staging

    async def _load(self, targets: Any, metadata: list[Any]) -> None:
        assert self._staging is not None
        self._staging.untyped_storage()._shared_incref()  # each opening takes one away
        await super()._load(targets, metadata)


def turns(rank: int, folder: str, server: Server) -> dict[str, Any]:
    """Three train turns, a push and a generate turn between any two of them."""
    weight_sync_module.BUCKET_BYTES = 100_000
    recipe, policy, optimizer = build(EP2)
    from gspo_megatron.colocated import Colocated
    from gspo_megatron.mcore.offload import Offload

    offload = Offload(policy, optimizer)
    recorder = Recorder(policy, optimizer, offload)
    fleet = Fleet(Path(folder)) if rank == 0 else None
    colocated = Colocated(policy, offload, recipe, fleet)
    weight_sync = WeightSync(policy, recipe, fleet, colocated)
    gatherer = weight_sync._gatherer
    weight_sync._transport = HostIpc(recipe, gatherer.specs, bucket_bytes=100_000, device=policy.parallel.device)
    found: dict[str, Any] = {"tokens": [], "held": [], "asleep": []}

    def look() -> None:
        found["held"].append(are_devices_held(Path(folder)))
        found["asleep"].append(is_asleep(Path(folder), server.name))

    for version in range(2):
        colocated.take_devices()
        look()
        change(policy, version)
        found["sent"] = hf_tensors(policy)
        if fleet is not None:
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(generate, server.url)
                time.sleep(0.3)
                assert not answer.done(), "a server that sleeps answers nobody"
                weight_sync.push(version)
                found["tokens"].append(answer.result(60)["meta_info"]["weight_version"])
            assert fleet.ready() == [server]
        else:
            weight_sync.push(version)
        look()
        weight_sync.bring_up()
    colocated.take_devices()
    look()
    found["events"], recorder.events = recorder.events, []
    change(policy, 2)
    found["sent"] = hf_tensors(policy)
    plain, num_loads = ServerClient.update_weights_from_tensor, itertools.count(1)

    async def fails_once(client: ServerClient, payloads: Any) -> None:
        if next(num_loads) == 2:
            raise RolloutError("the second bucket is refused")
        await plain(client, payloads)

    ServerClient.update_weights_from_tensor = fails_once
    weight_sync.push(2)
    return found | {"events_of_two_attempts": recorder.events, "reasons": list(weight_sync._failed.values())}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "servers"


@pytest.fixture
def sleeping(engine: Engine, model_dir: Path, folder: Path) -> Any:
    """The session's server, announced asleep; awake again for the other tests."""
    server = Server(name="server_0", url=engine.url, incarnation=0)
    engine.sleep(60)
    announce(folder, server)
    try:
        yield server
    finally:
        call(engine.url, "continue_generation")
        push(engine.url, load_file(model_dir / "model.safetensors"), weight_version=0)


def test_nothing_is_on_a_device_twice_and_every_turn_begins_when_the_other_has_ended(
    sleeping: Server, folder: Path
) -> None:
    first, second = spawn(turns, 2, str(folder), sleeping, timeout_s=200)
    weights, *rest = ALL_MEMORY
    pushed = [
        ("to_host", (), True),
        *((name, (), False) for name in ("pause_generation", "update_weight_version")),
        ("resume_memory_occupation", (weights,), False),
        *((name, (), False) for name in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update")),
        *((name, (), False) for name in ("flush_cache", "weights_checker", "update_weight_version")),
        ("resume_memory_occupation", tuple(rest), False),
        ("continue_generation", (), False),
    ]
    asleep = [
        ("pause_generation", (), False),
        ("release_memory_occupation", ALL_MEMORY, False),
        ("to_device", (), False),
    ]
    assert first["events"].count(pushed[5]) >= 2 * 3, "several buckets"
    events = [event for event, _ in itertools.groupby(first["events"])]
    assert events == [*pushed, *asleep, *pushed, *asleep]
    assert second["events"] == [pushed[0], asleep[-1], pushed[0], asleep[-1]]
    trainer_is_on, on_server = True, set()
    for name, tags, was_on in events:
        assert was_on == trainer_is_on
        trainer_is_on = name == "to_device" or (trainer_is_on and name != "to_host")
        on_server |= set(tags) if name.startswith("resume") else set()
        on_server -= set(tags) if name.startswith("release") else set()
        assert not (trainer_is_on and on_server)
    assert first["tokens"] == ["0", "1"]
    assert first["held"] == [True, False, True, False, True]
    assert first["asleep"] == [False, False, True, False, True], "the first is the supervisor's to say"
    assert first["reasons"] == ["the second bucket is refused"]
    names = [name for name, _ in itertools.groupby(name for name, _, _ in first["events_of_two_attempts"])]
    attempt = [name for name, _, _ in pushed[:6]]
    again = [name for name in attempt[1:] if name != "resume_memory_occupation"]
    assert names == [*attempt, "end_weight_update", *again, *(name for name, _, _ in pushed[6:])]
    assert held(sleeping.url) == exported(first["sent"])
    assert call(sleeping.url, "weight_version") == 2


async def wake_all(colocated: Any, server: Server) -> None:
    """Without going on."""
    async with aiohttp.ClientSession() as session:
        await colocated.wake(server, ServerClient(session, server.url, timeout_s=60), ALL_MEMORY)


def lost_servers(rank: int, folder: str, server: Server) -> dict[str, Any]:
    """take_devices with a server that does not answer, is late, is lost meanwhile, or never comes back."""
    _, policy, optimizer = build(["cluster.trainer_ranks=1", "parallel.expert_model_parallel_size=1"])
    from gspo_megatron.colocated import Colocated
    from gspo_megatron.mcore.offload import Offload

    path, offload = Path(folder), Offload(policy, optimizer)
    colocated = Colocated(policy, offload, load_recipe(RECIPE, LIMITS), Fleet(path))
    dead = read_servers(path)[0]
    found: dict[str, Any] = {}

    def restart_on_request() -> None:
        while (reason := read_restart_request(path, dead)) is None or are_devices_held(path):
            time.sleep(0.02)
        found["reason"] = reason
        withdraw(path, dead.name)
        announce(path, server)

    threading.Thread(target=restart_on_request, daemon=True).start()
    colocated.leave_devices()
    colocated.take_devices()
    found["is_back"] = colocated.is_trainers_turn and "reason" in found and is_asleep(path, server.name)

    colocated.leave_devices()
    withdraw(path, server.name)
    threading.Timer(1.0, announce, (path, server)).start()
    colocated.take_devices()
    found["is_back_again"] = colocated.is_trainers_turn and read_servers(path) == [server]

    async def lost_meanwhile(client: ServerClient, tags: Any) -> None:
        ServerClient.release_memory_occupation = plain_release
        await client.release_memory_occupation(tags)
        withdraw(path, server.name)
        threading.Timer(1.0, announce, (path, last)).start()

    plain_release, last = ServerClient.release_memory_occupation, replace(server, incarnation=2)
    ServerClient.release_memory_occupation = lost_meanwhile
    colocated.leave_devices()
    asyncio.run(wake_all(colocated, server))
    colocated.take_devices()
    found["is_back_with_the_last"] = colocated.is_trainers_turn and read_servers(path) == [last]

    colocated.leave_devices()
    withdraw(path, server.name)
    try:
        colocated.take_devices()
    except RolloutError as error:
        found["error"] = str(error)
    found["is_away"] = not colocated.is_trainers_turn
    return found


def test_trainer_waits_for_a_lost_server_and_never_shares_with_one_that_may_be_booting(
    sleeping: Server, folder: Path
) -> None:
    withdraw(folder, sleeping.name)
    announce(folder, Server(name="server_0", url=f"http://127.0.0.1:{take_port('127.0.0.1', 0)}", incarnation=0))
    back = Server(name="server_0", url=sleeping.url, incarnation=1)
    (found,) = spawn(lost_servers, 1, str(folder), back, timeout_s=200)
    assert found["reason"].startswith("does not release its memory: POST http://127.0.0.1:")
    assert found["is_back"] and found["is_back_again"] and found["is_back_with_the_last"] and found["is_away"]
    assert found["error"] == (
        "the trainer did not get its devices back from the servers within 10 s "
        "(cluster.start_timeout_s + probe_timeout_s): server_0: lost and not back"
    )
