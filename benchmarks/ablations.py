"""The paper's ablations on our models: its tables 1 to 4 and figures 5 and 6, at one ratio.

    python benchmarks/ablations.py [--model benchmarks/phonebook_model] [--task phonebook] [--lengths 1024] [--docs 20]

Every variant changes settings of Latent Compaction and nothing else; documents, rollouts and questions are shared. The
results of a run that is killed are kept in --folder, and the same command goes on.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from common import PHONEBOOK_MODEL, model_label, record

import ttmem
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.settings import LatentSettings, preset_settings
from ttmem.evaluation.bench import RESULTS, Plan, Result, Subject, append, open_run, read_results
from ttmem.evaluation.summary import Row, summarize
from ttmem.tasks.registry import make_task


def variants(base: LatentSettings) -> dict[str, dict[str, LatentSettings]]:
    """Table or figure -> label -> settings."""
    stage_1, stage_2 = base.fit_updates, base.distill_updates
    return {
        "table 1: initialisation": {
            "25 % anchors, 75 % diversifiers": base,
            "random": replace(base, initializer="random"),
            "all anchors": replace(base, anchor_fraction=1.0),
            "all diversifiers": replace(base, anchor_fraction=0.0),
        },
        "table 2: stage 1": {
            "default": base,
            "no stage 1": replace(base, fit_updates=0, mass_start=False, closed_form=False),
            "preservers trained": replace(base, fit_preservers=True),
            "no log Z loss": replace(base, log_z_weight=0.0),
        },
        "table 3: stage 2": {
            "default": base,
            "no stage 2": replace(base, distill_updates=0),
            "no LM loss": replace(base, lm_weight=0.0),
            "full-vocabulary KL": replace(base, full_vocabulary=True),
        },
        "table 4: architecture": {
            "default": base,
            "no biases": replace(base, biases=False),
            "branches averaged equally": replace(base, merging="equal"),
        },
        "figure 5: preserver fraction": {
            f"{fraction:.0%}": replace(base, latent_fraction=1 - fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 0.9)
        },
        "figure 5: anchor fraction": {
            f"{fraction:.0%}": replace(base, anchor_fraction=fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)
        },
        "figure 6: updates of stage 1 / 2": {
            f"{first} / {second}": replace(base, fit_updates=first, distill_updates=second)
            for first in (0, stage_1 // 4, stage_1, 2 * stage_1)
            for second in (0, stage_2 // 4, stage_2 // 2, stage_2, 2 * stage_2)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(PHONEBOOK_MODEL))
    parser.add_argument("--task", default="phonebook")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--docs", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--only", nargs="+", default=[""], help="only tables and figures whose names hold one of these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of partial results [ablations-PRESET]")
    parser.add_argument("--name", help="of the file of results [ablations_TASK_PRESET]")
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    base = replace(preset_settings(arguments.preset), choose_split=False)  # what is split is what is ablated
    groups = {
        name: group for name, group in variants(base).items() if any(part in name for part in arguments.only)
    }
    distinct = {settings: None for group in groups.values() for settings in group.values()}
    arguments.folder = arguments.folder or Path(f"ablations-{arguments.preset}")
    plan = Plan(
        (arguments.task,), ("latent",), (arguments.ratio,), tuple(arguments.lengths), arguments.docs, arguments.seed
    )
    open_run(arguments.folder, model, plan, base)
    results = run(model, arguments, base, list(distinct))
    tables = {}
    for name, group in groups.items():
        tables[name] = {label: by_length(results[settings]) for label, settings in group.items()}
    figures = {"model": model_label(model.name), "ratio": arguments.ratio, "docs": arguments.docs}
    record(
        arguments.name or f"ablations_{arguments.task}_{arguments.preset}",
        {**figures, "base": asdict(base), "tables": tables},
        arguments.seed,
    )


def run(
    model: ttmem.Model, arguments: argparse.Namespace, base: LatentSettings, distinct: list[LatentSettings]
) -> dict[LatentSettings, list[Result]]:
    """Results of every distinct setting on every document, each computed once."""
    task = make_task(arguments.task)
    path = arguments.folder / RESULTS
    done = {result.key: result for result in read_results(path)}
    progress = ttmem.ConsoleProgress()
    found: dict[LatentSettings, list[Result]] = {settings: [] for settings in distinct}
    with progress.stage("ablations", len(arguments.lengths) * arguments.docs * len(distinct)) as advance:
        for length in arguments.lengths:
            for index in range(arguments.docs):
                subject: Subject | None = None
                for settings in distinct:
                    label = difference(base, settings)
                    result = done.get((task.name, length, index, label, arguments.ratio))
                    if result is None:
                        subject = subject or Subject(model, task, length, index, arguments.seed, base)
                        result = subject.result(LatentCompaction(settings, arguments.seed), arguments.ratio)
                        result = replace(result, method=label)
                        append(path, result)
                    found[settings].append(result)
                    advance(1)
    return found


def difference(base: LatentSettings, settings: LatentSettings) -> str:
    """How settings differ from the base, as a label that is the same in every run."""
    changed = {name: value for name, value in asdict(settings).items() if value != getattr(base, name)}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "default"


def by_length(results: list[Result]) -> dict[str, dict[str, float]]:
    """Accuracy with its error, and agreement, per length."""
    rows: list[Row] = summarize(results)
    return {
        str(row.length): {
            "accuracy": round(row.accuracy, 2),
            "error": round(row.error, 2),
            "kl": round(row.kl, 4),
            "top1": round(row.top1, 4),
        }
        for row in rows
    }


if __name__ == "__main__":
    main()
