"""Blocking functions beside an event loop."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(fn: Callable[[], T], *, name: str | None = None) -> asyncio.Future[T]:
    """Run a blocking function; unlike asyncio's own threads it is not waited for when the loop or the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
            done.exception()  # nobody may be left to ask: an earlier error ended the wait
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, failure = None, None
        try:
            result = fn()
        except BaseException as error:  # whoever awaits the future raises it, whatever it is
            failure = error
            traceback.clear_frames(error.__traceback__)  # a process group in them would live as long as the error
        with suppress(RuntimeError):  # the loop is closed: another call has failed, and nobody waits for this one
            loop.call_soon_threadsafe(report, result, failure)

    threading.Thread(target=body, name=name, daemon=True).start()
    return done
