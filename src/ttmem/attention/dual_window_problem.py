"""What every engine of `dual_window.py` is given and gives back, and the gradient that the two windows share."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from ttmem.errors import BlockError


@dataclass(frozen=True)
class Problem:
    """q [batch, heads, tokens, d]; k [batch, kv_heads, keys, d]; v [batch, kv_heads, keys, d_v]; keys >= tokens.

    0 < student_window <= teacher_window <= keys. segments [batch, keys] or None. Last dimensions are contiguous.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    teacher_window: int
    student_window: int
    scale: float
    segments: Tensor | None

    @property
    def offset(self) -> int:
        """The position of the first query: the number of keys that were there before."""
        return self.k.shape[2] - self.q.shape[2]


class Solution(NamedTuple):
    """Outputs [batch, heads, tokens, d_v] in the queries' dtype; log-normalizers [batch, heads, tokens] in fp32."""

    teacher: Tensor
    student: Tensor
    teacher_log_z: Tensor
    student_log_z: Tensor


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


class RowGradient(NamedTuple):
    """What a softmax's backward pass needs of each row: dS = P * (output . v_j - term).

    output [batch, heads, tokens, d_v], term [batch, heads, tokens].
    """

    output: Tensor
    term: Tensor


def row_gradients(
    solution: Solution, d_teacher: Tensor | None, d_student: Tensor | None
) -> tuple[RowGradient | None, RowGradient]:
    """(of the far keys, which only the teacher sees; of the near keys, which both see).

    On near keys P_T = a P_S with a = Z_S / Z_T. So both windows' gradients are one gradient of the student's softmax:

        P_T (dO_T . v - D_T) + P_S (dO_S . v - D_S) = P_S ((a dO_T + dO_S) . v - (a D_T + D_S)),   D_r = dO_r . O_r

    and likewise for dV. One backward pass over the near keys serves both. a <= 1, so nothing overflows. On far keys it
    is the teacher's alone, with the merged output in D_T and the merged normalizer in P_T: no gradient of a
    log-normalizer is ever asked for. Without d_teacher the far keys get no gradient.
    """
    teacher, student = (_row_gradient(d, o) for d, o in ((d_teacher, solution.teacher), (d_student, solution.student)))
    if teacher is None:
        assert student is not None
        return None, student
    a = torch.exp(solution.student_log_z - solution.teacher_log_z).to(teacher.output.dtype)
    near = RowGradient(a.unsqueeze(-1) * teacher.output, a * teacher.term)
    if student is not None:
        near = RowGradient(near.output + student.output, near.term + student.term)
    return teacher, near


def _row_gradient(gradient: Tensor | None, output: Tensor) -> RowGradient | None:
    if gradient is None:
        return None
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    gradient = gradient.to(dtype)
    return RowGradient(gradient, (gradient * output.to(dtype)).sum(-1))


def check(q: Tensor, k: Tensor, v: Tensor, teacher_window: int, student_window: int, segments: Tensor | None) -> None:
    """Raises BlockError for what no engine can take."""
    if not q.dim() == k.dim() == v.dim() == 4 or not q.is_floating_point() or q.shape[-1] == 0:
        raise BlockError(
            f"queries, keys and values are [batch, heads, tokens, width] of floating point numbers, "
            f"not {_of(q)}, {_of(k)} and {_of(v)}."
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise BlockError(f"queries, keys and values differ in dtype or device: {_of(q)}, {_of(k)} and {_of(v)}.")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise BlockError(
            f"keys {list(k.shape)} and values {list(v.shape)} must agree in batch, heads and number, and keys with "
            f"queries {list(q.shape)} in batch and width."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise BlockError(f"{q.shape[1]} query heads do not divide into groups over {k.shape[1]} heads of keys.")
    if k.shape[2] < q.shape[2]:
        raise BlockError(
            f"there are {k.shape[2]} keys for {q.shape[2]} queries; the last keys are the queries' own, so pass the "
            f"new tokens' keys too."
        )
    whole = all(isinstance(window, Integral) for window in (teacher_window, student_window))
    if not whole or not 0 < student_window <= teacher_window:
        raise BlockError(
            f"the windows are {teacher_window} (teacher) and {student_window} (student); they are whole numbers of "
            f"keys, the student's at least 1, the token itself, and at most the teacher's."
        )
    if segments is not None:
        if segments.shape != (k.shape[0], k.shape[2]) or segments.dtype.is_floating_point or segments.is_complex():
            raise BlockError(
                f"segments are integers of [batch, keys], here {[k.shape[0], k.shape[2]]}, not {_of(segments)}."
            )
        if segments.device != q.device:
            raise BlockError(f"segments are on {segments.device} and the queries on {q.device}; move them there.")


def _of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
