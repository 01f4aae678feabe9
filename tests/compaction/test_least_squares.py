"""Bounded least squares against all ways to hold weights at their bounds; ridge against one stacked system."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.compaction.least_squares import bounded_nnls, clamped_least_squares, normal_equations, ridge


def best_by_enumeration(design: Tensor, target: Tensor, lower: float, upper: float) -> float:
    """The least squared error over all choices of weights held below, held above and free."""
    best = float("inf")
    columns = design.shape[1]
    for state in product((lower, upper, None), repeat=columns):
        weights = torch.tensor([0.0 if s is None else s for s in state], dtype=torch.float64)
        free = [j for j in range(columns) if state[j] is None]
        if free:
            rest = (target - design @ weights).unsqueeze(1)
            weights[free] = torch.linalg.lstsq(design[:, free], rest, driver="gelsd").solution.squeeze(1)
        if (weights >= lower - 1e-9).all() and (weights <= upper + 1e-9).all():
            best = min(best, (design @ weights - target).square().sum().item())
    return best


def error(design: Tensor, target: Tensor, weights: Tensor) -> float:
    return (design.double() @ weights.double() - target.double()).square().sum().item()


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 5),
    bounds=st.sampled_from([(0.0, 10.0), (0.05, 20.0), (0.5, 0.5), (0.3, 1.2)]),
    seed=st.integers(0, 999),
    alike=st.booleans(),
)
def test_many_iterations_reach_the_best_weights_within_the_bounds(
    rows: int, columns: int, bounds: tuple[float, float], seed: int, alike: bool
) -> None:
    torch.manual_seed(seed)
    design = torch.rand(rows, columns)
    if alike:  # almost the same column everywhere, as softmax weights are
        design = design[:, :1] + 0.01 * design
    target = torch.rand(rows) * 3
    weights = bounded_nnls(design, target, *bounds, iterations=60)
    assert weights.dtype == torch.float32
    assert (weights >= bounds[0] - 1e-6).all()
    assert (weights <= bounds[1] * (1 + 1e-6)).all()
    best = best_by_enumeration(design.double(), target.double(), *bounds)
    assert error(design, target, weights) <= best * (1 + 1e-4) + 1e-5 * target.square().sum().item()


@given(seed=st.integers(0, 99), from_least_squares=st.booleans())
def test_no_iteration_makes_the_fit_worse(seed: int, from_least_squares: bool) -> None:
    torch.manual_seed(seed)
    design = torch.randn(60, 20).mul(3).softmax(-1)
    target = torch.ones(60) + 0.2 * torch.rand(60)
    start = clamped_least_squares(design, target, 0.05, 20.0) if from_least_squares else None
    errors = [error(design, target, bounded_nnls(design, target, 0.05, 20.0, k, start)) for k in range(8)]
    assert all(after <= before * (1 + 1e-6) for before, after in pairwise(errors))
    if start is not None:
        assert errors[0] == pytest.approx(error(design, target, start), rel=1e-6)


def test_without_a_start_all_weights_are_one_and_the_best_such() -> None:
    torch.manual_seed(0)
    design, target = torch.rand(30, 4), torch.rand(30) + 1
    weights = bounded_nnls(design, target, 0.0, 9.0, iterations=0)
    assert weights.unique().numel() == 1
    row = design.sum(1)
    assert weights[0].item() == pytest.approx((row @ target / (row @ row)).item(), rel=1e-5)
    assert bounded_nnls(design, target, 0.0, 0.1, iterations=0).tolist() == pytest.approx([0.1] * 4)


def test_heads_in_a_batch_are_solved_as_if_alone_padding_and_all() -> None:
    torch.manual_seed(1)
    design, target = torch.rand(2, 3, 50, 6), torch.rand(2, 3, 50) + 1
    design[1, :, :, 4:] = 0
    together = bounded_nnls(design, target, 0.05, 20.0, 12, torch.ones(2, 3, 6))
    for a in range(2):
        width = 6 if a == 0 else 4
        for b in range(3):
            alone = bounded_nnls(design[a, b, :, :width], target[a, b], 0.05, 20.0, 12, torch.ones(width))
            torch.testing.assert_close(together[a, b, :width], alone, atol=1e-5, rtol=1e-4)
    assert torch.equal(together[1, :, 4:], torch.ones(3, 2))


def test_a_design_of_zeros_changes_nothing() -> None:
    assert bounded_nnls(torch.zeros(5, 3), torch.ones(5), 0.1, 9.0, 4).tolist() == [1.0] * 3
    prior = torch.randn(3, 2)
    torch.testing.assert_close(ridge(torch.zeros(5, 3), torch.ones(5, 2), prior, 1e-3), prior)


def test_a_start_outside_the_bounds_is_put_within_them_and_left_as_it_was() -> None:
    start = torch.tensor([-4.0, 50.0])
    assert bounded_nnls(torch.eye(2), torch.ones(2), 0.5, 2.0, 0, start).tolist() == [0.5, 2.0]
    assert bounded_nnls(torch.eye(2), torch.ones(2), 0.5, 2.0, 3, start).tolist() == pytest.approx([1.0, 1.0])
    assert start.tolist() == [-4.0, 50.0]


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-1.0, 1.0)])
def test_bounds_that_are_none_are_refused(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        bounded_nnls(torch.eye(2), torch.ones(2), *bounds, 1)


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 8),
    channels=st.integers(1, 5),
    strength=st.sampled_from([1e-6, 1e-3, 0.1, 10.0]),
    seed=st.integers(0, 999),
)
def test_ridge_solves_the_stacked_system(rows: int, columns: int, channels: int, strength: float, seed: int) -> None:
    torch.manual_seed(seed)
    weights = torch.rand(2, rows, columns).double()
    targets, prior = torch.randn(2, rows, channels).double(), torch.randn(2, columns, channels).double()
    found = ridge(weights.float(), targets.float(), prior.float(), strength)
    assert found.dtype == torch.float32
    for w, a, p, v in zip(weights.float().double(), targets, prior, found, strict=True):
        scale = (strength * w.square().sum(0).mean()).sqrt()
        stacked = torch.cat([w, scale * torch.eye(columns, dtype=torch.float64)])
        expected = torch.linalg.lstsq(stacked, torch.cat([a, scale * p]), driver="gelsd").solution
        torch.testing.assert_close(v.double(), expected, atol=2e-2 if strength < 1e-3 else 1e-4, rtol=1e-3)


def test_a_strong_ridge_keeps_the_prior_and_a_weak_one_fits() -> None:
    torch.manual_seed(2)
    weights, truth, prior = torch.rand(40, 5), torch.randn(5, 3), torch.randn(5, 3)
    torch.testing.assert_close(ridge(weights, weights @ truth, prior, 1e-9), truth, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(ridge(weights, weights @ truth, prior, 1e9), prior, atol=1e-3, rtol=1e-3)


def test_the_ridge_of_padded_heads_is_that_of_their_own_columns() -> None:
    torch.manual_seed(3)
    weights, targets, prior = torch.rand(20, 6), torch.randn(20, 2), torch.randn(6, 2)
    weights[:, 4:] = 0
    found = ridge(weights, targets, prior, 0.3)
    torch.testing.assert_close(found[:4], ridge(weights[:, :4], targets, prior[:4], 0.3))
    torch.testing.assert_close(found[4:], prior[4:])


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan")])
def test_a_ridge_without_strength_is_refused(strength: float) -> None:
    with pytest.raises(ValueError, match="strength"):
        ridge(torch.eye(2), torch.ones(2, 1), torch.zeros(2, 1), strength)


def test_columns_that_are_equal_can_be_solved() -> None:
    design = torch.full((9, 300), 1 / 300)
    assert torch.isfinite(ridge(design, torch.ones(9, 2), torch.zeros(300, 2), 1e-10)).all()
    weights = bounded_nnls(
        design, torch.full((9,), 2.0), 0.05, 20.0, 5, clamped_least_squares(design, torch.ones(9), 0, 9)
    )
    assert (design @ weights).tolist() == pytest.approx([2.0] * 9, rel=1e-4)


def test_clamped_least_squares_is_the_solution_within_the_bounds() -> None:
    torch.manual_seed(4)
    design, truth = torch.randn(30, 3), torch.tensor([-2.0, 0.5, 7.0])
    assert clamped_least_squares(design, design @ truth, 0.0, 3.0).tolist() == pytest.approx([0.0, 0.5, 3.0], abs=1e-5)


def test_long_problems_are_summed_in_parts() -> None:
    torch.manual_seed(5)
    design, targets = torch.randn(5000, 7), torch.randn(5000, 2)
    gram, moment = normal_equations(design, targets)
    assert gram.dtype == moment.dtype == torch.float64
    torch.testing.assert_close(gram, design.double().T @ design.double())
    torch.testing.assert_close(moment, design.double().T @ targets.double())


@pytest.mark.parametrize("bound", [3.0, 7.0])
def test_a_score_of_iterations_is_enough_where_columns_resemble_each_other(bound: float) -> None:
    torch.manual_seed(6)
    scores = torch.randn(3, 400, 4) @ torch.randn(3, 4, 200) * 2
    shares = scores.softmax(-1)
    design = shares[..., :100]
    target = torch.ones(3, 400)
    lower, upper = math.exp(-bound), math.exp(bound)
    start = clamped_least_squares(design, target, lower, upper)
    for begin in (None, start):
        quick = bounded_nnls(design, target, lower, upper, 20, begin)
        long = bounded_nnls(design, target, lower, upper, 300, begin)
        for d, t, few, many in zip(design, target, quick, long, strict=True):
            assert error(d, t, few) <= 1.001 * error(d, t, many)
