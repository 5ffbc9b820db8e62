"""Who is held to have failed in a weight push, and what a server has to have received."""

import asyncio
import threading
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_megatron.checksum import bytes_of
from gspo_megatron.config import load_recipe
from gspo_megatron.convert.shards import MESSAGES_AHEAD, runs
from gspo_megatron.engine import RolloutError
from gspo_megatron.fleet import Server
from gspo_megatron.sglang_checksum import BROKE, Arriving, CopyingByMemcpy
from gspo_megatron.threads import in_daemon_thread
from gspo_megatron.transports import (
    Broadcast,
    BucketStream,
    CollectiveBroke,
    PushFailed,
    Targets,
    messages_of,
    row_of_bytes,
    widest_first,
)
from gspo_megatron.weight_sync import check_received

SERVERS = [Server(name=f"server_{i}", url=f"http://host:{i}", incarnation=0) for i in range(3)]


async def answers():
    await asyncio.sleep(0.01)


async def refuses():
    raise RolloutError("status 400: no")


async def loses_connection():
    raise RolloutError("ServerDisconnectedError", retryable=True)


async def is_silent():
    await asyncio.sleep(60)


def ask(behaviours, limit_s=0.3, beside=None, **options):
    async def run():
        if beside is not None:
            options["beside"] = in_daemon_thread(beside)
        async with aiohttp.ClientSession() as session:
            targets = Targets(session, SERVERS, limit_s=limit_s)
            await targets.all(lambda _client, place: behaviours[place](), **options)

    asyncio.run(run())


def failed(behaviours, **options):
    with pytest.raises(PushFailed) as caught:
        ask(behaviours, **options)
    return {server.name: reason for server, reason in caught.value.reasons.items()}, caught.value.are_silent


def test_all_servers_that_answer_are_no_failure():
    ask([answers, answers, answers], beside=lambda: None)


def test_server_that_is_silent_or_lost_is_to_blame_and_not_the_one_that_refused_beside_it():
    assert failed([answers, loses_connection, answers]) == ({"server_1": "ServerDisconnectedError"}, True)
    assert failed([refuses, is_silent, answers]) == ({"server_1": "no answer within 0.3 s"}, True)
    assert failed([refuses, loses_connection, answers]) == ({"server_1": "ServerDisconnectedError"}, True)
    assert failed([answers, refuses, answers]) == ({"server_1": "status 400: no"}, False)


def test_servers_that_wait_for_a_lost_one_are_released_and_not_blamed():
    async def run():
        released = asyncio.Event()

        async def waits():
            await released.wait()
            raise RolloutError("status 400: broken collective")

        behaviours = [waits, loses_connection, waits]
        async with aiohttp.ClientSession() as session:
            targets = Targets(session, SERVERS, limit_s=30.0)
            await targets.all(lambda _client, place: behaviours[place](), release=released.set)

    start_s = time.monotonic()
    with pytest.raises(PushFailed) as caught:
        asyncio.run(run())
    assert [server.name for server in caught.value.reasons] == ["server_1"]
    assert time.monotonic() - start_s < 10.0


def test_server_that_refuses_is_to_blame_and_not_those_whose_collective_breaks_for_it():
    async def breaks():
        raise CollectiveBroke("status 400: the broadcast broke")

    assert failed([breaks, refuses, is_silent], release=lambda: None) == ({"server_1": "status 400: no"}, False)
    assert failed([breaks, is_silent, answers], release=lambda: None)[0] == {"server_1": "no answer within 0.3 s"}
    assert list(failed([breaks, loses_connection, refuses], release=lambda: None)[0]) == ["server_1"]
    assert list(failed([breaks, answers, breaks], release=lambda: None)[0]) == ["server_0", "server_2"]


def test_failure_of_the_trainers_own_side_is_an_error_that_says_so():
    def fails():
        raise ValueError("own")

    with pytest.raises(RolloutError, match="trainer's side of a weight push failed: ValueError: own"):
        ask([answers, answers, answers], beside=fails)
    assert failed([answers, loses_connection, answers], beside=fails)[0] == {"server_1": "ServerDisconnectedError"}
    blocked = threading.Event()
    with pytest.raises(RolloutError, match="was not done within 0.2 s"):
        ask([answers, answers, answers], beside=partial(blocked.wait, 60), limit_s=0.2)
    blocked.set()


def test_thread_is_not_waited_for_when_the_loop_ends():
    release = threading.Event()

    async def run():
        in_daemon_thread(release.wait)

    start_s = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - start_s < 5.0
    release.set()


def test_error_in_the_thread_is_raised_where_it_is_awaited():
    async def run():
        await in_daemon_thread(lambda: [][0])

    with pytest.raises(IndexError):
        asyncio.run(run())


