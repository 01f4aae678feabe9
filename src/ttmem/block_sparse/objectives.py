"""Needles as what the common loop minimizes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ttmem.block_sparse.retrieval import Needles, run
from ttmem.errors import TaskError
from ttmem.training.loop import Stateless


@dataclass
class RetrievalObjective(Stateless):
    """Batches of needle sequences of one length, as many tokens in each.

    length: of the longest; a batch's is drawn between `shortest` and it, evenly in its logarithm: short sequences teach
    the lookup, long ones to do it from afar. batch: sequences of the longest. needles: how many there are, drawn for
    each sequence. asked: questions behind each, at most; many teach faster than one.
    """

    network: PreTrainedModel
    task: Needles
    length: int
    batch: int
    seed: int
    shortest: int | None = None
    needles: tuple[int, ...] = (1, 8, 8)
    asked: int = 8
    losses: list[float] = field(default_factory=list)
    """Of the steps done, for those who watch."""

    def __post_init__(self) -> None:
        least = self.task.shortest(max(self.needles), min(self.asked, max(self.needles)))
        if not least <= (self.shortest or self.length) <= self.length:
            raise TaskError(
                f"training sequences of {self.shortest or self.length} to {self.length} tokens: the shortest must hold "
                f"{least}, and not be longer than the longest."
            )

    def loss(self, step: int) -> Tensor:
        rng = np.random.default_rng([self.seed, step])
        low = np.log(self.shortest or self.length)
        length = int(np.exp(rng.uniform(low, np.log(self.length + 1)))) if self.shortest else self.length
        sequences = []
        for _ in range(max(1, self.batch * self.length // length)):
            needles = int(rng.choice(self.needles))
            sequences.append(self.task.sequence(rng, length, needles, min(self.asked, needles)))
        loss = run(self.network, sequences).loss()
        self.losses.append(loss.item())
        return loss
