"""MAD runs: a small model of any kind is trained on a task's sequences and tested on others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ttmem.errors import TaskError
from ttmem.progress import Progress
from ttmem.tasks.mad.data import SPLITS, MadData, class_accuracy, make_data
from ttmem.tasks.mad.instances import IGNORE
from ttmem.tasks.mad.settings import MadSetting, Sweep
from ttmem.training.loop import Stateless, TrainSettings, train

TEST_BATCH = 64

Encoder = Callable[[Tensor], Tensor]
"""Token ids [B, T] -> hidden states [B, T, d], behind the last norm, causal."""


class NextTokens(nn.Module):
    """The readout of all tasks but one: logits of a linear layer at every token."""

    def __init__(self, encoder: nn.Module, width: int, vocabulary: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.unembed = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        return self.unembed(self.encoder(ids))


class AutoEncoder(nn.Module):
    """The readout of compression: all tokens are decoded from the hidden state of the last one.

    The state plus a sinusoidal vector for each place goes through two layers of the model's own width.
    """

    places: Tensor

    def __init__(self, encoder: nn.Module, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, vocabulary),
        )  # fmt: skip
        self.register_buffer("places", sinusoids(length, width))

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, V]."""
        last = self.encoder(ids)[:, -1:]
        return self.decoder(last + self.places[: ids.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of the places at rates from 1 to 1/10,000: [length, width]."""
    half = (width + 1) // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half) / max(1, half - 1))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]


def readout(setting: MadSetting, encoder: nn.Module, width: int) -> nn.Module:
    """The model of a setting around an encoder."""
    if setting.task == "compression":
        return AutoEncoder(encoder, width, setting.vocabulary, setting.length)
    return NextTokens(encoder, width, setting.vocabulary)


@dataclass
class MadObjective(Stateless):
    """Cross-entropy over the tokens that count, in an order of the sequences drawn anew for each epoch.

    What is left of an epoch behind its last whole batch is dropped.
    """

    model: nn.Module
    data: MadData
    batch: int
    seed: int
    losses: list[float] = field(default_factory=list)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, len(self.data.inputs) // self.batch)

    def loss(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data.inputs))
        rows = torch.from_numpy(order[place * self.batch : (place + 1) * self.batch]).to(self.data.inputs.device)
        logits = self.model(self.data.inputs[rows])
        loss = cross_entropy(logits.flatten(0, 1), self.data.targets[rows].flatten(), ignore_index=IGNORE)
        self.losses.append(loss.item())
        return loss


@torch.no_grad()
def accuracy_on(model: nn.Module, data: MadData, classes: int) -> float:
    """MAD's accuracy over a set, of the most likely tokens."""
    training = model.training
    model.eval()
    said = [model(ids).argmax(-1) for ids in data.inputs.split(TEST_BATCH)]
    model.train(training)
    return class_accuracy(torch.cat(said), data.targets, classes)


def run_setting(
    setting: MadSetting,
    make_encoder: Callable[[int], nn.Module],
    width: int,
    sweep: Sweep,
    rate: float,
    weight_decay: float,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Mapping[str, float]:
    """Train and test one model. Returns accuracy, the last epoch's mean loss, steps, seconds and parameters.

    make_encoder: an `Encoder` module for a vocabulary's size. Its weights are drawn from the sweep's seed.
    """
    if sweep.batch < 1 or not 0 < sweep.lowest_rate <= rate:
        raise TaskError(
            f"batches of {sweep.batch} at a rate of {rate} that falls to {sweep.lowest_rate}: batches need a sequence, "
            "and the lowest rate lies above 0 and not above the rate"
        )
    torch.manual_seed(sweep.seed)
    model = readout(setting, make_encoder(setting.vocabulary), width).to(device).train()
    training, testing = (make_data(setting, split, sweep.seed).to(device) for split in SPLITS)
    objective = MadObjective(model, training, sweep.batch, sweep.seed)
    settings = TrainSettings(
        steps=sweep.epochs * objective.steps_per_epoch,
        lr=rate,
        weight_decay=weight_decay,
        schedule="cosine",
        floor=sweep.lowest_rate / rate,
    )
    end = train(dict(model.named_parameters()), objective, settings, progress)
    recent = objective.losses[-objective.steps_per_epoch :]
    return {
        "accuracy": accuracy_on(model, testing, setting.vocabulary),
        "loss": sum(recent) / max(1, len(recent)),
        "steps": end.step,
        "seconds": end.seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
