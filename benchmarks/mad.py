"""MAD: the fast-weight layers and their baselines on six synthetic token tasks.

    python benchmarks/mad.py [--systems window in_place lact deltanet gated_deltanet ttcd] [--tasks recall ...]
        [--seeds 12345 12346] [--full] [--every-setting] [--work FOLDER] [--finished]

Without --full: each task's baseline setting (or every one), fewer sequences and epochs, a narrower model, one rate and
no decay, so that a run takes a CPU minutes. With it: all 66 settings, three rates and two decays, 200 epochs, the
reference width; that is for GPUs (--device cuda). All systems have two layers of the same width and see the same
sequences; a setting's score is the best test accuracy of its sweep, a task's the mean over settings. Finished runs are
kept in --work, and the same command goes on; --finished records them early, and --take-over goes on with a record.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, replace
from typing import Any

import kept_runs
import torch
from common import field_of, record, run_script
from torch import Tensor, nn

from ttmem.evaluation.mad import run_setting
from ttmem.fast_weights import TTCDConfig, TTCDModel
from ttmem.fast_weights.recipes import SYSTEMS, make_config
from ttmem.progress import ConsoleProgress
from ttmem.tasks.mad import FULL, REDUCED, TASKS, MadSetting, Sweep, grid, reduced, reduced_sweep

COMPARED = ("window", "in_place", "lact", "deltanet", "gated_deltanet", "ttcd")
LAYERS = 2
SHORT = ("compression", "memorisation")
"""Tasks whose sequences are so short that the windows are halved."""


class Encoder(nn.Module):
    """A decoder as MAD's readouts want it: ids in, hidden states out."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        self.decoder = TTCDModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(input_ids=ids, use_cache=False).last_hidden_state


def chunk_of(setting: MadSetting) -> int:
    """Tokens of a chunk and of the student's window, half the teacher's."""
    return 8 if setting.task in SHORT else 16


def config_of(system: str, setting: MadSetting, vocabulary: int, width: int, changes: dict[str, Any]) -> TTCDConfig:
    """Two layers, four heads, MLPs of twice the width; windows 32 and 16 (16 and 8 for the short tasks)."""
    chunk = chunk_of(setting)
    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": width // 4,
        "max_position_embeddings": setting.length,
        "windows": 2 * chunk,
        "teacher_window": 2 * chunk,
        "student_window": chunk,
        "chunk_size": chunk,
    }
    return make_config(values, system, changes)


def sweep_of(setting: MadSetting, arguments: argparse.Namespace) -> Sweep:
    """How a setting is trained, with what the options change."""
    sweep = FULL if arguments.full else reduced_sweep(setting)
    return replace(
        sweep,
        epochs=arguments.epochs or sweep.epochs,
        batch=arguments.batch or sweep.batch,
        rates=tuple(arguments.rates or sweep.rates),
        weight_decays=tuple(arguments.decays or sweep.weight_decays),
    )


def run_one(
    system: str,
    setting: MadSetting,
    sweep: Sweep,
    rate: float,
    decay: float,
    arguments: argparse.Namespace,
) -> dict[str, Any] | None:
    """One training, or what an earlier call has found of it; None for one left to a later call."""
    changes = dict(arguments.set)
    identity = {
        "system": system,
        "setting": asdict(setting),
        "sweep": asdict(replace(sweep, rates=(rate,), weight_decays=(decay,))),
        "width": arguments.width,
        "set": changes,
    }
    path = kept_runs.path_of(arguments.work, f"{system}-{setting.task}", identity)
    earlier = kept_runs.finished(path)
    if earlier is not None or arguments.finished:
        return earlier

    def make(vocabulary: int) -> nn.Module:
        return Encoder(config_of(system, setting, vocabulary, arguments.width, changes))

    found = run_setting(setting, make, arguments.width, sweep, rate, decay, arguments.device)
    return kept_runs.keep({**identity, **found}, path)


def scores(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By system and task: the best of each setting's sweep, the mean over settings, and its spread over seeds.

    A mean over all tasks is of the seeds that have run all of the system's.
    """
    best: dict[tuple[str, str, int, str], float] = {}
    for run in runs:
        key = (run["system"], run["setting"]["task"], run["sweep"]["seed"], json.dumps(run["setting"], sort_keys=True))
        best[key] = max(best.get(key, 0.0), 100 * run["accuracy"])
    order = list(dict.fromkeys(run["setting"]["task"] for run in runs))
    table: dict[str, Any] = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        means: dict[str, dict[int, float]] = {}
        for task, seed in sorted({key[1:3] for key in best if key[0] == system}, key=lambda pair: order.index(pair[0])):
            values = [value for key, value in best.items() if key[:3] == (system, task, seed)]
            means.setdefault(task, {})[seed] = statistics.fmean(values)
        whole = set.intersection(*(set(row) for row in means.values()))
        means["all"] = {seed: statistics.fmean(row[seed] for row in means.values()) for seed in whole}
        table[system] = {task: spread(row) for task, row in means.items() if row}
    return table


def spread(by_seed: dict[int, float]) -> dict[str, Any]:
    seeds = sorted(by_seed)
    values = [by_seed[seed] for seed in seeds]
    return {"mean": statistics.fmean(values), "by_seed": values, "seeds": seeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(COMPARED))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--full", action="store_true", help="all settings and the whole sweep")
    parser.add_argument("--every-setting", action="store_true", help="with the short training all the same")
    parser.add_argument("--width", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--rates", type=float, nargs="+")
    parser.add_argument("--decays", type=float, nargs="+")
    parser.add_argument("--batch", type=int)
    parser.add_argument(
        "--set", type=field_of(TTCDConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of all models"
    )
    parser.add_argument("--device", default="cpu")
    kept_runs.add_options(parser, "mad")
    arguments = parser.parse_args()
    arguments.width = arguments.width or (128 if arguments.full else 64)
    kept_runs.prepare(arguments)
    settings = grid(arguments.tasks) if arguments.full else reduced(arguments.tasks, arguments.every_setting)
    seeds = arguments.seeds or ([FULL.seed] if arguments.full else [REDUCED.seed, REDUCED.seed + 1])
    plan = [
        (system, setting, replace(sweep, seed=seed), rate, decay)
        for seed in seeds  # seed by seed, so that what an interruption leaves compares all systems
        for setting in settings
        for sweep in [sweep_of(setting, arguments)]
        for system in arguments.systems
        for rate in sweep.rates
        for decay in sweep.weight_decays
    ]
    runs = []
    with ConsoleProgress().stage("MAD", len(plan)) as advance:
        for one in plan:
            runs.append(run_one(*one, arguments))
            advance(1)
    runs = [run for run in runs if run is not None]
    figures = {
        "width": arguments.width,
        "full": arguments.full,
        "every_setting": arguments.every_setting,
        "set": dict(arguments.set),
        "torch_threads": torch.get_num_threads(),
        "scores": scores(runs),
        "runs": runs,
    }
    record(arguments.name, figures, seeds[0])


if __name__ == "__main__":
    run_script(main)
