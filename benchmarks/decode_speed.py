"""Tokens per second with the full cache, the memory, and an empty context, side by side.

    python benchmarks/decode_speed.py [--lengths 4096 8192] [--ratio 16] [--rounds 7]

The memory is selected, not trained: training changes numbers, not shapes. "full (transformers)" is the same context
in transformers' own DynamicCache; "full" is ttmem's full memory. Systems are interleaved; figures are medians over
rounds and their quartiles, ratios are of the rounds' pairs.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from common import filler_text, record
from transformers import DynamicCache

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.evaluation.speed import step_seconds
from ttmem.memory import Memory
from ttmem.models import Model

STEPS = 24


def transformers_cache(model: Model, full: Memory) -> DynamicCache:
    """The full context as transformers itself would hold it."""
    cache = DynamicCache(config=model.network.config)
    for index, layer in enumerate(full.compacted):
        keys, values = (t.view(1, layer.num_heads, -1, t.shape[-1]) for t in (layer.keys, layer.values))
        cache.update(keys, values, index)
    return cache


def measure(model: Model, length: int, ratio: float, rounds: int, batches: list[int]) -> list[dict[str, object]]:
    ids = torch.tensor(model.encode(filler_text(length, model.encode)))[:length]
    prepared = Prepared(model, Document("filler", "", ids))
    memory: Memory = KVzipPlus()(prepared, Budget.of(length, ratio))
    plain = transformers_cache(model, prepared.full)
    figures: list[dict[str, object]] = []
    for batch in batches:
        systems = {
            "empty": lambda: (DynamicCache(config=model.network.config), 0),
            "memory": lambda: (memory.cache(), length),
            "full": lambda: (prepared.full.cache(), length),
        }
        if batch == 1:
            systems["full (transformers)"] = lambda: (copy.deepcopy(plain), length)
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(rounds):
            for name, make in systems.items():
                seconds[name].append(step_seconds(model, *make(), STEPS, batch))
        empty = seconds["empty"]
        figures.append(
            {
                "length": length,
                "batch": batch,
                "ratio": ratio,
                "bytes": {"memory": memory.num_bytes(), "full": prepared.full.num_bytes()},
                "ms_per_step": {name: spread([1e3 * s for s in values]) for name, values in seconds.items()},
                "tokens_per_second": {name: batch / statistics.median(values) for name, values in seconds.items()},
                "time_relative_to_empty": {
                    name: spread([s / e for s, e in zip(values, empty, strict=True)])
                    for name, values in seconds.items()
                },
            }
        )
    return figures


def spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 7680])
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    figures = [
        row
        for length in arguments.lengths
        for row in measure(model, length, arguments.ratio, arguments.rounds, arguments.batches)
    ]
    record("decode_speed", figures)


if __name__ == "__main__":
    main()
