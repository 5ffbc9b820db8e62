"""Buckets of a weight push, and the thread that its collectives run in."""

import asyncio
import sys
import threading
import time

import pytest
import torch

from gspo_megatron.engine import RolloutError
from gspo_megatron.weight_sync import _in_daemon_thread, buckets


def tensors(*sizes):
    return [(f"t{i}", torch.full((n,), float(i))) for i, n in enumerate(sizes)]


def test_buckets_keep_order_and_limit_and_lose_nothing():
    stream = tensors(3, 2, 1, 9, 1)
    cut = list(buckets(iter(stream), max_bytes=5 * 4))
    assert [[name for name, _ in bucket] for bucket in cut] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert [pair for bucket in cut for pair in bucket] == stream
    assert list(buckets(iter([]), max_bytes=4)) == []


def test_failed_call_is_not_kept_waiting_by_a_blocked_collective():
    release = threading.Event()

    async def refuse():
        await asyncio.sleep(0.05)
        raise RolloutError("refused")

    async def push():
        await asyncio.gather(refuse(), _in_daemon_thread(release.wait))

    start_s = time.monotonic()
    with pytest.raises(RolloutError, match="refused"):
        asyncio.run(push())
    assert time.monotonic() - start_s < 5.0
    release.set()


def test_error_in_the_thread_is_an_error_of_the_push(monkeypatch):
    seen, has_seen = [], threading.Event()  # the thread reports first and is unwound after

    def hook(args):
        seen.append(args.exc_value)
        has_seen.set()

    monkeypatch.setattr(threading, "excepthook", hook)

    async def push():
        await _in_daemon_thread(lambda: sys.getrefcount())

    with pytest.raises(RolloutError, match="weight push failed"):
        asyncio.run(push())
    assert has_seen.wait(timeout=10)
    assert isinstance(seen[0], TypeError)
