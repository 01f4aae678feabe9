"""Sequences behind a document with the teacher's predictions for them: what stage 2 learns from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.compaction.prompts import replay_request
from ttmem.models import Model

CUE_TOKENS = 8
"""Tokens before a piece of the document that tell the model where to go on."""


@dataclass
class Predictions:
    """The teacher's predictions per step: its most likely tokens with their logits, and its vocabulary's normalizer.

    top_ids, top_logits [..., k]; log_z [...].
    """

    top_ids: Tensor
    top_logits: Tensor
    log_z: Tensor

    @classmethod
    def of(cls, logits: Tensor, k: int) -> Predictions:
        """What is kept of logits [..., V], on the CPU."""
        logits = logits.float()
        best = logits.topk(k, dim=-1)
        return cls(best.indices.cpu(), best.values.cpu(), logits.logsumexp(-1).cpu())

    @classmethod
    def empty(cls, *shape: int, k: int) -> Predictions:
        return cls(torch.zeros(*shape, k, dtype=torch.long), torch.zeros(*shape, k), torch.zeros(*shape))

    def __getitem__(self, index: Tensor | slice | tuple[slice | int, ...]) -> Predictions:
        return Predictions(self.top_ids[index], self.top_logits[index], self.log_z[index])

    def __setitem__(self, index: tuple[slice | int, ...], value: Predictions) -> None:
        self.top_ids[index], self.top_logits[index], self.log_z[index] = value.top_ids, value.top_logits, value.log_z


@dataclass
class Supervised:
    """B sequences, token ids of prompts and answers, and the teacher's predictions [B, T] of the answers' steps."""

    prompts: list[list[int]]
    answers: list[list[int]]
    predictions: Predictions


def replay_cue(model: Model, ids: Tensor, start: int) -> list[int]:
    """The request to repeat the document [N] from `start` on, cued with the tokens before it: token ids."""
    cue = model.decode(ids[max(0, start - CUE_TOKENS) : start]) if start else ""
    return model.encode(replay_request(cue))


def replay_pieces(model: Model, ids: Tensor, predictions: Predictions, starts: list[int], length: int) -> Supervised:
    """Pieces of the document [N] to be repeated: up to `length` tokens from each start, with the replay's predictions.

    A start may lie before the document: its piece is what of it falls inside.
    """
    spans = [range(max(0, start), min(start + length, len(ids))) for start in starts]
    supervision = Predictions.empty(len(spans), length, k=predictions.top_ids.shape[-1])
    for row, span in enumerate(spans):
        supervision[row, : len(span)] = predictions[slice(span.start, span.stop)]
    tokens = ids.tolist()
    return Supervised(
        [replay_cue(model, ids, span.start) for span in spans],
        [tokens[span.start : span.stop] for span in spans],
        supervision,
    )


def piece_starts(document_length: int, length: int, seed: int) -> Iterator[int]:
    """Starts of pieces without end, in rounds: every token of the document is in exactly one piece of a round.

    A round has an offset and an order of its own, so that pieces end elsewhere each time. The first piece of a round
    may begin before the document: it is the shorter for it.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(min(length, document_length), (), generator=generator))
        starts = torch.arange(-offset, document_length, length)
        yield from starts[torch.randperm(len(starts), generator=generator)].tolist()
