"""Queries, keys, values and segments for the two windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def make_qkv() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """(batch, heads, kv_heads, tokens, keys, dim, value_dim, dtype, seed) -> q, k, v that want gradients."""

    def make(
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 1,
        tokens: int = 12,
        keys: int | None = None,
        dim: int = 4,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        keys, value_dim = keys or tokens, value_dim or dim
        shapes = ((heads, tokens, dim), (kv_heads, keys, dim), (kv_heads, keys, value_dim))
        q, k, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return tuple(t.to(dtype).requires_grad_() for t in (2 * q, k, v))  # type: ignore[return-value]

    return make


@pytest.fixture(scope="session")
def make_segments() -> Callable[[int, int, int], Tensor]:
    """(batch, keys, seed) -> documents of random lengths packed into each row, padded on the left and on the right."""

    def make(batch: int, keys: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        segments = torch.randint(0, 4, (batch, keys), generator=generator).sort(1).values
        left, right = torch.randint(0, max(1, keys // 3), (2, batch), generator=generator)
        place = torch.arange(keys)
        outside = (place < left[:, None]) | (place >= keys - right[:, None])
        return segments.masked_fill(outside, -1)

    return make
