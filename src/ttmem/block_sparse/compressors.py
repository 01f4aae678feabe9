"""What makes a chunk's summary key k'_c and bias b'_c: the compressors of `ttmem.regression`, by name.

Each takes blocks [.., T, d] to [.., d]. What has weights over the tokens can also give their entropy as the bias:

    attention    p = softmax_t(q'_c . x_t / sqrt(d)), its own weights; with the entropy this is HiLS's summary, and
                 s_c is a lower bound of the chunk's log-normalizer
    mean         p = 1 / T
    ttr          p_t = |alpha_t| / sum |alpha|, alpha_t = v_t - k_t . h*, the residuals that make up h*
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ttmem.regression import (
    AttentionPooling,
    ConcatProjection,
    MeanPooling,
    TTRCompressor,
    line_neighbours,
)
from ttmem.regression.convolution import convolved_targets
from ttmem.regression.reference import EPS

TINY = 1e-12


class Kind(NamedTuple):
    """build(dim, tokens) makes the module; weights(module, x, vector, options) are those over the tokens, [.., T]."""

    build: Callable[[int, int], nn.Module]
    weights: Callable[[nn.Module, Tensor, Tensor, dict[str, Any]], Tensor] | None


def _uniform(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    return x.new_full(x.shape[:-1], 1.0 / x.shape[-2], dtype=torch.float32)


def _attention(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    query: Tensor = options["query"] if options else module.query  # type: ignore[assignment]
    scores = (x @ query.to(x.dtype).unsqueeze(-1)).squeeze(-1).float()
    return (scores * x.shape[-1] ** -0.5).softmax(-1)


def _residuals(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    """|alpha| / sum |alpha| of a `TTRCompressor`'s regression."""
    assert isinstance(module, TTRCompressor)
    x, h = x.float(), vector.float()
    keys = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(EPS)
    if module.kernel is None:
        targets = x @ module.a.float()
    else:
        neighbours = line_neighbours(x.shape[-2], module.kernel_size, x.device)
        targets = convolved_targets(x, module.a, module.kernel, neighbours)
    alpha = (targets - (keys @ h.unsqueeze(-1)).squeeze(-1)).abs()
    return alpha / alpha.sum(-1, keepdim=True).clamp_min(TINY)


KINDS: dict[str, Kind] = {
    "mean": Kind(lambda dim, tokens: MeanPooling(), _uniform),
    "concat": Kind(ConcatProjection, None),
    "attention": Kind(lambda dim, tokens: AttentionPooling(dim), _attention),
    "ttr": Kind(lambda dim, tokens: TTRCompressor(dim), _residuals),
    "ttr-conv": Kind(lambda dim, tokens: TTRCompressor(dim, "1d"), _residuals),
}


class ChunkCompressor(nn.Module):
    """Chunks of every stream to a vector and a bias each; every stream (a key-value head, say) has its own compressor.

    kind: one of `KINDS`. streams: M of them, of width `dim`; tokens: of a chunk. entropy: whether there is a bias.
    mark: for "attention", the width of a hidden state from which each chunk's query is made, in place of learned ones.
    """

    def __init__(
        self, kind: str, streams: int, dim: int, tokens: int, entropy: bool = False, mark: int | None = None
    ) -> None:
        super().__init__()
        self.kind, self.streams, self.entropy = kind, streams, entropy
        self.compress = nn.ModuleList(KINDS[kind].build(dim, tokens) for _ in range(streams))
        self.mark = None if mark is None else nn.Linear(mark, streams * dim, bias=False)
        if self.mark is not None:
            for module in self.compress:
                del module.query  # made from the marks

    def forward(self, blocks: Tensor, marks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """blocks [B, M, C, S, d], marks [B, C, hidden] -> vectors [B, M, C, d], biases [B, M, C] in fp32 or None."""
        queries = None
        if self.mark is not None:
            assert marks is not None
            queries = self.mark(marks).unflatten(-1, (self.streams, -1)).transpose(1, 2)
        vectors, biases = [], []
        for stream, module in enumerate(self.compress):
            x = blocks[:, stream]
            options = {} if queries is None else {"query": queries[:, stream]}
            vector = module(x, **options)
            vectors.append(vector)
            if self.entropy:
                weights = KINDS[self.kind].weights
                assert weights is not None
                biases.append(entropy_of(weights(module, x, vector, options)))
        return torch.stack(vectors, dim=1), torch.stack(biases, dim=1) if biases else None


def entropy_of(weights: Tensor) -> Tensor:
    """-sum_t p_t log p_t over the last dimension, in nats."""
    return -(weights * weights.clamp_min(TINY).log()).sum(-1)
