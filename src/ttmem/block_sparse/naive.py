"""Block-sparse attention query by query, as the formulas stand in `attention.py`: for reading, and for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ttmem.block_sparse.attention import Streams
from ttmem.block_sparse.chunks import Sparsity


def naive_attention(streams: Streams, sparsity: Sparsity) -> Tensor:
    """[B, Hq, Q, d]. What a query in the padding gets is left zero."""
    batch, heads, queries, _ = streams.query.shape
    group = heads // streams.far_keys.shape[1]
    rows = []
    for b in range(batch):
        start = 0 if streams.starts is None else int(streams.starts[b])
        outputs = []
        for first in range(0, heads, group):
            for t in range(queries):
                position = streams.length - queries + t - start
                outputs.append(_one_query(streams, sparsity, b, range(first, first + group), t, start, position))
        # One entry per key-value head and query: [H, Q, G, d] -> [Hq, Q, d].
        rows.append(torch.stack(outputs).unflatten(0, (-1, queries)).transpose(1, 2).flatten(0, 1))
    return torch.stack(rows)


def _one_query(
    streams: Streams, sparsity: Sparsity, b: int, heads: range, t: int, start: int, position: int
) -> Tensor:
    """The outputs of the query heads that share a key-value head, [G, d]."""
    kv, S, W = heads[0] // len(heads), sparsity.chunk, sparsity.window
    scale = streams.query.shape[-1] ** -0.5
    if position < 0:
        return torch.zeros_like(streams.query[b, : len(heads), t])
    begin = position - W + 1
    if sparsity.align_window:
        begin = begin // S * S
    chunks = range(max(0, begin // S))

    dropped = streams.length - streams.keys.shape[2]  # slots before those kept for windows
    near = slice(start + max(begin, 0) - dropped, start + position + 1 - dropped)
    keys, values = streams.keys[b, kv, near], streams.values[b, kv, near]
    window_scores = [scale * keys @ streams.query[b, h, t] for h in heads]
    window_outputs = [scores.softmax(0) @ values for scores in window_scores]
    lse_win = [scores.logsumexp(0) for scores in window_scores]

    def score(h: int, c: int) -> Tensor:
        s = scale * streams.summaries[b, kv, c] @ streams.scoring[b, h, t]
        return s if streams.biases is None else s + streams.biases[b, kv, c]

    scores = [torch.stack([score(h, c) for c in chunks]) if chunks else lse_win[0].new_zeros(0) for h in heads]
    shares = torch.stack(
        [torch.cat([s, z.unsqueeze(0)]).softmax(0)[:-1] for s, z in zip(scores, lse_win, strict=True)]
    )
    selected = shares.amax(0).topk(min(sparsity.top_k, len(chunks))).indices.tolist()

    outputs = []
    for i, h in enumerate(heads):
        entries = [scores[i][c] for c in selected] + [lse_win[i]]
        if sparsity.sink:
            entries.append(torch.zeros_like(lse_win[i]))
        w = torch.stack(entries).softmax(0)
        output = w[len(selected)] * window_outputs[i]
        for weight, c in zip(w, selected, strict=False):
            far = slice(start + c * S, start + (c + 1) * S)
            attention = (scale * streams.far_keys[b, kv, far] @ streams.far_query[b, h, t]).softmax(0)
            output = output + weight * (attention @ streams.far_values[b, kv, far])
        outputs.append(output)
    return torch.stack(outputs)


def naive_summaries(
    summarise: Callable[[Tensor], Tensor], tokens: Tensor, starts: Tensor | None, chunk: int
) -> Tensor:
    """Chunk by chunk: tokens [B, H, N, d], summarise [H, S, d] -> [H, d]; [B, H, C, d], zeros where not complete."""
    batch, _, length, _ = tokens.shape
    rows = []
    for b in range(batch):
        start = 0 if starts is None else int(starts[b])
        done = [
            summarise(tokens[b, :, start + c * chunk : start + (c + 1) * chunk])
            for c in range(max(0, length - start) // chunk)
        ]
        nothing = torch.zeros_like(summarise(tokens[b, :, :chunk]))
        rows.append(torch.stack([*done, *[nothing] * (length // chunk - len(done))], dim=1))
    return torch.stack(rows)
