"""The engine for GPUs, in Triton: one program per block forward, one per chunk of blocks backward. Dual form, T <= 64.

A block is read from memory once; the second pass over its columns finds it in the cache. The T x T system is factorised
in registers, column by column, and the backward pass reuses its factor. Sums over blocks are taken in a fixed order, so
gradients do not change from run to run.

The formulas are those of plain.py. With TRITON_INTERPRET=1 the kernels run on the CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ttmem.errors import BlockError
from ttmem.regression.problem import LARGE, Gradients, Problem, Solution, first_unfit, refuse_block
from ttmem.regression.reference import EPS

MAX_TOKENS = 64
COLUMNS = {16: 64, 32: 64, 64: 32}
"""Columns of a block worked on at once, by tokens (padded): as many as registers hold beside the T x T matrices."""
CHUNKS = 528
"""Programs of the backward pass at most: four for each of 132 processors."""
SQUARE_MAX = tl.constexpr(LARGE * LARGE)
SMALLEST = tl.constexpr(EPS)


@triton.jit
def _rows(x, valid, columns, row_stride, d, size):
    """Columns of a block's tokens in fp32, divided by their sizes; zeros where there is no token. [TP, BD]."""
    tokens = tl.arange(0, valid.shape[0])
    here = valid[:, None] & (columns < d)[None, :]
    places = x + tokens[:, None] * row_stride + columns[None, :]
    return tl.load(places, mask=here, other=0.0).to(tl.float32) / size[:, None]


@triton.jit
def _measure(
    x, y, w, valid, size, row_stride, d, TP: tl.constexpr, BD: tl.constexpr, GRAM: tl.constexpr, PRECISION: tl.constexpr
):
    """||row||^2 and y . row [TP], the weighted Gram matrix [TP, TP], and the largest entries [TP], in one pass."""
    square = tl.zeros([TP], tl.float32)
    dot = tl.zeros([TP], tl.float32)
    largest = tl.zeros([TP], tl.float32)
    gram = tl.zeros([TP, TP], tl.float32)
    for start in range(0, d, BD):
        columns = start + tl.arange(0, BD)
        rows = _rows(x, valid, columns, row_stride, d, size)
        weights = tl.load(y + columns, mask=columns < d, other=0.0)
        square += tl.sum(rows * rows, 1)
        dot += tl.sum(rows * weights[None, :], 1)
        largest = tl.maximum(largest, tl.max(tl.abs(rows), 1))
        if GRAM:
            scale = tl.load(w + columns, mask=columns < d, other=0.0)
            gram += tl.dot(rows * scale[None, :], tl.trans(rows), input_precision=PRECISION)
    return square, dot, gram, largest


@triton.jit
def _scales(square, size, KEYS: tl.constexpr, TARGETS: tl.constexpr):
    """A token's norm; key is key * row, target is target * a . row."""
    norm = tl.sqrt(square)
    inverse = 1.0 / tl.maximum(norm, SMALLEST)
    key = inverse if KEYS else tl.full(norm.shape, 1.0, tl.float32)
    target = inverse if TARGETS else size
    return norm, key, target


@triton.jit
def _solve(L, b, tokens, T: tl.constexpr):
    """(L L')^-1 b by both substitutions; zeros beyond T."""
    y = tl.where(tokens < T, b, 0.0)
    for k in range(T):
        at = tokens == k
        column = tl.sum(tl.where(at[None, :], L, 0.0), 1)
        pivot = tl.sum(tl.where(at, column, 0.0), 0)
        value = tl.sum(tl.where(at, y, 0.0), 0) / pivot
        y = tl.where(at, value, tl.where(tokens > k, y - column * value, y))
    for step in range(T):
        k = T - 1 - step
        at = tokens == k
        column = tl.sum(tl.where(at[None, :], L, 0.0), 1)
        pivot = tl.sum(tl.where(at, column, 0.0), 0)
        value = tl.sum(tl.where(at, y, tl.where(tokens > k, -column * y, 0.0)), 0) / pivot
        y = tl.where(at, value, y)
    return y


