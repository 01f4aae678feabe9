"""Grids on their way to the mergers, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem import BlockError, VisionError
from ttmem.vision import KINDS, MergerSettings, install
from ttmem.vision.grids import MergeGrids

EVERY = pytest.mark.parametrize("kind", KINDS)


def plain_order(grids: list[tuple[int, int, int]], m: int) -> list[tuple[int, int, int]]:
    """(frame, row, column) of every patch in the order of Qwen3-VL's processor, by counting."""
    order, frames = [], 0
    for time, height, width in grids:
        for _ in range(time):
            for block_row in range(height // m):
                for block_column in range(width // m):
                    for row in range(m):
                        for column in range(m):
                            order.append((frames, block_row * m + row, block_column * m + column))
            frames += 1
    return order


@given(
    m=st.integers(1, 3),
    kernel=st.sampled_from([1, 3]),
    shapes=st.lists(st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_neighbours_are_those_of_the_picture(m: int, kernel: int, shapes: list[tuple[int, int, int]]) -> None:
    grids = [(time, rows * m, columns * m) for time, rows, columns in shapes]
    held = MergeGrids(m, kernel)
    held._grids = grids
    found = held.neighbours(torch.device("cpu"))
    order = plain_order(grids, m)
    place = {patch: index for index, patch in enumerate(order)}
    taps = [(y, x) for y in range(kernel) for x in range(kernel)]
    reach = kernel // 2
    for tap, (y, x) in enumerate(taps):
        for index, (frame, row, column) in enumerate(order):
            expected = place.get((frame, row + y - reach, column + x - reach), -1)
            assert found[tap, index] == expected


def visual_answer(network: Any, pixels: Tensor, grids: list[list[int]]) -> Tensor:
    return network.model.visual(pixels, grid_thw=torch.tensor(grids)).pooler_output


def test_the_convolution_crosses_groups_and_stays_in_its_picture(make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 2))
    merger, grids = network.model.visual.merger, network.model.visual.merger.grids
    with torch.no_grad():
        merger.compress.kernel.normal_()
    x = torch.randn(2 * 24, 24)
    x[24:] = x[:24]
    grids._grids = [(1, 4, 6), (1, 4, 6)]
    before = merger(x)
    torch.testing.assert_close(before[:6], before[6:])
    x[0] += 1.0  # the first patch: alone in its group's corner
    grids._neighbours = None
    changed = (merger(x) - before).abs().amax(-1) > 1e-6
    assert changed.nonzero().flatten().tolist() == [0]
    x[0] -= 1.0
    x[3] += 1.0  # row 1, column 1: touches the groups to the right, below, and between them
    changed = (merger(x) - before).abs().amax(-1) > 1e-6
    assert changed.nonzero().flatten().tolist() == [0, 1, 3, 4]


@EVERY
def test_pictures_do_not_mix(kind: Any, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 2))
    first, second = torch.randn(24, 96), torch.randn(16, 96)
    both = visual_answer(network, torch.cat([first, second]), [[1, 4, 6], [1, 4, 4]])
    torch.testing.assert_close(both[:6], visual_answer(network, first, [[1, 4, 6]]))
    torch.testing.assert_close(both[6:], visual_answer(network, second, [[1, 4, 4]]))


@EVERY
@pytest.mark.parametrize("grid", [[1, 6, 4], [1, 4, 6], [1, 5, 6], [1, -3, -3]])
def test_a_grid_that_does_not_divide_is_refused(
    kind: Any, grid: list[int], make_vision_network: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 3))
    with pytest.raises(VisionError, match=r"image 1 has a grid of .* 3 x 3"):
        visual_answer(network, torch.randn(33, 96), [[1, 3, 3], grid])
    answer = visual_answer(network, torch.randn(9, 96), [[1, 3, 3]])  # and nothing is left of the failed call
    assert answer.isfinite().all()


@EVERY
def test_other_misfits_are_refused(kind: Any, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 2))
    pixels = torch.randn(24, 96)
    with pytest.raises(VisionError, match="24 patches, but the grids hold 16"):
        visual_answer(network, pixels, [[1, 4, 4]])
    for bad in (torch.tensor([1, 4, 6]), torch.tensor([[4, 6]]), torch.tensor([[1.0, 4.0, 6.0]]), None):
        with pytest.raises(VisionError, match="grid_thw must hold"):
            network.model.visual(pixels, grid_thw=bad)
    with pytest.raises(VisionError, match="without patches"):
        network.model.visual(None, grid_thw=torch.tensor([[1, 4, 6]]))


@EVERY
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_not_finite_are_refused(
    kind: Any, value: float, make_vision_network: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 2))
    pixels = torch.randn(24, 96)
    pixels[7, 3] = value
    with pytest.raises(VisionError, match="patch 7 has pixels that are not finite"):
        visual_answer(network, pixels, [[1, 4, 6]])


@pytest.mark.parametrize("kind", ["ttr", "ttr-conv"])
def test_what_is_not_finite_inside_is_the_operators_to_refuse(
    kind: Any, make_vision_network: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 2))
    merger = network.model.visual.merger
    if kind == "ttr-conv":
        merger.grids._grids = [(1, 4, 6)]
    x = torch.randn(24, 24)
    x[9] = float("nan")
    with pytest.raises(BlockError, match="not finite"):
        merger(x)


@EVERY
def test_no_patches_give_no_tokens(kind: Any, make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, 2))
    merger = network.model.visual.merger
    if kind == "ttr-conv":
        merger.grids._grids = [(0, 4, 6)]
    assert merger(torch.empty(0, 24)).shape == (0, 32)


@EVERY
@pytest.mark.parametrize("merge_size", [2, 3])
def test_groups_of_zeros_are_finite_with_finite_gradients(
    kind: Any, merge_size: int, make_vision_network: Callable[..., Any]
) -> None:
    network = make_vision_network()
    install(network, MergerSettings(kind, merge_size))
    merger = network.model.visual.merger
    if kind == "ttr-conv":
        merger.grids._grids = [(1, 6, 6)]
    x = torch.randn(36, 24)
    x[: merge_size**2] = 0.0
    x.requires_grad_()
    merger(x).square().sum().backward()
    assert merger(x).isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in merger.parameters())


def test_a_merger_on_its_own(make_vision_network: Callable[..., Any]) -> None:
    network = make_vision_network()
    install(network, MergerSettings("ttr-conv", 2))
    merger = network.model.visual.merger
    with pytest.raises(VisionError, match="outside its vision model"):
        merger(torch.randn(8, 24))
    for shape in ((6, 24), (8, 23), (2, 4, 24)):
        with pytest.raises(VisionError, match="whole groups of 4"):
            merger(torch.randn(shape))
