"""Stage 2: train every entry end to end on the teacher's predictions (paper 3.4).

The paper learns from answers to generic prompts alone. `settings.distill_passages` adds passages of the document, which
ask for everything it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor

from ttmem.compaction.rollouts import Rollouts
from ttmem.compaction.sequences import answer_logits, batch_sequences
from ttmem.compaction.settings import LatentSettings
from ttmem.compaction.supervision import Supervised
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory
from ttmem.models import Model
from ttmem.progress import Progress
from ttmem.training.schedules import learning_rate_factor

CHECKPOINT_EVERY = 50
"""Updates between two checkpoints of a resumable run."""
WARMUP = 0.1
"""Part of the updates over which a decaying rate is warmed up."""


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


def full_kl(logits: Tensor, teacher: Tensor) -> Tensor:
    """KL over the whole vocabulary: logits of both [..., V]."""
    log_p, log_q = teacher.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def mean_over_steps(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over each sequence's own steps, then over sequences: values and mask [B, T]."""
    return (torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1)).mean()


@dataclass
class DistillationState:
    """Where a run stands: enough to go on exactly as if it had not stopped."""

    update: int
    tensors: dict[str, Tensor]


def trainable(memory: Memory, biases: bool = True) -> tuple[Memory, list[Tensor]]:
    """A copy of the memory whose keys, values and biases are fp32 parameters, and these parameters.

    Without `biases` these stay as they are.
    """
    parameters: list[Tensor] = []
    layers = []
    for layer in memory.layers:
        if isinstance(layer, LayerMemory):
            own = [t.detach().float().clone() for t in (layer.keys, layer.values, layer.biases)]
            parameters += [part.requires_grad_(True) for part in (own if biases else own[:2])]
            layer = LayerMemory(own[0], own[1], own[2], layer.lengths, layer.unbiased and not biases)
        layers.append(layer)
    return replace(memory, layers=layers), parameters


def distill(
    model: Model,
    memory: Memory,
    teaching: Teaching,
    settings: LatentSettings,
    seed: int,
    progress: Progress,
    state: DistillationState | None = None,
    checkpoint: Callable[[DistillationState], None] | None = None,
    label: str = "stage 2: distillation",
) -> tuple[Memory, list[float]]:
    """Run stage 2 from `memory`. Returns the trained memory (fp32) and the loss at each update of this run."""
    student, parameters = trainable(memory, settings.biases)
    sizes = [root_mean_square(parameter) if settings.relative_rate else 1.0 for parameter in parameters]
    optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    first = 0
    if state is not None:
        first = state.update
        _restore(state, parameters, optimizer, generator)
    passages = teaching.order(seed, skipped=first * settings.distill_passages)
    curve: list[float] = []
    with progress.stage(label, settings.distill_updates) as advance:
        advance(first)
        for update in range(first, settings.distill_updates):
            for group, size in zip(optimizer.param_groups, sizes, strict=True):
                group["lr"] = settings.distill_lr * rate_factor(update, settings) * size
            optimizer.zero_grad()
            total = 0.0
            for batch in teaching.batches(settings, generator, passages):
                loss = supervised_loss(model, student, batch, settings, teaching.full)
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            curve.append(total)
            progress.figure(label, update + 1, total)
            advance(1)
            if checkpoint is not None and (update + 1) % CHECKPOINT_EVERY == 0:
                checkpoint(_state(update + 1, parameters, optimizer, generator))
    for parameter in parameters:
        parameter.requires_grad_(False)
    return student, curve


def root_mean_square(parameter: Tensor) -> float:
    """Of keys or values [n, d]; 1 for biases [n], which are in units of nats whatever the model."""
    return parameter.detach().square().mean().sqrt().item() if parameter.dim() > 1 else 1.0


def rate_factor(update: int, settings: LatentSettings) -> float:
    """The part of the learning rate an update uses: 1, or with decay a linear warmup and a linear fall to zero."""
    if not settings.decay:
        return 1.0
    total = settings.distill_updates
    return learning_rate_factor("linear", update / total, update, warmup=round(WARMUP * total))


@dataclass
class Teaching:
    """What stage 2 learns from: the teacher's rollouts, and passages of the document where they are asked for."""

    full: Memory
    rollouts: Rollouts
    passages: Rollouts | None = None

    def order(self, seed: int, skipped: int) -> Iterator[int]:
        """Passages in the order in which they are learned, round after round, from the one after `skipped`."""
        return islice(shuffled_rounds(len(self.passages.prompts) if self.passages else 0, seed), skipped, None)

    def batches(self, settings: LatentSettings, generator: Generator, passages: Iterator[int]) -> Iterator[Supervised]:
        """The sequences of one update: some rollouts, drawn with replacement, and the next passages."""
        if settings.distill_batch:
            drawn = torch.randint(len(self.rollouts.prompts), (settings.distill_batch,), generator=generator)
            yield self.rollouts.chosen(drawn.tolist())
        if settings.distill_passages:
            assert self.passages is not None
            yield self.passages.chosen(list(islice(passages, settings.distill_passages)))


def shuffled_rounds(count: int, seed: int) -> Iterator[int]:
    """0 to count - 1 without end, in rounds of an order of their own; nothing where there is nothing."""
    generator = torch.Generator().manual_seed(seed)
    while count:
        yield from torch.randperm(count, generator=generator).tolist()


def supervised_loss(
    model: Model, memory: Memory, batch: Supervised, settings: LatentSettings, full: Memory
) -> Tensor:
    """KL plus weighted LM loss of some sequences as one padded batch (paper eq. 9-10).

    The mathematics of one pass per sequence: means over each sequence's own steps, then over sequences.
    """
    sequences = batch_sequences(model, memory.document_length, batch.prompts, batch.answers)
    logits = answer_logits(model, memory, sequences)
    steps = sequences.answers.shape[1]
    if settings.full_vocabulary:
        with torch.no_grad():
            teacher = answer_logits(model, full, sequences)
        divergence = full_kl(logits, teacher)
    else:
        predictions = batch.predictions
        divergence = grouped_kl(
            logits,
            predictions.top_ids[:, :steps].to(model.device),
            predictions.top_logits[:, :steps].to(model.device),
            predictions.log_z[:, :steps].to(model.device),
        )
    loss = mean_over_steps(divergence, sequences.answer_mask)
    if settings.lm_weight:
        lm = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), sequences.answers, reduction="none")
        loss = loss + settings.lm_weight * mean_over_steps(lm, sequences.answer_mask)
    return loss


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
