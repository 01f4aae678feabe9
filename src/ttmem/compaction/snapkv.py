"""SnapKV: keep what the end of the document attends to, untrained (arXiv 2404.14469), before any question is known.

The published method observes attention from the end of the prompt, where the question stands. Here no question is
known, so the window is the document's own last tokens (the query-agnostic adaptation of arXiv 2610.20582, A.3).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from ttmem.attention.branches import Branch
from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.selection import gather_entries
from ttmem.compaction.sequences import mask_behind, positions_behind
from ttmem.compaction.settings import Budget
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory


@dataclass
class SnapKV:
    """(document, budget) -> Memory: every head keeps its B positions of highest score.

    window: document tokens at the end whose attention is observed, and which are always kept; kernel: width of the mean
    over neighbouring positions, an odd number.
    """

    window: int = 32
    kernel: int = 5
    name = "snapkv"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Keep B entries per layer and head of the prepared document."""
        scores = window_scores(prepared, self.window, self.kernel)
        layers = keep_highest(prepared.full, scores, [budget.tokens] * len(scores))
        return prepared.memory(layers, self.name, budget, asdict(self))


@torch.no_grad()
def window_scores(prepared: Prepared, window: int, kernel: int) -> list[Tensor]:
    """SnapKV scores [H, N] per compacted layer, fp32.

    A position before the window scores the attention it gets from the window's queries (softmax over all they see),
    averaged over the queries, over `kernel` neighbouring positions (zeros beyond the ends) and over the query group.
    The window's own positions score above all others, later ones higher.
    """
    memory = prepared.full
    length = memory.document_length
    window = min(window, length)
    ahead = torch.arange(1.0, window + 1, device=memory.layers[0].keys.device)
    if window == length:
        return [ahead.expand(layer.num_heads, -1).clone() for layer in memory.compacted]
    scores = []
    for layer, attention in zip(memory.compacted, window_attention(prepared, window), strict=True):
        pooled = avg_pool1d(attention, kernel, stride=1, padding=kernel // 2)
        before = pooled.unflatten(0, (layer.num_heads, -1)).mean(dim=1)
        scores.append(torch.cat([before, 1 + ahead.expand(layer.num_heads, -1)], dim=-1))
    return scores


def window_attention(prepared: Prepared, window: int) -> list[Tensor]:
    """Mean softmax weights [H*G, N - window] that the last `window` tokens give to those before, per compacted layer.

    The window runs behind the memory of what comes before it, so that no layer attends to it twice.
    """
    model = prepared.model
    before = memory_before_window(prepared, window)
    heads = {layer.index: kept for layer, kept in zip(model.compacted_layers, before.compacted, strict=True)}
    found: dict[int, Tensor] = {}

    def observe(index: int, query: Tensor, scale: float, from_memory: Branch, merged: Branch) -> None:
        layer = heads[index]
        keys = layer.keys.unflatten(0, (layer.num_heads, -1)).float()
        queries = query[0].float().unflatten(0, (layer.num_heads, -1))
        log_z = merged.log_z[0].unflatten(0, (layer.num_heads, -1)).unsqueeze(-1)
        weights = torch.exp(scale * (queries @ keys.unsqueeze(1).transpose(-1, -2)) - log_z)
        found[index] = weights.mean(dim=-2).flatten(0, 1)

    ids = prepared.document.ids[-window:].to(model.device).unsqueeze(0)
    mask = torch.ones_like(ids)
    model.forward(
        ids,
        before.cache(observer=observe),
        attention_mask=mask_behind(before.document_length, mask),
        position_ids=positions_behind(before.document_length, mask),
        logits_to_keep=1,
    )
    return [found[layer.index] for layer in model.compacted_layers]


def memory_before_window(prepared: Prepared, window: int) -> Memory:
    """The full memory of the document without its last `window` tokens.

    Where all layers are global it is cut from the document's; a sliding layer no longer holds what lay before it, so
    that there the shorter document is read anew.
    """
    full = prepared.full
    length = full.document_length - window
    layers: list[LayerMemory | WindowMemory]
    if len(full.compacted) == len(full.layers):
        layers = [
            LayerMemory.full(*(t.unflatten(0, (layer.num_heads, -1))[:, :length] for t in (layer.keys, layer.values)))
            for layer in full.compacted
        ]
    else:
        ids = prepared.document.ids[:length].to(prepared.model.device).unsqueeze(0)
        layers = full_memory_layers(prepared.model.network, ids)
    return Memory(layers, length, full.info)


def keep_highest(memory: Memory, scores: list[Tensor], counts: list[int]) -> list[LayerMemory | WindowMemory]:
    """The memory's layers with, per compacted layer, each head's `count` highest scores [H, N], in document order."""
    chosen = (score.topk(count, dim=-1).indices.sort().values for score, count in zip(scores, counts, strict=True))
    return [
        gather_entries(layer, list(next(chosen))) if isinstance(layer, LayerMemory) else layer
        for layer in memory.layers
    ]
