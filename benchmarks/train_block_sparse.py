"""Train the block-sparse language model, at any size, on needles or on a token file.

    python benchmarks/train_block_sparse.py --recipe cpu --out FOLDER [--set compressor=mean chunk_size=32] [--seed 0]
    python benchmarks/train_block_sparse.py --recipe 345m --tokens fineweb.npy --out FOLDER --device cuda
        [--dtype bfloat16] [--gradient-checkpointing]
    torchrun --nproc-per-node 8 benchmarks/train_block_sparse.py --recipe 345m --tokens fineweb.npy --parallel fsdp ...

A recipe (`ttmem.block_sparse.recipes`) gives the model, its training and the lengths; every part can be set otherwise.
`--set` takes any field of `BlockSparseConfig`, for example attention=full for a reference. Without `--tokens` the model
learns the retrieval task, and its accuracy at the training length, twice and four times that is printed at the end. A
token file is one array of ids as `numpy.save` writes it. The training state is saved to `--state` now and then, from
which `--resume` goes on. The model in `--out` loads with `AutoModelForCausalLM` after `import ttmem.block_sparse`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import field_of
from rich.console import Console

from ttmem.block_sparse import BlockSparseConfig, BlockSparseForCausalLM
from ttmem.block_sparse.objectives import RetrievalObjective
from ttmem.block_sparse.recipes import RECIPES, Recipe
from ttmem.block_sparse.retrieval import PAD, accuracy
from ttmem.block_sparse.start import look_back
from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.language import NextToken, TokenObjective, read_tokens
from ttmem.training.loop import TrainSettings, TrainState, train
from ttmem.training.metrics import MetricsFile
from ttmem.training.parallel import KINDS as KINDS_OF_PARALLELISM
from ttmem.training.parallel import World, parallelize, start_world, whole_state

KINDS = {"single": 1, "multi": 8}
"""Needles of the two tasks. The name is RULER's; the sequences are `ttmem.block_sparse.retrieval`'s."""


def build(recipe: Recipe, seed: int, changes: dict[str, Any], needles: bool) -> BlockSparseForCausalLM:
    """A fresh model. `needles`: with the retrieval task's vocabulary, whatever the recipe's is."""
    own = {"vocab_size": recipe.task.vocabulary, "pad_token_id": PAD} if needles else {}
    torch.manual_seed(seed)
    network = BlockSparseForCausalLM(BlockSparseConfig(**{**recipe.model, **own, **changes}))
    if recipe.look_back:
        look_back(network)
    return network


def evaluate(
    network: BlockSparseForCausalLM, recipe: Recipe, sequences: int, seed: int, factors: tuple[int, ...] = (1, 2, 4)
) -> dict[str, dict[str, float]]:
    """Accuracy by task and length: {"single": {"256": ..}, ..}."""
    lengths = [factor * recipe.length for factor in factors]
    return {
        kind: {str(n): accuracy(network, recipe.task, needles, n, sequences, seed) for n in lengths}
        for kind, needles in KINDS.items()
    }


def changed(settings: TrainSettings, arguments: argparse.Namespace) -> TrainSettings:
    names = ("steps", "minutes", "optimizer", "lr", "weight_decay", "schedule", "warmup", "checkpoint_every")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return replace(settings, **given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--tokens", type=Path, help="token file to train on, instead of needles")
    parser.add_argument(
        "--set", type=field_of(BlockSparseConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of the model"
    )
    parser.add_argument("--length", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--micro", type=int, default=1, help="sequences at once, with --tokens")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float, help="stop after so much time instead of after --steps")
    parser.add_argument("--optimizer")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--schedule")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=128, help="per task and length, in the evaluation")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="autocast, with --tokens")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="less memory, more computing")
    parser.add_argument("--state", type=Path, help="where the training state is kept (default: beside --out)")
    parser.add_argument("--resume", action="store_true", help="go on from --state")
    parser.add_argument("--parallel", choices=KINDS_OF_PARALLELISM, default="none", help="with --tokens and torchrun")
    parser.add_argument("--metrics", type=Path, help="a file for loss, rate and gradient norm, as JSON lines")
    arguments = parser.parse_args()
    if arguments.parallel != "none" and arguments.tokens is None:
        parser.error("--parallel is for --tokens; the needles' models are small")
    with start_world(arguments.device) as world:
        run(arguments, world)


def run(arguments: argparse.Namespace, world: World) -> None:
    recipe = RECIPES[arguments.recipe]
    length = arguments.length or recipe.length
    shortest = None if recipe.shortest is None else min(recipe.shortest, length)
    recipe = replace(recipe, length=length, batch=arguments.batch or recipe.batch, shortest=shortest)
    settings, changes = changed(recipe.training, arguments), dict(arguments.set)
    network = build(recipe, arguments.seed, changes, arguments.tokens is None).to(world.device).train()
    if arguments.gradient_checkpointing:
        # The older name warns since transformers 5.24.
        getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)()
    objective: RetrievalObjective | TokenObjective
    if arguments.tokens is None:
        objective = RetrievalObjective(
            network, recipe.task, recipe.length, recipe.batch, arguments.seed, recipe.shortest
        )
    else:
        tokens = read_tokens(arguments.tokens, network.config.vocab_size)
        dtype = getattr(torch, arguments.dtype)
        module = parallelize(NextToken(network), network.get_decoder().layers, arguments.parallel, world, dtype)
        objective = TokenObjective(
            module,
            tokens,
            recipe.length,
            recipe.batch,
            arguments.seed,
            arguments.micro,
            dtype=torch.float32 if arguments.parallel == "fsdp" else dtype,
            world=world,
        )

    console = Console(stderr=True)
    state_path = arguments.state or arguments.out.with_name(arguments.out.name + ".state.safetensors")
    identity = {
        **asdict(settings),
        "seed": arguments.seed,
        "model": network.config.to_diff_dict(),
        "length": recipe.length,
        "batch": recipe.batch,
        "shortest": recipe.shortest,
        "tokens": None if arguments.tokens is None else arguments.tokens.name,
    }

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
        return
    network.eval().save_pretrained(arguments.out, state_dict=weights)
    state_path.unlink(missing_ok=True)
    figures: dict[str, Any] = {"steps": state.step, "seconds": state.seconds, "last_loss": objective.losses[-1:]}
    if arguments.tokens is None:
        figures["accuracy"] = evaluate(network, recipe, arguments.sequences, arguments.seed + 1)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
