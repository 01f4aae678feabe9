"""Sequences behind a document with the teacher's predictions for them: what stage 2 learns from."""

from __future__ import annotations

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


def words_before(model: Model, ids: Tensor, start: int) -> str:
    """The text of the last tokens of the document [N] before `start`."""
    return model.decode(ids[max(0, start - CUE_TOKENS) : start]) if start else ""


def replay_cue(model: Model, ids: Tensor, start: int) -> list[int]:
    """The request to repeat the document [N] from `start` on, cued with the tokens before it: token ids."""
    return model.encode(replay_request(words_before(model, ids, start)))
