"""KVzip+: keep the entries with the highest reconstruction scores, untrained (arXiv 2505.23416 and 2601.07891)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ttmem.compaction.prepared import Prepared
from ttmem.compaction.selection import gather_entries, global_top
from ttmem.compaction.settings import Budget
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory


@dataclass
class KVzipPlus:
    """(document, budget) -> Memory by one global ranking. `sinks` first positions of every head are always kept."""

    sinks: int = 4
    name = "kvzip+"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Keep L*H*B entries of the prepared document."""
        full = prepared.full
        scores = [score.clone() for score in prepared.scores]
        for score in scores:
            score[:, : min(self.sinks, budget.tokens)] = torch.inf
        chosen = iter(global_top(scores, full.heads * budget.tokens))
        layers: list[LayerMemory | WindowMemory] = [
            gather_entries(layer, next(chosen)) if isinstance(layer, LayerMemory) else layer for layer in full.layers
        ]
        return prepared.memory(layers, self.name, budget, {"sinks": self.sinks})