def test_error_in_the_thread_keeps_nothing_alive_that_the_function_held():
    class Group:
        pass

    held = []

    def fails():
        group = Group()
        held.append(weakref.ref(group))
        raise ValueError

    async def run():
        future = in_daemon_thread(fails)
        await asyncio.wait([future])
        return future

    future = asyncio.run(run())
    assert held[0]() is None and isinstance(future.exception(), ValueError)


def make_stream(count, log):
    def buckets():
        for i in range(count):
            log.append(i)
            yield [(f"t{i}", torch.full((3,), float(i)))]

    return BucketStream(buckets(), defaultdict(float))


def test_next_bucket_is_gathered_while_one_is_sent_and_no_further():
    log: list[int] = []
    stream = make_stream(4, log)

    async def run():
        seen = []
        async for ((name, _),) in stream.ahead():
            await asyncio.sleep(0.05)
            seen.append((name, list(log)))
        return seen

    assert asyncio.run(run()) == [
        ("t0", [0, 1]),
        ("t1", [0, 1, 2]),
        ("t2", [0, 1, 2, 3]),
        ("t3", [0, 1, 2, 3]),
    ]
    assert list(stream.checksums.resolve()) == ["t0", "t1", "t2", "t3"]


def test_drained_stream_has_been_at_its_end_whatever_was_taken():
    for taken in range(4):
        log: list[int] = []
        stream = make_stream(3, log)
        for _ in range(taken):
            stream.take()
        stream.drain()
        assert log == [0, 1, 2]
        assert stream.take() is None


def test_every_tensor_of_a_bucket_begins_at_a_multiple_of_its_element():
    bucket = [
        ("a", torch.zeros(3, dtype=torch.float8_e4m3fn)),
        ("b", torch.zeros(5, dtype=torch.bfloat16)),
        ("c", torch.zeros(1)),
        ("d", torch.zeros(7, dtype=torch.bfloat16)),
    ]
    start = 0
    for _, tensor in widest_first(bucket):
        assert start % tensor.itemsize == 0
        start += tensor.nbytes
    assert [name for name, _ in widest_first(bucket)] == ["c", "b", "d", "a"]


def test_bytes_are_sent_from_where_they_lie_if_they_lie_in_a_row():
    whole = torch.arange(24, dtype=torch.float32)
    parts = [whole[2:5], whole[5:6].view(1, 1), whole[6:10].view(2, 2)]
    row = row_of_bytes(parts)
    assert row.data_ptr() == parts[0].data_ptr()
    assert torch.equal(row.view(torch.float32), whole[2:10])
    for others in ([whole[2:5], whole[6:7]], [whole[5:6], whole[2:5]], [whole[:8].view(2, 4).t(), whole[8:9]]):
        copy = row_of_bytes(others)
        assert torch.equal(copy.view(torch.float32), torch.cat([t.flatten() for t in others]))
        copy.zero_()
        assert whole[1] == 1.0 and whole[23] == 23.0


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(0, 50), max_size=100), least_bytes=st.integers(1, 100))
def test_runs_are_everything_in_order_and_none_is_larger_than_it_has_to_be(sizes, least_bytes):
    found = list(runs(sizes, least_bytes))
    assert [i for run in found for i in run] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in run[:-1]) < least_bytes for run in found)
    assert all(sum(sizes[i] for i in run) >= least_bytes for run in found[:-1])


class Broadcasts:
    """Stands in for torch.distributed.broadcast on the receiving side: message i is bytes of i."""

    def __init__(self, breaks_at=None):
        self.log, self.rows, self.breaks_at = [], [], breaks_at

    def __call__(self, row, *, src, group, async_op):
        self.rows.append(row.data_ptr())
        self.log.append(f"begin {len(self.rows) - 1}")
        return Work(self, row, len(self.rows) - 1)


class Work:
    def __init__(self, broadcasts, row, i):
        self.broadcasts, self.row, self.i = broadcasts, row, i

    def wait(self):
        if self.i == self.broadcasts.breaks_at:
            raise RuntimeError("closed")
        self.row.fill_(self.i)
        self.broadcasts.log.append(f"there {self.i}")


def arrive(monkeypatch, broadcasts, count, rows=None):
    monkeypatch.setattr("torch.distributed.broadcast", broadcasts)
    rows = [torch.empty(0, dtype=torch.uint8)] * (MESSAGES_AHEAD + 1) if rows is None else rows
    plan = [[(f"a{i}", "float32", [2, 3]), (f"b{i}", "uint8", [5])] for i in range(count)]
    return Arriving(plan, None, torch.device("cpu"), rows)


