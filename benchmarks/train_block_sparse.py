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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import field_of, run_script
from training_run import (
    Recorded,
    add_options,
    changed,
    checkpoint_gradients,
    run_training,
    show,
    token_identity,
    token_objective,
)

from ttmem.block_sparse import BlockSparseConfig, BlockSparseForCausalLM
from ttmem.block_sparse.objectives import RetrievalObjective
from ttmem.block_sparse.recipes import RECIPES, Recipe
from ttmem.block_sparse.retrieval import PAD, accuracy
from ttmem.block_sparse.start import look_back
from ttmem.training.parallel import World, start_world

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--tokens", type=Path, help="token file to train on, instead of needles")
    parser.add_argument(
        "--set", type=field_of(BlockSparseConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of the model"
    )
    parser.add_argument("--sequences", type=int, default=128, help="per task and length, in the evaluation")
    add_options(parser)
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
        checkpoint_gradients(network)
    objective: Recorded
    if arguments.tokens is None:
        objective = RetrievalObjective(
            network, recipe.task, recipe.length, recipe.batch, arguments.seed, recipe.shortest
        )
    else:
        objective = token_objective(network, recipe.length, recipe.batch, arguments, world)
    identity = {
        **asdict(settings),
        "seed": arguments.seed,
        "model": network.config.to_diff_dict(),
        "length": recipe.length,
        "batch": recipe.batch,
        "shortest": recipe.shortest,
        "tokens": token_identity(arguments, objective),
    }
    figures = run_training(network, objective, settings, identity, arguments, world)
    if figures is None:
        return
    if arguments.tokens is None:
        figures["accuracy"] = evaluate(network, recipe, arguments.sequences, arguments.seed + 1)
    show(figures)


if __name__ == "__main__":
    run_script(main)
