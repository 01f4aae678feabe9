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

from ttmem.errors import BlockError
from ttmem.regression import (
    AttentionPooling,
    ConcatProjection,
    MeanPooling,
    TTRCompressor,
    line_neighbours,
)
from ttmem.regression.convolution import convolved_targets
from ttmem.regression.plain import full_precision
from ttmem.regression.problem import compute_dtype
from ttmem.regression.reference import EPS

TINY = 1e-12


class Kind(NamedTuple):
    """build(dim, tokens, settings) makes the module, whose settings are keyword arguments by name.

    weights(module, x, vector, options) are those over the tokens, [.., T].
    """

    build: Callable[..., nn.Module]
    weights: Callable[[nn.Module, Tensor, Tensor, dict[str, Any]], Tensor] | None


def _uniform(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    return x.new_full(x.shape[:-1], 1.0 / x.shape[-2])


def _attention(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    query: Tensor = options["query"] if options else module.query  # type: ignore[assignment]
    scores = (x @ query.to(x.dtype).unsqueeze(-1)).squeeze(-1)
    return (scores * x.shape[-1] ** -0.5).softmax(-1)


def _residuals(module: nn.Module, x: Tensor, vector: Tensor, options: dict[str, Any]) -> Tensor:
    """|alpha| / sum |alpha| of a `TTRCompressor`. Differences of near numbers, so h must not be rounded."""
    assert isinstance(module, TTRCompressor)
    directions = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(EPS)
    read = directions if module.normalize_targets else x
    if module.kernel is None:
        targets = read @ module.a.to(x.dtype)
    else:
        neighbours = line_neighbours(x.shape[-2], module.kernel_size, x.device)
        targets = convolved_targets(read, module.a, module.kernel, neighbours)
    keys = directions if module.normalize_keys else x
    alpha = (targets - (keys @ vector.unsqueeze(-1)).squeeze(-1)).abs()
    return alpha / alpha.sum(-1, keepdim=True).clamp_min(TINY)


KINDS: dict[str, Kind] = {
    "mean": Kind(lambda dim, tokens: MeanPooling(), _uniform),
    "concat": Kind(lambda dim, tokens: ConcatProjection(dim, tokens), None),
    "attention": Kind(lambda dim, tokens: AttentionPooling(dim), _attention),
    "ttr": Kind(lambda dim, tokens, **settings: TTRCompressor(dim, **settings), _residuals),
    "ttr-conv": Kind(lambda dim, tokens, **settings: TTRCompressor(dim, "1d", **settings), _residuals),
}


def build(kind: str, dim: int, tokens: int, settings: dict[str, Any] | None = None) -> nn.Module:
    """One compressor by name. Raises BlockError for a kind or a setting that there is not."""
    if kind not in KINDS:
        raise BlockError(f"there is no compressor {kind!r}, only {', '.join(KINDS)}.")
    try:
        return KINDS[kind].build(dim, tokens, **(settings or {}))
    except TypeError as error:
        raise BlockError(
            f"the compressor {kind!r} does not take the settings {settings!r}; 'ttr' and 'ttr-conv' take those of "
            "TTRCompressor by keyword, the others none."
        ) from error


class ChunkCompressor(nn.Module):
    """Chunks of every stream to a vector and a bias each; every stream (a key-value head, say) has its own compressor.

    kind: one of `KINDS`. streams: M of them, of width `dim`; tokens: of a chunk. entropy: whether there is a bias.
    mark: for "attention", the width of a hidden state from which each chunk's query is made, in place of learned ones.
    settings: of the compressors, for `build`.

    Raises BlockError for a kind or a setting that there is not, and for an entropy or a mark that the kind has not.
    """

    def __init__(
        self,
        kind: str,
        streams: int,
        dim: int,
        tokens: int,
        entropy: bool = False,
        mark: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.streams, self.entropy = kind, streams, entropy
        self.compress = nn.ModuleList(build(kind, dim, tokens, settings) for _ in range(streams))
        if entropy and KINDS[kind].weights is None:
            raise BlockError(f"the compressor {kind!r} has no weights over tokens, and so no entropy for a bias.")
        if mark is not None and kind != "attention":
            raise BlockError(f"the compressor {kind!r} has no query to be made from a mark; only 'attention' has.")
        self.mark = None if mark is None else nn.Linear(mark, streams * dim, bias=False)
        if self.mark is not None:
            for module in self.compress:
                del module.query  # made from the marks

    def forward(self, blocks: Tensor, marks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """blocks [B, M, C, S, d], marks [B, C, hidden] -> vectors [B, M, C, d], biases [B, M, C] in fp32 or None.

        With a bias, both come from fp32 tokens, whatever autocast says. Raises BlockError for other shapes.
        """
        if blocks.dim() != 5 or blocks.shape[1] != self.streams:
            raise BlockError(f"the blocks are {list(blocks.shape)}; they must be [B, {self.streams}, C, S, d].")
        queries = None
        if self.mark is not None:
            assert marks is not None
            queries = self.mark(marks).unflatten(-1, (self.streams, -1)).transpose(1, 2)
        vectors, biases = [], []
        for stream, module in enumerate(self.compress):
            x = blocks[:, stream]
            options = {} if queries is None else {"query": queries[:, stream]}
            weights = KINDS[self.kind].weights
            if not self.entropy or weights is None:
                vectors.append(module(x, **options))
                continue
            with full_precision(x):
                x = x.to(compute_dtype(x.dtype))
                vector = module(x, **options)
                biases.append(entropy_of(weights(module, x, vector, options)))
            vectors.append(vector.to(blocks.dtype))
        return torch.stack(vectors, dim=1), torch.stack(biases, dim=1) if biases else None


def entropy_of(weights: Tensor) -> Tensor:
    """-sum_t p_t log p_t over the last dimension, in nats."""
    return -(weights * weights.clamp_min(TINY).log()).sum(-1)
