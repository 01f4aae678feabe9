"""Full memory -> teacher rollouts: the model's own answers to generic prompts, and what they reveal (paper 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.attention.branches import Branch
from ttmem.compaction.pools import QueryPool
from ttmem.compaction.sequences import mask_behind, positions_behind
from ttmem.compaction.settings import LatentSettings
from ttmem.compaction.supervision import Predictions, Supervised
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory
from ttmem.models import Model
from ttmem.progress import Advance, Progress

BATCH = 48
"""Prompts answered at once; they share the document's keys."""
ROWS = 2048
"""Query rows scored against the document at once, to bound memory."""


@dataclass
class Rollouts:
    """J prompts, the teacher's greedy answers, and the supervision both stages take from them.

    prompts, answers: token ids; an answer ends with the end token where the teacher ended.
    predictions [J, T]: the teacher's, per answer step.
    pools: one per compacted layer, thinned; scales: the attention scale of each.
    max_log_attention: [H, N] per compacted layer, the maximum over all queries of a head's group (before thinning) of
    the log softmax weight over the document (paper eq. 6); none where it was not asked for.
    """

    prompts: list[list[int]]
    answers: list[list[int]]
    predictions: Predictions
    pools: list[QueryPool]
    max_log_attention: list[Tensor]
    scales: list[float]

    @property
    def all(self) -> Supervised:
        """Every rollout."""
        return self.chosen(list(range(len(self.prompts))))

    def chosen(self, indices: list[int]) -> Supervised:
        """Some of the rollouts, as long as their longest answer."""
        answers = [self.answers[i] for i in indices]
        steps = max(map(len, answers))
        predictions = self.predictions[torch.tensor(indices)]
        return Supervised([self.prompts[i] for i in indices], answers, predictions[:, :steps])


@torch.no_grad()
def collect_rollouts(
    model: Model, memory: Memory, prompts: list[str], settings: LatentSettings, progress: Progress
) -> Rollouts:
    """Answer every prompt from its own fork of the full memory, greedily, up to `rollout_tokens` or an end token."""
    encoded = [model.encode(prompt) for prompt in prompts]
    steps = settings.rollout_tokens
    count = len(encoded)
    predictions = Predictions.empty(count, steps, k=settings.top_k)
    answers: list[list[int]] = []
    capture = Capture(memory, model)
    with progress.stage("teacher rollouts", count * (steps + 1)) as advance:
        for start in range(0, count, BATCH):
            part = encoded[start : start + BATCH]
            answers += _answer(model, memory, part, capture, predictions[start : start + len(part)], advance)
    pools = capture.pools(settings.pool)
    return Rollouts(encoded, answers, predictions, pools, capture.max_log_attention, capture.scales)


def _answer(
    model: Model,
    memory: Memory,
    prompts: list[list[int]],
    capture: Capture,
    predictions: Predictions,
    advance: Advance,
) -> list[list[int]]:
    """Greedy answers of one batch; fills `predictions` [B, T] and the capture."""
    steps = predictions.log_z.shape[1]
    ids, mask = model.left_pad(prompts)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    ends = torch.tensor(sorted(model.eos_token_ids), device=model.device)
    cache = memory.cache(observer=capture.observe)
    position_ids = positions_behind(memory.document_length, mask)
    chosen: list[Tensor] = []
    lengths = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    for step in range(steps + 1):
        output = model.forward(
            ids,
            cache,
            attention_mask=mask_behind(memory.document_length, mask),
            position_ids=position_ids,
            logits_to_keep=1,
        )
        advance(len(prompts))
        if step == steps or not alive.any():
            break
        predictions[:, step] = Predictions.of(output.logits[:, -1], predictions.top_ids.shape[-1])
        token = predictions.top_ids[:, step, 0].to(model.device)
        chosen.append(token)
        lengths += alive
        ids = token.unsqueeze(1)
        mask = torch.cat([mask, alive.unsqueeze(1).to(mask.dtype)], dim=1)
        position_ids = positions_behind(memory.document_length, mask)[:, -1:]
        alive = alive & ~torch.isin(token, ends)
    capture.close_batch(mask.bool())
    tokens = torch.stack(chosen, dim=1).tolist()
    return [row[:length] for row, length in zip(tokens, lengths.tolist(), strict=True)]


class Capture:
    """Gathers queries and their full-memory branches per layer while the teacher answers or reads along."""

    def __init__(self, memory: Memory, model: Model, maxima: bool = True) -> None:
        self.layers = model.compacted_layers
        self.slots = {layer.index: slot for slot, layer in enumerate(self.layers)}
        self.memories = memory.compacted
        self.open: list[list[tuple[Tensor, Branch]]] = [[] for _ in self.layers]
        self.done: list[list[QueryPool]] = [[] for _ in self.layers]
        self.max_log_attention = [
            layer.keys.new_full((layer.num_heads, layer.lengths[0]), -torch.inf, dtype=torch.float32)
            for layer in (self.memories if maxima else [])
        ]
        self.scales = [0.0] * len(self.layers)

    def observe(self, index: int, query: Tensor, scale: float, from_memory: Branch, merged: Branch) -> None:
        slot = self.slots[index]
        self.scales[slot] = scale
        # A single query per sequence may arrive with its group on the query axis; the order of elements is the same.
        shape = (query.shape[0], self.layers[slot].num_heads, -1)
        branch = Branch(
            from_memory.output.reshape(*shape, from_memory.output.shape[-1]), from_memory.log_z.reshape(shape)
        )
        self.open[slot].append((query.reshape(*shape, query.shape[-1]), branch))

    def close_batch(self, mask: Tensor) -> None:
        """End a batch: mask [B, L] says which of its positions are real."""
        for slot, (parts, layer) in enumerate(zip(self.open, self.memories, strict=True)):
            length = sum(query.shape[2] for query, _ in parts)
            real = mask[:, :length]
            pool = QueryPool(
                torch.cat([query for query, _ in parts], dim=2).transpose(1, 2)[real].transpose(0, 1),
                torch.cat([branch.output for _, branch in parts], dim=2).transpose(1, 2)[real].transpose(0, 1),
                torch.cat([branch.log_z for _, branch in parts], dim=2).transpose(1, 2)[real].transpose(0, 1),
            )
            self.done[slot].append(pool)
            self.open[slot] = []
            if self.max_log_attention:
                highest = max_log_attention(pool, layer, self.scales[slot])
                torch.maximum(self.max_log_attention[slot], highest, out=self.max_log_attention[slot])

    def pools(self, size: int) -> list[QueryPool]:
        """All captured queries per layer, evenly thinned to `size` positions."""
        return [QueryPool.concatenate(parts).thinned(size) for parts in self.done]


def max_log_attention(pool: QueryPool, layer: LayerMemory, scale: float) -> Tensor:
    """log of max over a KV head's queries of softmax(s K q) over the document (paper eq. 6): [H, N]."""
    keys = layer.keys.unflatten(0, (layer.num_heads, -1)).float()
    queries = pool.queries.unflatten(0, (layer.num_heads, -1)).flatten(1, 2)
    log_z = pool.log_z.unflatten(0, (layer.num_heads, -1)).flatten(1, 2)
    highest = keys.new_full((layer.num_heads, keys.shape[1]), -torch.inf)
    for rows, normalizer in zip(queries.split(ROWS, dim=1), log_z.split(ROWS, dim=1), strict=True):
        weights = torch.baddbmm(-normalizer.unsqueeze(-1), rows.float(), keys.transpose(1, 2), alpha=scale)
        torch.maximum(highest, weights.amax(dim=1), out=highest)
    return highest
