"""Attention over a band of ages, nearest <= p - j < window, a block of queries at a time, forward and backward.

A block of queries needs only the keys between its first query's oldest and its last query's nearest, so the work is
tokens * (window - nearest + block), and nothing larger than a block's scores is held. Query heads that share keys are
folded into a block's rows. Padding is a segment like others here; `dual_window.py` hides it.

On the CPU, torch's flash kernels do a block; elsewhere plain torch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ttmem.attention.branches import Branch, merge_branches
from ttmem.attention.dual_window_problem import Gradients, Problem, RowGradient


class Band(NamedTuple):
    """The keys of ages nearest, ..., window - 1."""

    nearest: int
    window: int


class Tile(NamedTuple):
    """A block of queries, the keys that any of them sees, and the additive mask [batch or 1, 1, rows, keys].

    rows = group * queries, as `_fold` makes them.
    """

    queries: slice
    keys: slice
    mask: Tensor


def block_size(band: Band) -> int:
    """Queries in a block: few against the band's width, since a block meets as many keys more; enough to be fast."""
    return 64 if band.window - band.nearest < 512 else 128


def band_attention(problem: Problem, band: Band, seen: Branch | None = None) -> Branch:
    """What the band's keys contribute to each query's softmax; with `seen`, merged with what other keys contribute.

    Outputs and log-normalizers are fp32 (or double). A query with no key in the band has zeros and a log-normalizer of
    minus infinity, or the lowest number of its dtype where others in its block see keys: in a merge both weigh nothing.
    """
    q, k, v = problem.q, problem.k, problem.v
    attend = _flash if _has_flash(q, v) else _plain
    dtype = torch.promote_types(q.dtype, torch.float32)
    total = _nothing(problem, band, dtype) if seen is None else Branch(seen.output.clone(), seen.log_z.clone())
    for tile in _tiles(problem, band, q.dtype if attend is _flash else dtype):
        output, log_z = (t[:, :, tile.queries] for t in total)
        queries = _fold(q[:, :, tile.queries], k.shape[1])
        o, z = attend(queries, k[:, :, tile.keys], v[:, :, tile.keys], problem.scale, tile.mask)
        here = Branch(o.reshape(output.shape).to(dtype), z.reshape(log_z.shape))
        if seen is not None:
            here = merge_branches(Branch(output, log_z), here)
        output.copy_(here.output)
        log_z.copy_(here.log_z)
    return total


def _nothing(problem: Problem, band: Band, dtype: torch.dtype) -> Branch:
    """Room for the answers, with those of queries that no block takes filled in."""
    shape = problem.q.shape[:3]
    output = problem.q.new_empty(*shape, problem.v.shape[3], dtype=dtype)
    log_z = problem.q.new_empty(shape, dtype=dtype)
    without = slice(0, _first_query(problem, band))
    output[:, :, without], log_z[:, :, without] = 0, -torch.inf
    return Branch(output, log_z)


def _first_query(problem: Problem, band: Band) -> int:
    """The first query that has a key in the band."""
    return max(0, band.nearest - problem.offset)


def add_band_gradients(
    problem: Problem, band: Band, log_z: Tensor, row: RowGradient, gradients: Gradients
) -> None:
    """Add the band's part of the gradients of a softmax with normalizers log_z [batch, heads, tokens].

    With P = exp(scores - log_z) on the band, dV = P' output and dS = P * (output V' - term). Gradients are fp32 (or
    double), and so is the arithmetic: a block is converted at a time.
    """
    q, k, v = problem.q, problem.k, problem.v
    attend_backward = _flash_backward if _has_flash(q, v) else _plain_backward
    dtype, kv_heads = gradients.q.dtype, k.shape[1]
    for tile in _tiles(problem, band, dtype):
        dq, dk, dv = attend_backward(
            _fold(row.output[:, :, tile.queries], kv_heads),
            _fold(row.term[:, :, tile.queries].unsqueeze(-1), kv_heads),
            _fold(log_z[:, :, tile.queries].unsqueeze(-1), kv_heads).squeeze(-1),
            _fold(q[:, :, tile.queries], kv_heads).to(dtype),
            k[:, :, tile.keys].to(dtype),
            v[:, :, tile.keys].to(dtype),
            problem.scale,
            tile.mask,
        )
        gradients.q[:, :, tile.queries] += dq.reshape(gradients.q[:, :, tile.queries].shape)
        gradients.k[:, :, tile.keys] += dk
        gradients.v[:, :, tile.keys] += dv


