"""Captured queries with what the full memory answers them: what attention is fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class QueryPool:
    """Post-rotary queries of one layer and what the full memory answers them.

    queries [H*G, P, d] in the model's dtype; outputs [H*G, P, value_dim] and log_z [H*G, P] fp32, over the document.
    """

    queries: Tensor
    outputs: Tensor
    log_z: Tensor

    @classmethod
    def concatenate(cls, pools: Sequence[QueryPool]) -> QueryPool:
        """One pool of several, position after position."""
        return cls(*(torch.cat([getattr(pool, name) for pool in pools], dim=1) for name in NAMES))

    @property
    def positions(self) -> int:
        return self.queries.shape[1]

    def thinned(self, size: int) -> QueryPool:
        """`size` evenly spaced positions; all, where there are no more."""
        if size >= self.positions:
            return self
        keep = evenly(self.positions, size).to(self.queries.device)
        return QueryPool(*(getattr(self, name)[:, keep].contiguous() for name in NAMES))


def joined(first: list[QueryPool], second: list[QueryPool]) -> list[QueryPool]:
    """Layer by layer, the positions of both."""
    return [QueryPool.concatenate(pair) for pair in zip(first, second, strict=True)]


NAMES = ("queries", "outputs", "log_z")


def evenly(total: int, size: int) -> Tensor:
    """`size` evenly spaced positions of `total`, first and last among them; all, where there are no more."""
    return torch.linspace(0, total - 1, min(size, total), dtype=torch.float64).round().long()
