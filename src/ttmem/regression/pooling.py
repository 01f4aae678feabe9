"""What the operator is compared with, behind its interface: x [.., T, d] and a mask [.., T] -> [.., d].

A mask is True where there is a token. Without any token the answers that need none are zeros, as the operator's is.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from ttmem.errors import BlockError


class Compressor(Protocol):
    """Blocks of tokens [.., T, d] -> one vector each."""

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor: ...


class MeanPooling(nn.Module):
    """The mean of the tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return x.mean(-2) if x.shape[-2] else x.sum(-2)
        tokens = mask.expand(x.shape[:-1]).sum(-1, keepdim=True)
        return masked(x, mask).sum(-2) / tokens.clamp_min(1).to(x.dtype)


class AttentionPooling(nn.Module):
    """sum_t p_t x_t with p = softmax_t(q . x_t / sqrt(d)): q is learned, or each block's own where one is handed in."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.query)

    def forward(self, x: Tensor, mask: Tensor | None = None, query: Tensor | None = None) -> Tensor:
        """query: [.., d], in place of the learned one."""
        q = (self.query if query is None else query).to(x.dtype)
        scores = (masked(x, mask) @ q.unsqueeze(-1)).squeeze(-1).float() * x.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).to(x.dtype)
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)
        return (weights.unsqueeze(-2) @ masked(x, mask)).squeeze(-2)


class ConcatProjection(nn.Module):
    """A learned matrix over the block's T concatenated tokens: T d x out parameters. Missing tokens are zeros."""

    def __init__(self, dim: int, tokens: int, out: int | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.projection = nn.Linear(tokens * dim, out or dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.projection(concatenated(x, mask, self.tokens))


class MLPMerger(nn.Module):
    """Two layers over the block's concatenated tokens, GELU between: the patch merger of vision-language models.

    hidden: T d by default, as there.
    """

    def __init__(self, dim: int, tokens: int, hidden: int | None = None, out: int | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.up = nn.Linear(tokens * dim, hidden or tokens * dim)
        self.down = nn.Linear(hidden or tokens * dim, out or dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.down(nn.functional.gelu(self.up(concatenated(x, mask, self.tokens))))


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros in the place of missing tokens, whatever was there."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def concatenated(x: Tensor, mask: Tensor | None, tokens: int) -> Tensor:
    """[.., T, d] -> [.., T d]. Raises BlockError for another T than the layer was made for."""
    if x.shape[-2] != tokens:
        raise BlockError(f"this compressor takes blocks of {tokens} tokens, not {x.shape[-2]}; pad them and mask.")
    return masked(x, mask).flatten(-2)
