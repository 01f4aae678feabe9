"""`dual_window_attention`: the choice of engine, the gradient, and the form that merges bands by log-sum-exp."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ttmem.attention.bands import Band, add_band_gradients, band_attention
from ttmem.attention.branches import Branch
from ttmem.attention.dual_window_problem import Gradients, Problem, Solution, check, row_gradients
from ttmem.attention.dual_window_reference import dual_window_reference
from ttmem.errors import BlockError

Engine = Literal["auto", "reference", "merge", "triton"]


def dual_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    teacher_window: int,
    student_window: int,
    *,
    scale: float | None = None,
    segments: Tensor | None = None,
    engine: Engine = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention through a long and a short window at once: (teacher, student) [batch, heads, tokens, d_v].

    q [batch, heads, tokens, d]; k [batch, kv_heads, keys, d]; v [batch, kv_heads, keys, d_v], all of one floating
    dtype, which the answers have too. keys >= tokens: the last `tokens` keys belong to the queries, earlier ones are a
    cache. A window counts keys including the token's own, so 1 sees that alone; one larger than the keys sees them all.
    scale: of the scores, by default d ** -0.5.

    segments, integers [batch, keys]: a query sees only keys with its own segment's id, for documents packed into one
    row. A negative id is padding, which nobody sees and which answers zeros. Windows count places in the row, so
    padding belongs before or after a document, not into it.

    engine: "merge" attends to the keys of both windows once and to the rest of the teacher's once, and merges by
    log-sum-exp, on any device; "triton" is the fused kernel for GPUs; "reference" is two plain passes with whole score
    matrices; "auto" takes the kernel on a GPU that has Triton, else "merge". Differentiable once in q, k and v
    ("reference": as often as one likes). Half precision is accumulated in fp32.

    Raises BlockError for shapes that do not fit, windows out of order, and an engine that cannot take the input.
    """
    check(q, k, v, teacher_window, student_window, segments)
    keys = k.shape[2]
    windows = min(teacher_window, keys), min(student_window, keys)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    solver = choose_solver(q, v, engine)
    if solver is None or min(q.numel(), v.numel()) == 0:
        return dual_window_reference(q, k, v, *windows, scale, segments)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return _attend(solver, windows, scale, q, k, v, segments)


class Forward(Protocol):
    def __call__(self, problem: Problem) -> Solution: ...


class Backward(Protocol):
    def __call__(
        self, problem: Problem, solution: Solution, d_teacher: Tensor | None, d_student: Tensor | None
    ) -> Gradients: ...


class Solver(NamedTuple):
    """An engine."""

    forward: Forward
    backward: Backward


def choose_solver(q: Tensor, v: Tensor, engine: Engine) -> Solver | None:
    """None is the reference, which autograd differentiates. Raises BlockError for an engine that cannot take this."""
    if engine not in ("auto", "reference", "merge", "triton"):
        raise BlockError(f"there is no engine {engine!r}; take 'auto', 'reference', 'merge' or 'triton'.")
    if engine == "reference":
        return None
    if engine == "triton":
        try:
            from ttmem.attention import dual_window_triton
        except ImportError as error:
            raise BlockError("engine 'triton' needs Triton: pip install triton, or take engine='auto'.") from error
        dual_window_triton.refuse(q, v)
        return Solver(dual_window_triton.forward, dual_window_triton.backward)
    if engine == "auto" and q.is_cuda and _triton_takes(q, v):
        return choose_solver(q, v, "triton")
    return Solver(merge_forward, merge_backward)


def _triton_takes(q: Tensor, v: Tensor) -> bool:
    try:
        from ttmem.attention import dual_window_triton
    except ImportError:
        return False
    return dual_window_triton.takes(q, v)


def merge_forward(problem: Problem) -> Solution:
    """The student's window, then the keys beyond it that only the teacher sees, then both as one softmax.

    The bands are disjoint, so this costs what the teacher alone costs, and a block's width more.
    """
    student = band_attention(problem, Band(0, problem.student_window))
    teacher = student
    if problem.student_window < problem.teacher_window:
        teacher = band_attention(problem, Band(problem.student_window, problem.teacher_window), seen=student)
    dtype = problem.q.dtype
    # Equal windows give the same answer twice, in two tensors, of which a caller may change one.
    return Solution(_copied(teacher, student).to(dtype), student.output.to(dtype), teacher.log_z, student.log_z)


def merge_backward(
    problem: Problem, solution: Solution, d_teacher: Tensor | None, d_student: Tensor | None
) -> Gradients:
    """One backward pass per band: both windows' gradients on the near keys, the teacher's on the far ones."""
    far, near = row_gradients(solution, d_teacher, d_student)
    dtype = near.output.dtype
    gradients = Gradients(*(torch.zeros_like(t, dtype=dtype) for t in (problem.q, problem.k, problem.v)))
    add_band_gradients(problem, Band(0, problem.student_window), solution.student_log_z, near, gradients)
    if far is not None and problem.student_window < problem.teacher_window:
        beyond = Band(problem.student_window, problem.teacher_window)
        add_band_gradients(problem, beyond, solution.teacher_log_z, far, gradients)
    return Gradients(*(t.to(problem.q.dtype) for t in gradients))


def _copied(teacher: Branch, student: Branch) -> Tensor:
    return teacher.output.clone() if teacher is student else teacher.output


@torch.compiler.disable
def _attend(
    solver: Solver, windows: tuple[int, int], scale: float, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _DualWindow.apply(solver, windows, scale, q, k, v, segments)


class _DualWindow(torch.autograd.Function):
    """Outputs and log-normalizers are kept for the backward pass, scores are computed again."""

    @staticmethod
    def forward(
        ctx: Any,
        solver: Solver,
        windows: tuple[int, int],
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        solution = solver.forward(Problem(q, k, v, windows[0], windows[1], scale, segments))
        # Queries that are padding answer zeros, whatever an engine made of them.
        teacher, student = (_hide_padding(output, segments) for output in solution[:2])
        solution = solution._replace(teacher=teacher, student=student)
        ctx.solver, ctx.windows, ctx.scale = solver, windows, scale
        ctx.save_for_backward(q, k, v, segments, *solution)
        ctx.set_materialize_grads(False)
        return solution.teacher, solution.student

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_teacher: Tensor | None, d_student: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, segments, *solution = ctx.saved_tensors
        if d_teacher is None and d_student is None:
            return (None,) * 7
        problem = Problem(q, k, v, ctx.windows[0], ctx.windows[1], ctx.scale, segments)
        d_teacher, d_student = (None if d is None else _hide_padding(d, segments) for d in (d_teacher, d_student))
        return None, None, None, *ctx.solver.backward(problem, Solution(*solution), d_teacher, d_student), None


def _hide_padding(rows: Tensor, segments: Tensor | None) -> Tensor:
    if segments is None:
        return rows
    padding = segments[:, segments.shape[1] - rows.shape[2] :] < 0
    return rows.masked_fill(padding[:, None, :, None], 0)
