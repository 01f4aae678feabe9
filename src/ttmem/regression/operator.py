"""`ttr_compress`: checks, the choice of form and engine, and the gradient that reuses the forward pass's factor."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression import cpu, plain
from ttmem.regression.problem import Gradients, Problem, Rules, Solution, compute_dtype
from ttmem.regression.reference import FLOOR, penalty

Form = Literal["auto", "dual", "primal"]
Engine = Literal["auto", "plain", "cpu", "triton"]
SHORT = 64
"""Up to so many tokens a kernel's dual form is faster than the plain primal form, also where T is d or a bit more."""


def ttr_compress(
    x: Tensor,
    a: Tensor,
    rho: Tensor,
    *,
    targets: Tensor | None = None,
    mask: Tensor | None = None,
    floor: float = FLOOR,
    normalize_keys: bool = True,
    normalize_targets: bool = False,
    form: Form = "auto",
    engine: Engine = "auto",
    check: bool | None = None,
) -> Tensor:
    """One vector per block of tokens, by ridge regression: x [.., T, d], a [d], rho [d] -> [.., d].

    h* = (K'K + D)^-1 K'v with k_t = x_t / ||x_t||, v_t = a . x_t and D = diag(softplus(rho) + floor).

    rho of shape [] or [1] is one penalty for all channels. targets [.., T] take the place of a . x_t. mask [.., T] is
    True where there is a token; a block then gives what the shorter block would. No token at all gives zeros.
    normalize_keys and normalize_targets are the paper's ablations: without the first, or with the second, the answer
    collapses to what a alone says.

    form: "dual" (T x T systems), "primal" (d x d), or by shape: dual for T < d. engine: "plain" torch operations, the
    "cpu" kernel, the "triton" kernel for GPUs, or the fastest that there is. Both kernels are dual; "auto" takes them
    for blocks of up to 64 tokens and 2 d as well.
    check: raise for tokens that are not finite. By default on CPUs only: a GPU would have to be waited for, so there
    such a token spoils its own block's answer and no other.

    x may have any floating dtype, and the answer has it too. Double is computed in double, all else in fp32.
    Differentiable once in x, a, rho and targets. A token with a norm below 1e-12 has that norm by definition.

    Raises BlockError for shapes that do not fit, settings out of range, and (see check) tokens that are not finite.
    """
    check_inputs(x, a, rho, targets, mask, floor)
    *leading, T, d = x.shape
    dtype = compute_dtype(x.dtype)
    lam = penalty(rho.to(dtype), floor).expand(d)
    if x.numel() == 0:
        return x.sum(-2) + 0 * (a.sum() + rho.sum()).to(x.dtype)
    return _answer(
        form,
        engine,
        x.reshape(-1, T, d),
        a.to(dtype).contiguous(),
        lam.contiguous(),
        None if targets is None else targets.to(dtype).expand(*leading, T).reshape(-1, T).contiguous(),
        None if mask is None else mask.expand(*leading, T).reshape(-1, T).contiguous(),
        Rules(normalize_keys, normalize_targets),
        x.device.type == "cpu" if check is None else check,
    ).view(*leading, d)


class Forward(Protocol):
    def __call__(self, problem: Problem) -> Solution: ...


class Backward(Protocol):
    def __call__(self, problem: Problem, solution: Solution, gradient: Tensor) -> Gradients: ...


class Solver(NamedTuple):
    """An engine in one form."""

    forward: Forward
    backward: Backward


PLAIN_DUAL = Solver(plain.dual_forward, plain.dual_backward)
PLAIN_PRIMAL = Solver(plain.primal_forward, plain.primal_backward)
CPU = Solver(cpu.forward, cpu.backward)


def choose_solver(x: Tensor, form: Form, engine: Engine) -> Solver:
    """The solver for blocks x [.., T, d]. Raises BlockError for one that cannot take them."""
    T, d = x.shape[-2:]
    dual = form == "dual" or (form == "auto" and d > T)
    check_choice(form, engine)
    if engine == "cpu":
        _can(x.device.type == "cpu" and form != "primal", engine, "solves the dual form, on the CPU")
        return CPU
    if engine == "triton":
        from ttmem.regression import triton_kernel

        _can(form != "primal" and T <= triton_kernel.MAX_TOKENS, engine, "solves the dual form of up to 64 tokens")
        return Solver(triton_kernel.forward, triton_kernel.backward)
    if engine == "auto" and form != "primal" and (dual or min(2 * d, SHORT) >= T):
        if x.device.type == "cpu" and T <= cpu.MAX_TOKENS and cpu.available():
            return CPU
        if x.is_cuda and x.dtype != torch.float64 and T <= SHORT and _has_triton():
            return choose_solver(x, "dual", "triton")
    return PLAIN_DUAL if dual else PLAIN_PRIMAL


