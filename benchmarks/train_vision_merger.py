"""Train the mergers of a Qwen3-VL in two stages: the mergers alone, then the mergers and the language model.

    python benchmarks/train_vision_merger.py --model FOLDER --data data.jsonl --kind ttr-conv --merge-size 3
        --out FOLDER [--batch 8] [--epochs 1 1] [--lr 1e-3 2e-5] [--resume]

The model is a folder with a Qwen3-VL, its tokenizer and its image processor. The data are lines of JSON with `image` (a
file, relative to the data), `question` and `answer`; each stage reads them in an order of its own. The states of both
stages are kept in the folder `--out` with ".states" behind it, from which `--resume` goes on as if the run had not
stopped; the trained model is written to `--out` at the end and read with `ttmem.vision.load`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from ttmem.errors import TaskError
from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.loop import TrainSettings, train
from ttmem.vision import (
    KINDS,
    STAGES,
    ImageTextEncoder,
    MergerSettings,
    Stage,
    collate,
    load,
    load_image,
    load_image_processor,
    predict,
    stage_parameters,
)


def read_data(path: Path) -> list[dict[str, str]]:
    """The examples. Raises TaskError for a line that lacks something."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read ({error})") from error
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            example = json.loads(line)
            examples.append({key: str(example[key]) for key in ("image", "question", "answer")})
        except (ValueError, KeyError, TypeError) as error:
            raise TaskError(f"{path}, line {number}: not JSON with image, question and answer ({error!r})") from error
    if not examples:
        raise TaskError(f"{path}: there are no examples")
    return examples


class Answering:
    """The objective: the answers of a batch of examples, whose order depends on seed, stage and epoch alone."""

    def __init__(
        self, network: Any, encode: ImageTextEncoder, data: Path, examples: list[dict[str, str]], batch: int, seed: str
    ) -> None:
        self.network, self.encode, self.folder = network, encode, data.parent
        self.examples, self.batch, self.seed = examples, batch, seed

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return math.ceil(len(self.examples) / self.batch)

    def loss(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps)
        order = list(range(len(self.examples)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        chosen = [self.examples[i] for i in order[place * self.batch : (place + 1) * self.batch]]
        encoded = [self.encode(load_image(self.folder / e["image"]), e["question"], e["answer"]) for e in chosen]
        pad_id = self.encode.tokenizer.pad_token_id
        if pad_id is None:
            pad_id = self.encode.tokenizer.eos_token_id
        return predict(self.network, collate(encoded, self.network.config, pad_id)).loss()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def train_stage(
    number: int, stage: Stage, epochs: float, objective: Answering, states: Path, run: dict[str, Any], resume: bool
) -> None:
    """One stage to its end, from its own state where there is one."""
    path = states / f"stage-{number}.safetensors"
    steps = round(epochs * objective.steps)
    settings = TrainSettings(
        steps=steps, lr=stage.lr, schedule="cosine", warmup=min(100, steps // 10), checkpoint_every=50
    )
    owner = {**run, **asdict(settings), "stage": stage.name}
    console = Console(stderr=True)
    console.print(f"stage {number}, {stage.name}: {steps} steps at {stage.lr:g}")
    state = train(
        stage_parameters(objective.network, stage),
        objective,
        settings,
        ConsoleProgress(console),
        load_state(path, owner) if resume and path.exists() else None,
        lambda reached: save_state(reached, path, owner),
    )
    save_state(state, path, owner)


def write_model(network: Any, parts: list[Any], out: Path) -> None:
    """Model, tokenizer and processor: into a folder of its own first, then in one move. Replaces what is in `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for part in (network, *parts):
            part.save_pretrained(fresh)
        fresh.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        fresh.replace(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", default="ttr-conv", choices=KINDS)
    parser.add_argument("--merge-size", type=int, default=2)
    parser.add_argument("--norm", choices=["before", "after"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=float, nargs=2, default=[1.0, 1.0], help="of the two stages")
    parser.add_argument("--lr", type=float, nargs=2, default=[stage.lr for stage in STAGES], help="of the two stages")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the states beside --out")
    arguments = parser.parse_args()

    settings = MergerSettings(arguments.kind, arguments.merge_size, norm=arguments.norm)
    tokenizer, processor = AutoTokenizer.from_pretrained(arguments.model), load_image_processor(arguments.model)
    network = load(
        arguments.model, settings, processor, reinitialise=True, seed=arguments.seed, dtype=arguments.dtype
    ).to(arguments.device)
    Console(stderr=True).print(str(network.installation))
    encode = ImageTextEncoder(network, tokenizer, processor)
    examples = read_data(arguments.data)
    states = arguments.out.with_name(arguments.out.name + ".states")
    states.mkdir(parents=True, exist_ok=True)
    run = {**settings.block(), "batch": arguments.batch, "seed": arguments.seed, "examples": len(examples)}
    for number, (stage, epochs, lr) in enumerate(zip(STAGES, arguments.epochs, arguments.lr, strict=True), 1):
        seed = f"{arguments.seed}/{number}"
        objective = Answering(network.train(), encode, arguments.data, examples, arguments.batch, seed)
        train_stage(number, replace(stage, lr=lr), epochs, objective, states, run, arguments.resume)
    write_model(network.eval(), [tokenizer, processor], arguments.out)
    shutil.rmtree(states)


if __name__ == "__main__":
    main()