def test_tensor_of_a_message_is_given_when_it_is_there_and_no_more_than_a_few_are_waited_for(monkeypatch):
    broadcasts = Broadcasts()
    arriving = arrive(monkeypatch, broadcasts, 6)
    for name, tensor in arriving:
        broadcasts.log.append(name)
        assert tensor.view(torch.uint8).unique().tolist() == [int(name[1])]
        assert tensor.shape == ((2, 3) if name[0] == "a" else (5,))
    first = [*(f"begin {i}" for i in range(4)), "there 0", "a0", "b0", "begin 4", "there 1", "a1", "b1"]
    assert broadcasts.log[: len(first)] == first
    assert broadcasts.log[-3:] == ["there 5", "a5", "b5"]
    with pytest.raises(RuntimeError, match="draft model"):
        list(arriving)


def test_memory_of_messages_is_used_again_unless_someone_still_holds_it(monkeypatch):
    broadcasts = Broadcasts()
    rows = [torch.empty(0, dtype=torch.uint8)] * (MESSAGES_AHEAD + 1)
    for count in (20, 10):
        for _ in arrive(monkeypatch, broadcasts, count, rows):
            pass
    assert len(set(broadcasts.rows)) == MESSAGES_AHEAD + 1
    held = {name: tensor[1:] for name, tensor in arrive(monkeypatch, Broadcasts(), 20, rows) if int(name[1:]) % 3 == 0}
    for name, tensor in held.items():
        assert tensor.view(torch.uint8).unique().tolist() == [int(name[1:])]


def test_broadcast_that_breaks_is_named_so(monkeypatch):
    with pytest.raises(RuntimeError, match=f"{BROKE}: closed"):
        list(arrive(monkeypatch, Broadcasts(breaks_at=2), 4))


def test_message_is_of_neighbours_and_the_widest_come_first():
    bucket = [("a", torch.bfloat16, (3, 2**23)), ("b", torch.float32, (1,)), ("c", torch.bfloat16, (2**25 + 1,))]
    bucket += [("d", torch.bfloat16, (7,)), ("e", torch.float8_e4m3fn, (5,))]
    messages = [[name for name, _, _ in message] for message in messages_of(bucket)]
    assert messages == [["b", "a", "c"], ["d", "e"]]


def test_copy_by_memcpy_is_torchs_copy():
    source = torch.arange(24.0).view(4, 6)
    targets = [torch.zeros(4, 6), torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(6, 4).t(), torch.zeros(2, 4, 6)]
    targets += [torch.zeros(8, 6)[2:6], torch.nn.Parameter(torch.zeros(4, 6)).data]
    for target in targets:
        wanted = torch.zeros_like(target).copy_(source)
        with CopyingByMemcpy():
            assert target.copy_(source) is target
        assert torch.equal(target, wanted)
    with CopyingByMemcpy():
        target = torch.zeros(6, 4).copy_(source.t())
        one = torch.zeros(1).copy_(source[1:2, 1])
    assert torch.equal(target, source.t()) and one == 7.0


def test_dropped_group_is_an_error_and_not_the_trainers_own_group():
    recipe = load_recipe(Path("recipes/gspo-tiny-moe-cpu.yaml"))
    transport = Broadcast(recipe, [], device=torch.device("cpu"), limit_s=1.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="dropped"):
            transport._broadcast([torch.zeros(1)])
    finally:
        dist.destroy_process_group()


def test_time_limit_counts_from_the_last_sign_of_progress():
    start_s = time.monotonic()

    ended = []

    async def takes_long():
        await asyncio.sleep(0.8)
        ended.append(1)

    def sign():
        return min(time.monotonic(), start_s + 0.7)

    with suppress(PushFailed):
        ask([takes_long, answers, answers], limit_s=0.3, last_sign_s=sign)
    assert ended == [1], "not given up before"
    start_s = time.monotonic()
    assert failed([takes_long, answers, is_silent], last_sign_s=lambda: start_s)[0] == {
        "server_0": "no answer within 0.3 s",
        "server_2": "no answer within 0.3 s",
    }


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
def test_bytes_of_a_tensor_whatever_its_strides(shape):
    spread = torch.arange(60, dtype=torch.float64).as_strided(shape, [7] * len(shape))
    assert bytes_of(spread).view(torch.float64).tolist() == spread.flatten().tolist()


SENT = {"a": "01", "b": "02", "c": "03"}


@pytest.mark.parametrize(
    ("received", "message"),
    [
        ({"a": "01", "b": "02"}, "rank 1: c did not arrive"),
        ({"a": "01", "b": "ff", "c": "03"}, "rank 1: b differs"),
        (SENT | {"d": "04"}, "rank 1: d was not sent"),
        (SENT | {"unfilled x.w13_weight": ""}, "rank 1: unfilled x.w13_weight"),
        ({}, "rank 1: a did not arrive, b did not arrive, c did not arrive"),
        (SENT | {f"n{i}": "" for i in range(9)}, "n4 was not sent and 4 more"),
    ],
)
def test_everything_sent_and_nothing_else_has_to_arrive_on_every_rank(received, message):
    check_received([SENT, dict(SENT)], SENT)
    with pytest.raises(RolloutError, match=message):
        check_received([SENT, received], SENT)