def check_choice(form: str, engine: str) -> None:
    """Raises BlockError for a name that there is not."""
    if form not in ("auto", "dual", "primal") or engine not in ("auto", "plain", "cpu", "triton"):
        raise BlockError(f"there is no form {form!r} or no engine {engine!r}; see ttr_compress for those there are.")


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _can(condition: bool, engine: str, what: str) -> None:
    if not condition:
        raise BlockError(f"engine {engine!r} {what}; use engine='auto' or 'plain' for this input.")


@torch.compiler.disable
def _answer(
    form: Form,
    engine: Engine,
    x: Tensor,
    a: Tensor,
    lam: Tensor,
    targets: Tensor | None,
    mask: Tensor | None,
    rules: Rules,
    check: bool,
) -> Tensor:
    """h [B, d] of x [B, T, d], with its gradient."""
    wanted = any(t is not None and t.requires_grad for t in (x, a, lam, targets))
    keep = wanted and torch.is_grad_enabled()
    solver = choose_solver(x, form, engine)
    return _Compress.apply(solver, rules, check, keep, x, a, lam, targets, mask)


class _Compress(torch.autograd.Function):
    """The solution is kept from the forward pass to the backward; nothing else is."""

    @staticmethod
    def forward(
        ctx: Any,
        solver: Solver,
        rules: Rules,
        check: bool,
        keep: bool,
        x: Tensor,
        a: Tensor,
        lam: Tensor,
        targets: Tensor | None,
        mask: Tensor | None,
    ) -> Tensor:
        solution = solver.forward(Problem(x, a, lam, targets, mask, rules, keep, check))
        if keep:
            ctx.solver, ctx.rules, ctx.check = solver, rules, check
            ctx.save_for_backward(x, a, lam, targets, mask, *solution)
        return solution.h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # torch's `once_differentiable` is silent where the gradient is a constant
            raise BlockError(
                "the regression can be differentiated once; a second time (create_graph=True, jvp, hvp) only in "
                "ttmem.regression.reference, by autograd."
            )
        x, a, lam, targets, mask, *solution = ctx.saved_tensors
        problem = Problem(x, a, lam, targets, mask, ctx.rules, True, ctx.check)
        return None, None, None, None, *ctx.solver.backward(problem, Solution(*solution), gradient), None


def check_inputs(
    x: Tensor, a: Tensor, rho: Tensor, targets: Tensor | None, mask: Tensor | None, floor: float
) -> None:
    """Raises BlockError for what `ttr_compress` cannot take."""
    if x.dim() < 2 or not x.is_floating_point() or x.shape[-1] == 0:
        raise BlockError(f"blocks are [.., T, d] of floating point numbers with d > 0, not {_of(x)}.")
    d = x.shape[-1]
    if a.shape != (d,):
        raise BlockError(f"a must have the tokens' width, [{d}], not {_of(a)}.")
    if rho.shape not in ((d,), (1,), ()):
        raise BlockError(f"rho must be one number or [{d}], the tokens' width, not {_of(rho)}.")
    if not FLOOR <= floor < float("inf"):
        raise BlockError(f"the floor under the penalty is {floor}; fp32 needs at least {FLOOR}.")
    for name, tensor in (("targets", targets), ("mask", mask)):
        if tensor is not None and not _fits(tensor, x):
            raise BlockError(f"{name} must be {list(x.shape[:-1])} or broadcast to it, not {_of(tensor)}.")
    if mask is not None and mask.dtype != torch.bool:
        raise BlockError(f"mask must be boolean, True where there is a token, not {mask.dtype}.")


def _fits(tensor: Tensor, x: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(tensor.shape, x.shape[:-1]) == x.shape[:-1]
    except RuntimeError:
        return False


def _of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"
