"""Reading rendered digits: merging patches by an MLP, by pooling and by regression, accuracy against tokens kept.

    python benchmarks/vision_merging.py [--kinds mlp ttr ttr-conv] [--merge-sizes 2 3] [--seeds 0 1 2] [--steps 1000]
        [--norms after] [--work FOLDER] [--finished]

Every run trains a small Qwen3-VL from scratch (vision encoder, mergers with deepstack, language model) on pictures of
one line of digits at a random place, and reads held-out pictures greedily. A seed fixes all weights outside the
mergers, the order of the pictures and the held-out ones, for all kinds alike. Pictures divide into groups of 2 x 2 and
of 3 x 3 patches, so both merge sizes see the same pixels. A run that is killed goes on from its last state, finished
runs are kept in --work, and the same command does the rest; --finished records them early, and --take-over goes on with
a record.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import kept_runs
import rendered_text
import torch
from common import record, run_script
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from ttmem.progress import ConsoleProgress
from ttmem.training.checkpoints import load_state, save_state
from ttmem.training.loop import TrainSettings, TrainState, train
from ttmem.training.packing import Predictions
from ttmem.vision import KINDS, ImageTextBatch, MergerSettings, install, predict

END, IMAGE, VIDEO, START_IMAGE, END_IMAGE, PAD = range(10, 16)
"""Token ids behind the ten digits."""


CHECKPOINT_EVERY = 100
SPREADING = 0.6
"""Part of a run over which lines spread from the middle to anywhere."""


@dataclass(frozen=True)
class Experiment:
    """What all runs share. Pictures must divide by 2 and by 3 patches in both directions."""

    height: int = 24
    width: int = 48
    patch: int = 4
    digits: int = 6
    noise: float = 0.15
    vision_width: int = 64
    vision_layers: int = 2
    language_width: int = 96
    language_layers: int = 2
    batch: int = 32
    steps: int = 1000
    optimizer: str = "muon"
    lr: float = 5e-3
    warmup: int = 50
    held_out: int = 500


@dataclass(frozen=True)
class Run:
    """What distinguishes a run."""

    kind: str
    merge_size: int
    norm: str | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.merge_size}x{self.merge_size}-{self.norm or 'own'}-{self.seed}"


def build(experiment: Experiment, run: Run) -> Any:
    """The network with its mergers."""
    text = {
        "vocab_size": 16,
        "hidden_size": experiment.language_width,
        "intermediate_size": 3 * experiment.language_width,
        "num_hidden_layers": experiment.language_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 24,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 4, 4],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "initializer_range": 0.1,
    }
    vision = {
        "depth": experiment.vision_layers,
        "hidden_size": experiment.vision_width,
        "intermediate_size": 3 * experiment.vision_width,
        "num_heads": 4,
        "in_channels": 1,
        "patch_size": experiment.patch,
        "temporal_patch_size": 1,
        "out_hidden_size": experiment.language_width,
        "num_position_embeddings": 144,
        "deepstack_visual_indexes": [experiment.vision_layers - 2],
        "initializer_range": 0.1,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START_IMAGE,
        vision_end_token_id=END_IMAGE,
    )
    torch.manual_seed(run.seed)
    network = Qwen3VLForConditionalGeneration(config)
    install(network, MergerSettings(run.kind, run.merge_size, norm=run.norm), seed=run.seed)
    return network


def inputs(experiment: Experiment, merge_size: int, pictures: Tensor, digits: Tensor) -> ImageTextBatch:
    """Prompt (the picture) and answer (its digits and the end), weights on the answer."""
    count, rows = len(pictures), experiment.height // experiment.patch
    columns = experiment.width // experiment.patch
    visual = torch.full((count, rows * columns // merge_size**2), IMAGE)
    parts = [torch.full((count, 1), START_IMAGE), visual, torch.full((count, 1), END_IMAGE)]
    prompt = torch.cat(parts, dim=1)
    answer = torch.cat([digits, torch.full((count, 1), END)], dim=1) if digits.numel() else digits.long()
    ids = torch.cat([prompt, answer], dim=1)
    weights = torch.cat([torch.zeros(prompt.shape), torch.ones(answer.shape)], dim=1)
    patches = rendered_text.patchify(pictures, experiment.patch, merge_size)
    return ImageTextBatch(
        {
            "input_ids": ids,
            "mm_token_type_ids": (ids == IMAGE).int(),
            "pixel_values": patches.flatten(0, 1),
            "image_grid_thw": torch.tensor([[1, rows, columns]]).expand(count, 3),
        },
        weights,
    )


class Reading:
    """The objective: new pictures at every step; lines lie in the middle at first, and further and further off."""

    def __init__(self, network: Any, experiment: Experiment, run: Run) -> None:
        self.network, self.experiment, self.run = network, experiment, run
        self._start = time.process_time()

    def loss(self, step: int) -> Tensor:
        spread = min(1.0, step / (SPREADING * self.experiment.steps))
        return self.predictions((self.run.seed, 0, step), spread).loss()

    def predictions(self, seed: tuple[int, ...], spread: float = 1.0) -> Predictions:
        pictures, digits = pictures_of(self.experiment, seed, self.experiment.batch, spread)
        return predict(self.network, inputs(self.experiment, self.run.merge_size, pictures, digits))

    def state(self) -> dict[str, Any]:
        return {"processor_seconds": time.process_time() - self._start}

    def restore(self, state: dict[str, Any]) -> None:
        self._start = time.process_time() - state["processor_seconds"]


def pictures_of(
    experiment: Experiment, seed: tuple[int, ...], count: int, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    return rendered_text.batch(
        seed, count, experiment.digits, experiment.height, experiment.width, experiment.noise, spread
    )


@torch.no_grad()
def read(network: Any, experiment: Experiment, run: Run) -> dict[str, float]:
    """Held-out pictures read greedily: shares of digits, and of whole strings, that are right."""
    network.eval()
    pictures, digits = pictures_of(experiment, (run.seed, 1), experiment.held_out)
    right = []
    for some, said in zip(pictures.split(100), digits.split(100), strict=True):
        prompt = inputs(experiment, run.merge_size, some, said[:, :0])
        ids = prompt.inputs["input_ids"]
        made = network.generate(
            **prompt.inputs,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=experiment.digits,
            min_new_tokens=experiment.digits,
            do_sample=False,
        )
        right.append(made[:, ids.shape[1] :] == said)
    hits = torch.cat(right)
    return {"digits": hits.float().mean().item(), "strings": hits.all(1).float().mean().item()}


def measure(experiment: Experiment, run: Run, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Train one run, from its state where there is one, and read; or what an earlier call has found of it.

    None for a run that is left to a later call.
    """
    owner = {**asdict(experiment), **asdict(run)}
    done = kept_runs.path_of(arguments.work, run.name, owner)
    finished = kept_runs.finished(done)
    if finished is not None or arguments.finished:
        return finished
    network = build(experiment, run)
    settings = TrainSettings(
        steps=experiment.steps,
        optimizer=experiment.optimizer,
        lr=experiment.lr,
        schedule="cosine",
        warmup=experiment.warmup,
        checkpoint_every=CHECKPOINT_EVERY,
    )
    path = done.with_suffix(".state.safetensors")
    objective = Reading(network.train(), experiment, run)

    def checkpoint(state: TrainState) -> None:
        save_state(state, path, owner)
        with torch.no_grad():
            found = objective.predictions((run.seed, 2))
        print(f"{run.name} step {state.step}: {found.loss():.3f} nats, {found.hits().float().mean():.1%} right")

    state = train(
        dict(network.named_parameters()),
        objective,
        settings,
        ConsoleProgress(),
        load_state(path, owner) if path.exists() else None,
        checkpoint,
    )
    patches = experiment.height * experiment.width // experiment.patch**2
    mergers = [parameter.numel() for name, parameter in network.named_parameters() if "merger" in name]
    figures = {
        **asdict(run),
        "tokens": patches // run.merge_size**2,
        **read(network, experiment, run),
        "seconds": state.seconds,
        "processor_seconds": state.objective["processor_seconds"],
        "merger_parameters": sum(mergers),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }
    figures = kept_runs.keep(figures, done)
    path.unlink(missing_ok=True)
    return figures


