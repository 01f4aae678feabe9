"""Every method at equal budgets: accuracy, agreement with the full context, preparation seconds.

    python benchmarks/accuracy.py phonebook|ruler|facts [--docs 20] [--preset quick] [--folder results-folder]

phonebook runs on the phonebook model at ratios 4 to 64; ruler and facts on the bundled model. What a killed run has
finished is kept in --folder, and the same command goes on. Seconds are fair only where nothing else computes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

from common import PHONEBOOK_MODEL, model_label, record

import ttmem
from ttmem.compaction.settings import preset_settings
from ttmem.evaluation.bench import Plan, run_bench
from ttmem.evaluation.summary import summarize
from ttmem.tasks.registry import make_task

ALL = ("full", "latent", "kvzip+", "am", "am-omp", "snapkv", "pyramidkv", "summary")


@dataclass(frozen=True)
class Suite:
    """What one claim needs: model, tasks with the questions per document (None: the task's own), methods, ratios,
    lengths, documents."""

    model: str | None
    tasks: dict[str, int | None]
    ratios: tuple[float, ...]
    lengths: tuple[int, ...]
    docs: int
    methods: tuple[str, ...] = ALL


SUITES = {
    "phonebook": Suite(
        str(PHONEBOOK_MODEL), {"phonebook": 20}, (4, 8, 16, 32, 64), (1024,), 20
    ),
    "ruler": Suite(
        None,
        {
            "niah_single_1": None,
            "niah_single_2": None,
            "niah_single_3": None,
            "niah_multikey_1": 4,
            "niah_multikey_2": 8,
            "niah_multivalue": None,
            "niah_multiquery": None,
        },
        (8, 16, 32),
        (1024, 2048, 4096),
        5,
    ),
    "facts": Suite(None, {"facts": None}, (8, 16, 32), (1200, 3000), 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--docs", type=int)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--ratios", type=float, nargs="+")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of partial results [accuracy-SUITE-PRESET]")
    parser.add_argument("--name", help="of the file of results [SUITE_PRESET]")
    arguments = parser.parse_args()
    suite = SUITES[arguments.suite]
    plan = Plan(
        tuple(arguments.tasks or suite.tasks),
        tuple(arguments.methods or suite.methods),
        tuple(arguments.ratios or suite.ratios),
        tuple(arguments.lengths or suite.lengths),
        suite.docs if arguments.docs is None else arguments.docs,
        arguments.seed,
    )
    counts = {name: suite.tasks.get(name) for name in plan.tasks}
    tasks = {name: make_task(name, **({} if n is None else {"questions": n})) for name, n in counts.items()}
    model = ttmem.load_model(suite.model)
    settings = preset_settings(arguments.preset)
    folder = arguments.folder or Path(f"accuracy-{arguments.suite}-{arguments.preset}")
    rows = summarize(run_bench(model, tasks, plan, settings, folder, ttmem.ConsoleProgress()))
    figures = {"model": model_label(model.name), "plan": asdict(plan), "settings": asdict(settings)}
    name = arguments.name or f"{arguments.suite}_{arguments.preset}"
    record(name, {**figures, "rows": [asdict(row) for row in rows]}, arguments.seed)


if __name__ == "__main__":
    main()
