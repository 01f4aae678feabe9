"""The engine for GPUs, in Triton: one sweep over the teacher's keys, from the diagonal backwards, answers both windows.

The student's keys are the first that the sweep meets. So there is one accumulator: when it has passed the student's
window it holds the student's answer, which is stored, and it goes on to the teacher's. Keys and scores are read and
computed once, but for the blocks that the edge of the student's window cuts, which are visited from either side. Blocks
of keys that all queries of a block see run without a mask.

Backward, the near keys take one pass for both windows and the far ones one for the teacher (`row_gradients`): a program
per block of keys sums over queries and over the heads that share the keys, another per block of queries sums over keys.
Nothing is added atomically, so gradients do not change from run to run.

Positions p of queries and j of keys count keys from the first; a band is nearest <= p - j < window, any 0 < w_S <= w_T.
With TRITON_INTERPRET=1 the kernels run on the CPU, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ttmem.attention.dual_window_problem import Gradients, Problem, RowGradient, Solution, row_gradients
from ttmem.errors import BlockError

MAX_WIDTH = 256
LOG2E = tl.constexpr(1.4426950408889634)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _rows(base, index, count, stride, width, WIDTH: tl.constexpr):
    """Rows `index` of a matrix [count, width], zeros outside: [len(index), WIDTH]."""
    columns = tl.arange(0, WIDTH)
    inside = ((index >= 0) & (index < count))[:, None] & (columns < width)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(base, index, count, stride, width, value):
    columns = tl.arange(0, value.shape[1])
    inside = (index < count)[:, None] & (columns < width)[None, :]
    places = base + index.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(places, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _ids(segments, index, count):
    return tl.load(segments + index, mask=(index >= 0) & (index < count), other=-1)


@triton.jit
def _visible(p, j, keys, nearest, window, p_id, j_id, SEGMENTED: tl.constexpr):
    """p and j broadcast against each other, and so do their segments."""
    age = p - j
    visible = (age >= nearest) & (age < window) & (j < keys)
    if SEGMENTED:
        visible = visible & (p_id == j_id) & (p_id >= 0)
    return visible


@triton.jit
def _parts(first, end, whole_first, whole_end):
    """Blocks [first, end) in three parts, cut by an edge of the band, whole, and cut again: their four borders."""
    lower = tl.minimum(tl.maximum(whole_first, first), end)
    return first, lower, tl.minimum(tl.maximum(whole_end, lower), end), end


@triton.jit
def _key_blocks(p_first, p_last, nearest, window, BN: tl.constexpr):
    """Blocks of keys that queries p_first .. p_last see in the band, as `_parts`."""
    first = tl.maximum(p_first - window + 1, 0) // BN
    end = tl.maximum((tl.maximum(p_last - nearest + 1, 0) + BN - 1) // BN, first)
    whole_first = (tl.maximum(p_last - window + 1, 0) + BN - 1) // BN
    return _parts(first, end, whole_first, tl.maximum(p_first - nearest + 1, 0) // BN)


@triton.jit
def _query_blocks(j_first, j_last, offset, tokens, nearest, window, BM: tl.constexpr):
    """Blocks of queries that see keys j_first .. j_last in the band, as `_parts`."""
    first = tl.maximum(j_first + nearest - offset, 0) // BM
    last = tl.minimum(j_last + window - 1 - offset, tokens - 1)
    end = tl.maximum((tl.maximum(last + 1, 0) + BM - 1) // BM, first)
    whole_first = (tl.maximum(j_last + nearest - offset, 0) + BM - 1) // BM
    return _parts(first, end, whole_first, tl.maximum(j_first + window - offset, 0) // BM)


@triton.jit
def _sweep(
    m, l, acc, q, p, p_id, p_first, p_last, k, v, segments, keys, k_stride, v_stride, width, v_width,
    nearest, window, scale, BN: tl.constexpr, SEGMENTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The band's keys, backwards, into the softmax with maximum m, sum l and unnormalized answer acc."""
    borders = _key_blocks(p_first, p_last, nearest, window, BN)
    for part in tl.static_range(3):
        end = borders[3 - part]
        for step in range(end - borders[2 - part]):
            j = (end - 1 - step) * BN + tl.arange(0, BN)
            key = _rows(k, j, keys, k_stride, width, q.shape[1])
            scores = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
            if SEGMENTED or part != 1:
                j_id = _ids(segments, j, keys) if SEGMENTED else j
                visible = _visible(
                    p[:, None], j[None, :], keys, nearest, window, p_id[:, None], j_id[None, :], SEGMENTED
                )
                scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(m, tl.max(scores, 1))
            at = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - at[:, None])
            shrink = tl.exp2(m - at)
            l = l * shrink + tl.sum(weights, 1)
            value = _rows(v, j, keys, v_stride, v_width, acc.shape[1])
            acc = acc * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
            m = highest
    return m, l, acc