def runs_of(arguments: argparse.Namespace) -> list[Run]:
    """Seed by seed, so that a run that is cut short has compared all kinds."""
    runs = []
    for seed in arguments.seeds:
        for merge_size in arguments.merge_sizes:
            for kind in arguments.kinds:
                norms = [None] if kind == "mlp" else arguments.norms
                runs += [Run(kind, merge_size, norm, seed) for norm in norms]
    return runs


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and range over seeds, one row per kind, merge size and norm."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["kind"], result["merge_size"], result["norm"]), []).append(result)
    rows = []
    for (kind, merge_size, norm), group in groups.items():
        row = {"kind": kind, "merge_size": merge_size, "norm": norm, "tokens": group[0]["tokens"], "seeds": len(group)}
        for figure in ("digits", "strings", "processor_seconds"):
            values = [result[figure] for result in group]
            row[figure] = {"mean": statistics.fmean(values), "least": min(values), "most": max(values)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["mlp", "ttr", "ttr-conv"], choices=KINDS)
    parser.add_argument("--merge-sizes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--norms", nargs="+", default=["after"], choices=["after", "before"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=Experiment.steps)
    parser.add_argument("--lr", type=float, default=Experiment.lr)
    parser.add_argument("--batch", type=int, default=Experiment.batch)
    parser.add_argument("--digits", type=int, default=Experiment.digits)
    parser.add_argument("--held-out", type=int, default=Experiment.held_out)
    kept_runs.add_options(parser, "vision_merging")
    arguments = parser.parse_args()
    changes = {name: getattr(arguments, name) for name in ("steps", "lr", "batch", "digits", "held_out")}
    experiment = replace(Experiment(), **changes)
    kept_runs.prepare(arguments)
    found = [measure(experiment, run, arguments) for run in runs_of(arguments)]
    results = [figures for figures in found if figures is not None]
    chance = 1.0 / len(rendered_text.CHARACTERS)
    record(
        arguments.name,
        {"experiment": asdict(experiment), "chance": chance, "summary": summary(results), "runs": results},
        seed=None,
    )


if __name__ == "__main__":
    run_script(main)
