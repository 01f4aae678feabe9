"""The reference solves the least-squares problem it says it solves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from ttmem.regression.reference import dual, keys_and_targets, penalty, primal


@pytest.mark.parametrize(("T", "d"), [(1, 4), (4, 12), (9, 9), (20, 6)])
@pytest.mark.parametrize("form", [dual, primal])
def test_equals_a_least_squares_solver(
    T: int, d: int, form: Callable[..., Tensor], make_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> None:
    """|K h - v|^2 + h'Dh is the squared length of [K; D^1/2] h - [v; 0]."""
    x, a, rho = make_inputs(3, T, d)
    lam = penalty(rho)
    K, v = keys_and_targets(x, a)
    for b, h in enumerate(form(K, v, lam)):
        norms = np.linalg.norm(x[b].numpy(), axis=1, keepdims=True)
        design = np.concatenate([x[b].numpy() / norms, np.diag(np.sqrt(lam.numpy()))])
        target = np.concatenate([x[b].numpy() @ a.numpy(), np.zeros(d)])
        np.testing.assert_allclose(h.numpy(), np.linalg.lstsq(design, target)[0], rtol=1e-9, atol=1e-9)


def test_the_penalty_is_positive_however_small_rho_is() -> None:
    lam = penalty(torch.tensor([-1000.0, -5.0, 0.0, 50.0]))
    assert (lam >= 1e-6).all()
    torch.testing.assert_close(lam, torch.tensor([1e-6, 6.71638e-3, 0.6931482, 50.0]))
