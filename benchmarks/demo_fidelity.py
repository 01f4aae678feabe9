"""The demo document at 16x: fidelity before and after training and of KVzip+, seconds per stage.

    python benchmarks/demo_fidelity.py [--preset quick] [--ratio 16] [--seed 0]

KL and top-1 agreement are against the full context on the held-out prompts, which no training sees.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from common import record

import ttmem
from ttmem.compaction.document import Document
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.latent import LatentCompaction
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, preset_settings
from ttmem.demo import document, questions
from ttmem.evaluation.fidelity import measure_fidelities
from ttmem.generation import ask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = ttmem.load_model(arguments.model)
    settings = preset_settings(arguments.preset)
    progress = ttmem.ConsoleProgress()
    prepared = Prepared(model, Document.of(model, document()), settings, progress)
    budget = Budget.of(prepared.document.length, arguments.ratio)
    method = LatentCompaction(settings, arguments.seed)
    fitted = method.after_stage_1(prepared, budget)
    memories = {
        "initialisation": method.initial(prepared, budget),
        "kvzip+ (4 sinks)": KVzipPlus()(prepared, budget),
        "kvzip+ (no sinks)": KVzipPlus(sinks=0)(prepared, budget),
        "after stage 1": fitted,
        "latent": method.after_stage_2(prepared, fitted),
    }
    fidelities = measure_fidelities(model, prepared.full, memories, progress)
    asked = [item.question for item in questions()]
    shown = {"full": prepared.full, "kvzip+ (4 sinks)": memories["kvzip+ (4 sinks)"], "latent": memories["latent"]}
    answers = {name: ask(model, memory, asked, max_new_tokens=24) for name, memory in shown.items()}
    figures = {
        "preset": arguments.preset,
        "settings": asdict(settings),
        "document_tokens": prepared.document.length,
        "budget": asdict(budget),
        "bytes": {name: memory.num_bytes() for name, memory in {"full": prepared.full, **memories}.items()},
        "fidelity": {name: asdict(fidelity) for name, fidelity in fidelities.items()},
        "right_answers": {
            name: sum(item.answer.lower() in text.lower() for item, text in zip(questions(), given, strict=True))
            for name, given in answers.items()
        },
        "answers": [
            {"question": item.question, "expected": item.answer, **{name: answers[name][i] for name in shown}}
            for i, item in enumerate(questions())
        ],
        "seconds": progress.seconds,
    }
    record(f"demo_fidelity_{arguments.preset}", figures, arguments.seed)


if __name__ == "__main__":
    main()
