"""Which servers get requests: announcements, pushes, rejections."""

import json

import pytest

from gspo_megatron import fleet as fleet_module
from gspo_megatron.fleet import (
    Fleet,
    Server,
    announce,
    are_devices_held,
    is_asleep,
    is_probed,
    read_restart_request,
    read_servers,
    withdraw,
)

A0, B0 = (Server(name=f"server_{i}", url=f"http://host:{i}", incarnation=0) for i in range(2))
A1 = Server(name="server_0", url="http://host:7", incarnation=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_module, "REREAD_S", 0.0)
    for server in (A0, B0):
        announce(tmp_path, server)
    return tmp_path


def test_announced_servers_are_read_back_by_name_and_without_what_was_withdrawn(folder):
    (folder / ".server_2.json.tmp").write_text("{")
    assert read_servers(folder) == [A0, B0]
    withdraw(folder, "server_0")
    withdraw(folder, "server_0")
    assert read_servers(folder) == [B0]


def test_no_server_is_ready_before_a_push_to_it_was_verified(folder):
    fleet = Fleet(folder)
    assert (fleet.ready(), fleet.wanting()) == ([], [A0, B0])
    fleet.begin_push(0)
    assert fleet.ready() == []
    fleet.confirm([A0], 0)
    assert (fleet.ready(), fleet.wanting()) == ([A0], [B0])
    assert fleet.is_ready(A0)
    assert not fleet.is_ready(B0)


def test_server_that_a_push_did_not_reach_is_no_longer_ready(folder):
    fleet = Fleet(folder)
    fleet.confirm([A0, B0], 0)
    fleet.begin_push(1)
    assert (fleet.weight_version, fleet.newest_version) == (0, 1)
    fleet.confirm([A0], 1)
    assert (fleet.ready(), fleet.wanting(), fleet.newest_version) == ([A0], [B0], 1)


def test_restarted_server_is_another_one_that_wants_the_weights(folder):
    fleet = Fleet(folder)
    fleet.confirm([A0, B0], 3)
    announce(folder, A1)
    assert (fleet.ready(), fleet.wanting()) == ([B0], [A1])


def test_rejected_server_wants_weights_and_after_three_times_a_restart(folder):
    fleet, rejected = Fleet(folder), []
    fleet.on_reject(rejected.append)
    for times in range(1, 4):
        fleet.confirm([A0, B0], 0)
        assert read_restart_request(folder, A0) is None
        fleet.reject(A0, f"reason {times}")
        assert fleet.ready() == [B0]
        assert fleet.wanting() == ([A0] if times < 3 else [])
    assert rejected == [A0] * 3
    assert read_restart_request(folder, A0) == "reason 3"
    assert read_restart_request(folder, A1) is None, "the request is for one incarnation"
    assert json.loads((folder / "server_0.restart.json").read_text())["incarnation"] == 0
    announce(folder, A1)
    assert fleet.wanting() == [A1]


def test_who_holds_the_devices_sees_who_is_announced_at_that_moment(folder, monkeypatch):
    fleet = Fleet(folder)
    monkeypatch.setattr(fleet_module, "REREAD_S", 1e9)
    assert fleet.announced() == [A0, B0]
    withdraw(folder, "server_1")
    assert not are_devices_held(folder)
    assert fleet.hold_devices() == [A0]
    assert are_devices_held(folder)
    assert read_servers(folder) == [A0], "the mark is no server"
    fleet.free_devices()
    fleet.free_devices()
    assert not are_devices_held(folder)


def test_sleep_of_a_server_is_told_by_its_name(folder):
    fleet = Fleet(folder)
    fleet.set_asleep(A0, True)
    assert (is_asleep(folder, "server_0"), is_asleep(folder, "server_1")) == (True, False)
    assert read_servers(folder) == [A0, B0], "the mark is no server"
    fleet.set_asleep(A1, False)
    assert not is_asleep(folder, "server_0")


def test_server_that_sleeps_or_is_paused_is_not_probed(folder):
    fleet = Fleet(folder)
    for mark in (lambda on: fleet.set_asleep(A0, on), lambda on: fleet.set_paused([A0], on)):
        mark(True)
        assert (is_probed(folder, "server_0"), is_probed(folder, "server_1")) == (False, True)
        assert read_servers(folder) == [A0, B0], "the mark is no server"
        mark(False)
        assert is_probed(folder, "server_0")


def test_rejection_can_ask_for_a_restart_at_once(folder):
    fleet = Fleet(folder)
    fleet.reject(A0, "does not release its memory", needs_restart=True)
    assert read_restart_request(folder, A0) == "does not release its memory"
    assert fleet.announced() == [B0]
