"""The SGLang servers of a run: launch.py says which there are, rank 0 of the trainer decides which get requests.

A server is known by its name and its incarnation, which rises with each restart. launch.py writes one file per server
into the run's folder when it answers; so the trainer needs no other way to the nodes that the servers run on:

    servers/server_0.json              a Server, written by the supervisor (supervisor.py)
    servers/server_0.restart.json      what the trainer has against an incarnation, written by Fleet.reject
    servers/server_0.asleep            a colocated server has no memory on its device now (colocated.py)
    servers/server_0.paused            a weight push is under way on it (weight_sync.py)
    servers/devices_held               nor may a server be started: the trainer has the devices

A server gets requests when, and only when, a push of the current weights to this very incarnation was verified
(weight_sync.py). A restarted server, one that failed, and one that a push did not reach have to be pushed to first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NO_VERSION = -1
"""Reported by a server that was started and not pushed to: no token may come from it."""
REREAD_S = 0.5
"""The announcements are read again after this long."""
DEVICES_HELD = "devices_held"
MAX_REJECTIONS = 3
"""Of one incarnation; then the trainer asks for a restart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running SGLang server."""

    name: str
    url: str
    incarnation: int
    """0 at first, one more with each restart."""


def announce(folder: Path, server: Server) -> None:
    """Make a server that answers known to the trainer."""
    _write(folder / f"{server.name}.json", asdict(server))


def withdraw(folder: Path, name: str) -> None:
    """Take back what announce said: the server is gone."""
    (folder / f"{name}.json").unlink(missing_ok=True)


def read_servers(folder: Path) -> list[Server]:
    """Announced servers, by name."""
    found = []
    for path in folder.glob("*.json"):
        if path.name.endswith(".restart.json"):
            continue
        try:
            found.append(Server(**json.loads(path.read_text())))
        except FileNotFoundError:  # withdrawn meanwhile
            continue
    return sorted(found, key=lambda server: server.name)


def read_restart_request(folder: Path, server: Server) -> str | None:
    """Why the trainer wants this incarnation restarted; None if it does not."""
    try:
        request = json.loads((folder / f"{server.name}.restart.json").read_text())
    except FileNotFoundError:
        return None
    return str(request["reason"]) if request["incarnation"] == server.incarnation else None


def set_asleep(folder: Path, name: str, is_asleep: bool) -> None:
    """Say whether a server sleeps."""
    _set_mark(folder / f"{name}.asleep", is_asleep)


def is_asleep(folder: Path, name: str) -> bool:
    """Whether a server sleeps."""
    return (folder / f"{name}.asleep").exists()


def set_paused(folder: Path, name: str, is_paused: bool) -> None:
    """Say whether a weight push has paused a server."""
    _set_mark(folder / f"{name}.paused", is_paused)


def is_probed(folder: Path, name: str) -> bool:
    """Whether a server is expected to generate when it is asked: it neither sleeps nor is paused."""
    return not is_asleep(folder, name) and not (folder / f"{name}.paused").exists()


def hold_devices(folder: Path, are_held: bool) -> None:
    """Say whether the trainer has the devices of colocated servers, so that none may be started."""
    _set_mark(folder / DEVICES_HELD, are_held)


def are_devices_held(folder: Path) -> bool:
    """Whether no server may be started. Whoever starts one withdraws it first and asks then; whoever holds looks who
    is announced then: so one of them sees the other."""
    return (folder / DEVICES_HELD).exists()


def _set_mark(path: Path, is_set: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if is_set else path.unlink(missing_ok=True)


def _write(path: Path, fields: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    tmp.write_text(json.dumps(fields))
    tmp.rename(path)


class Fleet:
    """Rank 0's knowledge of the servers and their weights. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        """Of the servers announced in a folder."""
        self._folder = folder
        self._lock = threading.Lock()
        self._servers: list[Server] = []
        self._read_s = float("-inf")
        self._confirmed: dict[Server, int] = {}
        self._rejections: Counter[Server] = Counter()
        self._given_up: set[Server] = set()
        self._on_reject: list[Callable[[Server], None]] = []
        self.weight_version = NO_VERSION
        """Of the weights that ready servers have."""
        self.newest_version = NO_VERSION
        """The same, or one more from the start of a push on: the newest that a token can come from."""

    def announced(self) -> list[Server]:
        """Servers that launch.py says are there, but for those that wait for a restart."""
        with self._lock:
            return self._announced()

    def _announced(self) -> list[Server]:
        if time.monotonic() - self._read_s > REREAD_S:
            self._servers, self._read_s = read_servers(self._folder), time.monotonic()
        return [server for server in self._servers if server not in self._given_up]

    def hold_devices(self) -> list[Server]:
        """From now on no server is started; those that are announced at this moment."""
        hold_devices(self._folder, True)
        with self._lock:
            self._read_s = float("-inf")
            return self._announced()

    def free_devices(self) -> None:
        """Servers may be started again."""
        hold_devices(self._folder, False)

    def set_asleep(self, server: Server, is_asleep: bool) -> None:
        """Say whether a server sleeps."""
        set_asleep(self._folder, server.name, is_asleep)

    def set_paused(self, servers: Iterable[Server], are_paused: bool) -> None:
        """Say that a push pauses these, so that they are not probed, or no longer does."""
        for server in servers:
            set_paused(self._folder, server.name, are_paused)

    def ready(self) -> list[Server]:
        """Servers with verified current weights: these and no other may be given requests."""
        with self._lock:
            return [s for s in self._announced() if self._confirmed.get(s) == self.weight_version != NO_VERSION]

    def is_ready(self, server: Server) -> bool:
        """Whether it has verified current weights, as far as the trainer knows."""
        with self._lock:
            return self._confirmed.get(server) == self.weight_version != NO_VERSION

    def wanting(self) -> list[Server]:
        """Servers that are there and have to be pushed to before they get requests."""
        with self._lock:
            return [s for s in self._announced() if self._confirmed.get(s) != self.weight_version]

    def begin_push(self, weight_version: int) -> None:
        """From now on tokens of this version are possible."""
        with self._lock:
            self.newest_version = weight_version

    def confirm(self, servers: list[Server], weight_version: int) -> None:
        """A push to these was verified; servers with another version are no longer ready."""
        with self._lock:
            self.weight_version = self.newest_version = weight_version
            self._confirmed |= dict.fromkeys(servers, weight_version)

    def reject(self, server: Server, reason: str, *, needs_restart: bool = False) -> None:
        """No more requests until it was pushed to again; until it was restarted where that is asked for, or after
        MAX_REJECTIONS."""
        with self._lock:
            if self._confirmed.pop(server, None) is None and server in self._given_up:
                return
            self._rejections[server] += 1
            if needs_restart or self._rejections[server] >= MAX_REJECTIONS:
                self._given_up.add(server)
                request = {"incarnation": server.incarnation, "reason": reason}
                _write(self._folder / f"{server.name}.restart.json", request)
            callbacks = list(self._on_reject)
        logger.warning("%s (%s): takes no more requests: %s", server.name, server.url, reason)
        for callback in callbacks:
            callback(server)

    def on_reject(self, callback: Callable[[Server], None]) -> None:
        """Call back when a server is rejected, in whatever thread did it: its open requests are to go elsewhere."""
        with self._lock:
            self._on_reject.append(callback)