def _tiles(problem: Problem, band: Band, dtype: torch.dtype) -> Iterator[Tile]:
    """Blocks of queries, without those before which the band has no key."""
    tokens, offset, segments = problem.q.shape[2], problem.offset, problem.segments
    group, block = problem.q.shape[1] // problem.k.shape[1], min(block_size(band), tokens)
    hidden = torch.finfo(dtype).min
    device = problem.q.device
    # All blocks see the band at the same place relative to themselves, so they share one mask and cut it to size.
    age = band.window - 1 + torch.arange(block, device=device)[:, None]
    age = age - torch.arange(band.window - band.nearest + block - 1, device=device)
    outside = (age < band.nearest) | (age >= band.window)
    mask = torch.zeros(age.shape, dtype=dtype, device=device).masked_fill_(outside, hidden)
    mask = mask.expand(1, group, *mask.shape)
    for start in range(_first_query(problem, band), tokens, block):
        stop = min(start + block, tokens)
        left = offset + start - band.window + 1  # of the first query's oldest key
        first, last = max(0, left), offset + stop - band.nearest
        here = mask[:, :, : stop - start, first - left : last - left]
        if segments is not None:
            own = segments[:, offset + start : offset + stop, None]
            here = here.masked_fill((own != segments[:, None, first:last])[:, None], hidden)
        yield Tile(slice(start, stop), slice(first, last), here.flatten(1, 2)[:, None])


def _fold(rows: Tensor, kv_heads: int) -> Tensor:
    """[batch, heads, n, width] -> [batch, kv_heads, group * n, width]; a view where a head has its own keys."""
    batch, heads, n, width = rows.shape
    return rows if heads == kv_heads else rows.reshape(batch, kv_heads, heads // kv_heads * n, width)


def _has_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[3] == v.shape[3]


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.to(mask.dtype) for t in (q, k, v))
    scores = scale * (q @ k.mT) + mask
    log_z = scores.logsumexp(-1)
    return torch.exp(scores - log_z.unsqueeze(-1)) @ v, log_z


def _plain_backward(
    output: Tensor, term: Tensor, log_z: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    P = torch.exp(scale * (q @ k.mT) + mask - log_z.unsqueeze(-1))
    dS = scale * P * (output @ v.mT - term)
    return dS @ k, dS.mT @ q, P.mT @ output


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=_per_head(mask, q), scale=scale
    )


def _flash_backward(
    output: Tensor, term: Tensor, log_z: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel computes the term itself, as gradient . output of a row; so it gets an output that gives ours."""
    output = _apart_from_zero(output, term)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output, q, k, v, _output_for(output, term), log_z, 0.0, False, attn_mask=_per_head(mask, q), scale=scale
    )


def _output_for(gradient: Tensor, term: Tensor) -> Tensor:
    """o along the gradient g with g . o = term: (g / m) (term / m) / |g / m|^2, where m is g's largest entry.

    All summands of g . o have one sign, so the kernel finds the term without cancellation.
    """
    largest = gradient.abs().amax(-1, keepdim=True)
    largest = largest.where(largest > 0, 1)
    unit = gradient / largest
    square = unit.square().sum(-1, keepdim=True)
    return unit * (term / largest / square.where(square > 0, 1))


def _apart_from_zero(gradient: Tensor, term: Tensor) -> Tensor:
    """Where both windows' gradients cancel in a row and leave a term, an entry so small that it rounds away.

    Only the term matters there: dS = P * (gradient . v - term).
    """
    smallest = term.abs() * torch.finfo(gradient.dtype).eps ** 2
    largest = gradient.abs().amax(-1, keepdim=True)
    return torch.where(largest >= smallest, gradient, smallest)


def _per_head(mask: Tensor, q: Tensor) -> Tensor:
    """The kernel wants the mask's full shape, and reads one that is only expanded."""
    return mask.expand(q.shape[0], q.shape[1], -1, -1)
