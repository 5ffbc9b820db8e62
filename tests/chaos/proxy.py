"""An HTTP proxy before each SGLang server of a run, which does to chosen requests what a fault would do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gspo_megatron.engine import session_members
from gspo_megatron.fleet import Server
from tests.e2e.launching import listener_at, server_process

HOST = "127.0.0.1"
SLOW_S, NEVER_S = 2.0, 3600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to which request."""

    do: str
    """To the server, before the request goes on to it: kill, kill_all (every server), kill_and_take_port, stop.
    To the server, as its answer arrives: kill_after. In place of the server: slow (the answer comes later), silent
    (no answer ever), status_500, reset (of the connection), swallow (success, but the server hears nothing of it).
    To the answer: one of FALSIFY."""
    on: str = "generate"
    """Endpoint."""
    server: str | None = None
    """Name; None for all."""
    pushes: int = 1
    """From the time on that the server, over all its incarnations, was pushed to this often."""
    nth: int = 1
    """Of the requests that match all this: the first that it happens to."""
    times: int | None = 1
    """To so many requests; None for all from then on."""


def _wrong_version(answer: dict[str, Any]) -> None:
    for span in answer["meta_info"]["weight_versions"]:
        span["version"] = str(int(span["version"]) + 7)


def _older_version(answer: dict[str, Any]) -> None:
    for span in answer["meta_info"]["weight_versions"]:
        span["version"] = str(int(span["version"]) - 1)


def _logprob(value: float | None) -> Callable[[dict[str, Any]], None]:
    def set_first(answer: dict[str, Any]) -> None:
        answer["meta_info"]["output_token_logprobs"][0][0] = value

    return set_first


FALSIFY: dict[str, Callable[[dict[str, Any]], None]] = {
    "wrong_version": _wrong_version,
    "older_version": _older_version,
    "nan_logprob": _logprob(float("nan")),
    "null_logprob": _logprob(None),  # how SGLang's JSON says NaN
    "fewer_logprobs": lambda answer: answer["meta_info"]["output_token_logprobs"].pop(),
    "fewer_ids": lambda answer: answer["output_ids"].pop(),
}
"""What is changed in the first response of an answer of /generate."""


class Chaos:
    """The proxies of a launch, in a thread of their own."""

    def __init__(self, faults: list[Fault], log_path: Path) -> None:
        """Nothing happens before put_before; what happens then is written to the log, one JSON line a fault."""
        self._faults, self._log_path = faults, log_path
        self._pushes: Counter[str] = Counter()
        self._matched: Counter[int] = Counter()
        self._urls: dict[str, str] = {}
        self._taken: list[socket.socket] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def put_before(self, server: Server) -> Server:
        """Start a proxy; returns the server as the trainer is to see it."""
        self._urls[server.name] = server.url
        port = asyncio.run_coroutine_threadsafe(self._start(server), self._loop).result(10)
        return replace(server, url=f"http://{HOST}:{port}")

    async def _start(self, server: Server) -> int:
        unlimited = aiohttp.ClientTimeout(total=None)
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=unlimited)

        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, server, session)

        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{endpoint:.*}", handle)
        # A client that gives up ends its request on the server, as it would without a proxy.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        return int(runner.addresses[0][1])

    async def _handle(self, request: web.Request, server: Server, session: aiohttp.ClientSession) -> web.Response:
        body, endpoint = await request.read(), request.match_info["endpoint"]
        do = self._fault(endpoint, server)
        if do == "status_500":
            return web.Response(status=500, text="injected")
        if do == "reset":
            return _reset(request)
        if do == "swallow":
            return web.json_response({"success": True, "message": "injected"})
        if do in ("kill", "kill_all", "kill_and_take_port", "stop"):
            self._hurt(do, server)
        await asyncio.sleep({"slow": SLOW_S, "silent": NEVER_S}.get(do, 0.0))
        headers = {"Content-Type": request.headers.get("Content-Type", "text/plain")}
        try:
            url = server.url + request.path_qs
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                status, content_type, data = answer.status, answer.content_type, await answer.read()
        except aiohttp.ClientError:
            return _reset(request)
        if endpoint == "continue_generation" and status == 200:
            self._pushes[server.name] += 1
        if do == "kill_after":
            self._hurt("kill", server)
        if do in FALSIFY:
            answers = json.loads(data)
            FALSIFY[do](answers[0])
            data = json.dumps(answers).encode()
        return web.Response(status=status, body=data, content_type=content_type)

    def _fault(self, endpoint: str, server: Server) -> str:
        """What is to happen to this request; "" for nothing."""
        for i, fault in enumerate(self._faults):
            is_meant = fault.on == endpoint and fault.server in (None, server.name)
            if not is_meant or self._pushes[server.name] < fault.pushes:
                continue
            self._matched[i] += 1
            count = self._matched[i] - fault.nth
            if count >= 0 and (fault.times is None or count < fault.times):
                hurt = list(self._urls) if fault.do == "kill_all" else [server.name]
                with self._log_path.open("a") as log:
                    log.write(json.dumps({"time_s": time.time(), "hurt": hurt, "do": fault.do}) + "\n")
                return fault.do
        return ""

    def _hurt(self, do: str, server: Server) -> None:
        for url in self._urls.values() if do == "kill_all" else [server.url]:
            process = server_process(url)
            if process is None:  # it is just being restarted
                continue
            if do == "stop":
                for pid in session_members(process.pid):
                    os.kill(pid, signal.SIGSTOP)
                continue
            process.kill()
            if do == "kill_and_take_port":
                self._taken.append(listener_at(url))


def _reset(request: web.Request) -> web.Response:
    """Close the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
