"""Two least-squares problems, batched over heads: entry weights within bounds, and entry values.

Attention Matching (arXiv 2602.16284) solves them to fit a head's attention mass and output. Of the many queries P only
a Gram matrix [n, n] is kept. All arithmetic is fp64, on the device of the inputs: columns of softmax weights resemble
each other so much that fp32 Gram matrices are not positive definite.

Columns that are zero throughout (the padding of heads with fewer entries) change nothing: their weights stay where they
start, their values are the prior's.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 2048
"""Queries multiplied at once."""
DAMPING = 1e-9
"""Added to the Newton systems, relative to the mean diagonal, so that equal columns can be told apart."""
HALVINGS = 12
"""Lengths 1, 1/2, 1/4, ... tried along a step."""
FALLBACK = 0.1
"""Other steps than Newton's are taken where they gain more than ten times as much: Newton's pay later."""


@torch.no_grad()
def bounded_nnls(
    design: Tensor, target: Tensor, lower: float, upper: float, iterations: int, start: Tensor | None = None
) -> Tensor:
    """Minimise |design @ w - target|^2 over lower <= w <= upper: design [.., P, n], target [.., P] -> w [.., n] fp32.

    Starts at `start` [.., n], put within the bounds, or where there is none at the one weight that serves all columns
    best. No iteration makes the fit worse; 2 come close, and 10 to 20 mostly reach the optimum.
    Raises ValueError for bounds out of order or below zero.
    """
    if not 0 <= lower <= upper:
        raise ValueError(f"the bounds are {lower} and {upper}; they must be in order and not negative")
    gram, moment = normal_equations(design, target.unsqueeze(-1))
    moment = moment.squeeze(-1)
    weights = one_weight(gram, moment) if start is None else start.to(gram)
    return projected_newton(gram, moment, weights, lower, upper, iterations).float()


@torch.no_grad()
def projected_newton(
    gram: Tensor, moment: Tensor, start: Tensor, lower: float, upper: float, iterations: int
) -> Tensor:
    """`bounded_nnls` on its normal equations, fp64: gram [.., n, n], moment and start [.., n] -> [.., n].

    Two-metric projection (Bertsekas 1982): weights at a bound that the slope pushes against stay, the others take the
    Newton step of their own subproblem. Of several lengths of that step and of the steepest descent, each put within
    the bounds, the best is taken. The length at which the first weight meets its bound is among them: it always
    descends where one weight after another has to be held.
    """
    weights = start.clamp(lower, upper)
    damping = DAMPING * mean_diagonal(gram)
    lengths = 0.5 ** torch.arange(HALVINGS, dtype=gram.dtype, device=gram.device).unsqueeze(-1)
    for _ in range(iterations):
        slope = _times(gram, weights) - moment
        held = ((weights <= lower) & (slope >= 0)) | ((weights >= upper) & (slope <= 0))
        free = (~held).to(gram.dtype)
        descent = -slope * free
        system = gram * free.unsqueeze(-1) * free.unsqueeze(-2)
        system.diagonal(dim1=-2, dim2=-1).add_(damping * free + (1 - free))
        newton = torch.cholesky_solve(descent.unsqueeze(-1), torch.linalg.cholesky(system)).squeeze(-1)
        curvature = (descent * _times(gram, descent)).sum(-1, keepdim=True)
        steepest = descent * (descent.square().sum(-1, keepdim=True) / curvature.clamp_min(1e-300))
        room = torch.where(newton > 0, upper - weights, weights - lower) / newton.abs()
        first = newton * room.nan_to_num(1.0).amin(dim=-1, keepdim=True).clamp(max=1.0)
        steps = torch.cat([newton.unsqueeze(-2) * lengths, steepest.unsqueeze(-2) * lengths, first.unsqueeze(-2)], -2)
        moves = (weights.unsqueeze(-2) + steps).clamp(lower, upper) - weights.unsqueeze(-2)
        change = ((0.5 * moves @ gram + slope.unsqueeze(-2)) * moves).sum(-1)
        change[..., HALVINGS:] *= FALLBACK
        lowest, best = change.min(dim=-1, keepdim=True)
        if not (lowest < 0).any():
            break
        move = moves.gather(-2, best.unsqueeze(-1).expand(*best.shape, weights.shape[-1])).squeeze(-2)
        weights = torch.where(lowest < 0, weights + move, weights).clamp(lower, upper)
    return weights


@torch.no_grad()
def clamped_least_squares(design: Tensor, target: Tensor, lower: float, upper: float) -> Tensor:
    """The unbounded solution put within the bounds: [.., P, n] and [.., P] -> [.., n] fp32.

    A start for `bounded_nnls`; a poor answer by itself, since columns that resemble each other get large weights of
    opposite signs.
    """
    prior = design.new_zeros(*design.shape[:-2], design.shape[-1], 1)
    return ridge(design, target.unsqueeze(-1), prior, DAMPING).squeeze(-1).clamp(lower, upper)


@torch.no_grad()
def ridge(weights: Tensor, targets: Tensor, prior: Tensor, strength: float) -> Tensor:
    """Minimise |W V - A|^2 + lambda |V - prior|^2: W [.., P, n], A [.., P, v], prior [.., n, v] -> V [.., n, v] fp32.

    lambda = strength * the mean diagonal of W^T W (over columns that are not all zero), so that a strength means the
    same in every head. Raises ValueError for a strength below 1e-10, which rounding would not survive.
    """
    if not strength >= 1e-10:
        raise ValueError(f"the ridge strength is {strength}; it must be at least 1e-10")
    gram, moment = normal_equations(weights, targets)
    prior = prior.to(gram)
    missing = moment - gram @ prior
    gram.diagonal(dim1=-2, dim2=-1).add_(strength * mean_diagonal(gram))
    return (prior + torch.cholesky_solve(missing, torch.linalg.cholesky(gram))).float()


def normal_equations(design: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """D^T D [.., n, n] and D^T T [.., n, v] in fp64 for D [.., P, n] and T [.., P, v]."""
    size = design.shape[-1]
    gram = design.new_zeros(*design.shape[:-2], size, size, dtype=torch.float64)
    moment = design.new_zeros(*design.shape[:-2], size, targets.shape[-1], dtype=torch.float64)
    for part, wanted in zip(design.split(ROWS, dim=-2), targets.split(ROWS, dim=-2), strict=True):
        rows = part.double()
        gram += rows.mT @ rows
        moment += rows.mT @ wanted.double()
    return gram, moment


def mean_diagonal(gram: Tensor) -> Tensor:
    """The mean over columns that are not all zero, [.., n, n] -> [.., 1]; at least a tiny positive number."""
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    used = (diagonal > 0).sum(-1, keepdim=True).clamp_min(1)
    return (diagonal.sum(-1, keepdim=True) / used).clamp_min(1e-30)


def one_weight(gram: Tensor, moment: Tensor) -> Tensor:
    """The best weight that is the same for all columns: [.., n, n] and [.., n] -> [.., n]."""
    total = gram.sum(dim=(-1, -2)).unsqueeze(-1)
    return torch.where(total > 0, moment.sum(-1, keepdim=True) / total, 1.0).expand(moment.shape)


def _times(gram: Tensor, vector: Tensor) -> Tensor:
    return (gram @ vector.unsqueeze(-1)).squeeze(-1)
