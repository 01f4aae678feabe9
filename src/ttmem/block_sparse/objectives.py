"""What the language model is trained on by the common loop: needles, or plain tokens from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ttmem.block_sparse.retrieval import Needles, run
from ttmem.errors import TaskError
from ttmem.training.packing import TokenBatch, predict


@dataclass
class RetrievalObjective:
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

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@dataclass
class TokenObjective:
    """Next-token prediction on random stretches of a token file: one array of ids, as numpy saves it (.npy).

    batch: stretches per step. micro: of them at once; the gradients of the others are summed up before. dtype: in which
    autocast runs the network.
    """

    network: PreTrainedModel
    tokens: np.ndarray
    length: int
    batch: int
    seed: int
    micro: int = 1
    dtype: torch.dtype = torch.float32
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.batch % self.micro:
            raise TaskError(f"{self.batch} sequences per step do not divide into parts of {self.micro}.")
        if self.tokens.ndim != 1 or len(self.tokens) <= self.length + 1:
            raise TaskError(
                f"the token file holds an array of shape {list(self.tokens.shape)}; it must be one row of more than "
                f"{self.length + 1} ids."
            )

    def loss(self, step: int) -> Tensor:
        """The mean of the last part over all parts; what is missing of the gradient is already there."""
        rng = np.random.default_rng([self.seed, step])
        starts = rng.integers(0, len(self.tokens) - self.length, self.batch)
        parts = starts.reshape(-1, self.micro)
        total = 0.0
        for number, part in enumerate(parts, start=1):
            loss = self._part(part) / len(parts)
            total += loss.item()
            if number < len(parts):
                loss.backward()
        self.losses.append(total)
        return loss

    def _part(self, starts: np.ndarray) -> Tensor:
        ids = torch.from_numpy(np.stack([self.tokens[s : s + self.length + 1] for s in starts]).astype(np.int64))
        ids = ids.to(self.network.device)
        with torch.autocast(ids.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            return predict(self.network, TokenBatch(ids, torch.ones_like(ids, dtype=torch.float32))).loss()

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def read_tokens(path: Path, vocabulary: int) -> np.ndarray:
    """A token file, mapped into memory. Raises TaskError where it is none, or holds ids beyond the vocabulary."""
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} is no token file ({error}); write one with numpy.save, an array of ids.") from error
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TaskError(f"{path} holds {tokens.dtype}, not token ids.")
    largest = int(tokens[: 2**20].max()) if len(tokens) else 0
    if largest >= vocabulary:
        raise TaskError(f"{path} holds the id {largest}, and the model's vocabulary has {vocabulary}.")
    return tokens
