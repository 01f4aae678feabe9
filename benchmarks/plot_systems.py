"""Draw what systems that learn their layers reach, from the recorded results.

    python benchmarks/plot_systems.py [--folder docs/figures]

block_sparse_retrieval: accuracy against the length, for each compressor. mad: accuracy of each task.
fast_weights_language and continual_pretraining: perplexity against the context. Lines are means over seeds, dots the
seeds themselves. What has no recorded result is left out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plot_method import need_matplotlib
from plot_results import FIGURES, finish, read

COLOURS = ("#3566a8", "#e07b1f", "#1f9e89", "#8a6fb0", "#b8434e", "#7a6a4f", "#5f6b7a", "#1f2933")
MARKERS = "osD^vXPd"

Lines = dict[str, dict[int, list[float]]]
"""By system and place on the x axis: a value for each seed."""


def draw_lines(axis: Any, lines: Lines) -> None:
    """A line through the means of each system, and its seeds as dots."""
    for (system, points), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
        xs = sorted(points)
        means = [statistics.fmean(points[x]) for x in xs]
        axis.plot(xs, means, color=colour, marker=marker, markersize=4, linewidth=1.4, label=system)
        for x in xs:
            axis.scatter([x] * len(points[x]), points[x], s=7, color=colour, alpha=0.45)
    places = sorted({x for points in lines.values() for x in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(places)
    axis.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, place: "")


def retrieval_lines(figures: dict[str, Any], kind: str) -> Lines:
    lines: Lines = {}
    for run in figures["runs"]:
        for length, accuracy in run["accuracy"][kind].items():
            lines.setdefault(run["system"], {}).setdefault(int(length), []).append(100 * accuracy)
    return lines


def draw_retrieval(figures: dict[str, Any], output: Path) -> None:
    """One needle, and one of several, side by side."""
    kinds = {"single": "one needle", "multi": "one of eight"}
    graph, axes = need_matplotlib().subplots(1, len(kinds), figsize=(8.4, 3.4), sharey="row", squeeze=False)
    for axis, (kind, title) in zip(axes[0], kinds.items(), strict=True):
        draw_lines(axis, retrieval_lines(figures, kind))
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"tokens (trained on {figures['settings']['length']})")
    axes[0][0].set_ylabel("values right, %")
    finish(graph, axes, axes[0][0], output)


def draw_mad(figures: dict[str, Any], output: Path) -> None:
    """A group of bars per task, the seeds as dots."""
    scores = figures["scores"]
    tasks = list(next(iter(scores.values())))
    graph, axes = need_matplotlib().subplots(1, 1, figsize=(9.0, 3.4), squeeze=False)
    axis, width = axes[0][0], 0.8 / len(scores)
    for place, ((system, rows), colour) in enumerate(zip(scores.items(), COLOURS, strict=False)):
        lefts = [group + place * width for group in range(len(tasks))]
        axis.bar(lefts, [rows[task]["mean"] for task in tasks], 0.92 * width, color=colour, label=system)
        for left, task in zip(lefts, tasks, strict=True):
            seeds = rows[task]["by_seed"]
            axis.scatter([left] * len(seeds), seeds, s=7, color="#1f2933", zorder=3)
    axis.set_xticks([group + 0.4 - width / 2 for group in range(len(tasks))], tasks)
    axis.set_ylabel("test tokens right, %")
    finish(graph, axes, axis, output)


def draw_language(figures: dict[str, Any], output: Path) -> None:
    lines = {
        system: {int(context): row["by_seed"] for context, row in rows.items()}
        for system, rows in figures["perplexity"].items()
    }
    draw_perplexity(lines, f"bytes of context (trained on {figures['settings']['length']})", output)


def draw_continual(figures: dict[str, Any], output: Path) -> None:
    lines = {
        system: {int(context): [value] for context, value in rows.items()}
        for system, rows in figures["perplexity"].items()
    }
    draw_perplexity(lines, f"tokens of context (trained on {figures['settings']['length']})", output)


def draw_perplexity(lines: Lines, label: str, output: Path) -> None:
    graph, axes = need_matplotlib().subplots(1, 1, figsize=(6.4, 3.6), squeeze=False)
    draw_lines(axes[0][0], lines)
    axes[0][0].set_xlabel(label)
    axes[0][0].set_ylabel("perplexity of the block behind it")
    finish(graph, axes, axes[0][0], output)


DRAWN: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "block_sparse_retrieval": draw_retrieval,
    "mad": draw_mad,
    "fast_weights_language": draw_language,
    "continual_pretraining": draw_continual,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FIGURES)
    parser.add_argument("--suffix", default="svg", choices=["svg", "png"])
    arguments = parser.parse_args()
    for name, draw in DRAWN.items():
        figures = read(name)
        if figures is not None:
            output = arguments.folder / f"{name}.{arguments.suffix}"
            draw(figures, output)
            print(output)


if __name__ == "__main__":
    main()
