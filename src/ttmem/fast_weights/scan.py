"""Reading and writing the fast weights of all chunks at once: the causal scan over dW (eq. 12 and 13).

With W_i = W_0 + sum_(j<i) dW_j and dW_j = sum_(s in C_j) v_s k_s', token t of chunk i reads

    (W_i - W_0) z_t  =  sum_s [s in an earlier chunk of the same document]  (k_s . z_t) v_s

which is linear attention whose mask moves on by whole chunks. So there are two ways to compute it: with the matrix
(update it and multiply by it: 4 d f operations per token, whatever the length), or with the scores k_s . z_t (2 (d + f)
operations per token and key). We take the tokens in blocks. A block meets what lies far back as a matrix M [d, f],
carried from block to block, and what lies near as masked scores. A block of C tokens would need the fewest operations,
but each block moves the d f numbers of M twice, so small chunks are put together to blocks of at least MIN_BLOCK; and a
text of up to 2 d f / (d + f) tokens is one block, without M: scores are cheaper there.

All W_i at once, as a cumulative sum over chunks, would hold T / C matrices of d f numbers: 15 GB in bf16 for the four
layers of an 8B model at 64K tokens. Carrying M needs one. So that the gradient does not hold them either, the backward
pass runs the loop again: forwards for what depends on the past (dz), backwards with a matrix G of the future (dk, dv).
That is one product more in six.

Where chunk boundaries differ between the rows of a batch (documents packed into rows, or a state whose rows are at
different places), a block cannot end on all of them. Then the last C keys before a block count as near too, since a
boundary may lie among them; and each row of M belongs to one document, and is dropped when the next one has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ttmem.fast_weights.layout import Layout

MIN_BLOCK = 256


@dataclass
class Plan:
    """Which keys each query of a forward reads. Coordinates as in `Layout`; `held` keys lie before the first new token.

    first, limit [B, T] or [1, T]: a query reads keys from `first` up to, not including, `limit`.
    pending [B, 1] or [1, 1]: keys before it are in the state's matrix already, or have no meaning.
    begun [B] or [1]: where the document of the state's matrix began.
    edges: where the blocks of queries begin, and the end. before, ahead: keys around a block that are near.
    aligned: all rows reach the end of a chunk together, and there is one document per row.
    """

    first: Tensor
    limit: Tensor
    pending: Tensor
    begun: Tensor
    edges: list[int]
    before: int
    ahead: int
    held: int
    aligned: bool
    skips: list[bool]
    """Blocks that are known to read none of their near keys: each is one chunk, or a part of one."""

    def near(self, i: int) -> tuple[int, int]:
        """The near keys of block i, as indices into the keys."""
        a, b = self.edges[i], self.edges[i + 1]
        low = max(self.held + a - self.before, 0) if a else 0
        return low, min(self.held + b + self.ahead, self.held + self.edges[-1])

    def mask(self, i: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        """1 where a query of block i reads a near key: [B, queries, keys]."""
        part = slice(self.edges[i], self.edges[i + 1])
        key = torch.arange(low - self.held, high - self.held, device=self.first.device)
        lower = torch.maximum(self.first[:, part], self.pending)
        return ((key >= lower.unsqueeze(-1)) & (key < self.limit[:, part].unsqueeze(-1))).to(dtype)

    def document(self, end: int) -> Tensor:
        """Where the document of the key before index `end` began, [B] or [1]."""
        at = end - self.held - 1
        return self.first[:, at] if at >= 0 else self.begun

    def belongs(self, low: int, high: int, document: Tensor, dtype: torch.dtype) -> Tensor:
        """1 for keys of `document` that the state's matrix does not hold yet: [B, keys, 1]."""
        key = torch.arange(low - self.held, high - self.held, device=self.first.device)
        return (key >= torch.maximum(document.unsqueeze(1), self.pending)).unsqueeze(-1).to(dtype)

    def uses(self, i: int, document: Tensor, dtype: torch.dtype) -> Tensor:
        """1 for queries of block i whose document is `document`: [B, queries, 1]."""
        part = slice(self.edges[i], self.edges[i + 1])
        return (self.first[:, part] == document.unsqueeze(1)).unsqueeze(-1).to(dtype)


