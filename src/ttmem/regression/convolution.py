"""Targets with context: v_t = a . (sum_j c_j * x_n(j,t)), a depthwise convolution under the learned projection.

Projection and convolution are both linear, so the convolved tokens are never formed: with J taps, a token is projected
on the J vectors a * c_j, and each target is a sum of J of these numbers. `neighbours` says which token tap j of token t
is. Outside the sequence or grid, and where a token is masked out, there are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression.problem import compute_dtype

Neighbours = Tensor
"""[J, n] int64: the index among n tokens of tap j of each token, or -1 for none."""


def line_neighbours(length: int, kernel_size: int, device: torch.device | None = None) -> Neighbours:
    """Taps of a 1D convolution over `length` tokens, centred: [kernel_size, length].

    Raises BlockError for an even size: it has no centre.
    """
    check_kernel(kernel_size)
    taps = torch.arange(kernel_size, device=device).unsqueeze(1) - kernel_size // 2
    index = torch.arange(length, device=device) + taps
    return index.where((index >= 0) & (index < length), -1)


def grid_neighbours(
    height: int, width: int, kernel_size: int, block: int = 1, device: torch.device | None = None
) -> Neighbours:
    """Taps of a 2D convolution over a grid of patches, centred: [kernel_size ** 2, height * width].

    Patches are in row-major order, or with `block` > 1 block after block (block x block patches each), as vision models
    hand them to their mergers. Raises BlockError for an even size, and for a grid that the block does not divide.
    """
    check_kernel(kernel_size)
    if block < 1:
        raise BlockError(f"blocks of {block} x {block} patches: a block has at least one.")
    if height % block or width % block:
        raise BlockError(f"a grid of {height} x {width} patches does not divide into blocks of {block} x {block}.")
    rows, columns = torch.meshgrid(
        torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij"
    )

    def ordered(grid: Tensor) -> Tensor:
        blocks = grid.view(height // block, block, width // block, block)
        return blocks.transpose(1, 2).reshape(-1)

    rows, columns = ordered(rows), ordered(columns)
    place = torch.empty(height * width, dtype=torch.int64, device=device)
    place[rows * width + columns] = torch.arange(height * width, device=device)
    taps = torch.arange(kernel_size, device=device) - kernel_size // 2
    down, right = (t.reshape(-1, 1) for t in torch.meshgrid(taps, taps, indexing="ij"))
    y, x = rows + down, columns + right
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return place[(y * width + x).where(inside, 0)].where(inside, -1)


def check_kernel(size: int) -> None:
    if size < 1 or size % 2 == 0:
        raise BlockError(f"a kernel of {size} taps has no centre; its size must be odd.")


def check_neighbours(neighbours: Neighbours, taps: int, tokens: torch.Size) -> None:
    """For `taps` taps over tokens [.., T]. What lies on a GPU is not looked into: it would have to be waited for."""
    T, N = tokens[-1], tokens.numel()
    if neighbours.dtype != torch.int64 or neighbours.dim() != 2 or neighbours.shape[0] != taps:
        raise BlockError(
            f"neighbours must be [{taps}, T] of int64, not {list(neighbours.shape)} of {neighbours.dtype}; "
            "line_neighbours and grid_neighbours make them."
        )
    n = neighbours.shape[1]
    if n not in (T, N):
        raise BlockError(
            f"neighbours must be [{taps}, {T}] within blocks or [{taps}, {N}] through all tokens, not "
            f"{list(neighbours.shape)}."
        )
    if neighbours.device.type == "cpu" and n and not -1 <= int(neighbours.min()) <= int(neighbours.max()) < n:
        raise BlockError(
            f"neighbours count from -1 (none) to {n - 1} here, not from {int(neighbours.min())} to "
            f"{int(neighbours.max())}."
        )


def convolved_targets(
    x: Tensor, a: Tensor, kernel: Tensor, neighbours: Neighbours, mask: Tensor | None = None
) -> Tensor:
    """x [.., T, d], a [d], kernel [J, d] -> v [.., T], in fp32 (or double for double).

    neighbours [J, T] counts within each block; [J, N], with N the number of all tokens, counts through all blocks.
    """
    dtype = compute_dtype(x.dtype)
    tokens = x.shape[:-1]
    check_neighbours(neighbours, kernel.shape[0], tokens)
    if mask is not None:
        x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    with torch.autocast(x.device.type, enabled=False):
        projections = x.to(dtype) @ (a.to(dtype) * kernel.to(dtype)).mT
    J, n = neighbours.shape
    if n != tokens[-1]:
        projections = projections.reshape(n, J)
    padded = torch.nn.functional.pad(projections, (0, 0, 0, 1))  # index -1 finds the zero at the end
    taps = torch.arange(J, device=x.device).unsqueeze(1)
    return padded[..., neighbours, taps].sum(-2).view(tokens)
