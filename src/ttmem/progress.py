"""Progress of long work: named stages with a known amount, silent by default, bars with time left on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Advance = Callable[[int], None]
LINE_EVERY = 30.0
"""Seconds between two lines of a stage where there is no terminal."""


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
    """One bar per stage with its name, amount, time elapsed and time left; in a log, a line with them now and then."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(stderr=True)

    @contextmanager
    def show(self, name: str, total: int) -> Iterator[Advance]:
        drawn = self.bars if self.console.is_terminal or self.console.is_jupyter else self.lines
        with drawn(name, total) as advance:
            yield advance

    @contextmanager
    def lines(self, name: str, total: int) -> Iterator[Advance]:
        """Where bars cannot be drawn anew: one line every `LINE_EVERY` seconds, and one at the end."""
        start = latest = time.perf_counter()
        done = 0

        def line(rest: str) -> None:
            elapsed = timedelta(seconds=round(time.perf_counter() - start))
            text = f"{name:<28} {done}/{total} {elapsed}{rest}"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

        def advance(units: int) -> None:
            nonlocal done, latest
            done += units
            now = time.perf_counter()
            if now - latest >= LINE_EVERY and 0 < done < total:
                latest = now
                line(f" left {timedelta(seconds=round((now - start) * (total - done) / done))}")

        yield advance
        done = total
        line("")

    @contextmanager
    def bars(self, name: str, total: int) -> Iterator[Advance]:
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