def make_plan(layout: Layout, chunk: int, held: int, d: int, f: int, inclusive: bool = False) -> Plan:
    """The plan of a forward behind a state with `held` pending keys; d, f: the sizes of the memory's matrix.

    inclusive: tokens read what their own chunk writes, later tokens included. It leaks, and is there to show that.
    """
    first = layout.begins()
    chunk_begin = layout.coordinates() - layout.places() % chunk
    counts = layout.row_counts()
    T, aligned = layout.tokens, layout.first is None
    block = chunk * max(1, -(-MIN_BLOCK // chunk))
    if T + held <= max(block, 2 * d * f // (d + f)):
        edges = [0, T]
    else:
        start = -layout.counts % chunk if isinstance(layout.counts, int) and aligned else 0
        edges = sorted({0, *range(start, T, block), T})
    lengths = [b - a + (0 if a else held) for a, b in pairwise(edges)]
    return Plan(
        first=first,
        limit=chunk_begin + chunk if inclusive else chunk_begin,
        pending=-(counts % chunk).unsqueeze(1),
        begun=-counts,
        edges=edges,
        before=0 if aligned else chunk,
        ahead=chunk if inclusive and not aligned else 0,
        held=held,
        aligned=aligned,
        skips=[aligned and not inclusive and length <= chunk for length in lengths],
    )


def scan_memory(z: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Tensor:
    """What each token reads beyond W_0: z [B, T, f], keys [B, T, f], values [B, T, d] -> [B, T, d], without a state.

    Computed in the dtype of z, M in fp32 at least.
    """
    return _Scan.apply(z, keys.to(z.dtype), values.to(z.dtype), plan)


def scan_state(
    z: Tensor, keys: Tensor, values: Tensor, plan: Plan, memory: Tensor | None, end: Tensor | int
) -> tuple[Tensor, Tensor | None]:
    """The same behind a state, and what the state's matrix [B, d, f] is afterwards; None: nothing is written yet.

    keys [B, held + T, f], values [B, held + T, d]: the pending ones of the state and the new ones.
    end [B], or a number: the coordinate where each row's unfinished chunk begins.
    """
    keys, values = keys.to(z.dtype), values.to(z.dtype)
    last = plan.held + z.shape[1]
    if isinstance(end, int):
        last = max(plan.held + end, 0)
    else:
        at = torch.arange(-plan.held, z.shape[1], device=z.device)
        values = values * (at < end.unsqueeze(1)).unsqueeze(-1).to(values.dtype)
    carried = _Carried(memory, plan.begun)
    out = _read(z, keys, values, plan, carried)
    carried.take(keys, values, plan, last)
    return out, carried.matrix


class _Carried:
    """M [B, d, f] over the keys before index `seen` that belong to the document begun at `document`."""

    def __init__(self, matrix: Tensor | None, document: Tensor) -> None:
        self.matrix, self.document, self.seen = matrix, document, 0

    def take(self, keys: Tensor, values: Tensor, plan: Plan, end: int) -> None:
        """Add the keys up to index `end`; drop what belongs to documents that ended before it."""
        if end <= self.seen:
            return
        k, v = keys[:, self.seen : end], values[:, self.seen : end]
        if not plan.aligned:
            document = plan.document(end)
            v = v * plan.belongs(self.seen, end, document, v.dtype)
            if self.matrix is not None:
                self.matrix = self.matrix * (document == self.document).to(self.matrix.dtype).view(-1, 1, 1)
            self.document = document
        written = v.mT @ k
        self.matrix = _wide(written) if self.matrix is None else self.matrix + written
        self.seen = end


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _read(z: Tensor, keys: Tensor, values: Tensor, plan: Plan, carried: _Carried) -> Tensor:
    parts = []
    for i, (a, b) in enumerate(pairwise(plan.edges)):
        low, high = plan.near(i)
        carried.take(keys, values, plan, low)
        q = z[:, a:b]
        part = q.new_zeros(q.shape[0], b - a, values.shape[-1])
        if carried.matrix is not None:
            part = q @ carried.matrix.to(q.dtype).mT
            if not plan.aligned:
                part = part * plan.uses(i, carried.document, part.dtype)
        if not plan.skips[i]:
            scores = (q @ keys[:, low:high].mT) * plan.mask(i, low, high, q.dtype)
            part = part + scores @ values[:, low:high]
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(z, keys, values)
        ctx.plan = plan
        return _read(z, keys, values, plan, _Carried(None, plan.begun))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        z, keys, values = ctx.saved_tensors
        plan: Plan = ctx.plan
        gradient = gradient.to(z.dtype)
        dz, dk, dv = torch.zeros_like(z), torch.zeros_like(keys), torch.zeros_like(values)
        carried, steps = _Carried(None, plan.begun), []
        for i, (a, b) in enumerate(pairwise(plan.edges)):
            low, high = plan.near(i)
            earlier = (carried.seen, carried.document)
            carried.take(keys, values, plan, low)
            steps.append((earlier, carried.document, low))
            q, g = z[:, a:b], gradient[:, a:b]
            if carried.matrix is not None:
                used = g if plan.aligned else g * plan.uses(i, carried.document, g.dtype)
                dz[:, a:b] += used @ carried.matrix.to(q.dtype)
            if not plan.skips[i]:
                k, v, mask = keys[:, low:high], values[:, low:high], plan.mask(i, low, high, q.dtype)
                of_scores = (g @ v.mT) * mask
                dz[:, a:b] += of_scores @ k
                dk[:, low:high] += of_scores.mT @ q
                dv[:, low:high] += ((q @ k.mT) * mask).mT @ g
        future: Tensor | None = None
        for i in range(len(steps) - 1, -1, -1):
            a, b = plan.edges[i], plan.edges[i + 1]
            (begin, document_before), document, end = steps[i]
            if end == 0:  # no keys lie far back from here on
                break
            g = gradient[:, a:b]
            if not plan.aligned:
                g = g * plan.uses(i, document, g.dtype)
            added = g.mT @ z[:, a:b]
            future = _wide(added) if future is None else future + added
            if end <= begin:
                continue
            G = future.to(z.dtype)
            of_keys, of_values = values[:, begin:end] @ G, keys[:, begin:end] @ G.mT
            if not plan.aligned:
                belongs = plan.belongs(begin, end, document, z.dtype)
                of_keys, of_values = of_keys * belongs, of_values * belongs
                future = future * (document == document_before).to(future.dtype).view(-1, 1, 1)
            dk[:, begin:end] += of_keys
            dv[:, begin:end] += of_values
        return dz, dk, dv, None
