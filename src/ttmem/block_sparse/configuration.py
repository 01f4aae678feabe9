"""`BlockSparseConfig`: the small language model, by default that of the 345M recipe."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import PreTrainedConfig

from ttmem.block_sparse.chunks import Sparsity
from ttmem.block_sparse.compressors import KINDS, build
from ttmem.checks import is_count, is_number
from ttmem.errors import BlockError

ATTENTIONS = ("block_sparse", "full", "sliding")
INPUTS = ("keys", "hidden", "residual")
BIASES = ("none", "entropy")
QUERIES = ("learned", "mark")


class BlockSparseConfig(PreTrainedConfig):
    """A decoder with RMSNorm, rotary positions and gated MLPs, whose layers attend block-sparsely.

    attention: "block_sparse", or the references "full" and "sliding" (the window alone).
    chunk_size, chunks_per_query (its top_k), window, align_window, sink: see `Sparsity`.
    compressor: one of "mean", "concat", "attention", "ttr", "ttr-conv".
    compressor_settings: of the two last, `TTRCompressor`'s by keyword: {"strength": "scalar"}, say.
    compressor_input: what is compressed. "keys": each head's keys of a chunk, d = head_dim. "hidden": the hidden states
    that the layer's projections get, d = hidden_size, and k'_c is the key of the result; "residual": the same before
    the layer's norm, which then comes behind the compressor.
    summary_bias: b'_c, "none" or "entropy" of the weights over the tokens (not for "concat").
    attention_query: of compressor "attention": "learned", or "mark": made from the hidden state of the chunk's last
    token, which is HiLS's landmark where the data put one at the end of each chunk.
    query_rank: of W_up W_down in the query that scores chunks.
    chunk_rotary: whether chunks are scored and read with rotary positions; the window always is. With hidden states as
    input only the reading has them: of chunks that repeat each other to the bit, any may then be read.

    Raises BlockError for values that do not fit, naming them.
    """

    model_type = "ttmem_block_sparse"

    vocab_size: int = 50257
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    attention: str = "block_sparse"
    chunk_size: int = 64
    chunks_per_query: int = 32
    window: int = 512
    align_window: bool = False
    sink: bool = False
    compressor: str = "ttr"
    compressor_settings: dict[str, Any] | None = None
    compressor_input: str = "keys"
    summary_bias: str = "none"
    attention_query: str = "learned"
    query_rank: int = 64
    chunk_rotary: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        positive = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                    "num_hidden_layers")  # fmt: skip
        for name in (*positive, "head_dim", "chunk_size", "chunks_per_query", "window", "query_rank"):
            self._require(name, is_count(getattr(self, name)), "an integer of at least 1")
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            self._require(name, is_number(value) and 0 < value < math.inf, "a positive number")
        deviation = self.initializer_range
        self._require("initializer_range", is_number(deviation) and 0 <= deviation < math.inf, "a number from 0 on")
        self._require("head_dim", self.head_dim % 2 == 0, "even, for rotary positions")
        self._require(
            "num_attention_heads",
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"a multiple of num_key_value_heads ({self.num_key_value_heads})",
        )
        choices = {
            "attention": ATTENTIONS,
            "compressor": tuple(KINDS),
            "compressor_input": INPUTS,
            "summary_bias": BIASES,
            "attention_query": QUERIES,
        }
        for name, known in choices.items():
            self._require(name, getattr(self, name) in known, f"one of {', '.join(known)}")
        self._require(
            "summary_bias",
            self.summary_bias == "none" or KINDS[self.compressor].weights is not None,
            f"'none' for compressor {self.compressor!r}, which has no weights over tokens",
        )
        self._require(
            "attention_query",
            self.attention_query == "learned" or self.compressor == "attention",
            f"'learned' for compressor {self.compressor!r}, which has no query",
        )
        with torch.device("meta"):
            build(self.compressor, self.head_dim, self.chunk_size, self.compressor_settings)

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise BlockError(f"the model's {name} is {getattr(self, name)!r}; it must be {wanted}.")

    @property
    def sparsity(self) -> Sparsity:
        return Sparsity(self.chunk_size, self.chunks_per_query, self.window, self.align_window, self.sink)
