"""Orthogonal matching pursuit: columns whose weighted sum comes close to a target, chosen a few at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ttmem.compaction.least_squares import projected_newton

REFITS = 3
"""Newton iterations after each choice, from the weights of the choice before."""
REPLACEMENTS = 3
"""How often columns that the fit gave no weight are replaced by others."""


@torch.no_grad()
def matching_pursuit(
    columns: Tensor, target: Tensor, count: int, per_step: int, lower: float, upper: float
) -> tuple[Tensor, Tensor]:
    """Choose `count` of N columns [P, N] whose sum, each weighted within the bounds, comes close to target [P].

    Each step adds the `per_step` columns of largest inner product with what is still missing, and fits the weights of
    all chosen ones anew. Columns whose weight ends at the lower bound are dropped for good, a few times over, where
    enough others are left. Returns positions [count], in order of choice, and weights [count], fp32.
    """
    rows, available = columns.shape
    selected = columns.new_empty(rows, count, dtype=torch.float32)
    gram = columns.new_zeros(count, count, dtype=torch.float64)
    moment = columns.new_zeros(count, dtype=torch.float64)
    chosen = torch.zeros(0, dtype=torch.long, device=columns.device)
    weights = moment[:0]
    candidate = torch.ones(available, dtype=torch.bool, device=columns.device)
    replacements = 0
    while True:
        while (begin := len(chosen)) < count:
            missing = target - selected[:, :begin] @ weights.float()
            gain = (missing @ columns).masked_fill(~candidate, -torch.inf)
            new = gain.topk(min(per_step, count - begin)).indices
            end = begin + len(new)
            selected[:, begin:end] = columns[:, new]
            products = selected[:, :end].double().mT @ selected[:, begin:end].double()
            gram[:end, begin:end], gram[begin:end, :end] = products, products.mT
            moment[begin:end] = selected[:, begin:end].double().mT @ target.double()
            chosen = torch.cat([chosen, new])
            candidate[new] = False
            weights = torch.cat([weights, weights.new_full((len(new),), lower)])
            weights = projected_newton(gram[:end, :end], moment[:end], weights, lower, upper, REFITS)
        unused = (weights <= lower).nonzero().squeeze(-1)[: int(candidate.sum())]
        if len(unused) == 0 or replacements == REPLACEMENTS:
            return chosen, weights.float()
        replacements += 1
        kept = torch.ones_like(weights, dtype=torch.bool)
        kept[unused] = False
        size = int(kept.sum())
        selected[:, :size] = selected[:, kept]
        gram[:size, :size], moment[:size] = gram[kept][:, kept], moment[kept]
        chosen, weights = chosen[kept], weights[kept]
