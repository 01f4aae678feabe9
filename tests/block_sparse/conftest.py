"""Tiny block-sparse models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ttmem.block_sparse import BlockSparseConfig, BlockSparseForCausalLM

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "chunk_size": 4,
    "chunks_per_query": 2,
    "window": 6,
    "query_rank": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def make_lm() -> Callable[..., BlockSparseForCausalLM]:
    """(config changes) -> a fresh fp32 model."""

    def build(seed: int = 0, **changes: Any) -> BlockSparseForCausalLM:
        torch.manual_seed(seed)
        return BlockSparseForCausalLM(BlockSparseConfig(**{**TINY, **changes})).eval()

    return build
