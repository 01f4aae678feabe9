"""Blocks to compress, and the definition to compare with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ttmem.regression import reference


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Tensor]:
    """(x, a, rho, mask, targets, form, **rules) -> the definition, in double, differentiable by autograd."""

    def compute(
        x: Tensor,
        a: Tensor,
        rho: Tensor,
        mask: Tensor | None = None,
        targets: Tensor | None = None,
        form: Callable[..., Tensor] = reference.dual,
        **rules: bool,
    ) -> Tensor:
        K, v = reference.keys_and_targets(x.double(), a.double(), **rules)
        v = v if targets is None else targets.double()
        if mask is not None:
            K, v = K * mask.unsqueeze(-1), v * mask
        return form(K, v, reference.penalty(rho.double()).expand(x.shape[-1]))

    return compute


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """(blocks, T, d, seed, dtype) -> x, a, rho with tokens of different norms."""

    def make(
        blocks: int, T: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        x = normal(blocks, T, d) * normal(blocks, T, 1).exp()
        return x.to(dtype), normal(d).to(dtype), (2 * normal(d) - 2).to(dtype)

    return make