@triton.jit
def _forward(
    x, a, w, targets, mask, h, saved_v, saved_alpha, saved_factor,
    block_stride, row_stride, d,
    T: tl.constexpr, TP: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, TARGETS: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, TP)
    valid = tokens < T
    if MASKED:
        valid = valid & (tl.load(mask + b * T + tokens, mask=valid, other=0) != 0)
    block = x + b * block_stride
    size = tl.full([TP], 1.0, tl.float32)
    square, dot, gram, largest = _measure(block, a, w, valid, size, row_stride, d, TP, BD, True, PRECISION)
    if KEYS:
        too_large = tl.where(square <= SQUARE_MAX, 0, 1)
        if tl.sum(too_large, 0) > 0:
            size = tl.where(too_large == 1, largest, 1.0)
            square, dot, gram, largest = _measure(block, a, w, valid, size, row_stride, d, TP, BD, True, PRECISION)
    _norm, key, target = _scales(square, size, KEYS, TARGETS)
    v = target * dot if OWN else tl.load(targets + b * T + tokens, mask=valid, other=0.0)

    diagonal = tokens[:, None] == tokens[None, :]
    A = tl.where(diagonal, 1.0, 0.0) + gram * key[:, None] * key[None, :]
    # A = L L'. For why entries are bounded see `factorize` in cpu_kernel.cpp: nothing can grow, and nothing fail.
    L = tl.zeros([TP, TP], tl.float32)
    left = tl.sum(tl.where(diagonal, A, 0.0), 1)
    for k in range(T):
        at = tokens == k
        pivot = tl.maximum(tl.sum(tl.where(at, left, 0.0), 0), 1.0)
        bound = tl.sqrt(tl.maximum((pivot - 1.0) * (left - 1.0), 0.0))
        column = tl.sum(tl.where(at[None, :], A, 0.0), 1)
        column = tl.where(tokens > k, tl.minimum(tl.maximum(column, -bound), bound), 0.0) / tl.sqrt(pivot)
        left -= column * column
        A -= column[:, None] * column[None, :]
        L += tl.where(at[None, :], tl.where(at, tl.sqrt(pivot), column)[:, None], 0.0)
    alpha = _solve(L, v, tokens, T)
    beta = key * alpha
    for start in range(0, d, BD):
        columns = start + tl.arange(0, BD)
        rows = _rows(block, valid, columns, row_stride, d, size)
        scale = tl.load(w + columns, mask=columns < d, other=0.0)
        answer = scale * tl.sum(rows * beta[:, None], 0)
        tl.store(h + b * d + columns, answer.to(h.dtype.element_ty), mask=columns < d)
    if KEEP:
        there = tokens < T
        tl.store(saved_v + b * T + tokens, tl.where(valid, v, 0.0), mask=there)
        tl.store(saved_alpha + b * T + tokens, tl.where(valid, alpha, 0.0), mask=there)
        places = saved_factor + b * T * T + tokens[:, None] * T + tokens[None, :]
        tl.store(places, L, mask=there[:, None] & there[None, :])


