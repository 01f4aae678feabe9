"""Two texts as one memory: compacted together, extended by the second, or merged from two (also with both sinks).

    python benchmarks/grown_documents.py [--docs 3] [--length 600] [--ratio 8] [--preset quick]

Each document is two of the task `facts`, of --length tokens each, with the questions of both. The full context of all
is the reference; the budget is the same for all. `of first` and `of second` are accuracies on each text's questions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import model_label, record

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import LatentSettings
from ttmem.evaluation.bench import greedy
from ttmem.evaluation.fidelity import agreement
from ttmem.memory import Memory
from ttmem.tasks.registry import make_task


def memories(
    model: ttmem.Model, first: str, second: str, ratio: float, preset: str, seed: int
) -> tuple[Memory, dict[str, tuple[Memory, float]]]:
    """(full context of both, name -> (memory, seconds of the step that a second text costs))."""
    options: dict[str, Any] = {"ratio": ratio, "preset": preset, "seed": seed, "measure": False}
    full = Prepared(model, Document.of(model, first + second), LatentSettings()).full
    one = ttmem.compact(model, first, **options)
    found = {}
    start = time.perf_counter()
    found["compacted together"] = (ttmem.compact(model, first + second, **options), time.perf_counter() - start)
    start = time.perf_counter()
    found["extended"] = (ttmem.extend(model, one, second, **options), time.perf_counter() - start)
    start = time.perf_counter()
    other = ttmem.compact(model, second, **options)
    found["merged"] = (ttmem.merge(model, [one, other]), time.perf_counter() - start)
    found["merged, sinks kept"] = (ttmem.merge(model, [one, other], keep_sinks=True), found["merged"][1])
    return full, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=int, default=3)
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--ratio", type=float, default=8)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, task = ttmem.load_model(arguments.model), make_task("facts")
    rows: dict[str, list[dict[str, float]]] = {}
    progress = ttmem.ConsoleProgress()
    with progress.stage("documents", arguments.docs) as advance:
        for index in range(arguments.docs):
            parts = [
                task.example(model.encode, arguments.length, 2 * index + half, arguments.seed) for half in (0, 1)
            ]
            first, second = parts[0].document, "\n\n" + parts[1].document
            full, found = memories(model, first, second, arguments.ratio, arguments.preset, arguments.seed)
            questions = [question for part in parts for question in part.questions]
            prompts = [model.encode(question.prompt) for question in questions]
            truth = greedy(model, full, prompts, questions)
            for name, (memory, seconds) in {"full context": (full, 0.0), **found}.items():
                answers = truth if memory is full else greedy(model, memory, prompts, questions)
                scores = [
                    task.score(model.decode(answer), question)
                    for answer, question in zip(answers, questions, strict=True)
                ]
                close = agreement(model, full, {"memory": memory}, prompts, truth)["memory"]
                half = len(parts[0].questions)
                rows.setdefault(name, []).append(
                    {
                        "accuracy": 100 * statistics.fmean(scores),
                        "of first": 100 * statistics.fmean(scores[:half]),
                        "of second": 100 * statistics.fmean(scores[half:]),
                        "kl": close.kl,
                        "top1": close.top1,
                        "seconds": seconds,
                        "entries": float(memory.entries),
                    }
                )
            advance(1)
    means = {
        name: {key: statistics.fmean(row[key] for row in group) for key in group[0]} for name, group in rows.items()
    }
    settings = {name: value for name, value in vars(arguments).items() if name != "model"}
    record(
        "grown_documents",
        {"model": model_label(model.name), "settings": settings, "means": means, "documents": rows},
        arguments.seed,
    )


if __name__ == "__main__":
    main()
