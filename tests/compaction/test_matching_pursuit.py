"""Matching pursuit against its definition, one loop per step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.compaction.least_squares import bounded_nnls
from ttmem.compaction.matching_pursuit import matching_pursuit


def pursuit_by_definition(columns: Tensor, target: Tensor, count: int, per_step: int, upper: float) -> list[int]:
    """Each step takes the columns whose inner products with the residual are largest, and fits all weights anew."""
    columns, target = columns.double(), target.double()
    chosen: list[int] = []
    residual = target.clone()
    while len(chosen) < count:
        gains = {j: (columns[:, j] @ residual).item() for j in range(columns.shape[1]) if j not in chosen}
        chosen += sorted(gains, key=lambda j: -gains[j])[: min(per_step, count - len(chosen))]
        part = columns[:, chosen]
        weights = torch.ones(len(chosen), dtype=torch.float64)
        step = 1 / torch.linalg.matrix_norm(part, 2) ** 2
        for _ in range(4000):
            weights = (weights - step * part.T @ (part @ weights - target)).clamp(1e-3, upper)
        residual = target - part @ weights
    return chosen


@pytest.mark.parametrize("per_step", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_choices_follow_the_definition(per_step: int, seed: int) -> None:
    torch.manual_seed(seed)
    columns = torch.rand(25, 14) * torch.rand(14)
    target = columns.sum(1)
    chosen, weights = matching_pursuit(columns, target, 5, per_step, 1e-3, 30.0)
    assert chosen.tolist() == pursuit_by_definition(columns, target, 5, per_step, 30.0)
    best = bounded_nnls(columns[:, chosen], target, 1e-3, 30.0, 50)
    torch.testing.assert_close(columns[:, chosen] @ weights, columns[:, chosen] @ best, atol=2e-2, rtol=2e-2)


@given(available=st.integers(1, 30), share=st.floats(0, 1), per_step=st.integers(1, 8), seed=st.integers(0, 99))
def test_it_chooses_as_many_as_asked_none_twice(available: int, share: float, per_step: int, seed: int) -> None:
    torch.manual_seed(seed)
    count = 1 + round(share * (available - 1))
    columns = torch.rand(6, available)
    chosen, weights = matching_pursuit(columns, columns.sum(1), count, per_step, 1e-3, 30.0)
    assert len(set(chosen.tolist())) == len(chosen) == len(weights) == count
    assert (weights >= 1e-3 - 1e-7).all()
    assert (weights <= 30.0 * (1 + 1e-6)).all()


def test_columns_without_weight_are_replaced() -> None:
    """Column 2 comes first, and is of no use once the two that it is a mixture of are there: 3 takes its place."""
    columns = torch.tensor([[1.0, 0.0, 0.9, 0.0], [0.0, 1.0, 0.8, 0.0], [0.0, 0.0, 0.3, 0.0], [0.0, 0.0, 0.0, 0.1]])
    target = torch.tensor([2.0, 2.0, 0.0, 0.1])
    chosen, weights = matching_pursuit(columns, target, 3, 1, 1e-3, 30.0)
    assert sorted(chosen.tolist()) == [0, 1, 3]
    assert weights[chosen.argsort()].tolist() == pytest.approx([2.0, 2.0, 1.0], rel=1e-3)
    chosen, _ = matching_pursuit(columns[:, :3], target, 3, 1, 1e-3, 30.0)
    assert sorted(chosen.tolist()) == [0, 1, 2], "nothing is left to take its place"


def test_more_columns_come_closer() -> None:
    torch.manual_seed(7)
    columns = torch.randn(200, 60).mul(2).softmax(-1)
    target = torch.ones(200)
    errors = []
    for count in (4, 8, 16, 32, 60):
        chosen, weights = matching_pursuit(columns, target, count, 2, 1e-3, 1e3)
        errors.append((columns[:, chosen] @ weights - target).square().mean().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8