@triton.jit
def _answer(output, log_z, rows, tokens, v_width, m, l, acc):
    """A query that saw nothing gets zeros, and a normalizer of 0, under which masked scores weigh nothing."""
    any_key = l > 0
    total = tl.where(any_key, l, 1.0)
    _store_rows(output, rows, tokens, v_width, v_width, acc / total[:, None])
    z = tl.where(any_key, (m + tl.log2(total)) / LOG2E, 0.0)
    tl.store(log_z + rows, z, mask=rows < tokens)


@triton.jit
def _forward(
    q, k, v, segments, teacher, student, teacher_z, student_z,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    heads, group, tokens, keys, width, v_width, teacher_window, student_window, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SEGMENTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    batch, head = program // heads, program % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    offset = keys - tokens
    p = rows + offset
    p_first = tl.program_id(0) * BM + offset
    p_last = tl.minimum(p_first + BM, keys) - 1
    k += batch * kb + head // group * kh
    v += batch * vb + head // group * vh
    segments += batch * keys
    p_id = _ids(segments, p, keys) if SEGMENTED else p
    query = _rows(q + batch * qb + head * qh, rows, tokens, qt, width, D)

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    m, l, acc = _sweep(
        m, l, acc, query, p, p_id, p_first, p_last, k, v, segments, keys, kt, vt, width, v_width,
        0, student_window, scale * LOG2E, BN, SEGMENTED, PRECISION,
    )  # fmt: skip
    place = program * tokens
    _answer(student + place * v_width, student_z + place, rows, tokens, v_width, m, l, acc)
    m, l, acc = _sweep(
        m, l, acc, query, p, p_id, p_first, p_last, k, v, segments, keys, kt, vt, width, v_width,
        student_window, teacher_window, scale * LOG2E, BN, SEGMENTED, PRECISION,
    )  # fmt: skip
    _answer(teacher + place * v_width, teacher_z + place, rows, tokens, v_width, m, l, acc)


@triton.jit
def _band_key_gradients(
    dk, dv, key, value, j, j_id, j_first, j_last, q, output, term, log_z, segments,
    tokens, keys, offset, q_stride, width, v_width, nearest, window, scale,
    BM: tl.constexpr, SEGMENTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The band's queries into the gradients of a block of keys. All products are transposed: [keys, queries]."""
    borders = _query_blocks(j_first, j_last, offset, tokens, nearest, window, BM)
    for part in tl.static_range(3):
        for block in range(borders[part], borders[part + 1]):
            rows = block * BM + tl.arange(0, BM)
            query = _rows(q, rows, tokens, q_stride, width, key.shape[1])
            gradient = _rows(output, rows, tokens, v_width, v_width, value.shape[1])
            z = tl.load(log_z + rows, mask=rows < tokens, other=0.0)
            d = tl.load(term + rows, mask=rows < tokens, other=0.0)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2E)
            weights = tl.exp2(scores - (z * LOG2E)[None, :])
            if SEGMENTED or part != 1:
                p = rows + offset
                p_id = _ids(segments, p, keys) if SEGMENTED else p
                visible = _visible(
                    p[None, :], j[:, None], keys, nearest, window, p_id[None, :], j_id[:, None], SEGMENTED
                )
                weights = tl.where(visible, weights, 0.0)
            dv += tl.dot(weights.to(gradient.dtype), gradient, input_precision=PRECISION)
            d_scores = weights * (tl.dot(value, tl.trans(gradient), input_precision=PRECISION) - d[None, :])
            dk += tl.dot(d_scores.to(query.dtype), query, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _key_gradients(
    q, k, v, segments, near, near_term, near_z, far, far_term, far_z, dk_to, dv_to,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    kv_heads, group, tokens, keys, width, v_width, teacher_window, student_window, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SEGMENTED: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    batch, kv_head = program // kv_heads, program % kv_heads
    j_first = tl.program_id(0) * BN
    j = j_first + tl.arange(0, BN)
    j_last = tl.minimum(j_first + BN, keys) - 1
    offset = keys - tokens
    segments += batch * keys
    j_id = _ids(segments, j, keys) if SEGMENTED else j
    key = _rows(k + batch * kb + kv_head * kh, j, keys, kt, width, D)
    value = _rows(v + batch * vb + kv_head * vh, j, keys, vt, v_width, DV)
    dk = tl.zeros([BN, D], tl.float32)
    dv = tl.zeros([BN, DV], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        query = q + batch * qb + head * qh
        place = (batch * kv_heads * group + head) * tokens
        dk, dv = _band_key_gradients(
            dk, dv, key, value, j, j_id, j_first, j_last, query, near + place * v_width, near_term + place,
            near_z + place, segments, tokens, keys, offset, qt, width, v_width, 0, student_window, scale,
            BM, SEGMENTED, PRECISION,
        )  # fmt: skip
        if FAR:
            dk, dv = _band_key_gradients(
                dk, dv, key, value, j, j_id, j_first, j_last, query, far + place * v_width, far_term + place,
                far_z + place, segments, tokens, keys, offset, qt, width, v_width, student_window, teacher_window,
                scale, BM, SEGMENTED, PRECISION,
            )  # fmt: skip
    _store_rows(dk_to + program * keys * width, j, keys, width, width, dk * scale)
    _store_rows(dv_to + program * keys * v_width, j, keys, v_width, v_width, dv)


@triton.jit
def _band_query_gradients(
    dq, query, p, p_id, p_first, p_last, rows, tokens, output, term, log_z, k, v, segments,
    keys, k_stride, v_stride, width, v_width, nearest, window, scale,
    BN: tl.constexpr, DV: tl.constexpr, SEGMENTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The band's keys into the gradient of a block of queries."""
    gradient = _rows(output, rows, tokens, v_width, v_width, DV)
    d = tl.load(term + rows, mask=rows < tokens, other=0.0)
    z = tl.load(log_z + rows, mask=rows < tokens, other=0.0)
    borders = _key_blocks(p_first, p_last, nearest, window, BN)
    for part in tl.static_range(3):
        for block in range(borders[part], borders[part + 1]):
            j = block * BN + tl.arange(0, BN)
            key = _rows(k, j, keys, k_stride, width, query.shape[1])
            value = _rows(v, j, keys, v_stride, v_width, DV)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
            weights = tl.exp2(scores - (z * LOG2E)[:, None])
            if SEGMENTED or part != 1:
                j_id = _ids(segments, j, keys) if SEGMENTED else j
                visible = _visible(
                    p[:, None], j[None, :], keys, nearest, window, p_id[:, None], j_id[None, :], SEGMENTED
                )
                weights = tl.where(visible, weights, 0.0)
            d_scores = weights * (tl.dot(gradient, tl.trans(value), input_precision=PRECISION) - d[:, None])
            dq += tl.dot(d_scores.to(key.dtype), key, input_precision=PRECISION)
    return dq


@triton.jit
def _query_gradients(
    q, k, v, segments, near, near_term, near_z, far, far_term, far_z, dq_to,
    qb, qh, qt, kb, kh, kt, vb, vh, vt,
    heads, group, tokens, keys, width, v_width, teacher_window, student_window, scale,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    SEGMENTED: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    batch, head = program // heads, program % heads
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    offset = keys - tokens
    p = rows + offset
    p_first = tl.program_id(0) * BM + offset
    p_last = tl.minimum(p_first + BM, keys) - 1
    k += batch * kb + head // group * kh
    v += batch * vb + head // group * vh
    segments += batch * keys
    p_id = _ids(segments, p, keys) if SEGMENTED else p
    query = _rows(q + batch * qb + head * qh, rows, tokens, qt, width, D)
    place = program * tokens
    dq = tl.zeros([BM, D], tl.float32)
    dq = _band_query_gradients(
        dq, query, p, p_id, p_first, p_last, rows, tokens, near + place * v_width, near_term + place, near_z + place,
        k, v, segments, keys, kt, vt, width, v_width, 0, student_window, scale, BN, DV, SEGMENTED, PRECISION,
    )  # fmt: skip
    if FAR:
        dq = _band_query_gradients(
            dq, query, p, p_id, p_first, p_last, rows, tokens, far + place * v_width, far_term + place, far_z + place,
            k, v, segments, keys, kt, vt, width, v_width, student_window, teacher_window, scale,
            BN, DV, SEGMENTED, PRECISION,
        )  # fmt: skip
    _store_rows(dq_to + place * width, rows, tokens, width, width, dq * scale)


class Blocks(NamedTuple):
    """Queries and keys in a block, and the warps that work on it."""

    queries: int
    keys: int
    warps: int


def forward_blocks(width: int, wide_numbers: bool) -> Blocks:
    """By the padded width of a head, and whether its numbers are fp32: shared memory holds half as many."""
    if wide_numbers:
        return Blocks(64, 32, 4) if width <= 64 else Blocks(32, 16, 4)
    return Blocks(128, 64, 4 if width <= 64 else 8) if width <= 128 else Blocks(64, 32, 8)


def backward_blocks(width: int, wide_numbers: bool) -> Blocks:
    if wide_numbers:
        return Blocks(32, 32, 4) if width <= 64 else Blocks(16, 16, 4)
    return Blocks(64, 64, 4 if width <= 64 else 8) if width <= 128 else Blocks(32, 32, 4)


def takes(q: Tensor, v: Tensor) -> bool:
    return q.dtype in DTYPES and max(q.shape[3], v.shape[3]) <= MAX_WIDTH


def refuse(q: Tensor, v: Tensor) -> None:
    if not takes(q, v):
        raise BlockError(
            f"the Triton kernel takes heads of up to {MAX_WIDTH} in fp32, bf16 or fp16, not {q.shape[3]} and "
            f"{v.shape[3]} in {q.dtype}; use engine='merge'."
        )


def forward(problem: Problem) -> Solution:
    q, v = problem.q, problem.v
    batch, heads, tokens, _ = q.shape
    teacher, student = (q.new_empty(batch, heads, tokens, v.shape[3]) for _ in range(2))
    teacher_z, student_z = (q.new_empty(batch, heads, tokens, dtype=torch.float32) for _ in range(2))
    constants = _constants(problem, forward_blocks)
    _forward[(triton.cdiv(tokens, constants["BM"]), batch * heads)](
        q, problem.k, v, _segments(problem), teacher, student, teacher_z, student_z,
        *_strides(problem), heads, *_sizes(problem), **constants,
    )  # fmt: skip
    return Solution(teacher, student, teacher_z, student_z)


def backward(problem: Problem, solution: Solution, d_teacher: Tensor | None, d_student: Tensor | None) -> Gradients:
    q, k, v = problem.q, problem.k, problem.v
    batch, heads, tokens, _ = q.shape
    kv_heads, keys = k.shape[1:3]
    far, near = row_gradients(solution, d_teacher, d_student)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    rows = (*_row(near, q), solution.student_log_z, *_row(far or near, q), solution.teacher_log_z)
    constants = {**_constants(problem, backward_blocks), "FAR": far is not None}
    _key_gradients[(triton.cdiv(keys, constants["BN"]), batch * kv_heads)](
        q, k, v, _segments(problem), *rows, dk, dv, *_strides(problem), kv_heads, *_sizes(problem), **constants
    )
    _query_gradients[(triton.cdiv(tokens, constants["BM"]), batch * heads)](
        q, k, v, _segments(problem), *rows, dq, *_strides(problem), heads, *_sizes(problem), **constants
    )
    return Gradients(dq, dk, dv)


def _row(row: RowGradient, q: Tensor) -> tuple[Tensor, Tensor]:
    """In the queries' dtype where products are taken of it."""
    return row.output.to(q.dtype).contiguous(), row.term.contiguous()


def _segments(problem: Problem) -> Tensor:
    """A pointer that the kernel does not follow, where there are none."""
    return problem.q if problem.segments is None else problem.segments.to(torch.int64).contiguous()


def _strides(problem: Problem) -> tuple[int, ...]:
    return tuple(stride for t in (problem.q, problem.k, problem.v) for stride in t.stride()[:3])


def _sizes(problem: Problem) -> tuple[int | float, ...]:
    q, k, v = problem.q, problem.k, problem.v
    return (
        q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
        problem.teacher_window, problem.student_window, problem.scale,
    )  # fmt: skip


def _constants(problem: Problem, choose: Callable[[int, bool], Blocks]) -> dict[str, Any]:
    q, v = problem.q, problem.v
    D, DV = (max(16, triton.next_power_of_2(t.shape[3])) for t in (q, v))
    blocks = choose(max(D, DV), q.dtype == torch.float32)
    return {
        "BM": blocks.queries,
        "BN": blocks.keys,
        "D": D,
        "DV": DV,
        "SEGMENTED": problem.segments is not None,
        # Three TF32 products are as exact as one in fp32, and the tensor cores do them. ROCm has no such mode.
        "PRECISION": "tf32x3" if torch.version.hip is None else "ieee",
        "num_warps": blocks.warps,
    }
