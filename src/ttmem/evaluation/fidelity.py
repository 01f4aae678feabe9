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
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in memories}
    steps = 0
    with (progress or Progress()).stage("fidelity on held-out prompts", len(encoded)) as advance:
        for start in range(0, len(encoded), BATCH):
            part = encoded[start : start + BATCH]
            answers = greedy_answers(model, full, part, ANSWER_TOKENS)
            batch = batch_sequences(model, full.document_length, part, answers)
            teacher = _log_probs(answer_logits(model, full, batch), batch.answer_mask)
            steps += teacher.shape[0]
            for name, memory in memories.items():
                student = _log_probs(answer_logits(model, memory, batch), batch.answer_mask)
                kl = (teacher.exp() * (teacher - student)).sum(-1)
                same = teacher.argmax(-1) == student.argmax(-1)
                sums[name] += torch.stack([kl.sum(), same.sum()]).double().cpu()
            advance(len(part))
    return {
        name: Fidelity(kl=total[0].item() / steps, top1=total[1].item() / steps, steps=steps, prompts=len(encoded))
        for name, total in sums.items()
    }


def _log_probs(logits: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities [steps, V] at the real answer steps."""
    return logits[mask].float().log_softmax(-1)
