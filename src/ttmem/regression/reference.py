"""The operator as its formulas say it: the oracle of the tests, differentiable by autograd, in the inputs' precision.

A block of T tokens X [T, d] poses a ridge regression: find h such that each token's direction predicts its projection
on a learned vector a,

    k_t = x_t / ||x_t||        v_t = a . x_t
    h*  = argmin_h  1/2 sum_t (k_t . h - v_t)^2 + 1/2 h' D h        D = diag(lambda), lambda = softplus(rho) + floor

and h* is the block's summary. `operator.py` computes the same, faster.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

EPS = 1e-12
"""Norms below it count as this one, so that a token of zeros has a key of zeros."""
FLOOR = 1e-6
"""The least penalty. Below it, fp32 cannot tell nearly equal tokens from equal ones."""


def penalty(rho: Tensor, floor: float = FLOOR) -> Tensor:
    """lambda > 0, elementwise; the diagonal of D."""
    return softplus(rho) + floor


def keys_and_targets(
    x: Tensor, a: Tensor, normalize_keys: bool = True, normalize_targets: bool = False
) -> tuple[Tensor, Tensor]:
    """K [.., T, d] and v [.., T] of x [.., T, d] and a [d]. The paper normalises the keys and not the targets."""
    directions = normalize(x, dim=-1, eps=EPS)
    return directions if normalize_keys else x, (directions if normalize_targets else x) @ a


def primal(K: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """h* = (K'K + D)^-1 K'v: K [.., T, d], v [.., T], lam [d] -> [.., d]. A d x d system."""
    system = K.mT @ K + torch.diag(lam)
    return torch.linalg.solve(system, (K.mT @ v.unsqueeze(-1))).squeeze(-1)


def dual(K: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """h* = D^-1/2 Kt' (I_T + Kt Kt')^-1 v with Kt = K D^-1/2: the same h*. A T x T system."""
    Kt = K / lam.sqrt()
    alpha = torch.linalg.solve(torch.eye(K.shape[-2], dtype=K.dtype) + Kt @ Kt.mT, v.unsqueeze(-1))
    return (Kt.mT @ alpha).squeeze(-1) / lam.sqrt()
