"""Weight pushes in numbers and under faults: servers hold what was exported, nothing leaks, nobody waits forever."""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from gspo_megatron.config import load_recipe
from gspo_megatron.engine import Engine
from gspo_megatron.fleet import Fleet, Server, announce, withdraw
from gspo_megatron.weight_sync import WeightSync
from tests.distributed.policy_worker import build, hf_tensors
from tests.distributed.spawn import spawn
from tests.e2e.conftest import RECIPES, make_model_dir
from tests.e2e.push_worker import EP2, Fault, Moment, change, push_with_fault
from tests.e2e.test_push import exported, held
from tests.e2e.test_sglang_server import call
from tools.pss import process_memory

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

NUM_RANDOM = 24
NUM_SETTLING, NUM_COUNTED = 30, 100
LIMIT_S = 10.0
"""cluster.probe_timeout_s: how long a push waits for a server."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Engine]]:
    """Starts ready servers without weights; all are stopped in the end."""
    folder = tmp_path_factory.mktemp("servers")
    model_dir = make_model_dir(folder / "model", seed=0)
    overrides = [f"model.hf_dir={model_dir}", f"model.load={model_dir}", "cold_start=null"]
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [*overrides, f"cluster.probe_timeout_s={LIMIT_S}"])
    engines: list[Engine] = []

    def start_one() -> Engine:
        log_path = folder / f"server_{len(engines)}.log"
        engine = Engine.start(
            recipe, model_dir=model_dir, port=0, log_path=log_path, load_format="dummy", weight_version=-1
        )
        engines.append(engine)
        engine.wait_ready(timeout_s=240)
        return engine

    try:
        yield start_one
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="module")
def survivor(start: Callable[[], Engine]) -> Engine:
    return start()


def in_run(folder: Path) -> list[str]:
    return [f"output_dir={folder}", f"cluster.probe_timeout_s={LIMIT_S}", "cluster.start_timeout_s=10"]


def processes_of(engine: Engine) -> list[psutil.Process]:
    main = psutil.Process(engine.process.pid)
    return [main, *main.children(recursive=True)]


def schedulers(engine: Engine) -> list[int]:
    return [p.pid for p in processes_of(engine) if "schedul" in p.name()]


def push_randomly(rank: int, folder: Path, overrides: list[str], seed: int) -> int:
    """Push random weights over random transports, also to a restarted server; compare each time. Returns how often."""
    recipe, policy, _ = build([*EP2, *overrides])
    recipe_of_disk = load_recipe_like(overrides, "cluster.weight_transport=disk")
    fleet = Fleet(folder) if rank == 0 else None
    ways = [WeightSync(policy, r, fleet) for r in (recipe, recipe_of_disk)]
    rng, version, compared = random.Random(seed), 0, 0
    for i in range(NUM_RANDOM):
        if i == NUM_RANDOM // 2:
            (folder / "restart").touch()
            while fleet is not None and (folder / "restart").exists():
                time.sleep(0.2)
        way = rng.choice(ways)
        version += rng.randint(1, 3)
        change(policy, rng.randrange(2**31))
        way.push(version)
        if i == NUM_RANDOM // 2:
            way.bring_up()  # to nobody: the restarted server was pushed to like the others
        tensors = hf_tensors(policy)
        if fleet is not None:
            (server,) = fleet.ready()
            assert held(server.url) == exported(tensors), i
            assert call(server.url, "weight_version") == version
            compared += 1
    for way in ways:
        way.close()
    return compared


def load_recipe_like(overrides: list[str], *more: str) -> Any:
    hf_dir = f"model.hf_dir={RECIPES / 'tiny-moe'}"
    return load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", [hf_dir, *EP2, *overrides, *more])


def test_server_holds_what_was_exported_after_random_pushes_and_a_restart(
    start: Callable[[], Engine], tmp_path: Path
) -> None:
    folder = tmp_path / "servers"
    engine = start()
    announce(folder, Server(name="server_0", url=engine.url, incarnation=0))

    def restart_when_asked() -> None:
        while not (folder / "restart").exists():
            time.sleep(0.2)
        withdraw(folder, "server_0")
        engine.stop()
        announce(folder, Server(name="server_0", url=start().url, incarnation=1))
        (folder / "restart").unlink()

    threading.Thread(target=restart_when_asked, daemon=True).start()
    compared, _ = spawn(push_randomly, 2, folder, in_run(tmp_path), 3, timeout_s=900)
    assert compared == NUM_RANDOM


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the server's processes and this rank's hold."""

    pss_gib: float
    num_fds: int
    shared_memory: int
    """Mappings of files in /dev/shm."""


