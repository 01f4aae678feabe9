"""A start for small models: a first layer that already looks at the tokens just before.

Lookup takes two steps: a value must know the key before it, and a question must find that value. The first is the same
for every kind of attention here, and a small model spends most of its training on finding it; so it is given.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ttmem.block_sparse.modeling import BlockSparseForCausalLM

EMBEDDING = 0.3
"""Standard deviation of the token embeddings."""
OFFSETS = (1, 2)
"""How many tokens back the query heads of the first layer look, by turns."""
FOCUS = 6.0
"""Advantage of that token, in nats per pair of channels that turns fast enough to tell neighbours apart."""
FAST = 0.03
"""Radians per token from which a pair does."""


@torch.no_grad()
def look_back(network: BlockSparseForCausalLM, offsets: tuple[int, ...] = OFFSETS) -> None:
    """Make each query head of the first layer attend mostly to the token `offset` places before its own.

    The embeddings' first channel becomes the same for all tokens. Queries and keys made of it alone, turned by their
    positions, score a token at distance t - s by the sum over pairs of cos(f (t - s - offset)), largest at the offset.
    """
    config, embeddings = network.config, network.model.embed_tokens.weight
    embeddings.mul_(EMBEDDING / config.initializer_range)
    embeddings[:, 0] = 1.0
    constant = 1.0 / math.sqrt(EMBEDDING**2 + 1.0 / config.hidden_size)  # the first channel behind the layer's norm
    attention: Any = network.model.layers[0].self_attn
    half = config.head_dim // 2
    rates = config.rope_theta ** -(torch.arange(half, device=embeddings.device) / half)
    size = (rates > FAST) * math.sqrt(FOCUS * math.sqrt(config.head_dim)) / constant
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.mul_(0.1)
    for head, query in enumerate(attention.q_proj.weight.split(config.head_dim)):
        query[:, 0] = _turned(size, -offsets[head % len(offsets)] * rates)
    for key in attention.k_proj.weight.split(config.head_dim):
        key[:, 0] = _turned(size, 0.0 * rates)


def _turned(size: Tensor, angles: Tensor) -> Tensor:
    """Pairs of length `size` at `angles`: channel i and i + d / 2 are a pair."""
    return torch.cat([size * angles.cos(), size * angles.sin()])
