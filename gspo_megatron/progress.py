"""Progress on the console: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

LINE_S = 10.0
"""Between two lines of progress where there is no terminal."""


def format_bytes(num_bytes: float) -> str:
    """In the largest binary unit that leaves a number of at least one: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


class StageClock:
    """Times the stages of each step and shows where the run is.

    Attributes:
        stage_s: seconds of each stage since the last `finish_step`.
    """

    def __init__(self, console: Console, *, total_steps: int) -> None:
        self.stage_s: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,  # warnings belong to the log that stderr is
        )
        self._task = self._progress.add_task("starting", total=total_steps)

    def __enter__(self) -> StageClock:
        self._progress.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._progress.stop()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; several stretches of one stage add up."""
        self._progress.update(self._task, description=name)
        start_s = time.perf_counter()
        yield
        self.stage_s[name] = self.stage_s.get(name, 0.0) + time.perf_counter() - start_s

    def finish_step(self, num_finished: int) -> dict[str, float]:
        """Seconds per stage of the step that ends here; num_finished steps are done with it."""
        stage_s, self.stage_s = self.stage_s, {}
        self._progress.update(self._task, completed=num_finished)
        return stage_s


class ByteProgress:
    """Bytes of a total, with rate and time left."""

    def __init__(self, console: Console, total_bytes: int, *, done_bytes: int = 0) -> None:
        self._console = console
        self._total_bytes, self._start_bytes, self._done_bytes = total_bytes, done_bytes, done_bytes
        self._start_s = self._line_s = time.monotonic()
        self._bar = Progress(
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total_bytes, completed=done_bytes)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """These bytes more are done."""
        self._done_bytes += num_bytes
        self._bar.update(self._task, completed=self._done_bytes)
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._line_s >= LINE_S:
            self._line_s = now_s
            self._console.print(self._line(now_s - self._start_s))

    def _line(self, elapsed_s: float) -> str:
        rate = (self._done_bytes - self._start_bytes) / elapsed_s
        left_s = (self._total_bytes - self._done_bytes) / rate if rate else float("inf")
        done, total = format_bytes(self._done_bytes), format_bytes(self._total_bytes)
        return f"{done} of {total}, {format_bytes(rate)}/s, {left_s:.0f} s left"
