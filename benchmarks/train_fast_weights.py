"""Train a model with fast weights, or one of its baselines, on a token file: from scratch or from a pretrained model.

    python benchmarks/train_fast_weights.py --recipe cpu --system ttcd --tokens book.npy --out FOLDER
    python benchmarks/train_fast_weights.py --recipe 340m --dry-run
    torchrun --nproc-per-node 8 benchmarks/train_fast_weights.py --recipe smollm2-360m --system ttcd --tokens books.npy
        --out FOLDER --device cuda --parallel fsdp --dtype bfloat16 --gradient-checkpointing

A recipe (`ttmem.fast_weights.recipes`) gives the model, its training and the lengths; every part can be set otherwise.
`--set` takes any field of `TTCDConfig`. `--system` is the rule; full is full attention, and in a pretrained model the
model itself, trained on. `--yarn 8` stretches positions, for full attention beyond the length a model was trained on.
Recipes for continual pre-training load their base from the hub, or from `--base`, a folder.

`--dry-run` prints parameters, operations per token, tokens and bytes, and trains, loads and downloads nothing.
A token file is one array of ids as `tokenize_text.py` writes it. The training state is saved to `--state` now and then,
from which `--resume` goes on, on any number of processes. The model in `--out` loads with `AutoModelForCausalLM` after
`import ttmem.fast_weights`; with its base's tokenizer beside it, `ttmem read` takes it too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import field_of, run_script
from training_run import add_options, changed, checkpoint_gradients, run_training, show, token_identity, token_objective
from transformers import PreTrainedModel

from ttmem.fast_weights import TTCDConfig, state_bytes
from ttmem.fast_weights.counting import training_plan
from ttmem.fast_weights.recipes import RECIPES, SYSTEMS, Recipe, build, load_base, outlined
from ttmem.training.parallel import World, start_world


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """The recipe with what the options say otherwise."""
    recipe = RECIPES[arguments.recipe]
    return replace(
        recipe,
        training=changed(recipe.training, arguments),
        length=arguments.length or recipe.length,
        batch=arguments.batch or recipe.batch,
        base=recipe.base and (arguments.base or recipe.base),
    )


def plan(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, Any]:
    """What --dry-run prints."""
    network = outlined(recipe, arguments.system, dict(arguments.set), arguments.yarn)
    figures = training_plan(network, recipe.training, recipe.length, recipe.batch)
    state = state_bytes(network.config, tokens=recipe.length)
    names = {"recipe": arguments.recipe, "system": arguments.system, "length": recipe.length}
    return {**names, **figures, "state_bytes_bf16": state}


def run(recipe: Recipe, arguments: argparse.Namespace, world: World) -> None:
    torch.manual_seed(arguments.seed)
    base, tokenizer = (None, None) if recipe.base is None else load_base(recipe.base)
    network: PreTrainedModel = build(recipe, arguments.system, dict(arguments.set), base, arguments.yarn)
    network = network.to(world.device).train()
    if arguments.gradient_checkpointing:
        checkpoint_gradients(network)
    objective = token_objective(network, recipe.length, recipe.batch, arguments, world, arguments.separator)
    identity = {
        **asdict(recipe.training),
        "seed": arguments.seed,
        "system": arguments.system,
        "base": recipe.base and Path(recipe.base).name,
        "model": network.config.to_diff_dict(),
        "length": recipe.length,
        "batch": recipe.batch,
        "separator": arguments.separator,
        "tokens": token_identity(arguments, objective),
    }
    figures = run_training(network, objective, recipe.training, identity, arguments, world)
    if figures is None:
        return
    if tokenizer is not None:
        tokenizer.save_pretrained(arguments.out)
    show(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=RECIPES, default="cpu")
    parser.add_argument("--system", choices=SYSTEMS, default="ttcd")
    parser.add_argument("--tokens", type=Path, help="token file to train on")
    parser.add_argument("--out", type=Path, help="folder for the model")
    parser.add_argument("--base", help="a folder or hub id in place of the recipe's base")
    parser.add_argument("--yarn", type=float, metavar="FACTOR", help="stretch positions")
    parser.add_argument("--separator", type=int, help="token between documents, which then do not see each other")
    parser.add_argument(
        "--set", type=field_of(TTCDConfig), nargs="+", default=[], metavar="FIELD=VALUE", help="of the model"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what the training would take")
    add_options(parser)
    arguments = parser.parse_args()
    recipe = recipe_of(arguments)
    if arguments.base is not None and recipe.base is None:
        parser.error(f"the recipe {arguments.recipe} is from scratch and has no --base")
    if arguments.separator is not None and recipe.base is not None and arguments.system == "full":
        parser.error("--separator is not for full attention in a base, which reads whole rows")
    if arguments.dry_run:
        show(plan(recipe, arguments))
        return
    if arguments.tokens is None or arguments.out is None:
        parser.error("training needs --tokens and --out; --dry-run needs neither")
    with start_world(arguments.device) as world:
        run(recipe, arguments, world)


if __name__ == "__main__":
    run_script(main)
