"""Biases and values in closed form: where an entry's keys stay, the rest of stage 1 is two least-squares problems.

Per layer and KV head, over pooled queries q with the full document's Z and A:

    entry weights  w = e^b:  min | D w - 1 |^2,  D[q, j] = exp(s q.k_j) / Z(q),  e^-bound <= w <= e^bound
    values               V:  min | P V - A |^2 + ridge |V - V_0|^2,  P = softmax weights of the entries under w

the second held at the entries' own values V_0 (ridge in units of the mean diagonal of P^T P). Preservers are fitted
too: with the document's own replay among the queries, this does not cost what they hold.
"""

from __future__ import annotations

import math

import torch

from ttmem.compaction.head_queries import by_head
from ttmem.compaction.least_squares import bounded_nnls, ridge
from ttmem.compaction.pools import QueryPool
from ttmem.compaction.settings import LatentSettings
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.progress import Progress

ITERATIONS = 8
"""Newton steps for the weights; the demo document's memory is as close to the full context as after 20."""


def closed_form(
    layers: list[LayerMemory | WindowMemory],
    pools: list[QueryPool],
    scales: list[float],
    settings: LatentSettings,
    progress: Progress,
) -> list[LayerMemory | WindowMemory]:
    """The layers with fitted biases and values, keys as they are; fp32."""
    remaining = iter(zip(pools, scales, strict=True))
    fitted: list[LayerMemory | WindowMemory] = []
    with progress.stage("stage 1: closed form", len(pools)) as advance:
        for layer in layers:
            if isinstance(layer, LayerMemory):
                layer = fit_layer(layer, *next(remaining), settings)
                advance(1)
            fitted.append(layer)
    return fitted


@torch.no_grad()
def fit_layer(layer: LayerMemory, pool: QueryPool, scale: float, settings: LatentSettings) -> LayerMemory:
    """One layer, head by head, since heads keep different numbers of entries."""
    keys, values, biases = [], [], []
    lower, upper = math.exp(-settings.closed_bound), math.exp(settings.closed_bound)
    for head, (own_keys, own_values, _) in zip(by_head(pool, layer.num_heads, scale), layer.heads(), strict=True):
        weights = own_keys.new_ones(own_keys.shape[0], dtype=torch.float32)
        if settings.biases and own_keys.shape[0]:
            mass = torch.ones_like(head.log_z)
            weights = bounded_nnls(head.shares(own_keys), mass, lower, upper, ITERATIONS)
        attention = head.attention(own_keys, weights)
        keys.append(own_keys.float())
        values.append(ridge(attention, head.outputs, own_values.float(), settings.closed_ridge))
        biases.append(weights.log())
    return LayerMemory.from_heads(keys, values, biases if settings.biases else None)
