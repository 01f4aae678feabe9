"""Stage 2: train every entry end to end on the teacher's answers (paper 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ttmem.compaction.rollouts import Rollouts
from ttmem.compaction.sequences import answer_logits, batch_sequences
from ttmem.compaction.settings import LatentSettings
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory
from ttmem.models import Model
from ttmem.progress import Progress

CHECKPOINT_EVERY = 50
"""Updates between two checkpoints of a resumable run."""


def grouped_kl(logits: Tensor, top_ids: Tensor, top_logits: Tensor, log_z: Tensor) -> Tensor:
    """KL over the teacher's top tokens kept one by one plus one tail category, without renormalising (paper eq. 9).

    logits [..., V]: the student's; the teacher's top_ids, top_logits [..., k] and vocabulary normalizer log_z [...].
    """
    logits = logits.float()
    student_log_z = logits.logsumexp(-1)
    student_top = logits.gather(-1, top_ids) - student_log_z.unsqueeze(-1)
    student_tail = logits.scatter(-1, top_ids, -torch.inf).logsumexp(-1) - student_log_z
    teacher_top = top_logits - log_z.unsqueeze(-1)
    top_mass = teacher_top.exp()
    tail_mass = (1.0 - top_mass.sum(-1)).clamp_min(0.0)
    from_top = (top_mass * (teacher_top - student_top)).sum(-1)
    from_tail = torch.xlogy(tail_mass, tail_mass) - tail_mass * student_tail
    return from_top + from_tail


def distillation_loss(
    logits: Tensor, answers: Tensor, mask: Tensor, top_ids: Tensor, top_logits: Tensor, log_z: Tensor
) -> tuple[Tensor, Tensor]:
    """(KL, LM) of a padded batch: means over each rollout's own steps, then over rollouts (paper eq. 9-10).

    logits [B, T, V]; answers, mask, log_z [B, T]; top_ids, top_logits [B, T, k].
    """
    steps = mask.sum(-1)
    kl = torch.where(mask, grouped_kl(logits, top_ids, top_logits, log_z), 0.0)
    lm = torch.where(
        mask, torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), answers, reduction="none"), 0.0
    )
    return (kl.sum(-1) / steps).mean(), (lm.sum(-1) / steps).mean()


@dataclass
class DistillationState:
    """Where a run stands: enough to go on exactly as if it had not stopped."""

    update: int
    tensors: dict[str, Tensor]


def trainable(memory: Memory) -> tuple[Memory, list[Tensor]]:
    """A copy of the memory whose keys, values and biases are fp32 parameters, and these parameters."""
    parameters: list[Tensor] = []
    layers = []
    for layer in memory.layers:
        if isinstance(layer, LayerMemory):
            own = [t.detach().float().clone().requires_grad_(True) for t in (layer.keys, layer.values, layer.biases)]
            parameters += own
            layer = LayerMemory(own[0], own[1], own[2], layer.lengths)
        layers.append(layer)
    return Memory(layers, memory.document_length, memory.info, memory.tokens), parameters


def distill(
    model: Model,
    memory: Memory,
    rollouts: Rollouts,
    settings: LatentSettings,
    seed: int,
    progress: Progress,
    state: DistillationState | None = None,
    checkpoint: Callable[[DistillationState], None] | None = None,
) -> tuple[Memory, list[tuple[float, float]]]:
    """Run stage 2 from `memory`. Returns the trained memory (fp32) and (KL, LM) at each update of this run."""
    student, parameters = trainable(memory)
    optimizer = torch.optim.AdamW(parameters, lr=settings.distill_lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    first = 0
    if state is not None:
        first = state.update
        _restore(state, parameters, optimizer, generator)
    curve: list[tuple[float, float]] = []
    with progress.stage("stage 2: distillation", settings.distill_updates) as advance:
        advance(first)
        for update in range(first, settings.distill_updates):
            chosen = torch.randint(len(rollouts.prompts), (settings.distill_batch,), generator=generator)
            optimizer.zero_grad()
            kl, lm = rollout_loss(model, student, rollouts, chosen)
            (kl + lm).backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            curve.append((kl.item(), lm.item()))
            advance(1)
            if checkpoint is not None and (update + 1) % CHECKPOINT_EVERY == 0:
                checkpoint(_state(update + 1, parameters, optimizer, generator))
    for parameter in parameters:
        parameter.requires_grad_(False)
    return student, curve


def rollout_loss(model: Model, memory: Memory, rollouts: Rollouts, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(KL, LM) of some rollouts as one padded batch: the mathematics of one pass per rollout, averaged."""
    indices = chosen.tolist()
    batch = batch_sequences(
        model,
        memory.document_length,
        [rollouts.prompts[i] for i in indices],
        [rollouts.answers[i] for i in indices],
    )
    steps = batch.answers.shape[1]
    supervision = (
        tensor[chosen, :steps].to(model.device) for tensor in (rollouts.top_ids, rollouts.top_logits, rollouts.log_z)
    )
    return distillation_loss(answer_logits(model, memory, batch), batch.answers, batch.answer_mask, *supervision)


def _state(
    update: int, parameters: list[Tensor], optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> DistillationState:
    tensors = {"generator": generator.get_state()}
    for i, parameter in enumerate(parameters):
        tensors[f"parameter.{i}"] = parameter.detach().clone()
        for name, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{i}.{name}"] = value.detach().clone()
    return DistillationState(update, tensors)


def _restore(
    state: DistillationState, parameters: list[Tensor], optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    generator.set_state(state.tensors["generator"])
    moments: dict[int, dict[str, Any]] = {}
    for i, parameter in enumerate(parameters):
        with torch.no_grad():
            parameter.copy_(state.tensors[f"parameter.{i}"])
        prefix = f"optimizer.{i}."
        moments[i] = {k.removeprefix(prefix): v for k, v in state.tensors.items() if k.startswith(prefix)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
