"""The short causal convolution of TTCD's features, on the layout that the chunks already have.

    y_t = sum_s w_s x_(t-s),   s = 0 .. 4,   with zeros before each chunk's first token

depthwise, so w_s is a vector of features; no bias. Features stay last: read as an image of one row with channels last,
[chunks, features, 1, chunk], a chunk is what torch's depthwise convolution works on without a copy to channels first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ttmem.errors import BlockError

KERNEL = 5
TILE = 2**17
"""Entries of a tile of the weight's gradient: its operands stay in the cache for all taps."""


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """x [batch, chunks, chunk, features] (or any leading dimensions), weight [features, kernel] -> like x.

    The weight is laid out as torch's: its last column meets the token itself, so the identity is that column of ones.
    The recipes' kernel has 5 taps; any number will do, also more than a chunk has tokens. Differentiable once in both.

    Raises BlockError for shapes or dtypes that do not fit.
    """
    if x.dim() < 2 or not x.is_floating_point():
        raise BlockError(f"chunks are [.., tokens, features] of floating point numbers, not {list(x.shape)} {x.dtype}.")
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1] or weight.shape[1] == 0 or weight.dtype != x.dtype:
        raise BlockError(
            f"the weight must be [{x.shape[-1]}, kernel] of {x.dtype} for these chunks, not {list(weight.shape)} of "
            f"{weight.dtype}."
        )
    if x.numel() == 0:
        return short_convolution_reference(x, weight)
    return _ShortConvolution.apply(x.contiguous(), weight)


def short_convolution_reference(x: Tensor, weight: Tensor) -> Tensor:
    """The formula: one shifted product per tap. Differentiable by autograd."""
    kernel, tokens = weight.shape[1], x.shape[-2]
    padded = F.pad(x, (0, 0, kernel - 1, 0))
    return sum((padded[..., j : j + tokens, :] * weight[:, j] for j in range(kernel)), torch.zeros_like(x))


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _convolve(x, weight, before=weight.shape[1] - 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """dx_t = sum_s w_s dy_(t+s) is the convolution run backwards; dw_s = sum_t dy_t x_(t-s)."""
        x, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        wants_x, wants_weight = ctx.needs_input_grad
        dx = _convolve(gradient, weight.flip(1), after=weight.shape[1] - 1) if wants_x else None
        return dx, _weight_gradient(x, gradient, weight) if wants_weight else None


def _convolve(x: Tensor, weight: Tensor, before: int = 0, after: int = 0) -> Tensor:
    chunks = F.pad(x.flatten(0, -3) if x.dim() > 2 else x[None], (0, 0, before, after))
    image = chunks.mT.unsqueeze(2)
    found = F.conv2d(image, weight[:, None, None], groups=weight.shape[0])
    return found.squeeze(2).mT.reshape(x.shape)


def _weight_gradient(x: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """[features, kernel], summed in fp32 (or double). A tile of tokens is read from memory once for all taps."""
    *_, tokens, features = x.shape
    kernel = weight.shape[1]
    x, gradient = x.reshape(-1, tokens, features), gradient.reshape(-1, tokens, features)
    dtype = torch.promote_types(x.dtype, torch.float32)
    found = torch.zeros(kernel, features, dtype=dtype, device=x.device)
    rows = min(tokens, max(1, TILE // features))
    chunks = max(1, TILE // (rows * features))
    for first in range(0, x.shape[0], chunks):
        here = slice(first, first + chunks)
        for start in range(0, tokens, rows):
            stop = min(start + rows, tokens)
            for s in range(min(kernel, stop)):
                left = max(start, s)
                product = gradient[here, left:stop] * x[here, left - s : stop - s]
                found[kernel - 1 - s] += product.sum((0, 1), dtype=dtype)
    return found.T.to(weight.dtype)
