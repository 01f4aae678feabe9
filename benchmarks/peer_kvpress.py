"""kvpress's KVzip and KVzip+ against ttmem: the same documents, model and budgets.

    sh benchmarks/peers/install_kvpress.sh .venv-kvpress
    python benchmarks/peer_kvpress.py --environment .venv-kvpress [--docs 3] [--ratios 8 16]

kvpress runs in a process and an environment of its own (it needs an older transformers), ttmem in this one, one after
the other. Accuracy is by the task's score on greedy answers to the same raw text; seconds are those of the preparation,
reading included; a token's seconds include the question's; bytes are what is really held for the document.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import record

import ttmem
from ttmem.compaction.api import make_method
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, preset_settings
from ttmem.evaluation.bench import greedy, timed
from ttmem.tasks.registry import make_task
from ttmem.tasks.task import Example, Task

PRESSES = ("kvzip", "kvzip+", "snapkv")
METHODS = ("kvzip+", "snapkv", "latent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=["facts", "niah_multikey_1"])
    parser.add_argument("--length", type=int, default=1200)
    parser.add_argument("--docs", type=int, default=3)
    parser.add_argument("--ratios", type=float, nargs="+", default=[8, 16])
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ttmem.load_model(dtype="float32", device="cpu")
    tasks = {name: make_task(name) for name in arguments.tasks}
    examples = {
        f"{name} {index}": (task, task.example(model.encode, arguments.length, index, arguments.seed))
        for name, task in tasks.items()
        for index in range(arguments.docs)
    }
    theirs = kvpress_rows(model, examples, arguments)
    ours = ttmem_rows(model, examples, arguments)
    figures = {
        "length": arguments.length,
        "docs": arguments.docs,
        "preset": arguments.preset,
        "kvpress": {"versions": theirs["versions"], "peak_bytes": theirs["peak_bytes"]},
        "ttmem": {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024},
        "rows": summary(theirs["rows"], "kvpress") + summary(ours, "ttmem"),
    }
    record("peer_kvpress", figures, arguments.seed)


def kvpress_rows(
    model: ttmem.Model, examples: dict[str, tuple[Task, Example]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Answers and figures of kvpress, scored here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model.network.save_pretrained(folder / "model")
        model.tokenizer.save_pretrained(folder / "model")
        job = {
            "model": str(folder / "model"),
            "threads": torch.get_num_threads(),
            "eos_token_ids": sorted(model.eos_token_ids),
            "presses": [["none", 1.0], *([press, ratio] for ratio in arguments.ratios for press in PRESSES)],
            "documents": [
                {
                    "name": label,
                    "text": example.document,
                    "prompts": [[question.prompt, question.max_new_tokens] for question in example.questions],
                }
                for label, (_, example) in examples.items()
            ],
        }
        (folder / "job.json").write_text(json.dumps(job))
        worker = Path(__file__).parent / "peers" / "kvpress_worker.py"
        command = [arguments.environment / "bin" / "python", worker, folder / "job.json", folder / "result.json"]
        subprocess.run([str(part) for part in command], check=True)
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    for row in found["rows"]:
        task, example = examples[row["document"]]
        row["method"] = row.pop("press")
        row["score"] = score(task, example, row.pop("answers"))
    return found


def ttmem_rows(
    model: ttmem.Model, examples: dict[str, tuple[Task, Example]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The same of ttmem's methods."""
    settings = preset_settings(arguments.preset)
    rows = []
    for label, (task, example) in examples.items():
        prepared = Prepared(model, Document.of(model, example.document, label), settings)
        prompts = [model.encode(question.prompt) for question in example.questions]
        for name, ratio in [("full", 1.0), *((name, ratio) for ratio in arguments.ratios for name in METHODS)]:
            budget = Budget.of(prepared.document.length, ratio)
            memory, steps = timed(prepared, make_method(name, settings, arguments.seed), budget)
            answers, times = [], []
            for prompt, question in zip(prompts, example.questions, strict=True):
                start = time.perf_counter()
                (answer,) = greedy(model, memory, [prompt], [question])
                times.append((time.perf_counter() - start) / max(1, len(answer)))
                answers.append(model.decode(answer))
            rows.append(
                {
                    "document": label,
                    "method": name,
                    "ratio": ratio,
                    "score": score(task, example, answers),
                    "seconds": sum(steps.values()),
                    "bytes": memory.num_bytes(),
                    "seconds_per_token": statistics.median(times),
                }
            )
    return rows


def score(task: Task, example: Example, answers: list[str]) -> float:
    return statistics.fmean(task.score(text, q) for text, q in zip(answers, example.questions, strict=True))


def summary(rows: list[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Means over documents per task, method and ratio."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["document"].rsplit(" ", 1)[0], row["method"], row["ratio"]), []).append(row)
    return [
        {
            "system": system,
            "task": task,
            "method": method,
            "ratio": ratio,
            "accuracy": 100 * statistics.fmean(row["score"] for row in group),
            "scores": [row["score"] for row in group],
            "seconds": statistics.median(row["seconds"] for row in group),
            "bytes": statistics.fmean(row["bytes"] for row in group),
            "seconds_per_token": statistics.median(row["seconds_per_token"] for row in group),
        }
        for (task, method, ratio), group in groups.items()
    ]


if __name__ == "__main__":
    main()
