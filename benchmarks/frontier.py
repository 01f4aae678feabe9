"""Accuracy against preparation seconds: recipes of Latent Compaction on development documents.

    python benchmarks/frontier.py phonebook|facts [--docs 2] [--ratios 16] [--only quick ...] [--folder frontier]

The documents are made with a seed that no other script uses: recipes may be chosen on them, and are then measured on
the documents of `accuracy.py`. What a killed run has finished is kept in --folder, and the same command goes on.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from common import PHONEBOOK_MODEL, model_label, record

import ttmem
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.settings import LatentSettings, preset_settings
from ttmem.evaluation.bench import RESULTS, Plan, Subject, append, open_run, read_results
from ttmem.evaluation.summary import summarize
from ttmem.tasks.registry import make_task

DEVELOPMENT_SEED = 7
SUITES = {
    "phonebook": (str(PHONEBOOK_MODEL), "phonebook", 1024),
    "facts": (None, "facts", 1200),
}


def recipes() -> dict[str, LatentSettings]:
    """Name -> settings: the paper's recipe and shorter runs of it, our presets, and these with parts taken away."""
    paper, quick, balanced = (preset_settings(name) for name in ("paper", "quick", "balanced"))
    return {
        "paper": paper,
        "paper, a fifth": replace(paper, rollouts=120, mass_start=True, distill_updates=200),
        "paper, a twentieth": replace(paper, rollouts=48, mass_start=True, fit_updates=400, distill_updates=40),
        "quick without passages": replace(quick, passage_rounds=0),
        "quick": quick,
        "quick, split chosen": replace(quick, choose_split=True),
        "balanced, rollouts alone": replace(balanced, distill_batch=8, distill_passages=0),
        "balanced, passages alone": replace(balanced, distill_batch=0, distill_passages=8),
        "balanced, rate .005": replace(balanced, distill_lr=0.005, trial_updates=0),
        "balanced, rate .05": replace(balanced, trial_updates=0),
        "balanced": balanced,
        "thorough": preset_settings("thorough"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--docs", type=int, default=2)
    parser.add_argument("--ratios", type=float, nargs="+", default=[16])
    parser.add_argument("--only", nargs="+", help="only recipes of these names")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    name, task_name, length = SUITES[arguments.suite]
    model, task = ttmem.load_model(name), make_task(task_name)
    chosen = {label: s for label, s in recipes().items() if not arguments.only or label in arguments.only}
    folder = arguments.folder or Path(f"frontier-{arguments.suite}")
    plan = Plan((task_name,), ("latent",), tuple(arguments.ratios), (length,), arguments.docs, DEVELOPMENT_SEED)
    open_run(folder, model, plan, preset_settings("quick"))
    done = {result.key: result for result in read_results(folder / RESULTS)}
    progress, results = ttmem.ConsoleProgress(), []
    with progress.stage("frontier", arguments.docs * len(chosen) * len(arguments.ratios)) as advance:
        for index in range(arguments.docs):
            for label, settings in chosen.items():
                subject: Subject | None = None
                for ratio in arguments.ratios:
                    result = done.get((task.name, length, index, label, ratio))
                    if result is None:
                        subject = subject or Subject(model, task, length, index, DEVELOPMENT_SEED, settings)
                        result = subject.result(LatentCompaction(settings), ratio)
                        result = replace(result, method=label)
                        append(folder / RESULTS, result)
                    results.append(result)
                    advance(1)
    figures = {
        "model": model_label(model.name),
        "docs": arguments.docs,
        "recipes": {label: asdict(settings) for label, settings in chosen.items()},
        "rows": [asdict(row) for row in summarize(results)],
    }
    record(f"frontier_{arguments.suite}", figures, DEVELOPMENT_SEED)


if __name__ == "__main__":
    main()
