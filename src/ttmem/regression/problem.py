"""What the engines share: a batch of blocks with its rules in, a solution or gradients out.

An engine is a module with `forward(Problem) -> Solution` and `backward(Problem, Solution, gradient) -> Gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ttmem.errors import BlockError

LARGE = 1e12
"""Tokens with a larger norm are divided by their largest entry before anything is squared."""


@dataclass(frozen=True)
class Rules:
    """Which of a token's two uses is normalised. The paper's are the defaults; the others are its ablations."""

    normalize_keys: bool = True
    normalize_targets: bool = False


@dataclass(frozen=True)
class Problem:
    """B ridge regressions.

    x: [B, T, d], the tokens, of any floating dtype. a, lam: [d] in `compute_dtype(x.dtype)`. targets: [B, T] in it too,
    used in place of a . x. mask: [B, T] bool, True where there is a token. keep: whether a gradient will be asked for.
    check: whether tokens that are not finite are looked for where that costs time.
    """

    x: Tensor
    a: Tensor
    lam: Tensor
    targets: Tensor | None = None
    mask: Tensor | None = None
    rules: Rules = Rules()
    keep: bool = False
    check: bool = True


class Solution(NamedTuple):
    """h [B, d] in the dtype of x. For the gradient: v and alpha [B, T], factor (the engine's own)."""

    h: Tensor
    v: Tensor
    alpha: Tensor
    factor: Tensor


class Gradients(NamedTuple):
    """Of x [B, T, d], a [d], lambda [d] and, where they were given, targets [B, T]."""

    x: Tensor
    a: Tensor
    lam: Tensor
    targets: Tensor | None


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Double stays double; everything else is computed in fp32. Half-precision Gram matrices break the solve."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_unfit(problem: Problem) -> int | None:
    """The first block with a token that is not finite, or that without normalised keys is too large to be squared."""
    x = problem.x if problem.mask is None else problem.x.masked_fill(~problem.mask.unsqueeze(-1), 0.0)
    x = x.to(compute_dtype(x.dtype))
    fit = x.isfinite().all(-1)
    if not problem.rules.normalize_keys:
        fit &= torch.linalg.vector_norm(x, dim=-1) <= LARGE
    unfit = (~fit.all(-1)).nonzero()
    return int(unfit[0]) if len(unfit) else None


def refuse_block(index: int) -> BlockError:
    return BlockError(
        f"block {index} (counted over all leading dimensions) holds a token that is not finite (NaN or infinite), or "
        f"with normalize_keys=False one larger than {LARGE:g}. Look for the layer before the compressor that produced "
        "it, or mask the token out."
    )
