"""Progress of a run on the console: a live bar with the stage on a terminal, one line per step everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


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
