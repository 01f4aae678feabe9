"""Ablations of the TTCD layer: each part left out or changed, trained on a book or on MAD's tasks.

    python benchmarks/fast_weights_ablations.py [--on book] [--ablations no_convolutions no_projection ...]
        [--seeds 0 1] [--steps 1500]
    python benchmarks/fast_weights_ablations.py --on mad [--tasks recall fuzzy] [--seeds 12345 12346]

Model, data and training are those of `fast_weights_language.py` and of `mad.py`; an ablation is a change of the
configuration. "inclusive_scan" is eq. 13 as printed: its tokens read what later tokens of their chunk write, so that
its loss is no language model's. Figures are the perplexity behind each context, or the accuracy, with its difference
from "as_is" seed by seed. Finished runs are kept in --work, and the same command goes on; --finished records them
early, and --take-over goes on with a record.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fast_weights_language as language
import kept_runs
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
    runs = []
    for seed in arguments.seeds or [0, 1]:
        for name, changes in plan.items():
            run = language.run_one("ttcd", seed, with_changes(arguments, changes), book)
            if run is not None:
                runs.append({**run, "system": name, "set": changes})
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
            run = mad.run_one("ttcd", setting, sweep, rate, sweep.weight_decays[0], options)
            if run is not None:
                runs.append({**run, "system": name})
            advance(1)
    table = mad.scores(runs)
    for name, rows in table.items():
        for task, row in rows.items() if name != AS_IS else ():
            of_reference = table.get(AS_IS, {}).get(task, {"seeds": [], "by_seed": []})
            reference = dict(zip(of_reference["seeds"], of_reference["by_seed"], strict=True))
            by_seed = zip(row["seeds"], row["by_seed"], strict=True)
            row["above_as_is"] = [own - reference[seed] for seed, own in by_seed if seed in reference]
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
    kept_runs.add_options(parser, "fast_weights_ablations")
    arguments = parser.parse_args()
    if arguments.name == parser.get_default("name"):
        arguments.name += f"_{arguments.on}"
    kept_runs.prepare(arguments)
    figures = ON[arguments.on](arguments)
    settings = {name: value for name, value in vars(arguments).items() if name not in kept_runs.OPTIONS}
    record(arguments.name, {"settings": settings, **figures})


if __name__ == "__main__":
    run_script(main)
