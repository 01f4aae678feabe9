"""The compressors in block-sparse attention: retrieval at the training length, at twice and at four times that.

    python benchmarks/block_sparse_retrieval.py [--systems mean concat attention ttr ttr-conv full sliding]
        [--seeds 0 1 2] [--steps 3000] [--work FOLDER] [--finished]

Every system is the same small language model (the recipe's, trained from scratch on needles for the same steps); only
the compressor of chunks differs. Full attention and the sliding window are the references. All systems of a seed see
the same training and test sequences. `attention` is HiLS's summary, with the entropy of its weights as the bias; the
others have no bias (`--bias` gives all the same one). A finished run, one system with one seed, is kept in `--work`,
and a training state now and then: call the same command again to go on; --finished records finished runs early, and
--take-over goes on with a record. The figures are accuracies of each run, with the mean and the standard deviation over
seeds, and each system's difference to `attention` seed by seed.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, replace
from typing import Any

import kept_runs
import torch
from common import differences, field_of, record, run_script
from rich.console import Console
from train_block_sparse import build, evaluate
from training_run import add_settings, changed

from ttmem.block_sparse import BlockSparseConfig
from ttmem.block_sparse.objectives import RetrievalObjective
from ttmem.block_sparse.recipes import RECIPES, Recipe
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.loop import TrainSettings, TrainState, train

SYSTEMS: dict[str, dict[str, Any]] = {
    "mean": {"compressor": "mean"},
    "concat": {"compressor": "concat"},
    "attention": {"compressor": "attention", "summary_bias": "entropy"},
    "ttr": {"compressor": "ttr"},
    "ttr-conv": {"compressor": "ttr-conv"},
    "full": {"attention": "full"},
    "sliding": {"attention": "sliding"},
}
BASELINE = "attention"
REFERENCES = ("full", "sliding")


def model_changes(system: str, arguments: argparse.Namespace) -> dict[str, Any]:
    changes = {**SYSTEMS[system], **dict(arguments.set)}
    if system not in REFERENCES:
        changes["compressor_input"] = arguments.input
        if arguments.bias is not None and system != "concat":
            changes["summary_bias"] = arguments.bias
    return changes


def run_one(
    system: str, seed: int, recipe: Recipe, settings: TrainSettings, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """Train and test one system with one seed, or read what an earlier call has found; None for one left to a later."""
    network = build(recipe, seed, model_changes(system, arguments), needles=True).to(arguments.device).train()
    run = {
        "training": asdict(settings),
        "seed": seed,
        "model": differences(network.config),
        "length": recipe.length,
        "batch": recipe.batch,
        "shortest": recipe.shortest,
        "task": asdict(recipe.task),
        "sequences": arguments.sequences,
    }
    done = kept_runs.path_of(arguments.work, f"{system}-{seed}", run)
    finished = kept_runs.finished(done)
    if finished is not None or arguments.finished:
        return finished
    state_path = done.with_suffix(".state.safetensors")
    objective = RetrievalObjective(network, recipe.task, recipe.length, recipe.batch, seed, recipe.shortest)
    console = Console(stderr=True)

    def checkpoint(state: TrainState) -> None:
        save_state(state, state_path, run)
        recent = objective.losses[-settings.checkpoint_every :]
        loss = sum(recent) / len(recent)
        console.print(f"{system}, seed {seed}: step {state.step}, {state.seconds:.0f} s, loss {loss:.3f}")

    earlier = load_state(state_path, run) if state_path.exists() else None
    state = train(dict(network.named_parameters()), objective, settings, None, earlier, checkpoint)
    found = {
        "system": system,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "steps": state.step,
        "seconds": state.seconds,
        "accuracy": evaluate(network, recipe, arguments.sequences, 10_000 + seed),
    }
    found = kept_runs.keep(found, done)
    state_path.unlink(missing_ok=True)
    console.print(f"{system}, seed {seed}: {found['accuracy']}")
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else 0.0}


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By system, task and length: the accuracy over seeds, and what it is above the baseline's, seed by seed."""
    by_run = {(run["system"], run["seed"]): run["accuracy"] for run in runs}
    table: dict[str, Any] = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        seeds = sorted(seed for own, seed in by_run if own == system)
        compared = [seed for seed in seeds if (BASELINE, seed) in by_run and system != BASELINE]
        table[system] = {}
        for kind, lengths in by_run[system, seeds[0]].items():
            table[system][kind] = {}
            for length in lengths:
                row: dict[str, Any] = spread([by_run[system, seed][kind][length] for seed in seeds])
                above = [by_run[system, s][kind][length] - by_run[BASELINE, s][kind][length] for s in compared]
                if above:
                    row[f"above_{BASELINE}"] = spread(above)
                table[system][kind][length] = row
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--input", choices=["keys", "hidden", "residual"], default="keys", help="what is compressed")
    parser.add_argument("--bias", choices=["none", "entropy"], help="of all compressors (concat has none)")
    parser.add_argument(
        "--set", type=field_of(BlockSparseConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of all models"
    )
    add_settings(parser)
    parser.add_argument("--sequences", type=int, default=256, help="per task and length, in the evaluation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch")
    kept_runs.add_options(parser, "block_sparse_retrieval")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recipe = RECIPES[arguments.recipe]
    length = arguments.length or recipe.length
    shortest = None if recipe.shortest is None else min(recipe.shortest, length)
    recipe = replace(recipe, length=length, batch=arguments.batch or recipe.batch, shortest=shortest)
    settings = changed(recipe.training, arguments)
    kept_runs.prepare(arguments)
    # Seed by seed, so that what is there after an interruption compares all systems.
    runs = [run_one(s, seed, recipe, settings, arguments) for seed in arguments.seeds for s in arguments.systems]
    runs = [run for run in runs if run is not None]
    kept = ("systems", "seeds", "recipe", "input", "bias", "sequences", "device")
    figures = {
        "settings": {
            **{name: getattr(arguments, name) for name in kept},
            "set": dict(arguments.set),
            "length": recipe.length,
            "batch": recipe.batch,
            "shortest": recipe.shortest,
            "task": asdict(recipe.task),
            "training": asdict(settings),
            "model": recipe.model,
        },
        "over_seeds": over_seeds(runs),
        "runs": runs,
    }
    record(arguments.name, figures)


if __name__ == "__main__":
    run_script(main)
