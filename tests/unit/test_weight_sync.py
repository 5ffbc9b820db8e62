"""The thread that the collectives of a weight push run in."""

import asyncio
import sys
import threading
import time

import pytest

from gspo_megatron.engine import RolloutError
from gspo_megatron.weight_sync import _in_daemon_thread


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
