"""Train the phonebook model from scratch on a CPU, or measure its checkpoint.

    python benchmarks/train_phonebook.py [--steps 2600 | --minutes 30] [--out benchmarks/phonebook_model] [--resume]
    python benchmarks/train_phonebook.py --evaluate

The curriculum begins with documents of a few entries and lets them grow whenever the model answers most of them. The
training state is saved to `--state` now and then, from which `--resume` goes on; the checkpoint in `--out` is written
at the end.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import PHONEBOOK_MODEL, record
from phonebook_network import build_network
from phonebook_text import Mix, PhonebookText, build_tokenizer
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ttmem import load_model
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.prompts import HELD_OUT_PROMPTS, replay_request, rollout_prompts
from ttmem.generation import greedy_answers
from ttmem.models import Model
from ttmem.progress import ConsoleProgress
from ttmem.tasks.phonebook import Phonebook
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.loop import TrainSettings, TrainState, train
from ttmem.training.packing import pad, predict

LENGTHS = (256, 512, 1024, 2048, 4096)

FIRST_ENTRIES, MOST_ENTRIES = 3, 72
"""Entries of the longest documents at the start and at the end of the curriculum: 90 and 2,100 tokens."""
GROWTH = 1.25
MASTERED = 0.85
"""Share of digits of long documents predicted rightly at which documents grow."""
LEAST_BATCHES = 12
"""Batches of long documents between two growths."""
MEMORY = 0.95
"""The share is a running mean that keeps so much of itself at each batch."""


@dataclass(frozen=True)
class Kind:
    """A kind of batch: entries of its documents, least and most, its tokens and what is asked."""

    least: float
    most: float
    tokens: int
    mix: Mix


def kinds(longest: float) -> list[tuple[float, Kind]]:
    """(share, kind) of the batches where documents of `longest` entries are the longest in the curriculum.

    Mostly its upper two octaves, so that what was learned on shorter documents is kept. Half of the generic prompts get
    short documents, which rarely have the letters they look for, so that the closest ones must be found.
    """
    if longest < 12:
        return [(1.0, Kind(max(2.0, longest / 4), longest, 1200, Mix(0.45, 0.1, 0.15, 0.3)))]
    lookups = Kind(longest / 4, longest, 2400, Mix(0.55, 0.05, 0.25, 0.15))
    quotes = Kind(longest / 2, longest, 2400, Mix(0.1, 0.8, 0.1, 0.0))
    short_quotes = Kind(4.0, longest / 2, 2400, Mix(0.1, 0.8, 0.1, 0.0))
    if longest < MOST_ENTRIES:
        return [(0.7, lookups), (0.15, quotes), (0.15, short_quotes)]
    beyond = Kind(longest, 2 * longest, 2400, Mix(0.6, 0.1, 0.2, 0.1))
    return [(0.6, lookups), (0.15, quotes), (0.2, short_quotes), (0.05, beyond)]


class PhonebookObjective:
    """Batches of documents of one length, as long as the model has mastered."""

    def __init__(self, network: LlamaForCausalLM, text: PhonebookText, seed: int) -> None:
        self.network, self.text, self.seed = network, text, seed
        self.digits = torch.tensor(text.digit_ids)
        self.longest, self.right, self.batches = float(FIRST_ENTRIES), 0.0, 0

    def loss(self, step: int) -> Tensor:
        rng = np.random.default_rng([self.seed, step])
        shares, choices = zip(*kinds(self.longest), strict=True)
        kind = choices[rng.choice(len(choices), p=shares)]
        entries = int(np.exp(rng.uniform(np.log(kind.least), np.log(kind.most + 1))))
        first = self.text.sequence(rng, entries, kind.mix)
        others = [self.text.sequence(rng, entries, kind.mix) for _ in range(round(kind.tokens / len(first)) - 1)]
        predictions = predict(self.network, pad([first, *others], self.network.config.pad_token_id))
        if entries >= 0.7 * self.longest:
            hits = predictions.hits()[torch.isin(predictions.targets, self.digits)]
            self._grow(hits)
        return predictions.loss()

    def _grow(self, hits: Tensor) -> None:
        if not len(hits):
            return
        self.right = MEMORY * self.right + (1.0 - MEMORY) * hits.float().mean().item()
        self.batches += 1
        if self.right > MASTERED and self.batches >= LEAST_BATCHES:
            self.longest = min(float(MOST_ENTRIES), max(self.longest + 1.0, self.longest * GROWTH))
            self.batches = 0

    def state(self) -> dict[str, Any]:
        return {"longest": self.longest, "right": self.right, "batches": self.batches}

    def restore(self, state: dict[str, Any]) -> None:
        self.longest, self.right, self.batches = state["longest"], state["right"], state["batches"]


def lookup_accuracy(model: Model, length: int, docs: int, seed: int) -> float:
    """Share of exact greedy answers, uncompressed, over `docs` phonebooks of at most `length` tokens."""
    task, scores = Phonebook(), []
    for index in range(docs):
        example = task.example(model.encode, length, index, seed)
        full = Prepared(model, Document.of(model, example.document)).full
        prompts = [model.encode(question.prompt) for question in example.questions]
        answers = greedy_answers(model, full, prompts, max(q.max_new_tokens for q in example.questions))
        scores += [task.score(model.decode(a), q) for a, q in zip(answers, example.questions, strict=True)]
    return sum(scores) / len(scores)


def generic_answers(model: Model, length: int, seed: int) -> dict[str, Any]:
    """What the model says to generic prompts about one phonebook, and how well it repeats it.

    quoted: share of answers (24 tokens) that are the beginning of a passage of the document; entries_reached: share of
    the document's entries that some answer begins with; repeated: share of the document's tokens predicted rightly
    while it is repeated, teacher-forced.
    """
    example = Phonebook().example(model.encode, length, 0, seed)
    prepared = Prepared(model, Document.of(model, example.document))
    names = [line.split()[4] for line in example.document.splitlines()]
    figures: dict[str, Any] = {}
    for name, prompts in (("training prompts", rollout_prompts()), ("held-out prompts", list(HELD_OUT_PROMPTS))):
        answers = []
        for start in range(0, len(prompts), 48):
            encoded = [model.encode(prompt) for prompt in prompts[start : start + 48]]
            answers += [model.decode(ids).strip() for ids in greedy_answers(model, prepared.full, encoded, 24)]
        reached = {name for name in names if any(name in answer for answer in answers)}
        figures[name] = {
            "quoted": sum(answer in example.document for answer in answers) / len(answers),
            "entries_reached": len(reached) / len(names),
            "answers": answers[:: max(1, len(answers) // 6)],
        }
    ids = prepared.document.ids
    repeated = torch.cat([torch.tensor(model.encode(replay_request())), ids[:-1]]).unsqueeze(0)
    logits = model.forward(repeated, prepared.full.cache(), logits_to_keep=len(ids)).logits[0]
    figures["repeated"] = (logits.argmax(-1) == ids).float().mean().item()
    return figures


def evaluate(model: Model, docs: int, seed: int) -> dict[str, Any]:
    """Everything that is recorded about a checkpoint."""
    accuracy = {str(length): lookup_accuracy(model, length, docs, seed) for length in LENGTHS}
    return {"lookup_accuracy": accuracy, "documents": docs, "generic": generic_answers(model, 1024, seed)}


def save_checkpoint(network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in fp16: into a folder of its own first, then file by file, each in one move."""
    out.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        copy.deepcopy(network).half().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for path in sorted(fresh.iterdir()):
            path.chmod(0o644)
            path.replace(out / path.name)
    finally:
        shutil.rmtree(fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--minutes", type=float, help="stop after so much time instead of after --steps")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--out", type=Path, default=PHONEBOOK_MODEL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="where the training state is kept (default: beside --out)")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--evaluate", action="store_true", help="measure the checkpoint in --out; train nothing")
    parser.add_argument("--docs", type=int, default=32, help="documents per length that are measured")
    args = parser.parse_args()
    if args.evaluate:
        model = load_model(args.out, dtype="float32", device="cpu")
        print(json.dumps(evaluate(model, args.docs, args.seed), indent=1))
        return

    console = Console(stderr=True)
    settings = TrainSettings(
        steps=args.steps,
        minutes=args.minutes,
        optimizer="muon",
        lr=args.lr,
        weight_decay=0.01,
        schedule="wsd",
        warmup=30,
        checkpoint_every=100,
    )
    run = {**asdict(settings), "seed": args.seed}
    state_path = args.state or args.out.with_name(args.out.name + ".state.safetensors")
    tokenizer = build_tokenizer()
    network = build_network(tokenizer, args.seed)
    objective = PhonebookObjective(network, PhonebookText(tokenizer), args.seed)

    def checkpoint(state: TrainState) -> None:
        save_state(state, state_path, run)
        model = Model(copy.deepcopy(network), tokenizer, name="phonebook")
        right = ", ".join(f"{n}: {lookup_accuracy(model, n, 2, args.seed + 1):.2f}" for n in LENGTHS[:-1])
        entries = int(objective.longest)
        console.print(f"step {state.step}, {state.seconds:.0f} s, up to {entries} entries; right at {right}")

    start = time.process_time()
    state = train(
        dict(network.named_parameters()),
        objective,
        settings,
        ConsoleProgress(console),
        load_state(state_path, run) if args.resume else None,
        checkpoint,
    )
    processor_seconds = time.process_time() - start
    save_checkpoint(network, tokenizer, args.out)
    state_path.unlink(missing_ok=True)
    figures = {
        "steps": state.step,
        "seconds": state.seconds,
        "processor_seconds": processor_seconds,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "settings": asdict(settings),
        **evaluate(load_model(args.out, dtype="float32", device="cpu"), args.docs, args.seed),
    }
    record("phonebook_model", figures, args.seed)


if __name__ == "__main__":
    main()
