"""The supervisor with real servers: what is lost comes back as another incarnation, or the run ends with one error."""

import io
import os
import re
import signal
import time

import pytest
from rich.console import Console

from gspo_megatron import fleet as fleet_module
from gspo_megatron import supervisor as supervisor_module
from gspo_megatron.config import load_recipe
from gspo_megatron.engine import session_members
from gspo_megatron.fleet import NO_VERSION, Fleet, hold_devices, read_servers, set_asleep, set_paused
from gspo_megatron.launch import server_ports
from gspo_megatron.process import RunError
from gspo_megatron.supervisor import Supervisor
from tests.e2e.conftest import RECIPES
from tests.e2e.launching import MARK, listener_at, server_process, still_running, two_ports
from tests.e2e.test_sglang_server import call

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def output():
    return io.StringIO()


@pytest.fixture(scope="module")
def supervisor(model_dir, output, tmp_path_factory):
    """Two servers that were started as in a full run."""
    overrides = [
        f"model.hf_dir={model_dir}",
        f"model.load={model_dir}",
        "cold_start=null",
        f"output_dir={tmp_path_factory.mktemp('runs')}",
        "cluster.rollout_servers=2",
        f"cluster.server_port={two_ports()}",
        "cluster.max_restarts=2",
        "cluster.probe_timeout_s=15",
    ]
    recipe = load_recipe(RECIPES / "gspo-tiny-moe-cpu.yaml", overrides)
    supervisor = Supervisor(
        recipe,
        model_dir=model_dir,
        load_format="dummy",
        weight_version=NO_VERSION,
        ports=server_ports(recipe),
        console=Console(file=output, width=500),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(recipe.run_dir))
        with supervisor:
            supervisor.start()
            assert len(still_running(str(recipe.run_dir))) >= 2 * 3
            yield supervisor
    assert not still_running(str(recipe.run_dir))
    assert read_servers(supervisor.folder) == []


def urls(supervisor):
    return {server.name: server.url for server in read_servers(supervisor.folder)}


def check_until(supervisor, is_done):
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline
        supervisor.check()
        time.sleep(0.1)


def error_about(name, supervisor, meanwhile=lambda: None):
    """The error that ends a run because of this server."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < deadline
        meanwhile()
        try:
            supervisor.check()
        except RunError as error:
            if name in str(error):
                return str(error)
        time.sleep(0.1)


def incarnations(supervisor):
    return {server.name: server.incarnation for server in read_servers(supervisor.folder)}


def test_killed_and_hung_servers_come_back_as_other_incarnations(supervisor, output):
    before = read_servers(supervisor.folder)
    assert [(s.name, s.incarnation) for s in before] == [("server_0", 0), ("server_1", 0)]
    assert [call(s.url, "weight_version") for s in before] == [NO_VERSION] * 2
    killed, hung = (server_process(s.url) for s in before)
    (scheduler,) = (p for p in hung.children() if "scheduler" in p.name())
    hold_devices(supervisor.folder, True)
    killed.kill()
    os.kill(scheduler.pid, signal.SIGSTOP)  # its HTTP process goes on answering what needs no token
    check_until(supervisor, lambda: "server_0" not in urls(supervisor))
    for mark in (set_asleep, set_paused):
        mark(supervisor.folder, "server_1", True)
        for _ in range(5):
            supervisor._places[1].next_probe_s = 0.0
            supervisor.check()
            assert supervisor._places[1].probe is None, "a server that sleeps or is paused is not probed"
            time.sleep(0.1)
        mark(supervisor.folder, "server_1", False)
    assert not list(supervisor.folder.parent.glob("logs/*.1.log")), "none is started while the trainer has the devices"
    hold_devices(supervisor.folder, False)
    with listener_at(before[0].url):  # for a moment, as by connections that are still closing
        check_until(supervisor, lambda: incarnations(supervisor).get("server_0") != 0)
        time.sleep(1.0)
        supervisor.check()
    assert "server_0" not in urls(supervisor), "withdrawn while it starts"
    check_until(supervisor, lambda: incarnations(supervisor) == {"server_0": 1, "server_1": 1})
    assert [s.url for s in read_servers(supervisor.folder)] == [s.url for s in before], "the recipe names the ports"
    assert not session_members(killed.pid) and not session_members(hung.pid)
    assert [call(url, "weight_version") for url in urls(supervisor).values()] == [NO_VERSION] * 2
    text = output.getvalue()
    assert "server_0 (" in text and "is restarted: its process ended with status -9" in text
    assert "is restarted: no health probe succeeded for 15 s (cluster.probe_timeout_s)" in text
    assert text.count("SGLang ready again (restart 1)") == 2
    logs = sorted(path.name for path in (supervisor.folder.parent / "logs").iterdir())
    assert logs == ["server_0.1.log", "server_0.log", "server_1.1.log", "server_1.log"]


def test_the_trainers_request_a_taken_port_and_too_many_losses(supervisor, output, monkeypatch):
    monkeypatch.setattr(supervisor_module, "PORT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(fleet_module, "REREAD_S", 0.0)
    fleet = Fleet(supervisor.folder)
    asked, killed = fleet.announced()
    for _ in range(fleet_module.MAX_REJECTIONS):
        fleet.reject(asked, "its log-probs are NaN")
    server_process(killed.url).kill()
    with listener_at(killed.url):
        error = error_about("server_1", supervisor)
    assert re.search("server_1 was lost .*status -9.* cannot be restarted .*port is in use", error)
    assert f"server_0 ({asked.url}) is restarted: the trainer asked for it: its log-probs are NaN" in output.getvalue()

    def kill_again():
        process = server_process(asked.url)
        if process is not None:
            process.kill()

    error = error_about("server_0", supervisor, kill_again)
    assert re.search(r"server_0 .* was lost 3 times within an hour \(cluster.max_restarts=2\): 1\. ", error)
    assert "the trainer asked for it: its log-probs are NaN; " in error
    assert "before it was ready" in error and error.endswith(".log")
