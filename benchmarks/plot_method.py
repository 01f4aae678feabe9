"""Draw docs/figures/how-it-works.svg: from a document's full KV cache to a small trained memory.

    python benchmarks/plot_method.py [--output docs/figures/how-it-works.svg]

A drawing, not a measurement: the numbers of entries are chosen so that they can be seen. An output that ends in .png is
written as an image.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent.parent / "docs" / "figures" / "how-it-works.svg"

LAYERS, HEADS = 3, 2
POSITIONS = 56
ANCHORS, DIVERSIFIERS = 1, 3
PRESERVERS = (1, 2, 3, 11, 6, 13)
"""One number per layer and head: preservers are ranked over all of them, so heads differ."""

INK, SOFT, PAPER, CACHE = "#1f2933", "#5f6b7a", "#ffffff", "#d5dbe3"
COLOURS = {"preservers": "#3566a8", "anchors": "#e07b1f", "diversifiers": "#1f9e89"}
BIAS = "#1f2933"

WIDTH, HEIGHT = 12.0, 4.72
TOP, ROW, LAYER_GAP = 3.36, 0.30, 0.16
CELL = 0.045
BIG = 0.085


def need_matplotlib() -> Any:
    """matplotlib's pyplot, or a message that says how to get it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit("this script draws with matplotlib: pip install 'ttmem[plots]'") from error
    # text as outlines, so that the picture is the same wherever it is shown; nothing that differs between two runs
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "ttmem", "font.family": "DejaVu Sans"})
    return pyplot


def choose(generator: random.Random, preservers: int) -> dict[int, str]:
    """Position -> kind, for one head. The first position is an anchor."""
    others = generator.sample(range(2, POSITIONS), preservers + ANCHORS - 1 + DIVERSIFIERS)
    kinds = ["preservers"] * preservers + ["anchors"] * (ANCHORS - 1) + ["diversifiers"] * DIVERSIFIERS
    return {0: "anchors", **dict(zip(others, kinds, strict=True))}


def row_heights() -> list[float]:
    """The lower edge of every head's bar, layer after layer."""
    return [TOP - (layer * HEADS + head) * ROW - layer * LAYER_GAP for layer in range(LAYERS) for head in range(HEADS)]


def packed(chosen: dict[int, str]) -> list[str]:
    """A head's kinds as the memory stores them: preservers, anchors, diversifiers."""
    return sorted(chosen.values(), key=list(COLOURS).index)


def cells(axes: Any, left: float, bottom: float, width: float, kinds: list[str | None], height: float = 0.2) -> None:
    """A row of entries, one colour per kind; None is an entry that is not kept."""
    for kind in (None, *COLOURS):
        spans = [(left + i * width, 0.84 * width) for i, other in enumerate(kinds) if other == kind]
        axes.broken_barh(spans, (bottom, height), color=CACHE if kind is None else COLOURS[kind], linewidth=0)


def arrow(axes: Any, start: float, end: float, y: float, label: str) -> None:
    axes.annotate(
        "", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4, "mutation_scale": 13}
    )
    axes.text((start + end) / 2, y + 0.1, label, ha="center", va="bottom", fontsize=10.5, color=INK, linespacing=1.2)


def heading(axes: Any, x: float, title: str, note: str, align: str = "left") -> None:
    axes.text(x, 4.38, title, fontsize=13, fontweight="bold", color=INK, ha=align, va="center")
    axes.text(x, 4.04, note, fontsize=10.5, color=SOFT, ha=align, va="center")


def page(axes: Any, patches: Any, generator: random.Random) -> None:
    heading(axes, 0.3, "Document", "N tokens")
    axes.add_patch(patches.Rectangle((0.3, 1.6), 1.0, 1.96, facecolor="#f6f8fa", edgecolor=SOFT, linewidth=1))
    for line in range(11):
        length = 0.78 * (0.55 if line in (4, 10) else generator.uniform(0.85, 1.0))
        y = 3.38 - line * 0.16
        axes.plot([0.41, 0.41 + length], [y, y], color=SOFT, linewidth=1.6, solid_capstyle="butt")


