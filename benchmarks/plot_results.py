"""Draw the recorded results: methods against the ratio, and recipes against their seconds.

    python benchmarks/plot_results.py [--folder docs/figures]

Reads `results/<suite>_<preset>.json` of accuracy.py and `results/frontier_<suite>.json` of frontier.py, whichever are
there, and writes an SVG for each.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import RESULTS
from plot_method import COLOURS, INK, SOFT, need_matplotlib

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
STYLES: dict[str, dict[str, Any]] = {
    "latent": {"color": "#3566a8", "marker": "o", "linewidth": 2.2, "zorder": 5},
    "kvzip+": {"color": COLOURS["anchors"], "marker": "s", "linewidth": 1.8, "zorder": 4},
    "am": {"color": "#1f9e89", "marker": "^"},
    "am-omp": {"color": "#1f9e89", "marker": "v", "linestyle": "--"},
    "snapkv": {"color": "#8a6fb0", "marker": "D"},
    "pyramidkv": {"color": "#8a6fb0", "marker": "d", "linestyle": "--"},
    "summary": {"color": SOFT, "marker": "x", "linestyle": ":"},
}
SUITES = ("phonebook_thorough", "facts_quick", "facts_balanced", "ruler_quick")
FRONTIERS = ("frontier_phonebook", "frontier_facts")


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else None


def draw_ratios(figures: dict[str, Any], output: Path) -> bool:
    """Accuracy above, KL below, a column per task and length. False where there are fewer than two ratios."""
    rows = [row for row in figures["rows"] if row["method"] != "full"]
    if len({row["ratio"] for row in rows}) < 2:
        return False
    pyplot = need_matplotlib()
    columns = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    figure, axes = pyplot.subplots(
        2, len(columns), figsize=(0.8 + 3.6 * len(columns), 6.2), sharex=True, sharey="row", squeeze=False
    )
    for column, (task, length) in enumerate(columns):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        for method, style in STYLES.items():
            points = sorted((row for row in own if row["method"] == method), key=lambda row: row["ratio"])
            if not points:
                continue
            ratios = [row["ratio"] for row in points]
            look = {"markersize": 4, "linewidth": 1.3, "label": method, **style}
            errors = [row["error"] for row in points]
            axes[0][column].errorbar(ratios, [row["accuracy"] for row in points], errors, capsize=2, **look)
            axes[1][column].plot(ratios, [row["kl"] for row in points], **look)
        for row in figures["rows"]:
            if row["method"] == "full" and (row["task"], row["length"]) == (task, length):
                axes[0][column].axhline(row["accuracy"], color=INK, linewidth=1, linestyle=":", label="full context")
        axes[0][column].set_title(f"{task}, {length:,} tokens", fontsize=10, color=INK)
        axes[1][column].set_xscale("log", base=2)
        axes[1][column].set_xticks(sorted({row["ratio"] for row in own}))
        axes[1][column].xaxis.set_major_formatter(lambda value, place: f"{value:g}x")
        axes[1][column].set_xlabel("compression ratio")
    axes[0][0].set_ylabel("right answers, %")
    axes[1][0].set_ylabel("KL to the full context, nats")
    finish(figure, axes, axes[0][-1], output)
    return True


def draw_frontier(figures: dict[str, Any], output: Path) -> bool:
    """Every recipe: KL against seconds of preparation, with its accuracy beside the name."""
    pyplot = need_matplotlib()
    figure, axes = pyplot.subplots(1, 1, figsize=(7.2, 4.2), squeeze=False)
    axis = axes[0][0]
    for row in figures["rows"]:
        paper = row["method"].startswith("paper")
        look = {"marker": "s", "color": COLOURS["anchors"]} if paper else {"marker": "o", "color": "#3566a8"}
        axis.plot(row["seconds"], row["kl"], linestyle="", **look)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda value, place: f"{value:g}")
        one.set_minor_formatter(lambda value, place: "")
    axis.margins(x=0.25, y=0.1)
    name_points(axis, figures["rows"])
    axis.set_xlabel("seconds of preparation")
    axis.set_ylabel("KL to the full context, nats")
    finish(figure, axes, None, output)
    return True


def name_points(axis: Any, rows: list[dict[str, Any]]) -> None:
    """A name right of each point, moved down where it would lie on another."""
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: -row["kl"]):
        x, y = axis.transData.transform((row["seconds"], row["kl"]))
        down = 3.0
        while any(abs(x - other_x) < 150 and abs(y + down - other_y) < 12 for other_x, other_y in taken):
            down -= 4.0
        taken.append((x, y + down))
        axis.annotate(
            f"{row['method']}: {row['accuracy']:.0f} %",
            (row["seconds"], row["kl"]),
            textcoords="offset pixels",
            xytext=(9, down),
            fontsize=7.5,
            color=INK,
        )


def finish(figure: Any, axes: Any, legend: Any, output: Path) -> None:
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    if legend is not None:
        handles, labels = legend.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, fontsize=8, ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, bbox_inches="tight", metadata={"Date": None} if output.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FIGURES)
    parser.add_argument("--suffix", default="svg", choices=["svg", "png"])
    arguments = parser.parse_args()
    for names, draw in ((SUITES, draw_ratios), (FRONTIERS, draw_frontier)):
        for name in names:
            figures = read(name)
            output = arguments.folder / f"{name}.{arguments.suffix}"
            if figures is not None and draw(figures, output):
                print(output)


if __name__ == "__main__":
    main()
