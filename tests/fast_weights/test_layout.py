"""Rows, documents, and what is kept of them."""

from __future__ import annotations

import pytest
import torch

from ttmem.errors import ModelError
from ttmem.fast_weights.layout import Layout, arrange

CPU = torch.device("cpu")


def test_a_mask_of_ones_and_counting_positions_change_nothing() -> None:
    rows, layout, positions = arrange((2, 4), CPU, torch.ones(2, 4), torch.arange(4).expand(2, 4))
    assert rows is None
    assert layout.first is None
    assert layout.lengths is None
    assert positions.tolist() == [[0, 1, 2, 3]] * 2


def test_padding_goes_to_the_end_and_back() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 1]])
    rows, layout, positions = arrange((3, 4), CPU, mask, None)
    assert rows is not None
    assert layout.lengths is not None
    x = torch.arange(12).view(3, 4)
    there = rows.arrange(x)
    assert [row[:n].tolist() for row, n in zip(there, layout.lengths, strict=True)] == [[2, 3], [4, 5, 6], [9, 11]]
    assert rows.restore(there)[mask.bool()].tolist() == x[mask.bool()].tolist()
    assert layout.next_counts().tolist() == [2, 3, 2]  # type: ignore[union-attr]
    assert positions.tolist() == [[0, 1, 2, 3]]


def test_a_position_of_zero_begins_a_document() -> None:
    _, layout, _ = arrange((1, 6), CPU, None, torch.tensor([[3, 4, 0, 1, 0, 1]]), counts=3, seen=3)
    assert layout.first is not None
    assert layout.first.tolist() == [[-3, -3, 2, 2, 4, 4]]
    assert layout.places().tolist() == [[3, 4, 0, 1, 0, 1]]
    assert layout.next_counts().tolist() == [2]  # type: ignore[union-attr]
    assert layout.completes(100)


def test_zeros_of_padding_begin_nothing() -> None:
    positions = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])
    _, layout, _ = arrange((2, 4), CPU, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]), positions)
    assert not layout.packed


def test_packed_rows_taken_apart() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 2, 0, 0]])
    rows, layout, _ = arrange((2, 5), CPU, mask, positions, unpack=True)
    assert rows is not None
    assert layout.lengths is not None
    x = torch.arange(10).view(2, 5)
    apart = [row[:n].tolist() for row, n in zip(rows.arrange(x), layout.lengths, strict=True)]
    assert apart == [[1, 2], [3, 4], [5, 6, 7]]
    assert rows.restore(rows.arrange(x))[mask.bool()].tolist() == x[mask.bool()].tolist()
    with pytest.raises(ModelError, match="one by one"):
        arrange((2, 5), CPU, mask, positions, seen=3, unpack=True)


def test_what_is_kept_leaves_padding_out() -> None:
    layout = Layout(2, 3, CPU, lengths=torch.tensor([3, 1]), counts=2)
    stream = torch.arange(10).view(2, 5, 1)
    assert layout.keep_last(stream, 2).squeeze(-1).tolist() == [[3, 4], [6, 7]]
    assert layout.keep_last(stream, 0).shape == (2, 0, 1)
    assert layout.next_counts().tolist() == [5, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(2, 3), (1, 4), (2, 4, 4)])
def test_masks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="attention mask"):
        arrange((2, 4), CPU, torch.ones(shape), None, seen=2)
