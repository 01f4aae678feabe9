"""Plots of a benchmark run: accuracy against ratio, length and preparation seconds."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttmem.errors import TaskError
from ttmem.evaluation.summary import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INSTALL = "pip install 'ttmem[plots]'"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Write the plots that the rows allow as SVG files: one axis needs two values. Returns their paths.

    Raises TaskError with the install line where matplotlib is missing.
    """
    if not can_plot():
        raise TaskError(f"plots need matplotlib: {INSTALL}")
    written = []
    for task in dict.fromkeys(row.task for row in rows):
        own = [row for row in rows if row.task == task]
        for x, label in (("ratio", "compression ratio"), ("length", "document length, tokens"), ("seconds", "seconds")):
            path = folder / f"{task.replace(':', '_')}-{x}.svg"
            if _draw(own, x, label, path):
                written.append(path)
    return written


def _draw(rows: list[Row], x: str, label: str, path: Path) -> bool:
    """One figure, a panel per value of what is neither x nor averaged. False where there is nothing to compare."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compacted = [row for row in rows if row.method != "full"]
    panel = "length" if x == "ratio" else "ratio"
    panels = sorted({getattr(row, panel) for row in compacted})
    if not panels or (x != "seconds" and len({getattr(row, x) for row in compacted}) < 2):
        return False
    figure, axes = pyplot.subplots(1, len(panels), figsize=(1 + 3.4 * len(panels), 3.6), sharey=True, squeeze=False)
    for axis, value in zip(axes[0], panels, strict=True):
        own = [row for row in compacted if getattr(row, panel) == value]
        _lines(axis, own, x)
        _full_line(axis, [row for row in rows if row.method == "full" and (panel != "length" or row.length == value)])
        axis.set_xscale("log", base=10 if x == "seconds" else 2)
        axis.set_xlabel(label)
        axis.set_title(f"{value:g} tokens" if panel == "length" else f"{value:g}x", fontsize=10)
    axes[0][0].set_ylabel(f"{rows[0].task}: accuracy, %")
    axes[0][-1].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _lines(axis: Axes, rows: list[Row], x: str) -> None:
    for number, method in enumerate(sorted({row.method for row in rows})):
        points: list[Any] = sorted((row for row in rows if row.method == method), key=lambda row: getattr(row, x))
        axis.errorbar(
            [getattr(row, x) for row in points],
            [row.accuracy for row in points],
            [row.error for row in points],
            label=method,
            color=f"C{number}",
            marker="o",
            markersize=3,
            linestyle="" if x == "seconds" else "-",
        )


def _full_line(axis: Axes, rows: list[Row]) -> None:
    if rows:
        axis.axhline(statistics.fmean(row.accuracy for row in rows), color="gray", linestyle=":", label="full")
