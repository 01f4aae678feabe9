"""Scores and keys -> the entries a compact memory starts from: preservers, anchors, diversifiers (paper 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory


@dataclass
class LayerSelection:
    """Document positions chosen in one layer: preservers, one ragged list per head; latents [H, M], anchors first."""

    preservers: list[Tensor]
    latents: Tensor


def select(
    memory: Memory,
    scores: list[Tensor],
    max_log_attention: list[Tensor],
    budget: Budget,
    settings: LatentSettings,
    seed: int = 0,
) -> list[LayerSelection]:
    """Choose L*H*B entries in all: M per head are anchors and diversifiers, the rest preservers, ranked globally.

    scores and max_log_attention are [H, N] per layer. The seed matters to random entries only.
    """
    num_latents, num_anchors = settings.latents(budget), settings.anchors(budget)
    share = budget.tokens - num_latents
    preservers = global_top(with_floor(scores, int(settings.preserver_floor * share)), memory.heads * share)
    generator = torch.Generator().manual_seed(seed)
    selections = []
    for layer, chosen, attention in zip(memory.compacted, preservers, max_log_attention, strict=True):
        if settings.initializer == "random":
            draws = [torch.randperm(attention.shape[1], generator=generator) for _ in range(layer.num_heads)]
            latents = torch.stack(draws)[:, :num_latents].to(attention.device)
        else:
            keys = layer.keys.unflatten(0, (layer.num_heads, -1))
            latents = farthest_first(keys, choose_anchors(attention, num_anchors), num_latents)
        selections.append(LayerSelection(chosen, latents))
    return selections


def with_floor(scores: list[Tensor], count: int) -> list[Tensor]:
    """Scores under which the best `count` positions of every head come before all others, in one ranking."""
    if count == 0:
        return scores
    return [score.scatter(1, score.topk(count, dim=-1).indices, torch.inf) for score in scores]


def global_top(scores: list[Tensor], count: int) -> list[list[Tensor]]:
    """The `count` highest scores over all layers, heads and positions: sorted positions per layer and head."""
    flat = torch.cat([score.flatten() for score in scores])
    chosen = torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
    chosen[flat.topk(count).indices] = True
    parts = chosen.split([score.numel() for score in scores])
    return [
        [head.nonzero().squeeze(-1) for head in part.view_as(score)] for part, score in zip(parts, scores, strict=True)
    ]


def choose_anchors(max_attention: Tensor, count: int) -> Tensor:
    """Position 0, then the positions of highest maximum teacher attention: [H, N] -> [H, count]."""
    ranked = max_attention.clone()
    ranked[:, 0] = torch.inf
    return ranked.topk(count, dim=-1).indices


def farthest_first(keys: Tensor, start: Tensor, count: int) -> Tensor:
    """Extend each head's positions [H, A] to [H, count] by farthest-first traversal in key space (paper eq. 7).

    Each step adds the position whose squared L2 distance to the nearest chosen key is largest; ties go to the lowest.
    """
    keys = keys.float()
    heads = torch.arange(keys.shape[0], device=keys.device)
    nearest = keys.new_full(keys.shape[:2], torch.inf)
    chosen = list(start.unbind(dim=1))
    for position in chosen:
        nearest = torch.minimum(nearest, (keys - keys[heads, position].unsqueeze(1)).square().sum(-1))
    nearest.scatter_(1, start, -1.0)
    for _ in range(count - start.shape[1]):
        position = nearest.argmax(dim=-1)
        chosen.append(position)
        nearest = torch.minimum(nearest, (keys - keys[heads, position].unsqueeze(1)).square().sum(-1))
        nearest[heads, position] = -1.0
    return torch.stack(chosen, dim=1)


def initial_layers(memory: Memory, selections: list[LayerSelection]) -> list[LayerMemory | WindowMemory]:
    """Copies of the chosen entries, each head's preservers before its anchors and diversifiers, biases zero."""
    remaining = iter(selections)
    return [
        gather_entries(layer, _with_latents(next(remaining))) if isinstance(layer, LayerMemory) else layer
        for layer in memory.layers
    ]


def _with_latents(selection: LayerSelection) -> list[Tensor]:
    return [torch.cat(pair) for pair in zip(selection.preservers, selection.latents, strict=True)]


def gather_entries(layer: LayerMemory, positions: list[Tensor]) -> LayerMemory:
    """The layer with only the given document positions per head, biases zero."""
    heads = list(zip(layer.heads(), positions, strict=True))
    return LayerMemory.from_heads(
        [head[0][chosen] for head, chosen in heads], [head[1][chosen] for head, chosen in heads]
    )
