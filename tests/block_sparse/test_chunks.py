"""Rows, windows and chunks."""

from __future__ import annotations

import pytest
import torch

from ttmem.block_sparse.cache import merge_summaries
from ttmem.block_sparse.chunks import Sparsity, all_chunks, complete, row_starts
from ttmem.errors import BlockError


def test_row_starts() -> None:
    assert row_starts(None, 4) is None
    assert row_starts(torch.ones(2, 4), 4) is None
    assert row_starts(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), 4) is None
    starts = row_starts(torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]), 4)
    assert starts is not None
    assert starts.tolist() == [2, 0, 1, 4]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 3), r"\[batch, 4\]"),
        (torch.ones(1, 1, 4, 4), r"\[batch, 4\]"),
        (torch.tensor([[1, 0, 1, 1]]), "between tokens"),
    ],
)
def test_refused_masks(mask: torch.Tensor, message: str) -> None:
    with pytest.raises(BlockError, match=message):
        row_starts(mask, 4)


def test_chunks_that_the_window_reaches_are_excluded() -> None:
    positions = torch.arange(12)
    # Window of 3: at position 6 it begins at 4, where chunk 1 begins.
    assert Sparsity(4, 1, 3).chunks_before(positions).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    aligned = Sparsity(4, 1, 3, align_window=True)
    assert aligned.chunks_before(positions).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert aligned.window_begin(positions).tolist() == [-4, -4, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert aligned.reach == 6
    for position in range(12):
        begin = int(aligned.window_begin(torch.tensor(position)))
        assert position - max(begin, 0) + 1 <= aligned.reach


def test_chunks_follow_their_rows() -> None:
    tokens = torch.arange(10.0).view(1, 1, 10, 1).expand(2, 1, 10, 1)
    found = all_chunks(tokens, torch.tensor([0, 3]), 2, 3)[:, 0, :, :, 0]
    assert found.tolist() == [[[0, 1, 2], [3, 4, 5]], [[3, 4, 5], [6, 7, 8]]]
    assert complete(10, None, 3) == 3
    assert complete(10, torch.tensor([0, 3, 12]), 3).tolist() == [3, 2, 0]  # type: ignore[union-attr]


def test_summaries_are_put_behind_each_rows_own() -> None:
    old = torch.tensor([[1.0, 2, -1], [1, -1, -1]]).view(2, 1, 3, 1)
    new = torch.tensor([[3.0, 4], [2, -2]]).view(2, 1, 2, 1)
    merged = merge_summaries(old, new, torch.tensor([2, 1]))[:, 0, :, 0]
    assert merged[0].tolist() == [1, 2, 3, 4]
    assert merged[1, :2].tolist() == [1, 2]
    assert merge_summaries(old, new, 1)[0, 0, :, 0].tolist() == [1, 3, 4]
    assert merge_summaries(None, new, 0) is new
