"""Attention over compressed blocks (HiLS) with any compressor, and the small language model built from it.

Importing this makes the model known to transformers' Auto classes.
"""

from ttmem.block_sparse.attention import Streams, block_sparse_attention
from ttmem.block_sparse.cache import BlockSparseCache
from ttmem.block_sparse.chunks import Sparsity
from ttmem.block_sparse.compressors import KINDS, ChunkCompressor
from ttmem.block_sparse.configuration import BlockSparseConfig
from ttmem.block_sparse.modeling import BlockSparseForCausalLM, BlockSparseModel, register
from ttmem.block_sparse.naive import naive_attention

register()

__all__ = [
    "KINDS",
    "BlockSparseCache",
    "BlockSparseConfig",
    "BlockSparseForCausalLM",
    "BlockSparseModel",
    "ChunkCompressor",
    "Sparsity",
    "Streams",
    "block_sparse_attention",
    "naive_attention",
]
