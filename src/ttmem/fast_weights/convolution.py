"""Short depthwise convolutions over tokens that start anew at every chunk (eq. 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ttmem.attention.short_convolution import short_convolution


def uniform_convolution(x: Tensor, kernel: Tensor, chunk: int) -> Tensor:
    """`chunk_convolution` where every row's chunks begin at its tokens 0, chunk, 2 chunk, ...: two times faster.

    x [B, T, f], kernel [taps, f] -> [B, T, f]. The last chunk may be short.
    """
    tokens = x.shape[1]
    whole = pad(x, (0, 0, 0, -tokens % chunk)).unflatten(1, (-1, chunk))
    return short_convolution(whole, kernel.flip(0).T).flatten(1, 2)[:, :tokens]


def chunk_convolution(x: Tensor, kernel: Tensor, place: Tensor) -> Tensor:
    """out_t = sum_j kernel_j * x_(t-j), over the j for which t - j lies in the chunk of t: x [B, T, f] -> [B, T, f].

    kernel [taps, f]: tap 0 weighs the token itself. place [B, T] or [1, T]: a token's place in its chunk, from 0.
    Saves x alone for the gradient, where plain torch operations would save a shifted copy of it for each tap.
    """
    return _ChunkConvolution.apply(x, kernel, place)


class _ChunkConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, kernel, place)
        out = x * kernel[0]
        for j in range(1, min(kernel.shape[0], x.shape[1])):
            out[:, j:] += _inside(x[:, :-j], place, j) * kernel[j]
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, kernel, place = ctx.saved_tensors
        of_x = gradient * kernel[0]
        of_kernel = torch.zeros_like(kernel)
        of_kernel[0] = (gradient * x).sum((0, 1))
        for j in range(1, min(kernel.shape[0], x.shape[1])):
            inside = _inside(gradient[:, j:], place, j)
            of_x[:, :-j] += inside * kernel[j]
            of_kernel[j] = (inside * x[:, :-j]).sum((0, 1))
        return of_x, of_kernel, None


def _inside(part: Tensor, place: Tensor, j: int) -> Tensor:
    """The part for tokens from j on, zero where the chunk began less than j tokens ago."""
    return part * (place[:, j:] >= j).unsqueeze(-1).to(part.dtype)


def centred_convolution(x: Tensor, kernel: Tensor, place: Tensor, end: Tensor) -> Tensor:
    """out_t = sum_j kernel_j * x_(t+j-c) within the chunk of t, c the middle tap: x [B, S, d] -> [B, S, d].

    place, end [B, S] or [1, S]: how many tokens of its chunk lie before a token, and from it to the chunk's end.
    It looks ahead: only chunks that are complete may be read through it.
    """
    taps, S = kernel.shape[0], x.shape[1]
    middle = taps // 2
    out = x * kernel[middle]
    for j in range(1, min(middle + 1, S)):
        before = x[:, :-j] * (place[:, j:] >= j).unsqueeze(-1) * kernel[middle - j]
        after = x[:, j:] * (end[:, :-j] > j).unsqueeze(-1) * kernel[middle + j]
        out = out + pad(before, (0, 0, j, 0)) + pad(after, (0, 0, 0, j))
    return out
