"""Prompts and their answers as one padded batch behind a shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.memory import Memory
from ttmem.models import Model


@dataclass
class SequenceBatch:
    """B sequences behind N document tokens: prompts left-padded to P, answers right-padded to T.

    The input is the prompt and all answer tokens but the last, so that the last T positions predict the answer.

    input_ids, position_ids [B, P+T-1]; attention_mask [B, N+P+T-1]; answers and answer_mask [B, T].
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    answers: Tensor
    answer_mask: Tensor


def batch_sequences(
    model: Model, document_length: int, prompts: list[list[int]], answers: list[list[int]]
) -> SequenceBatch:
    """Pad prompts and (teacher-forced) answers into one batch. The padding changes no result."""
    width = max(map(len, prompts))
    steps = max(map(len, answers))
    pad = model.pad_token_id
    ids, visible, targets, scored = [], [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        before, after = width - len(prompt), steps - len(answer)
        ids.append([pad] * before + prompt + (answer + [pad] * after)[:-1])
        visible.append([0] * before + [1] * len(prompt) + ([1] * len(answer) + [0] * after)[:-1])
        targets.append(answer + [pad] * after)
        scored.append([True] * len(answer) + [False] * after)
    mask = torch.tensor(visible, device=model.device)
    return SequenceBatch(
        input_ids=torch.tensor(ids, device=model.device),
        position_ids=positions_behind(document_length, mask),
        attention_mask=mask_behind(document_length, mask),
        answers=torch.tensor(targets, device=model.device),
        answer_mask=torch.tensor(scored, device=model.device),
    )


def positions_behind(document_length: int, mask: Tensor) -> Tensor:
    """Positions of new tokens: the i-th visible one of a sequence has position N + i. mask [B, L]."""
    return document_length + (mask.cumsum(-1) - 1).clamp_min(0)


def mask_behind(document_length: int, mask: Tensor) -> Tensor:
    """A mask over document and new tokens: [B, L] -> [B, N + L]."""
    return torch.cat([mask.new_ones(mask.shape[0], document_length), mask], dim=-1)


def answer_logits(model: Model, memory: Memory, batch: SequenceBatch) -> Tensor:
    """The logits [B, T, vocabulary] that predict each answer token, teacher-forced, with the document in `memory`.

    Differentiable in the memory's keys, values and biases where they require gradients.
    """
    steps = batch.answers.shape[1]
    output = model.forward(
        batch.input_ids,
        memory.cache(),
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=steps,
    )
    logits: Tensor = output.logits
    return logits
