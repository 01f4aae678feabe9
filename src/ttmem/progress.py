"""Progress of long work: named stages with a known amount, silent by default, bars with time left on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Advance = Callable[[int], None]


class Progress:
    """Silent progress, and the timing of stages. `seconds` holds the wall-clock time of each finished stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """A stage of `total` units; call what it yields with the number of units just done."""
        start = time.perf_counter()
        with self.show(name, total) as advance:
            yield advance
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def show(self, name: str, total: int) -> Iterator[Advance]:
        """How a stage is shown; here, not at all."""
        yield lambda units: None

    def figure(self, stage: str, step: int, value: SupportsFloat) -> None:
        """A figure of training within a stage, its loss after `step` updates; here, not shown.

        A tensor stays where it is until somebody wants its number, so that training does not wait for a GPU.
        """


class ConsoleProgress(Progress):
    """One bar per stage with its name, amount, time elapsed and time left."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(stderr=True)

    @contextmanager
    def show(self, name: str, total: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=self.console) as bars:
            task = bars.add_task(name, total=total)
            yield lambda units: bars.update(task, advance=units)
            bars.update(task, completed=total)
