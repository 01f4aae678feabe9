"""Ablations of the TTCD layer: each part left out or changed, trained on a book or on MAD's tasks.

    python benchmarks/fast_weights_ablations.py [--on book] [--ablations no_convolutions no_projection ...]
        [--seeds 0 1] [--steps 1500]
    python benchmarks/fast_weights_ablations.py --on mad [--tasks recall fuzzy] [--seeds 12345 12346]

Model, data and training are those of `fast_weights_language.py` and of `mad.py`; an ablation is a change of the
configuration. "inclusive_scan" is eq. 13 as printed: its tokens read what later tokens of their chunk write, so that
its loss is no language model's. Figures are the perplexity behind each context, or the accuracy, with its difference
from "as_is" seed by seed. Finished runs are kept in --work, and the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fast_weights_language as language
import mad
import numpy as np
from books import king_james
from common import at_least, record, run_script

from ttmem.progress import ConsoleProgress
from ttmem.tasks.mad import REDUCED, TASKS, reduced, reduced_sweep

AS_IS = "as_is"


def ablations(layers: int, chunk: int) -> dict[str, dict[str, Any]]:
    """Fields of `TTCDConfig` by name, for a model of so many layers whose chunks have so many tokens."""
    return {
        AS_IS: {},
        "no_convolutions": {"conv_kernel": 0},
        "no_projection": {"projection": False},
        "no_convolutions_no_projection": {"conv_kernel": 0, "projection": False},
        "keys_as_they_are": {"normalize_keys": False},
        "no_token_rates": {"token_rates": False},
        "reads_without_convolution": {"convolved_reads": False},
        "stopped_teacher": {"stop_gradient": True},
        "chunk_half": {"chunk_size": chunk // 2},
        "chunk_double": {"chunk_size": 2 * chunk},
        "one_layer": {"fast_layers": [0]},
        "all_layers": {"fast_layers": list(range(layers))},
        "inclusive_scan": {"scan": "inclusive"},
    }


def chosen(arguments: argparse.Namespace, layers: int, chunk: int) -> dict[str, dict[str, Any]]:
    found = ablations(layers, chunk)
    return {name: found[name] for name in dict.fromkeys([AS_IS, *(arguments.ablations or found)])}


def with_changes(arguments: argparse.Namespace, changes: dict[str, Any], **others: Any) -> argparse.Namespace:
    """The options of the script whose run this is."""
    return argparse.Namespace(**{**vars(arguments), "set": list(changes.items()), **others})


def on_book(arguments: argparse.Namespace) -> dict[str, Any]:
    """Language models, by name and context: perplexity, and nats below the layer as it is."""
    book = np.frombuffer(king_james().encode(), dtype=np.uint8)
    plan = chosen(arguments, language.SHAPE["num_hidden_layers"], language.SHAPE["chunk_size"])
    runs = [
        {**language.run_one("ttcd", seed, with_changes(arguments, changes), book), "system": name, "set": changes}
        for seed in arguments.seeds or [0, 1]
        for name, changes in plan.items()
    ]
    return {"perplexity": language.table(runs, AS_IS), "runs": runs}


def on_mad(arguments: argparse.Namespace) -> dict[str, Any]:
    """MAD's tasks, by name: accuracy, and points above the layer as it is."""
    plan = [
        (name, setting, replace(sweep, seed=seed, epochs=arguments.epochs or sweep.epochs), rate, changes)
        for seed in arguments.seeds or [REDUCED.seed, REDUCED.seed + 1]
        for setting in reduced(arguments.tasks)
        for sweep in [reduced_sweep(setting)]
        for name, changes in chosen(arguments, mad.LAYERS, mad.chunk_of(setting)).items()
        for rate in sweep.rates
    ]
    runs = []
    with ConsoleProgress().stage("ablations", len(plan)) as advance:
        for name, setting, sweep, rate, changes in plan:
            options = with_changes(arguments, changes)
            runs.append({**mad.run_one("ttcd", setting, sweep, rate, sweep.weight_decays[0], options), "system": name})
            advance(1)
    table = mad.scores(runs)
    for name, rows in table.items():
        for task, row in rows.items() if name != AS_IS else ():
            pairs = zip(row["by_seed"], table[AS_IS][task]["by_seed"], strict=True)
            row["above_as_is"] = [own - reference for own, reference in pairs]
    return {"scores": table, "runs": runs}


ON: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"book": on_book, "mad": on_mad}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=ON, default="book")
    parser.add_argument("--ablations", nargs="+", choices=ablations(4, 64), metavar="NAME", help="all by default")
    parser.add_argument("--seeds", type=at_least(0), nargs="+")
    language.add_options(parser)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="of MAD")
    parser.add_argument("--epochs", type=int, help="of MAD")
    parser.add_argument("--width", type=int, default=64, help="of MAD's models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("fast_weights_ablations.work"), help="finished runs, states")
    parser.add_argument("--name", help="of the file of results")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    figures = ON[arguments.on](arguments)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("work", "name")}
    name = arguments.name or f"fast_weights_ablations_{arguments.on}"
    record(name, {"settings": settings, **figures})


if __name__ == "__main__":
    run_script(main)
