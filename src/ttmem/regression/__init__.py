"""Blocks of tokens to one vector each, by a regression solved for each block (the TTR-Compressor), and baselines."""

from ttmem.regression.compressor import TTRCompressor
from ttmem.regression.convolution import grid_neighbours, line_neighbours
from ttmem.regression.operator import ttr_compress
from ttmem.regression.pooling import AttentionPooling, Compressor, ConcatProjection, MeanPooling, MLPMerger

__all__ = [
    "AttentionPooling",
    "Compressor",
    "ConcatProjection",
    "MLPMerger",
    "MeanPooling",
    "TTRCompressor",
    "grid_neighbours",
    "line_neighbours",
    "ttr_compress",
]