def measure(pids: list[int]) -> Held:
    memory = [process_memory(pid) for pid in pids]
    return Held(
        pss_gib=sum(m.pss_gib for m in memory if m is not None),
        num_fds=sum(psutil.Process(pid).num_fds() for pid in pids),
        shared_memory=sum(Path(f"/proc/{pid}/maps").read_text().count(" /dev/shm/") for pid in pids),
    )


def push_often(rank: int, folder: Path, overrides: list[str], server_pids: list[int]) -> list[tuple[Held, Held]]:
    """(server, this rank) after the settling pushes and after NUM_COUNTED more."""
    recipe, policy, _ = build([*EP2, *overrides])
    weight_sync = WeightSync(policy, recipe, Fleet(folder) if rank == 0 else None)
    seen = []
    for version in range(NUM_SETTLING + NUM_COUNTED):
        weight_sync.push(version)
        if version in (NUM_SETTLING - 1, NUM_SETTLING + NUM_COUNTED - 1):
            seen.append((measure(server_pids), measure([psutil.Process().pid])))
    weight_sync.close()
    return seen


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_hundred_pushes_leak_no_memory_descriptors_or_shared_memory(
    survivor: Engine, tmp_path: Path, transport: str
) -> None:
    folder = tmp_path / "servers"
    announce(folder, Server(name="server_0", url=survivor.url, incarnation=0))
    overrides = [*in_run(tmp_path), f"cluster.weight_transport={transport}"]
    pids = [process.pid for process in processes_of(survivor)]
    for before, after in spawn(push_often, 2, folder, overrides, pids, timeout_s=900):
        for early, late in zip(before, after, strict=True):
            assert late.pss_gib <= 1.05 * early.pss_gib
            assert late.num_fds <= early.num_fds
            assert late.shared_memory <= early.shared_memory


STOPPED = [(m, who) for m in ("before", "joining", "bucket", "verify") for who in ("main", "scheduler")]


@pytest.mark.parametrize(("moment", "who"), STOPPED)
def test_server_that_hangs_is_left_out_named_and_brought_up_when_it_goes_on(
    start: Callable[[], Engine], survivor: Engine, tmp_path: Path, moment: Moment, who: str
) -> None:
    victim = start()
    pids = [victim.process.pid] if who == "main" else schedulers(victim)
    fault = Fault(moment=moment, signal_number=signal.SIGSTOP, pids=pids)
    try:
        outcome = push_to_two(survivor, victim, tmp_path, fault)
        assert outcome.ready == ("server_0",)
        assert outcome.rejected.startswith("server_1: ")
        assert outcome.seconds < 6 * LIMIT_S
        assert outcome.ready_in_the_end == ("server_0", "server_1")
        assert held(survivor.url) == held(victim.url) == exported(outcome.tensors)
    finally:
        victim.stop()


@pytest.mark.parametrize(("moment", "who"), STOPPED)
def test_server_that_is_killed_is_left_out_and_named(
    start: Callable[[], Engine], survivor: Engine, tmp_path: Path, moment: Moment, who: str
) -> None:
    victim = start()
    pids = [victim.process.pid] if who == "main" else schedulers(victim)
    outcome = push_to_two(survivor, victim, tmp_path, Fault(moment=moment, signal_number=signal.SIGKILL, pids=pids))
    assert outcome.ready == outcome.ready_in_the_end == ("server_0",)
    assert outcome.rejected.startswith("server_1: ")
    assert outcome.seconds < 6 * LIMIT_S
    assert held(survivor.url) == exported(outcome.tensors)


def push_to_two(survivor: Engine, victim: Engine, tmp_path: Path, fault: Fault) -> Any:
    folder = tmp_path / "servers"
    for i, engine in enumerate((survivor, victim)):
        announce(folder, Server(name=f"server_{i}", url=engine.url, incarnation=0))
    outcome, other = spawn(push_with_fault, 2, folder, in_run(tmp_path), fault, timeout_s=300)
    assert outcome.error == other.error == ""
    return outcome


def test_push_to_nobody_but_a_killed_server_is_one_error_that_names_it(
    start: Callable[[], Engine], tmp_path: Path
) -> None:
    victim, folder = start(), tmp_path / "servers"
    announce(folder, Server(name="server_0", url=victim.url, incarnation=0))
    fault = Fault(moment="bucket", signal_number=signal.SIGKILL, pids=[victim.process.pid])
    outcome, other = spawn(push_with_fault, 2, folder, in_run(tmp_path), fault, timeout_s=300)
    assert f"server_0 ({victim.url})" in outcome.error
    assert other.error.startswith("rank 0 failed")
    assert outcome.seconds < 60.0
