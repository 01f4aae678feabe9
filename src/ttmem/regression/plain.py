"""The engine of torch operations: every device, dtype and shape, in the dual (T x T) or the primal (d x d) form.

The Gram matrix is scaled by the norms instead of forming normalised keys. With K the keys, W = D^-1 and A = I + K W K':

    dual     alpha = A^-1 v              h = W K' alpha
    primal   h = (K'K + D)^-1 K'v        alpha = v - K h

Both alphas are the same, and so one gradient serves both. For the gradient g of h,

    dual     u = A^-1 K W g              e = W (g - K'u)
    primal   e = (K'K + D)^-1 g          u = K e

    dK = alpha e' - u h'      dv = u      dlambda = - e * h

and a key's gradient loses its part along the key, which is u_t (2 alpha_t - v_t). The forward pass's Cholesky factor is
reused, no matrix of gradients is formed, and the whole backward costs two passes over the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ttmem.regression.problem import LARGE, Gradients, Problem, Solution, compute_dtype, first_unfit, refuse_block
from ttmem.regression.reference import EPS


@dataclass(frozen=True)
class Tokens:
    """rows [B, T, d] in the compute dtype, x = size * row. A key is key * row, a target target * (a . row): [B, T]."""

    rows: Tensor
    size: Tensor
    norm: Tensor
    key: Tensor
    target: Tensor


def dual_forward(problem: Problem) -> Solution:
    """A T x T system per block."""
    with full_precision(problem.x):
        tokens, w = prepare(problem), 1 / problem.lam
        v = targets_of(problem, tokens)
        factor = factor_of(lambda rows: gram(rows * w, rows, tokens.key.to(rows)), tokens.rows)
        alpha = solve(factor, v)
        h = w * weighted_sum(tokens.key * alpha, tokens.rows)
    return Solution(h.to(problem.x.dtype), v, alpha, factor)


def dual_backward(problem: Problem, solution: Solution, gradient: Tensor) -> Gradients:
    with full_precision(problem.x):
        tokens, w = prepare(problem), 1 / problem.lam
        p = w * gradient.to(w)
        u = solve(solution.factor, tokens.key * products(tokens.rows, p))
        e = p - w * weighted_sum(tokens.key * u, tokens.rows)
        return gradients(problem, tokens, solution, u, e)


def primal_forward(problem: Problem) -> Solution:
    """A d x d system per block: I + D^-1/2 K'K D^-1/2, whose pivots are at least 1 like the dual's."""
    with full_precision(problem.x):
        tokens, root = prepare(problem), problem.lam.rsqrt()
        v = targets_of(problem, tokens)

        def scaled(rows: Tensor) -> Tensor:
            keys = rows * tokens.key.to(rows).unsqueeze(-1) * root.to(rows)
            return keys.mT @ keys

        factor = factor_of(scaled, tokens.rows)
        h = root * solve(factor, root * weighted_sum(tokens.key * v, tokens.rows))
        alpha = v - tokens.key * products(tokens.rows, h)
    return Solution(h.to(problem.x.dtype), v, alpha, factor)


def primal_backward(problem: Problem, solution: Solution, gradient: Tensor) -> Gradients:
    with full_precision(problem.x):
        tokens, root = prepare(problem), problem.lam.rsqrt()
        e = root * solve(solution.factor, root * gradient.to(root))
        u = tokens.key * products(tokens.rows, e)
        return gradients(problem, tokens, solution, u, e)


def prepare(problem: Problem) -> Tokens:
    """Norms and scales of the tokens. Masked ones become tokens of zeros.

    Raises BlockError for a token that cannot be used (see `first_unfit`), if the problem wants that checked.
    """
    rules = problem.rules
    rows = problem.x.to(compute_dtype(problem.x.dtype))
    if problem.mask is not None:
        rows = rows.masked_fill(~problem.mask.unsqueeze(-1), 0.0)
    norm = torch.linalg.vector_norm(rows, dim=-1)
    size = torch.ones_like(norm)
    # Asking the device whether any norm is large would make it wait; without the check it divides always.
    if not problem.check or not bool((norm <= LARGE).all()):
        unfit = first_unfit(problem) if problem.check else None
        if unfit is not None:
            raise refuse_block(unfit)
        if rules.normalize_keys:
            size = torch.where(norm <= LARGE, size, rows.abs().amax(dim=-1))
            rows = rows / size.unsqueeze(-1)
            norm = torch.linalg.vector_norm(rows, dim=-1)
    inverse = 1 / norm.clamp_min(EPS)
    key = inverse if rules.normalize_keys else torch.ones_like(inverse)
    return Tokens(rows, size, norm, key, inverse if rules.normalize_targets else size)


def targets_of(problem: Problem, tokens: Tokens) -> Tensor:
    """v [B, T]."""
    if problem.targets is None:
        return tokens.target * (tokens.rows @ problem.a)
    return problem.targets if problem.mask is None else problem.targets.masked_fill(~problem.mask, 0.0)


def gram(left: Tensor, right: Tensor, key: Tensor) -> Tensor:
    """[B, T, d] twice and scales [B, T] -> [B, T, T]."""
    return (left @ right.mT) * (key.unsqueeze(-1) * key.unsqueeze(-2))


def factor_of(semidefinite: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The Cholesky factor of I + semidefinite(rows), which exists but for rounding.

    Where rounding breaks it (`cholesky_ex` says so in its second result), those blocks are done again in fp64.
    """
    factor, info = torch.linalg.cholesky_ex(_plus_identity(semidefinite(rows)))
    if bool(info.any()):
        exact, still = torch.linalg.cholesky_ex(_plus_identity(semidefinite(rows.double())))
        # Beyond fp64 are only Gram matrices of keys that are not normalised, and of tokens that are not finite.
        exact = torch.where(still.view(-1, 1, 1) == 0, exact, float("nan"))
        factor = torch.where(info.view(-1, 1, 1) == 0, factor, exact.to(factor.dtype))
    return factor