@triton.jit
def _backward(
    x, a, w, p, mask, saved_v, saved_alpha, saved_factor, dx, da, dlam, dtargets,
    block_stride, row_stride, d, blocks, chunk,
    T: tl.constexpr, TP: tl.constexpr, BD: tl.constexpr,
    KEYS: tl.constexpr, TARGETS: tl.constexpr, OWN: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    tokens = tl.arange(0, TP)
    there = tokens < T
    for b in range(program * chunk, tl.minimum((program + 1) * chunk, blocks)):
        valid = there
        if MASKED:
            valid = there & (tl.load(mask + b * T + tokens, mask=there, other=0) != 0)
        block = x + b * block_stride
        size = tl.full([TP], 1.0, tl.float32)
        y = p + b * d
        square, dot, _gram, largest = _measure(block, y, w, valid, size, row_stride, d, TP, BD, False, PRECISION)
        if KEYS:
            too_large = tl.where(square <= SQUARE_MAX, 0, 1)
            if tl.sum(too_large, 0) > 0:
                size = tl.where(too_large == 1, largest, 1.0)
                square, dot, _gram, largest = _measure(
                    block, y, w, valid, size, row_stride, d, TP, BD, False, PRECISION
                )
        norm, key, target = _scales(square, size, KEYS, TARGETS)
        v = tl.load(saved_v + b * T + tokens, mask=there, other=0.0)
        alpha = tl.load(saved_alpha + b * T + tokens, mask=there, other=0.0)
        places = saved_factor + b * T * T + tokens[:, None] * T + tokens[None, :]
        L = tl.load(places, mask=there[:, None] & there[None, :], other=0.0)
        u = _solve(L, key * dot, tokens, T)

        along = tl.zeros([TP], tl.float32)
        if KEYS:
            along += u * (2 * alpha - v)
        if TARGETS and OWN:
            along += u * v
        by_x = tl.where(norm > SMALLEST, -along / tl.maximum(square, SMALLEST * SMALLEST), 0.0) / size
        by_e = key * alpha / size
        by_h = -key * u / size
        for start in range(0, d, BD):
            columns = start + tl.arange(0, BD)
            inside = columns < d
            rows = _rows(block, valid, columns, row_stride, d, size)
            scale = tl.load(w + columns, mask=inside, other=0.0)
            e = tl.load(y + columns, mask=inside, other=0.0) - scale * tl.sum(rows * (key * u)[:, None], 0)
            h = scale * tl.sum(rows * (key * alpha)[:, None], 0)
            row = by_e[:, None] * e[None, :] + by_h[:, None] * h[None, :] + by_x[:, None] * rows
            if OWN:
                weights = tl.load(a + columns, mask=inside, other=0.0)
                row += (target * u / size)[:, None] * weights[None, :]
                part = da + program * d + columns
                share = tl.sum(rows * (target * u)[:, None], 0)
                tl.store(part, tl.load(part, mask=inside, other=0.0) + share, mask=inside)
            part = dlam + program * d + columns
            tl.store(part, tl.load(part, mask=inside, other=0.0) - e * h, mask=inside)
            row = tl.where(valid[:, None], row, 0.0)
            to = dx + b * T * d + tokens[:, None] * d + columns[None, :]
            tl.store(to, row.to(dx.dtype.element_ty), mask=there[:, None] & inside[None, :])
        if not OWN:
            tl.store(dtargets + b * T + tokens, u, mask=there)


def forward(problem: Problem) -> Solution:
    """Raises BlockError for a token that is not finite where the problem wants that checked, and for double."""
    x = _readable(problem)
    blocks, T, d = x.shape
    h = torch.empty(blocks, d, dtype=x.dtype, device=x.device)
    kept = blocks if problem.keep else 0
    v, alpha = (torch.empty(kept, T, dtype=torch.float32, device=x.device) for _ in range(2))
    factor = torch.empty(kept, T, T, dtype=torch.float32, device=x.device)
    _forward[(blocks,)](
        x, problem.a, 1 / problem.lam, _or(problem.targets, problem.a), _mask(problem), h, v, alpha, factor,
        x.stride(0), x.stride(1), d, **_constants(problem, x), KEEP=problem.keep,
    )  # fmt: skip
    unfit = first_unfit(problem) if problem.check else None
    if unfit is not None:
        raise refuse_block(unfit)
    return Solution(h, v, alpha, factor)


def backward(problem: Problem, solution: Solution, gradient: Tensor) -> Gradients:
    x = _readable(problem)
    blocks, _, d = x.shape
    w = 1 / problem.lam
    chunk = -(-blocks // CHUNKS)
    programs = -(-blocks // chunk)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    da, dlam = torch.zeros(2, programs, d, dtype=torch.float32, device=x.device)
    dtargets = None if problem.targets is None else torch.empty_like(problem.targets)
    _backward[(programs,)](
        x, problem.a, w, (w * gradient.float()).contiguous(), _mask(problem),
        solution.v, solution.alpha, solution.factor, dx, da, dlam, _or(dtargets, problem.a),
        x.stride(0), x.stride(1), d, blocks, chunk, **_constants(problem, x),
    )  # fmt: skip
    return Gradients(dx, da.sum(0), dlam.sum(0), dtargets)


def _readable(problem: Problem) -> Tensor:
    x = problem.x
    if x.dtype == torch.float64:
        raise BlockError("the Triton kernel computes in fp32; use engine='plain' for double.")
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(problem: Problem) -> Tensor:
    return problem.a if problem.mask is None else problem.mask.view(torch.uint8)


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A pointer that the kernel does not follow, where there is no tensor."""
    return unused if tensor is None else tensor


def _constants(problem: Problem, x: Tensor) -> dict[str, object]:
    T = x.shape[-2]
    padded = max(16, triton.next_power_of_2(T))
    return {
        "T": T,
        "TP": padded,
        "BD": COLUMNS[padded],
        "KEYS": problem.rules.normalize_keys,
        "TARGETS": problem.rules.normalize_targets,
        "OWN": problem.targets is None,
        "MASKED": problem.mask is not None,
        # Three TF32 products are as exact as one in fp32, and the tensor cores do them. ROCm has no such mode.
        "PRECISION": "tf32x3" if torch.version.hip is None else "ieee",
        "num_warps": 8 if padded == 64 else 4,
    }
