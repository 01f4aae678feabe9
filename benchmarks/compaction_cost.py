"""Seconds and FLOPs of each step of the pipeline, at several document lengths.

    python benchmarks/compaction_cost.py [--lengths 1024 2048 4096] [--preset quick] [--ratio 16]

FLOPs are counted by torch's own counter (matrix products and attention; a product of [m,k] and [k,n] is 2mkn), seconds
are taken in a run of their own without it. `growth` is the exponent p of seconds ~ N^p between first and last length.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from common import filler_text, record
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, preset_settings
from ttmem.models import Model
from ttmem.progress import Progress


@register_flop_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _flash_cpu_flops(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Scores and weighted values; a causal call is counted in full, as it is computed by the formula."""
    batch, heads, length, dim = query
    return 2 * batch * heads * length * key[-2] * (dim + value[-1])


class CountedProgress(Progress):
    """Progress that counts FLOPs per stage."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def show(self, name: str, total: int) -> Any:
        return _Counted(self, name)


class _Counted:
    def __init__(self, progress: CountedProgress, name: str) -> None:
        self.progress, self.name, self.counter = progress, name, FlopCounterMode(display=False)

    def __enter__(self) -> Any:
        self.counter.__enter__()
        return lambda units: None

    def __exit__(self, *error: Any) -> None:
        self.counter.__exit__(*error)
        self.progress.flops[self.name] = self.counter.get_total_flops()


def run(model: Model, length: int, ratio: float, preset: str, progress: Progress) -> None:
    ids = torch.tensor(model.encode(filler_text(length, model.encode)))[:length]
    settings = preset_settings(preset)
    prepared = Prepared(model, Document("filler", "", ids), settings, progress)
    LatentCompaction(settings)(prepared, Budget.of(length, ratio))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--preset", default="quick")
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    rows = []
    for length in arguments.lengths:
        timed, counted = Progress(), CountedProgress()
        run(model, length, arguments.ratio, arguments.preset, timed)
        run(model, length, arguments.ratio, arguments.preset, counted)
        rows.append(
            {
                "length": length,
                "seconds": timed.seconds,
                "gflops": {name: flops / 1e9 for name, flops in counted.flops.items()},
                "total_seconds": sum(timed.seconds.values()),
                "total_gflops": sum(counted.flops.values()) / 1e9,
            }
        )
    first, last = rows[0], rows[-1]
    span = math.log(last["length"] / first["length"])  # type: ignore[operator]
    growth = {
        name: math.log(last["seconds"][name] / first["seconds"][name]) / span  # type: ignore[index]
        for name in first["seconds"]  # type: ignore[attr-defined]
    }
    growth["total"] = math.log(last["total_seconds"] / first["total_seconds"]) / span  # type: ignore[operator]
    record("compaction_cost", {"preset": arguments.preset, "ratio": arguments.ratio, "rows": rows, "growth": growth}, 0)


if __name__ == "__main__":
    main()
