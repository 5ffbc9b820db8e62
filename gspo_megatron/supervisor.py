"""Keeps this node's SGLang servers up: starts, probes and restarts them, and says which there are (fleet.py).

Servers that share the trainer's devices are announced asleep at first, since the trainer has the devices first. One
that sleeps is not probed, and none is started while the trainer has the devices (colocated.py).
One that a weight push pauses is not probed either: it may wait there for another one that hangs.

A server is restarted when its process ended, when no health probe of it succeeds for cluster.probe_timeout_s, and when
the trainer asks for it. It boots as it did at first, so the trainer has to push to it before it gets requests.

There is no router before the servers. The client has to know which server it talks to (weights, group affinity), and
sglang-router 0.3.2 passes on only the request fields that it knows, so that return_routed_experts would be lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from gspo_megatron.config import ConfigError, Recipe
from gspo_megatron.engine import Engine, RolloutError, take_port
from gspo_megatron.fleet import (
    NO_VERSION,
    Server,
    announce,
    are_devices_held,
    hold_devices,
    is_probed,
    read_restart_request,
    set_asleep,
    set_paused,
    withdraw,
)
from gspo_megatron.process import RunError, assign_devices

PROBE_INTERVAL_S = 5.0
"""Between the end of a health probe and the next one."""
PORT_TIMEOUT_S = 30.0
"""For the port of a lost server to become free; its connections may still be closing."""
RESTART_WINDOW_S = 3600.0
"""cluster.max_restarts counts within it."""


@dataclass(kw_only=True, slots=True)
class _Place:
    """One server of this node through all its incarnations. The main thread changes all but `engine`."""

    name: str
    port: int
    cuda_devices: str
    incarnation: int = 0
    engine: Engine | None = None
    bring_up: Future[Engine] | None = None
    """None while it is announced."""
    probe: Future[None] | None = None
    next_probe_s: float = 0.0
    failing_since_s: float = float("inf")
    """When the first probe since the last success began."""
    probe_problem: str = "no answer"
    losses: list[tuple[float, str]] = field(default_factory=list)
    """When and why, within RESTART_WINDOW_S."""


class Supervisor:
    """The servers of this node; leaving the context stops them.

    Starting and probing happen in threads; start, check and stop belong to one thread.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model_dir: Path,
        load_format: str,
        weight_version: int,
        ports: Sequence[int],
        console: Console,
    ) -> None:
        """Nothing is started yet.

        Args:
            recipe: cluster, rollout.sglang and what else Engine.start uses.
            model_dir, load_format, weight_version: as Engine.start, for every incarnation.
            ports: of each server at first. A restarted one gets the same, or a free one if cluster.server_port is 0.
            console: one line for each server that is ready, lost or back.

        Raises:
            ConfigError: there are too few CUDA devices.
        """
        self._recipe, self._model_dir, self._console = recipe, model_dir, console
        self._load_format, self._weight_version = load_format, weight_version
        self.folder = recipe.run_dir / "servers"
        """Where the servers are announced."""
        _, *devices = assign_devices(recipe, os.environ)
        self._places = [
            _Place(name=f"server_{i}", port=port, cuda_devices=cuda_devices)
            for i, (port, cuda_devices) in enumerate(zip(ports, devices, strict=True))
        ]
        # Two each: a probe may still hang while its server is brought up again.
        self._pool = ThreadPoolExecutor(max_workers=2 * len(self._places), thread_name_prefix="supervisor")
        self._stopping = threading.Event()
        self._start_lock = threading.Lock()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all servers, wait until each answers, and announce them.

        Raises:
            ConfigError: a port is taken.
            RolloutError: a server did not become ready; one that never did is not restarted.
        """
        futures = []
        hold_devices(self.folder, False)  # a run that was killed may have left it so
        for place in self._places:
            place.bring_up = self._pool.submit(self._bring_up, place)
            futures.append(place.bring_up)
        with self._console.status(f"starting {len(futures)} SGLang server(s)"):
            wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()
        # With another version they have weights, for a run without a trainer.
        trainer_is_first = self._recipe.cluster.placement == "colocated" and self._weight_version == NO_VERSION
        hold_devices(self.folder, trainer_is_first)
        for place, future in zip(self._places, futures, strict=True):
            engine = future.result()
            if trainer_is_first:
                engine.sleep(self._recipe.cluster.probe_timeout_s)
            set_asleep(self.folder, place.name, trainer_is_first)
            self._announce(place, engine)

    def check(self) -> None:
        """Restart what needs it and announce what is back. To be called several times a second; does not wait.

        Raises:
            RunError: a server was lost more often than cluster.max_restarts allows, or its port is taken.
        """
        for place in self._places:
            if place.bring_up is None:
                reason = self._fault(place)
                if reason is not None:
                    self._restart(place, reason)
            elif place.bring_up.done():
                self._end_bring_up(place, place.bring_up)

    def stop(self) -> None:
        """End all servers with all that they started. Safe to call twice.

        Raises:
            RolloutError: a process does not end although it was killed.
        """
        self._stopping.set()
        with self._start_lock:  # no server is started from here on
            engines = [place.engine for place in self._places if place.engine is not None]
        for place in self._places:
            withdraw(self.folder, place.name)
        with ThreadPoolExecutor(max_workers=max(1, len(engines))) as pool:
            list(pool.map(Engine.stop, engines))
        self._pool.shutdown(cancel_futures=True)

    def _bring_up(self, place: _Place) -> Engine:
        """Runs in a thread: end the last incarnation, start the next one, wait until it answers."""
        port, lost = place.port, place.engine
        if lost is not None:
            lost.stop(limit_s=0.0)  # it may be stopped or hang, and then would not end by itself
        while are_devices_held(self.folder) and not self._stopping.is_set():
            time.sleep(0.2)
        if lost is not None:  # last: what else wants the port has it by now
            port = self._free_port(place.port) if self._recipe.cluster.server_port else 0
        number = f".{place.incarnation}" if place.incarnation else ""
        with self._start_lock:
            if self._stopping.is_set():
                raise RolloutError(f"{place.name}: not started, since the run ends")
            engine = place.engine = Engine.start(
                self._recipe,
                model_dir=self._model_dir,
                load_format=self._load_format,
                weight_version=self._weight_version,
                port=port,
                log_path=self._recipe.run_dir / "logs" / f"{place.name}{number}.log",
                cuda_devices=place.cuda_devices,
            )
        engine.wait_ready(self._recipe.cluster.start_timeout_s)
        return engine

    def _free_port(self, port: int) -> int:
        deadline = time.monotonic() + PORT_TIMEOUT_S
        while True:
            try:
                return take_port(self._recipe.cluster.host, port)
            except ConfigError:
                if time.monotonic() > deadline or self._stopping.is_set():
                    raise
            time.sleep(0.2)

    def _end_bring_up(self, place: _Place, bring_up: Future[Engine]) -> None:
        try:
            engine = bring_up.result()
        except RolloutError as error:
            self._restart(place, str(error))
        except ConfigError as error:
            reason = _first_line(place.losses[-1][1])
            raise RunError(
                f"{place.name} was lost ({reason}) and cannot be restarted within {PORT_TIMEOUT_S:g} s: {error}"
            ) from error
        else:
            self._announce(place, engine)

    def _announce(self, place: _Place, engine: Engine) -> None:
        place.bring_up = place.probe = None
        place.next_probe_s, place.failing_since_s = time.monotonic() + PROBE_INTERVAL_S, float("inf")
        announce(self.folder, Server(name=place.name, url=engine.url, incarnation=place.incarnation))
        again = f" again (restart {place.incarnation})" if place.incarnation else ""
        self._console.print(f"SGLang ready{again} at {engine.url}", soft_wrap=True)

    def _fault(self, place: _Place) -> str | None:
        """Why an announced server has to be restarted; None if it need not."""
        engine = place.engine
        assert engine is not None
        if not engine.is_alive():
            return f"its process ended with status {engine.process.returncode}"
        server = Server(name=place.name, url=engine.url, incarnation=place.incarnation)
        request = read_restart_request(self.folder, server)
        if request is not None:
            return f"the trainer asked for it: {request}"
        if not is_probed(self.folder, place.name):  # a probe would wait; the trainer itself watches it meanwhile
            place.probe, place.next_probe_s = None, time.monotonic() + PROBE_INTERVAL_S
            place.failing_since_s = float("inf")
            return None
        return self._probe(place, engine)

    def _probe(self, place: _Place, engine: Engine) -> str | None:
        now, timeout_s = time.monotonic(), self._recipe.cluster.probe_timeout_s
        if place.probe is not None and place.probe.done():
            error = place.probe.exception()
            if error is None:
                place.failing_since_s = float("inf")
            else:
                place.probe_problem = str(error)
            place.probe, place.next_probe_s = None, now + PROBE_INTERVAL_S
        if place.probe is None and now >= place.next_probe_s:
            place.probe = self._pool.submit(engine.check_health, timeout_s)
            place.failing_since_s = min(place.failing_since_s, now)
        if now - place.failing_since_s <= timeout_s:
            return None
        return f"no health probe succeeded for {timeout_s:g} s (cluster.probe_timeout_s): {place.probe_problem}"

    def _restart(self, place: _Place, reason: str) -> None:
        assert place.engine is not None
        withdraw(self.folder, place.name)
        set_asleep(self.folder, place.name, False)
        set_paused(self.folder, place.name, False)
        now, limit = time.monotonic(), self._recipe.cluster.max_restarts
        place.losses = [loss for loss in place.losses if now - loss[0] < RESTART_WINDOW_S] + [(now, reason)]
        where = f"{place.name} ({place.engine.url})"
        if len(place.losses) > limit:
            reasons = "; ".join(f"{i}. {_first_line(text)}" for i, (_, text) in enumerate(place.losses, start=1))
            raise RunError(
                f"SGLang server {where} was lost {len(place.losses)} times within an hour "
                f"(cluster.max_restarts={limit}): {reasons}; see {place.engine.log_path}"
            )
        self._console.print(f"SGLang server {where} is restarted: {_first_line(reason)}", soft_wrap=True)
        place.incarnation += 1
        place.bring_up = self._pool.submit(self._bring_up, place)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
