"""tools/pss.py on real process trees."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PSS = Path(__file__).parents[2] / "tools" / "pss.py"
ALLOCATE = "block = b'x' * (100 << 20); import time; time.sleep(0.5)"


def run_pss(*args, timeout_s=30):
    return subprocess.run(
        [sys.executable, str(PSS), *args], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def test_peak_counts_the_memory_that_a_child_touches(tmp_path):
    out = tmp_path / "pss.json"
    done = run_pss("--interval", "0.05", "--json", str(out), "--", sys.executable, "-c", ALLOCATE)
    peak = json.loads(out.read_text())["peak"]
    assert done.returncode == 0
    assert 100 <= peak["pss_gib"] * 1024 < 150
    assert peak["pss_gib"] == pytest.approx(sum(p["pss_gib"] for p in peak["processes"]))
    assert f"peak PSS {peak['pss_gib']:.3f} GiB at {peak['time_s']:.1f} s" in done.stderr


def test_memory_shared_by_two_processes_counts_once(tmp_path):
    out = tmp_path / "pss.json"
    fork = "import os\nblock = b'x' * (100 << 20)\nos.fork()\nimport time; time.sleep(0.5)"
    run_pss("--interval", "0.05", "--json", str(out), "--", sys.executable, "-c", fork)
    peak = json.loads(out.read_text())["peak"]
    assert len(peak["processes"]) == 2
    assert 100 <= peak["pss_gib"] * 1024 < 150


def test_an_orphan_in_a_session_of_its_own_still_counts(tmp_path):
    out = tmp_path / "pss.json"
    # The middle process ends at once, so that the one that allocates has lost its parent and its session.
    orphan = f"""
        import subprocess, sys, time
        middle = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
        subprocess.run([sys.executable, "-c", middle, sys.executable, "-c", {ALLOCATE!r}])
        time.sleep(0.5)
    """
    run_pss("--interval", "0.05", "--json", str(out), "--", sys.executable, "-c", textwrap.dedent(orphan))
    assert json.loads(out.read_text())["peak"]["pss_gib"] * 1024 >= 100


def test_a_process_that_outlives_the_command_is_named():
    done = run_pss("--interval", "0.05", "--", "sh", "-c", "sleep 0.6 & echo $!")
    assert f"still running after the command: [{done.stdout.strip()}]" in done.stderr


@pytest.mark.parametrize(
    ("limit_gib", "command_status", "expected"), [("0.05", 0, 3), ("0.05", 7, 7), ("12", 0, 0), ("12", 7, 7)]
)
def test_status_is_the_commands_own_or_3_over_the_limit(limit_gib, command_status, expected):
    code = f"{ALLOCATE}; import sys; sys.exit({command_status})"
    done = run_pss("--interval", "0.05", "--limit-gib", limit_gib, "--", sys.executable, "-c", code)
    assert done.returncode == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_reaches_the_command_once_and_its_status_comes_back(number, tmp_path):
    ready = tmp_path / "ready"
    code = f"""
        import pathlib, signal, sys, time
        received = []
        signal.signal({int(number)}, lambda n, _: received.append(n))
        pathlib.Path({str(ready)!r}).touch()
        while not received:
            time.sleep(0.01)
        time.sleep(0.3)
        sys.exit(10 + len(received))
    """
    command = [sys.executable, str(PSS), "--interval", "0.05", "--", sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 20
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    assert process.wait(timeout=20) == 11


def test_a_command_ended_by_a_signal_gives_128_plus_its_number():
    assert run_pss("--", "sh", "-c", "kill -9 $$").returncode == 137


def test_an_unknown_command_gives_127():
    done = run_pss("--", "no-such-command-here")
    assert done.returncode == 127
    assert "no-such-command-here: no such command" in done.stderr