def _plus_identity(matrices: Tensor) -> Tensor:
    matrices.diagonal(dim1=-2, dim2=-1).add_(1.0)
    return matrices


def solve(factor: Tensor, right: Tensor) -> Tensor:
    """(L L')^-1 b for [B, n, n] and [B, n]."""
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)


def weighted_sum(weights: Tensor, rows: Tensor) -> Tensor:
    """sum_t weights_t row_t: [B, T] and [B, T, d] -> [B, d]."""
    return (weights.unsqueeze(-2) @ rows).squeeze(-2)


def products(rows: Tensor, y: Tensor) -> Tensor:
    """row_t . y: [B, T, d] and [B, d] -> [B, T]."""
    return (rows @ y.unsqueeze(-1)).squeeze(-1)


def gradients(problem: Problem, tokens: Tokens, solution: Solution, u: Tensor, e: Tensor) -> Gradients:
    """All gradients from u [B, T] and e [B, d] (see above)."""
    v, alpha, own = solution.v, solution.alpha, problem.targets is None
    # In half precision h would be rounded; it is cheaper to compute than to keep.
    h = weighted_sum(tokens.key * alpha, tokens.rows) / problem.lam
    along = torch.zeros_like(u)
    if problem.rules.normalize_keys:
        along = along + u * (2 * alpha - v)
    if problem.rules.normalize_targets and own:
        along = along + u * v
    along = torch.where(tokens.norm > EPS, along / tokens.norm.square().clamp_min(EPS**2), 0.0)
    left = torch.stack([tokens.key * alpha, -tokens.key * u], dim=-1)
    dx = left @ torch.stack([e, h], dim=-2)
    dx.addcmul_(along.unsqueeze(-1), tokens.rows, value=-1.0)
    da = torch.zeros_like(problem.a)
    if own:
        dx.add_((u * tokens.target).unsqueeze(-1) * problem.a)
        da = weighted_sum(tokens.target * u, tokens.rows).sum(0)
    dx.div_(tokens.size.unsqueeze(-1))
    if problem.mask is not None:
        dx.masked_fill_(~problem.mask.unsqueeze(-1), 0.0)
    dtargets = None if own else (u if problem.mask is None else u.masked_fill(~problem.mask, 0.0))
    return Gradients(dx.to(problem.x.dtype), da, -(e * h).sum(0), dtargets)


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """No autocast inside, and no TF32: both round what the solve cannot bear to have rounded."""
    tf32 = x.is_cuda and torch.backends.cuda.matmul.allow_tf32
    with torch.autocast(x.device.type, enabled=False):
        try:
            if tf32:
                torch.backends.cuda.matmul.allow_tf32 = False
            yield
        finally:
            if tf32:
                torch.backends.cuda.matmul.allow_tf32 = True