def full_cache(axes: Any, left: float, heads: list[dict[int, str]]) -> None:
    heading(axes, left, "Full KV cache", "layers and heads, N entries each")
    for index, (bottom, chosen) in enumerate(zip(row_heights(), heads, strict=True)):
        cells(axes, left, bottom, CELL, [chosen.get(position) for position in range(POSITIONS)])
        if index % HEADS == 0:
            axes.text(
                left - 0.1, bottom - ROW / 2 + 0.1, f"layer {index // HEADS + 1}",
                rotation=90, fontsize=9, color=SOFT, ha="center", va="center",
            )  # fmt: skip


def memory(axes: Any, left: float, heads: list[dict[int, str]], generator: random.Random | None) -> None:
    """The chosen entries, packed; trained ones carry a bias, drawn as a small bar of its own height."""
    for bottom, chosen in zip(row_heights(), heads, strict=True):
        kinds = packed(chosen)
        if generator is None:
            cells(axes, left, bottom, BIG, list(kinds))
            continue
        cells(axes, left, bottom, BIG, list(kinds), height=0.15)
        for i in range(len(kinds)):
            height = generator.uniform(0.02, 0.085)
            axes.broken_barh([(left + i * BIG, 0.84 * BIG)], (bottom + 0.165, height), color=BIAS, linewidth=0)


def questions(axes: Any, patches: Any, left: float) -> None:
    heading(axes, left, "Answers", "all in one batch")
    for index, text in enumerate(("Who runs the kitchen?", "When is the boat due?", "Where may one smoke?", "...")):
        bottom = 3.28 - index * 0.52
        box = patches.FancyBboxPatch(
            (left + 0.04, bottom), 1.72, 0.28,
            boxstyle="round,pad=0.04,rounding_size=0.08", facecolor="#f6f8fa", edgecolor=SOFT, linewidth=1,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(left + 0.9, bottom + 0.135, text, fontsize=9.8, color=INK, ha="center", va="center")


def legend(axes: Any, left: float) -> None:
    entries = (
        ("preservers", "preservers: used to repeat the text, as many as a head needs"),
        ("anchors", "anchors: what the model's own answers look at"),
        ("diversifiers", "diversifiers: those least like the rest"),
    )
    for index, (kind, text) in enumerate(entries):
        y = 0.98 - index * 0.32
        axes.broken_barh([(left, 0.2)], (y, 0.17), color=COLOURS[kind], linewidth=0)
        axes.text(left + 0.3, y + 0.085, text, fontsize=10.5, color=INK, ha="left", va="center")


def draw(pyplot: Any, output: Path) -> None:
    from matplotlib import patches

    generator = random.Random(3)
    heads = [choose(generator, preservers) for preservers in PRESERVERS]
    figure = pyplot.figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.set_axis_off()

    middle = 2.58
    page(axes, patches, generator)
    arrow(axes, 1.38, 1.98, middle, "read\nonce")
    full_cache(axes, 2.28, heads)
    arrow(axes, 4.9, 5.5, middle, "choose")
    heading(axes, 5.6, "Selection", "ragged: heads differ")
    memory(axes, 5.6, heads, None)
    arrow(axes, 7.12, 7.66, middle, "train")
    heading(axes, 7.76, "Trained memory", "keys, values, biases")
    memory(axes, 7.76, heads, generator)
    arrow(axes, 9.32, 9.84, middle, "ask")
    questions(axes, patches, 9.94)

    legend(axes, 0.3)
    stages = (
        ("Stage 1", "anchors and diversifiers learn the full cache's attention"),
        ("Stage 2", "all entries learn to keep the model's answers"),
        ("Always", "the model's weights stay frozen; black bars are biases"),
    )
    for index, (name, text) in enumerate(stages):
        y = 0.98 - index * 0.32 + 0.085
        axes.text(6.3, y, name, fontsize=10.5, fontweight="bold", color=INK, ha="left", va="center")
        axes.text(7.15, y, text, fontsize=10.5, color=INK, ha="left", va="center")

    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".svg":
        figure.savefig(output, facecolor=PAPER, metadata={"Date": None})
    else:
        figure.savefig(output, facecolor=PAPER, dpi=130)
    pyplot.close(figure)
    print(f"{output}: {output.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    draw(need_matplotlib(), arguments.output)


if __name__ == "__main__":
    main()
