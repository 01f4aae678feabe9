"""Attention Matching: entries chosen by attention, biases and values fitted in closed form (arXiv 2602.16284).

Per layer and KV head, on the queries of the document's replay (the paper's "repeat-prefill"): choose B of the
document's keys; fit entry weights e^b so that the entries' mass is the full document's; fit values so that attention
over the entries gives the full document's output.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ttmem.compaction.head_queries import HeadQueries, by_head
from ttmem.compaction.least_squares import bounded_nnls, clamped_least_squares, ridge
from ttmem.compaction.matching_pursuit import matching_pursuit
from ttmem.compaction.pools import QueryPool
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory

ROWS = 4096
"""Queries whose attention over the whole document is held at once."""


@dataclass
class AttentionMatching:
    """(document, budget) -> Memory: the B keys of highest attention per head, with fitted biases and values.

    iterations: of bounded least squares for the entry weights; bound: biases lie in [-bound, bound]; strength: of the
    ridge that holds values no query speaks for at their originals.
    """

    iterations: int = 2
    bound: float = 3.0
    strength: float = 1e-6
    name = "am"

    def __call__(self, prepared: Prepared, budget: Budget) -> Memory:
        """Keep B fitted entries per layer and head of the prepared document, in the model's dtype."""
        full = prepared.full
        pools = iter(zip(prepared.replay_pools, prepared.scales, strict=True))
        layers: list[LayerMemory | WindowMemory] = []
        with prepared.progress.stage("attention matching", len(full.compacted)) as advance:
            for layer in full.layers:
                if isinstance(layer, LayerMemory):
                    layer = self.fit_layer(layer, *next(pools), budget.tokens).to(dtype=full.dtype)
                    advance(1)
                layers.append(layer)
        return prepared.memory(layers, self.name, budget, asdict(self))

    @torch.no_grad()
    def fit_layer(self, layer: LayerMemory, pool: QueryPool, scale: float, count: int) -> LayerMemory:
        """`count` fitted entries for every head of a full layer."""
        keys, values, biases = [], [], []
        for head, (all_keys, all_values, _) in zip(by_head(pool, layer.num_heads, scale), layer.heads(), strict=True):
            chosen, weights = self.choose(head, all_keys, count)
            attention = head.attention(all_keys[chosen], weights)
            keys.append(all_keys[chosen].float())
            values.append(ridge(attention, head.outputs, all_values[chosen], self.strength))
            biases.append(weights.log())
        return LayerMemory.from_heads(keys, values, biases)

    def choose(self, head: HeadQueries, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Positions [count] of highest root-mean-square attention over the queries, and their weights e^b."""
        norms = torch.stack([part.shares(keys).norm(dim=0) for part in head.split(ROWS)]).norm(dim=0)
        chosen = norms.topk(count).indices.sort().values
        design, mass = head.shares(keys[chosen]), torch.ones_like(head.log_z)
        lower, upper = math.exp(-self.bound), math.exp(self.bound)
        start = clamped_least_squares(design, mass, lower, upper)
        return chosen, bounded_nnls(design, mass, lower, upper, self.iterations, start)


@dataclass
class AttentionMatchingOMP(AttentionMatching):
    """The same with keys chosen by orthogonal matching pursuit on the mass, `per_step` keys at a time.

    Slower and closer to the mass. `bound` is wider, as in the published settings.
    """

    iterations: int = 10
    bound: float = 7.0
    per_step: int = 4
    name = "am-omp"

    def choose(self, head: HeadQueries, keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Positions [count] whose weighted shares add up to the full mass, chosen greedily, and their weights e^b."""
        lower, upper = math.exp(-self.bound), math.exp(self.bound)
        mass = torch.ones_like(head.log_z)
        chosen, weights = matching_pursuit(head.shares(keys), mass, count, self.per_step, lower, upper)
        chosen, order = chosen.sort()
        return chosen, bounded_nnls(head.shares(keys[chosen]), mass, lower, upper, self.iterations, weights[order])
