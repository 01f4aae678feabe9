"""Fidelity: how close a memory's answers are to the full context's, on held-out generic prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.compaction.prompts import HELD_OUT_PROMPTS
from ttmem.compaction.sequences import answer_logits, batch_sequences
from ttmem.generation import greedy_answers
from ttmem.memory import Memory
from ttmem.models import Model
from ttmem.progress import Progress

BATCH = 12
ANSWER_TOKENS = 24


@dataclass
class Fidelity:
    """Means over answer steps of the full context's greedy answers, teacher-forced.

    kl: KL divergence from the full context's next-token distribution to the memory's, whole vocabulary, in nats.
    top1: share of steps at which both have the same most likely token.
    """

    kl: float
    top1: float
    steps: int
    prompts: int


def measure_fidelity(
    model: Model,
    full: Memory,
    memory: Memory,
    progress: Progress | None = None,
    prompts: Sequence[str] = HELD_OUT_PROMPTS,
) -> Fidelity:
    """Compare `memory` with the full context on prompts that no training has seen."""
    return measure_fidelities(model, full, {"memory": memory}, progress, prompts)["memory"]


@torch.no_grad()
def measure_fidelities(
    model: Model,
    full: Memory,
    memories: dict[str, Memory],
    progress: Progress | None = None,
    prompts: Sequence[str] = HELD_OUT_PROMPTS,
) -> dict[str, Fidelity]:
    """`measure_fidelity` for several memories against one pass of the full context."""
    encoded = [model.encode(prompt) for prompt in prompts]
    answers: list[list[int]] = []
    with (progress or Progress()).stage("fidelity on held-out prompts", len(encoded)) as advance:
        for start in range(0, len(encoded), BATCH):
            part = encoded[start : start + BATCH]
            answers += greedy_answers(model, full, part, ANSWER_TOKENS)
            advance(len(part))
    return agreement(model, full, memories, encoded, answers)


@torch.no_grad()
def agreement(
    model: Model, full: Memory, memories: dict[str, Memory], prompts: list[list[int]], answers: list[list[int]]
) -> dict[str, Fidelity]:
    """How close memories come to the full context on given answers (token ids) to given prompts, teacher-forced."""
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in memories}
    steps = 0
    for start in range(0, len(prompts), BATCH):
        rows = slice(start, start + BATCH)
        teacher = _log_probs(model, full, prompts[rows], answers[rows])
        steps += teacher.shape[0]
        for name, memory in memories.items():
            student = _log_probs(model, memory, prompts[rows], answers[rows])
            kl = (teacher.exp() * (teacher - student)).sum(-1)
            same = teacher.argmax(-1) == student.argmax(-1)
            sums[name] += torch.stack([kl.sum(), same.sum()]).double().cpu()
    return {
        name: Fidelity(kl=total[0].item() / steps, top1=total[1].item() / steps, steps=steps, prompts=len(prompts))
        for name, total in sums.items()
    }


def _log_probs(model: Model, memory: Memory, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """Log-probabilities [steps, V] at the real answer steps, the document in `memory`."""
    batch = batch_sequences(model, memory.document_length, prompts, answers)
    return answer_logits(model, memory, batch)[batch.answer_mask].float().log_softmax(-1)
