"""Run a command and record the memory of its whole process tree: the sum of PSS, sampled.

PSS divides each shared page by the processes that map it, so that the sum over processes counts it once. The tree
holds every descendant, in whatever session or process group: this tool adopts orphans (PR_SET_CHILD_SUBREAPER), so a
daemon whose parent has ended is still below it.

    python tools/pss.py --limit-gib 12 --json pss.json -- make train

Prints the peak, when it was and which processes made it. Exits with the command's status (128 + n if signal n ended
it); with 3 if the command succeeded but the peak was over the limit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OVER_LIMIT_STATUS = 3
NOT_STARTED_STATUS = 127
FORWARDED = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """One process in one sample."""

    pid: int
    pss_gib: float
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The tree at one moment."""

    time_s: float
    """Seconds since the command started."""
    processes: tuple[ProcessMemory, ...]

    @property
    def pss_gib(self) -> float:
        """Sum over the tree."""
        return sum(p.pss_gib for p in self.processes)


def descendants(root_pid: int) -> list[int]:
    """Pids of the live processes below root_pid, without it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            # The name in parentheses may hold anything; the fields after the last one are state, parent, ...
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    queue = [root_pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def process_memory(pid: int) -> ProcessMemory | None:
    """PSS of one process; None if it has ended."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            return ProcessMemory(pid=pid, pss_gib=int(line.split()[1]) / 2**20, command=command)
    return None


def _read(path: str) -> str:
    """The file's text, or nothing if its process has ended meanwhile."""
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def run_sampled(command: list[str], interval_s: float) -> tuple[int, list[Sample]]:
    """Run command in a session of its own and sample its tree until it ends.

    SIGINT and SIGTERM go on to the command's process group once, as a terminal would send them.

    Args:
        command: program and arguments.
        interval_s: seconds between samples.

    Returns:
        The command's status (128 + n if signal n ended it) and the samples, the last one taken at the end.

    Raises:
        OSError: the command cannot be started.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    start = time.monotonic()
    pid = os.posix_spawnp(command[0], command, os.environ, setsid=True)
    for number in FORWARDED:
        signal.signal(number, lambda received, _frame: os.killpg(pid, received))
    ended = os.pidfd_open(pid)
    samples = []
    has_ended = False
    while not has_ended:
        has_ended = bool(select.select([ended], [], [], 0 if not samples else interval_s)[0])
        processes = tuple(m for p in descendants(os.getpid()) if (m := process_memory(p)) is not None)
        samples.append(Sample(time_s=time.monotonic() - start, processes=processes))
        _reap_orphans(pid)
    _, wait_status = os.waitpid(pid, 0)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(wait_status)
    return (code if code >= 0 else 128 - code), samples


def _reap_orphans(command_pid: int) -> None:
    """Collect adopted processes that have ended, but leave the command's own status to its waiter."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == command_pid:
            return
        os.waitpid(ended.si_pid, 0)


def report(peak: Sample, limit_gib: float | None) -> str:
    """The lines for people: the peak and its processes, largest first."""
    limit = "" if limit_gib is None else f", limit {limit_gib:g} GiB"
    lines = [f"peak PSS {peak.pss_gib:.3f} GiB at {peak.time_s:.1f} s in {len(peak.processes)} processes{limit}"]
    for p in sorted(peak.processes, key=lambda p: -p.pss_gib)[:10]:
        lines.append(f"  {p.pss_gib:8.3f} GiB  pid {p.pid}  {p.command[:90]}")
    return "\n".join(lines)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between samples (1)")
    parser.add_argument("--limit-gib", type=float, metavar="GIB", help=f"exit with {OVER_LIMIT_STATUS} above this")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write peak and all samples here")
    parser.add_argument("command", nargs="+", help="after --: the command and its arguments")
    args = parser.parse_args()
    if args.interval <= 0:
        parser.error(f"--interval {args.interval}: wants more than 0 seconds")
    try:
        status, samples = run_sampled(args.command, args.interval)
    except FileNotFoundError:
        print(f"pss: {args.command[0]}: no such command", file=sys.stderr)
        return NOT_STARTED_STATUS
    peak = max(samples, key=lambda s: s.pss_gib)
    is_over = args.limit_gib is not None and peak.pss_gib > args.limit_gib
    print(report(peak, args.limit_gib), file=sys.stderr)
    if samples[-1].processes:
        print(f"pss: still running after the command: {[p.pid for p in samples[-1].processes]}", file=sys.stderr)
    if args.json is not None:
        summary = {
            "command": args.command,
            "status": status,
            "limit_gib": args.limit_gib,
            "peak": {"pss_gib": peak.pss_gib, **asdict(peak)},
            "samples": [{"time_s": s.time_s, "pss_gib": s.pss_gib, "processes": len(s.processes)} for s in samples],
        }
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return OVER_LIMIT_STATUS if is_over and status == 0 else status


if __name__ == "__main__":
    sys.exit(main())
