"""How a memory is trained, chosen per document on prompts and passages that train nothing (ours).

Documents differ: a list of facts wants few trained entries and a large rate, prose wants more of them and a small rate.
Two divergences from the full context decide: on the model's answers to `CHOICE_PROMPTS`, and on passages of the
document cut elsewhere than the training's. The first is what generic prompts can see, the second everything else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ttmem.compaction.distillation import Teaching, distill, supervised_loss
from ttmem.compaction.passages import collect_passages
from ttmem.compaction.prompts import CHOICE_PROMPTS
from ttmem.compaction.rollouts import Rollouts, collect_rollouts
from ttmem.compaction.settings import LatentSettings
from ttmem.memory import Memory
from ttmem.models import Model
from ttmem.progress import Progress

PASSAGES = 8
"""Passages that decide."""
PASSAGE_SEED = 1_000_003
"""Their cuts and requests are drawn apart from those of the training."""
FLOOR = 0.01
"""Nats added to each divergence: below it, differences decide nothing."""
SLACK = 1.25
"""A rate may raise the divergence on answers by this factor, no more."""
RATES = (1.0, 1 / 3, 1 / 9)
"""Rates that are tried, as parts of the highest."""
SPLITS = ((0.02, 0.0), (0.25, 0.0), (0.25, 0.25))
"""Latent fractions with preserver floors that are tried."""


@dataclass(frozen=True)
class Divergence:
    """Mean KL from the full context's predictions to a memory's, in nats: on answers and on passages."""

    answers: float
    passages: float

    @property
    def score(self) -> float:
        """Both, whatever their scales: halving one is as good as halving the other. Lower is better."""
        return math.log(self.answers + FLOOR) + math.log(self.passages + FLOOR)


@dataclass
class Choice:
    """What decides for one document: the full context's answers, and its predictions along passages."""

    model: Model
    full: Memory
    answers: Rollouts
    passages: Rollouts

    @classmethod
    def of(cls, model: Model, full: Memory, settings: LatentSettings, progress: Progress) -> Choice:
        answers = collect_rollouts(model, full, list(CHOICE_PROMPTS), settings, progress)
        return cls(model, full, answers, collect_passages(model, full, PASSAGES, settings, PASSAGE_SEED, progress))

    @torch.no_grad()
    def divergence(self, memory: Memory, settings: LatentSettings) -> Divergence:
        """Of a memory of the document."""
        kl_only = replace(settings, lm_weight=0.0)
        parts = (
            supervised_loss(self.model, memory, each.all, kl_only, self.full).item()
            for each in (self.answers, self.passages)
        )
        return Divergence(*parts)


def splits(settings: LatentSettings) -> Iterator[LatentSettings]:
    """The settings under every split of the budget that is tried."""
    for latent_fraction, preserver_floor in SPLITS:
        yield replace(settings, latent_fraction=latent_fraction, preserver_floor=preserver_floor)


def choose_rate(
    choice: Choice, fitted: Memory, teaching: Teaching, settings: LatentSettings, seed: int, progress: Progress
) -> float:
    """The stage-2 rate that is best after a few updates, warmup and decay included, without spoiling the answers.

    Where every rate spoils them, the lowest.
    """
    before = choice.divergence(fitted, settings)
    limit = SLACK * before.answers + FLOOR
    best, rate = math.inf, RATES[-1] * settings.distill_lr
    for part in RATES:
        trial = replace(settings, distill_lr=part * settings.distill_lr, distill_updates=settings.trial_updates)
        memory, _ = distill(choice.model, fitted, teaching, trial, seed, progress, label="stage 2: choosing the rate")
        found = choice.divergence(memory, settings)
        if found.answers <= limit and found.score < best:
            best, rate = found.score, trial.distill_lr
    return rate


def better(choice: Choice, fitted: Memory, trained: Memory, settings: LatentSettings) -> Memory:
    """The one closer to the full context: a memory that was close before training can lose by it."""
    before, after = (choice.divergence(memory, settings) for memory in (fitted, trained))
    return trained if after.score < before.score else fitted
