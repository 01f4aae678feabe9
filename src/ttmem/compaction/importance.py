"""Full memory -> the document's replay: how much each entry is used when the model repeats the document (KVzip+)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.attention.branches import Branch
from ttmem.compaction.pools import QueryPool, evenly
from ttmem.compaction.sequences import mask_behind, positions_behind
from ttmem.compaction.supervision import replay_cue
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory
from ttmem.models import Model
from ttmem.models.layers import AttentionLayer
from ttmem.progress import Progress

MIN_CHUNK = 64
REQUEST_ROOM = 64
"""Positions left for the request to repeat, where a document comes close to the model's limit."""


@dataclass
class Replay:
    """What one replay of the document shows, per compacted layer.

    scores [H, N]: KVzip+ scores of the document's entries. pools: the replayed positions' queries and what the full
    memory answers them, evenly thinned. scales: the attention scale.
    """

    scores: list[Tensor]
    pools: list[QueryPool]
    scales: list[float]


@torch.no_grad()
def replay_document(model: Model, memory: Memory, chunk: int, pool: int, progress: Progress) -> Replay:
    """Replay the document, score every entry as KVzip+ does, and keep `pool` of the replayed positions' queries.

    The document is replayed in chunks after a request to repeat it. For a replayed position t, a query head of the
    entry's group and document entry i:

        a[t, i] / ||h_t|| * ||W_O v_i||

    with a the softmax weight over [document, replay so far], h_t the attention block's input and W_O the query head's
    slice of the output projection. The score is the maximum over t and over the group.
    """
    assert memory.tokens is not None
    ids = memory.tokens.to(model.device)
    if model.max_positions is not None:  # a document close to the limit is replayed in shorter pieces
        chunk = min(chunk, max(MIN_CHUNK, model.max_positions - memory.document_length - REQUEST_ROOM))
    scorer = _Scorer(model, memory, evenly(ids.shape[0], pool))
    with scorer.watching(), progress.stage("reconstruction scores", ids.shape[0]) as advance:
        for start in range(0, ids.shape[0], chunk):
            part = ids[start : start + chunk]
            request = torch.tensor(replay_cue(model, ids, start), device=model.device)
            scorer.start, scorer.replayed = start, part.shape[0]
            replay = torch.cat([request, part]).unsqueeze(0)
            mask = torch.ones_like(replay)
            model.forward(
                replay,
                memory.cache(observer=scorer.observe),
                attention_mask=mask_behind(memory.document_length, mask),
                position_ids=positions_behind(memory.document_length, mask),
                logits_to_keep=1,
            )
            advance(part.shape[0])
    return Replay(scorer.scores(), scorer.pools(), scorer.scales)


def value_norms(layer: AttentionLayer, memory: LayerMemory) -> Tensor:
    """||W_O v_i|| for every query head: [H*G, N], fp32, by the Gram matrix of the head's slice of W_O."""
    weight = layer.output_weight().float()
    gram = weight @ weight.transpose(1, 2)
    values = memory.values.unflatten(0, (memory.num_heads, -1)).float()
    values = values.repeat_interleave(layer.num_heads // memory.num_heads, dim=0)
    return ((values @ gram) * values).sum(-1).clamp_min(0).sqrt()


class _Scorer:
    """Keeps, per query head and entry, the maximum over replayed positions of log(a / ||h||); and some queries."""

    def __init__(self, model: Model, memory: Memory, kept: Tensor) -> None:
        self.layers = model.compacted_layers
        self.memories = memory.compacted
        self.slots = {layer.index: slot for slot, layer in enumerate(self.layers)}
        self.kept = kept.to(memory.compacted[0].keys.device)
        self.start, self.replayed = 0, 0
        self.parts: list[list[QueryPool]] = [[] for _ in self.layers]
        self.scales = [0.0] * len(self.layers)
        self.log_norms: list[Tensor] = [torch.empty(0)] * len(self.layers)
        self.highest = [
            layer.keys.new_full((attention.num_heads, layer.lengths[0]), -torch.inf, dtype=torch.float32)
            for attention, layer in zip(self.layers, self.memories, strict=True)
        ]

    def watching(self) -> _InputNorms:
        return _InputNorms(self)

    def observe(self, index: int, query: Tensor, scale: float, from_memory: Branch, merged: Branch) -> None:
        slot = self.slots[index]
        self.scales[slot] = scale
        self._keep(slot, query, from_memory)
        keys = self.memories[slot].keys.unflatten(0, (self.memories[slot].num_heads, -1)).float()
        group = query.shape[1] // keys.shape[0]
        last = slice(query.shape[2] - self.replayed, None)
        subtract = merged.log_z[0, :, last] + self.log_norms[slot][last]
        for head in range(query.shape[1]):
            log_weights = torch.addmm(
                -subtract[head].unsqueeze(-1), query[0, head, last].float(), keys[head // group].T, alpha=scale
            )
            torch.maximum(self.highest[slot][head], log_weights.amax(dim=0), out=self.highest[slot][head])

    def _keep(self, slot: int, query: Tensor, from_memory: Branch) -> None:
        """Add the queries of this chunk's kept positions, which are the last of the sequence."""
        here = self.kept[(self.kept >= self.start) & (self.kept < self.start + self.replayed)]
        rows = here - self.start + query.shape[2] - self.replayed
        self.parts[slot].append(
            QueryPool(query[0, :, rows], from_memory.output[0, :, rows], from_memory.log_z[0, :, rows])
        )

    def pools(self) -> list[QueryPool]:
        return [QueryPool.concatenate(parts) for parts in self.parts]

    def scores(self) -> list[Tensor]:
        return [
            (highest.exp() * value_norms(layer, memory)).unflatten(0, (memory.num_heads, -1)).amax(dim=1)
            for highest, layer, memory in zip(self.highest, self.layers, self.memories, strict=True)
        ]


class _InputNorms:
    """While entered, notes log ||h_t|| of every compacted layer's attention input."""

    def __init__(self, scorer: _Scorer) -> None:
        self.scorer = scorer

    def __enter__(self) -> None:
        self.handles = [
            layer.module.register_forward_pre_hook(self._note(slot), with_kwargs=True)
            for slot, layer in enumerate(self.scorer.layers)
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _note(self, slot: int):  # type: ignore[no-untyped-def]
        def note(module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.scorer.log_norms[slot] = hidden[0].float().norm(dim=-1).log()

        return note
