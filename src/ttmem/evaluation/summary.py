"""Figures of a benchmark run: means over documents with their standard errors, as rows and as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ttmem.evaluation.bench import Result


@dataclass(frozen=True)
class Row:
    """One task, length, method and ratio over its documents.

    accuracy: mean score in percent; error: its standard error over documents (0 for a single one); seconds: the median
    preparation; kl, top1: means of the agreement with the full context; ratio: the one asked for.
    """

    task: str
    length: int
    method: str
    ratio: float
    docs: int
    accuracy: float
    error: float
    kl: float
    top1: float
    seconds: float


def summarize(results: Iterable[Result]) -> list[Row]:
    """One row per task, length, method and ratio, in the order of first appearance."""
    groups: dict[tuple[str, int, str, float], list[Result]] = {}
    for result in results:
        groups.setdefault((result.task, result.length, result.method, result.ratio), []).append(result)
    return [_row(group) for group in groups.values()]


def _row(group: list[Result]) -> Row:
    first = group[0]
    scores = [100 * statistics.fmean(result.scores) for result in group]
    return Row(
        task=first.task,
        length=first.length,
        method=first.method,
        ratio=first.ratio,
        docs=len(group),
        accuracy=statistics.fmean(scores),
        error=standard_error(scores),
        kl=statistics.fmean(result.kl for result in group),
        top1=statistics.fmean(result.top1 for result in group),
        seconds=statistics.median(result.seconds for result in group),
    )


def standard_error(values: list[float]) -> float:
    """Of the mean of independent values; 0 for a single one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def markdown(rows: list[Row]) -> str:
    """Accuracy per task and length: one line per method, one column per ratio; then every figure, row by row."""
    parts = []
    for task, length in dict.fromkeys((row.task, row.length) for row in rows):
        own = [row for row in rows if (row.task, row.length) == (task, length)]
        ratios = sorted({row.ratio for row in own if row.method != "full"})
        lines = [
            f"### {task}, {length} tokens ({max(row.docs for row in own)} documents)",
            "",
            "| method | " + " | ".join(f"{ratio:g}x" for ratio in ratios) + " |",
            "|---|" + "---|" * len(ratios),
        ]
        for method in dict.fromkeys(row.method for row in own):
            cells = {row.ratio: f"{row.accuracy:.1f} ± {row.error:.1f}" for row in own if row.method == method}
            if method == "full":
                cells = dict.fromkeys(ratios, cells[1.0])
            lines.append(f"| {method} | " + " | ".join(cells.get(ratio, "") for ratio in ratios) + " |")
        parts.append("\n".join(lines))
    detail = ["### all figures", "", "| task | length | method | ratio | docs | accuracy | KL | top-1 | seconds |"]
    detail.append("|---|---|---|---|---|---|---|---|---|")
    detail += [
        f"| {row.task} | {row.length} | {row.method} | {row.ratio:g} | {row.docs} | {row.accuracy:.1f} "
        f"± {row.error:.1f} | {row.kl:.3f} | {row.top1:.3f} | {row.seconds:.1f} |"
        for row in rows
    ]
    return "\n\n".join([*parts, "\n".join(detail)]) + "\n"
