"""A layer's pool of queries, KV head by KV head: what biases and values are fitted on in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.compaction.pools import QueryPool


@dataclass
class HeadQueries:
    """Pooled queries of one KV head's group and what the full document answers them, fp32.

    queries [R, d], outputs [R, value_dim], log_z [R]: R = query heads of the group * positions. scale: the model's.
    """

    queries: Tensor
    outputs: Tensor
    log_z: Tensor
    scale: float

    def shares(self, keys: Tensor) -> Tensor:
        """exp(s q.k) / Z_full [R, n]: the part of each query's mass over the document that falls on keys [n, d]."""
        return torch.addmm(-self.log_z.unsqueeze(-1), self.queries, keys.float().T, alpha=self.scale).exp_()

    def attention(self, keys: Tensor, weights: Tensor) -> Tensor:
        """Softmax weights [R, n] over entries of keys [n, d] and weights e^b [n]."""
        shares = self.shares(keys).mul_(weights)
        return shares / shares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

    def split(self, rows: int) -> Iterator[HeadQueries]:
        """The same in parts of at most `rows` queries."""
        parts = zip(self.queries.split(rows), self.outputs.split(rows), self.log_z.split(rows), strict=True)
        return (HeadQueries(queries, outputs, log_z, self.scale) for queries, outputs, log_z in parts)


def by_head(pool: QueryPool, heads: int, scale: float) -> Iterator[HeadQueries]:
    """A layer's pool [H*G, P, ..], KV head by KV head."""
    parts = (part.unflatten(0, (heads, -1)).flatten(1, 2).float() for part in (pool.queries, pool.outputs, pool.log_z))
    return (HeadQueries(queries, outputs, log_z, scale) for queries, outputs, log_z in zip(*parts, strict=True))
