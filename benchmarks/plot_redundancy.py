"""Copies in a block: what they do to the TTR operator's answer, and to pooled ones.

    python benchmarks/plot_redundancy.py [--output docs/figures/redundancy.svg]

A block holds one token that is unlike the rest and k that say the same, exactly or nearly (`--noise` is the length of
what differs, the token's own being 1). Measured is how much of each direction the answer holds: the answer is written
in the directions of the two by least squares. Means over `--blocks` random blocks, with the middle half of them.
The regression's `a` has the same product with both, so that no direction is preferred.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import record
from plot_method import INK, SOFT, need_matplotlib
from torch import Tensor

from ttmem.regression import ttr_compress

OUTPUT = Path(__file__).parent.parent / "docs" / "figures" / "redundancy.svg"
COLOURS = {"mean": SOFT, "attention": "#e07b1f", "ttr .01": "#3566a8", "ttr 1": "#1f9e89"}
LABELS = {
    "mean": "mean pooling",
    "attention": "attention pooling",
    "ttr .01": "TTR, $\\lambda$ = .01",
    "ttr 1": "TTR, $\\lambda$ = 1",
}


def blocks_of(copies: int, noise: float, blocks: int, dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [blocks, copies + 1, dim], the two directions [blocks, 2, dim], a [dim]); the first token is unlike."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(blocks, dim, 3, generator=generator, dtype=torch.float64))[0].mT
    distinct, repeated = directions[:, 0], directions[:, 1]
    difference = torch.randn(blocks, copies, dim, generator=generator, dtype=torch.float64) / math.sqrt(dim)
    tokens = torch.cat([distinct[:, None], repeated[:, None] + noise * difference], dim=1)
    return tokens, directions[:, :2], distinct + repeated


def pooled_by_attention(tokens: Tensor, seed: int) -> Tensor:
    """Softmax weights of one random query with unit variance of its scores: what a pool can do before it is trained."""
    query = torch.randn(tokens.shape[-1], generator=torch.Generator().manual_seed(seed), dtype=tokens.dtype)
    return torch.softmax(tokens @ query, dim=-1)[:, None] @ tokens


def systems(a: Tensor, seed: int) -> dict[str, Callable[[Tensor], Tensor]]:
    def regression(strength: float) -> Callable[[Tensor], Tensor]:
        rho = torch.full_like(a[0], math.log(math.expm1(strength)))
        # a differs from block to block here, so the blocks are solved one by one
        return lambda x: torch.stack([ttr_compress(block, own, rho) for block, own in zip(x, a, strict=True)])

    return {
        "mean": lambda x: x.mean(1),
        "attention": lambda x: pooled_by_attention(x, seed)[:, 0],
        "ttr .01": regression(0.01),
        "ttr 1": regression(1.0),
    }


def shares(answer: Tensor, directions: Tensor) -> Tensor:
    """How much of each direction an answer holds: [blocks, 2] from [blocks, dim], [blocks, 2, dim] (orthonormal)."""
    return (directions @ answer[..., None])[..., 0]


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for noise in arguments.noise:
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in COLOURS}
        for copies in arguments.copies:
            tokens, directions, a = blocks_of(copies, noise, arguments.blocks, arguments.dim, arguments.seed)
            for name, compress in systems(a, arguments.seed).items():
                distinct, repeated = shares(compress(tokens), directions).unbind(-1)
                ratio = distinct / repeated
                low, middle, high = ratio.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=ratio.dtype)).tolist()
                rows[name].append(
                    {
                        "copies": copies,
                        "repeated": repeated.mean().item(),
                        "distinct": distinct.mean().item(),
                        "distinct_to_repeated": middle,
                        "q1": low,
                        "q3": high,
                    }
                )
        found[f"{noise:g}"] = rows
    return found


def draw(figures: dict[str, dict[str, list[dict[str, float]]]], output: Path) -> None:
    pyplot: Any = need_matplotlib()
    figure, panels = pyplot.subplots(1, len(figures), figsize=(5.2 * len(figures), 3.9), sharey=True, squeeze=False)
    for axes, (noise, rows) in zip(panels[0], figures.items(), strict=True):
        for name, points in rows.items():
            copies = [point["copies"] for point in points]
            axes.fill_between(
                copies, [p["q1"] for p in points], [p["q3"] for p in points], color=COLOURS[name], alpha=0.15, lw=0
            )
            axes.plot(
                copies,
                [p["distinct_to_repeated"] for p in points],
                color=COLOURS[name],
                marker="o",
                markersize=3.5,
                label=LABELS[name],
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(copies, [str(c) for c in copies])
        axes.set_title("exact copies" if float(noise) == 0 else f"near copies (noise {noise})", color=INK, fontsize=11)
        axes.set_xlabel("tokens that say the same", color=INK)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("the one unlike token, against them", color=INK)
    panels[0][0].legend(frameon=False, fontsize=9, loc="lower left")
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 63])
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    figures = measure(arguments)
    draw(figures, arguments.output)
    record("redundancy", {"blocks": arguments.blocks, "dim": arguments.dim, "noise": figures}, arguments.seed)


if __name__ == "__main__":
    main()
