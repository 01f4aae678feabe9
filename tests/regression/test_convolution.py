"""Targets with context equal torch's own depthwise convolutions, projected."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, conv2d

from ttmem.errors import BlockError
from ttmem.regression.convolution import convolved_targets, grid_neighbours, line_neighbours


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_line_is_conv1d(kernel_size: int, length: int) -> None:
    torch.manual_seed(0)
    x, a, kernel = torch.randn(2, 3, length, 8).double(), torch.randn(8).double(), torch.randn(kernel_size, 8).double()
    found = convolved_targets(x, a, kernel, line_neighbours(length, kernel_size))
    convolved = conv1d(x.flatten(0, 1).mT, kernel.T.unsqueeze(1), padding=kernel_size // 2, groups=8).mT
    torch.testing.assert_close(found, (convolved @ a).view(2, 3, length))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_grid_is_conv2d_in_any_order_of_patches(block: int) -> None:
    torch.manual_seed(0)
    grid, a, kernel = torch.randn(6, 12, 8).double(), torch.randn(8).double(), torch.randn(9, 8).double()
    weight = kernel.T.reshape(8, 1, 3, 3)
    expected = conv2d(grid.permute(2, 0, 1)[None], weight, padding=1, groups=8)[0].permute(1, 2, 0) @ a

    def blocks(t: torch.Tensor) -> torch.Tensor:
        """[6, 12, ..] -> [blocks, block * block, ..]"""
        parts = t.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)
        return parts.flatten(2, 3).flatten(0, 1)

    x = blocks(grid)
    found = convolved_targets(x, a, kernel, grid_neighbours(6, 12, 3, block))
    torch.testing.assert_close(found, blocks(expected))


def test_masked_tokens_are_no_ones_neighbours() -> None:
    torch.manual_seed(0)
    x, a, kernel = torch.randn(1, 5, 8), torch.randn(8), torch.randn(3, 8)
    mask = torch.tensor([[True, True, True, False, False]])
    full = convolved_targets(x.masked_fill(~mask.unsqueeze(-1), float("nan")), a, kernel, line_neighbours(5, 3), mask)
    short = convolved_targets(x[:, :3], a, kernel, line_neighbours(3, 3))
    torch.testing.assert_close(full[:, :3], short)


def test_refusals() -> None:
    with pytest.raises(BlockError, match="5 x 4"):
        grid_neighbours(5, 4, 3, block=2)
    with pytest.raises(BlockError, match="neighbours must be"):
        convolved_targets(torch.zeros(2, 4, 8), torch.zeros(8), torch.zeros(3, 8), line_neighbours(5, 3))
    with pytest.raises(BlockError, match="neighbours must be"):
        convolved_targets(torch.zeros(2, 4, 8), torch.zeros(8), torch.zeros(3, 8), line_neighbours(4, 5))


@pytest.mark.parametrize("size", [0, 2, 4, -1])
def test_a_kernel_without_a_centre_is_refused(size: int) -> None:
    for make in (lambda: line_neighbours(4, size), lambda: grid_neighbours(4, 4, size)):
        with pytest.raises(BlockError, match="odd"):
            make()
    with pytest.raises(BlockError, match="at least one"):
        grid_neighbours(4, 4, 3, block=0)
