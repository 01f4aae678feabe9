"""What the training scripts share: their options, and a run of the common loop that is saved, goes on and reports."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from common import at_least
from rich.console import Console
from transformers import PreTrainedModel

from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.language import NextToken, TokenObjective, fingerprint_tokens, read_tokens
from ttmem.training.loop import Objective, TrainSettings, TrainState, train
from ttmem.training.metrics import MetricsFile
from ttmem.training.parallel import KINDS, World, parallelize, whole_state

SETTINGS = ("steps", "minutes", "optimizer", "lr", "weight_decay", "schedule", "warmup", "checkpoint_every")


class Recorded(Objective, Protocol):
    """An objective that keeps the losses it has had."""

    losses: list[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that set a recipe's training otherwise, and say where and how it runs."""
    add_settings(parser)
    parser.add_argument("--micro", type=at_least(1), default=1, help="sequences at once, with --tokens")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="autocast, with --tokens")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, more computing")
    parser.add_argument("--state", type=Path, help="where the training state is kept (default: beside --out)")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--parallel", choices=KINDS, default="none", help="with --tokens and torchrun")
    parser.add_argument("--metrics", type=Path, help="a file for loss, rate and gradient norm, as JSON lines")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that `changed` reads, and the shape of a batch."""
    parser.add_argument("--length", type=at_least(1))
    parser.add_argument("--batch", type=at_least(1))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="stop a run after so much time instead of after --steps")
    parser.add_argument("--optimizer")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--schedule")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--checkpoint-every", type=int)


def changed(settings: TrainSettings, arguments: argparse.Namespace) -> TrainSettings:
    """A recipe's training with what the options say otherwise."""
    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    return replace(settings, **given)


def checkpoint_gradients(network: PreTrainedModel) -> None:
    # The older name warns since transformers 5.24.
    getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)()


def token_objective(
    network: PreTrainedModel,
    length: int,
    batch: int,
    arguments: argparse.Namespace,
    world: World,
    separator: int | None = None,
) -> TokenObjective:
    """Next-token prediction of `network` on the token file of the options, on as many processes as there are."""
    tokens = read_tokens(arguments.tokens, network.config.vocab_size)
    dtype = getattr(torch, arguments.dtype)
    module = parallelize(NextToken(network), network.get_decoder().layers, arguments.parallel, world, dtype)
    return TokenObjective(
        module,
        tokens,
        length,
        batch,
        arguments.seed,
        arguments.micro,
        separator=separator,
        dtype=torch.float32 if arguments.parallel == "fsdp" else dtype,
        world=world,
    )


def token_identity(arguments: argparse.Namespace, objective: Objective) -> dict[str, str] | None:
    """What a run's state tells of its token file; none where it learns something else."""
    if not isinstance(objective, TokenObjective):
        return None
    return {"name": arguments.tokens.name, "fingerprint": fingerprint_tokens(objective.tokens)}


def run_training(
    network: PreTrainedModel,
    objective: Recorded,
    settings: TrainSettings,
    identity: dict[str, Any],
    arguments: argparse.Namespace,
    world: World,
) -> dict[str, Any] | None:
    """Train and save to --out. identity: all that the run depends on. Returns figures in the first process only."""
    console = Console(stderr=True)
    state_path = arguments.state or arguments.out.with_name(arguments.out.name + ".state.safetensors")

    def checkpoint(state: TrainState) -> None:
        if not world.first:
            return
        save_state(state, state_path, identity)
        recent = objective.losses[-settings.checkpoint_every :]
        loss = sum(recent) / len(recent) if recent else math.nan
        console.print(f"step {state.step}, {state.seconds:.0f} s, loss {loss:.3f}")

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    earlier = load_state(state_path, identity) if arguments.resume else None
    report = None
    if world.first and arguments.metrics is not None:
        report = MetricsFile(arguments.metrics, earlier.step if earlier else 0)
    state = train(
        dict(network.named_parameters()),
        objective,
        settings,
        ConsoleProgress(console) if world.first else None,
        earlier,
        checkpoint,
        report,
    )
    weights = whole_state(network)
    if not world.first:
        return None
    network.eval().save_pretrained(arguments.out, state_dict=weights)
    state_path.unlink(missing_ok=True)
    return {"steps": state.step, "seconds": state.seconds, "last_loss": objective.losses[-1:]}


def show(figures: dict[str, Any]) -> None:
    print(json.dumps(figures, indent=1))
