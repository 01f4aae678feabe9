"""A band of ages equals a masked softmax, in torch's flash kernels and in plain torch; disjoint bands merge to one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem.attention import bands
from ttmem.attention.bands import Band, add_band_gradients, band_attention
from ttmem.attention.branches import branch_attention
from ttmem.attention.dual_window_problem import Gradients, Problem, RowGradient
from ttmem.attention.dual_window_reference import visible_keys

Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
SCALE = 0.6


def problem_of(leaves: tuple[Tensor, ...], window: int) -> Problem:
    q, k, v = (t.detach() for t in leaves)
    return Problem(q, k, v, window, window, SCALE, None)


@given(
    tokens=st.integers(1, 150),
    cached=st.integers(0, 40),
    ages=st.tuples(st.integers(0, 120), st.integers(1, 80)),
    flash=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_band_is_a_masked_softmax(
    tokens: int, cached: int, ages: tuple[int, int], flash: bool, seed: int, make_qkv: Make
) -> None:
    keys = tokens + cached
    nearest, window = min(ages[0], keys - 1), min(sum(ages), keys)
    leaves = make_qkv(1, 2, 2, tokens, keys, 8, dtype=torch.float32, seed=seed)
    visible = visible_keys(tokens, keys, nearest, window, None, torch.device("cpu"))
    expected = branch_attention(*(t.detach() for t in leaves), SCALE, mask=visible)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, "_has_flash", lambda q, v: flash)
        found = band_attention(problem_of(leaves, keys), Band(nearest, window))
    some = visible.any(-1)
    torch.testing.assert_close(found.output[:, :, some], expected.output[:, :, some], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_z[:, :, some], expected.log_z[:, :, some], atol=1e-5, rtol=1e-5)
    assert (found.log_z[:, :, ~some] < -1e30).all()
    assert found.output.isfinite().all()


def test_bands_in_turn_are_one_band(make_qkv: Make) -> None:
    problem = problem_of(make_qkv(2, 4, 2, 90, 100, dim=8), 100)
    whole = band_attention(problem, Band(0, 77))
    parts = band_attention(problem, Band(30, 77))
    for band in (Band(0, 1), Band(1, 30)):
        parts = band_attention(problem, band, seen=parts)
    torch.testing.assert_close(parts, whole)


def test_what_was_seen_stays_as_it_was(make_qkv: Make) -> None:
    problem = problem_of(make_qkv(), 8)
    seen = band_attention(problem, Band(0, 3))
    before = seen.output.clone()
    band_attention(problem, Band(3, 8), seen=seen)
    assert torch.equal(seen.output, before)


@pytest.mark.parametrize("flash", [False, True])
def test_gradients_of_a_band(flash: bool, make_qkv: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row's own softmax, any gradient and term: here of its output and, which flash kernels lack, of its log_z."""
    monkeypatch.setattr(bands, "_has_flash", lambda q, v: flash)
    leaves = make_qkv(2, 4, 2, 80, 95, 8)
    problem, band = problem_of(leaves, 60), Band(0, 60)
    output, log_z = band_attention(problem, band)
    d_output, d_log_z = torch.randn_like(output), torch.randn_like(log_z)
    gradients = Gradients(*(torch.zeros_like(t) for t in leaves))
    row = RowGradient(d_output, (d_output * output).sum(-1) - d_log_z)
    add_band_gradients(problem, band, log_z, row, gradients)

    q, k, v = leaves
    visible = visible_keys(80, 95, 0, 60, None, q.device)
    shared = [t.repeat_interleave(2, 1) for t in (k, v)]
    scores = (SCALE * q @ shared[0].mT).masked_fill(~visible, -torch.inf)
    expected = torch.autograd.grad((scores.softmax(-1) @ shared[1], scores.logsumexp(-1)), leaves, (d_output, d_log_z))
    torch.testing.assert_close(tuple(gradients), expected)
