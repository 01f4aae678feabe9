"""Block-sparse attention as in HiLS-Attention (arXiv 2607.02980), for all queries at once.

For a query q, with s_c the score of chunk c and lse_win the log-normalizer of the local window:

    s_c      = q_hat . k'_c / sqrt(d) + b'_c                      for chunks c before the window
    p_c      = exp(s_c) / (sum_c exp(s_c) + exp(lse_win))         selected: the top k of the maximum of p_c over the
                                                                  query heads that share a key-value head
    w        = softmax([s_c of the selected, lse_win, 0])         the 0 is optional
    output   = sum_c w_c Attn_c(q) + w_win Attn_win(q)

The indices carry no gradient; s_c does, through w. `naive.py` reads like these formulas, and this file must equal it.
Everything is fp32 inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ttmem.attention.branches import Branch
from ttmem.block_sparse.chunks import Sparsity, all_chunks, chunk_slots, take_slots
from ttmem.errors import BlockError

QUERY_BLOCK = 512
"""Queries whose scores are held at once, at most: in blocks, a window is not computed over the whole text."""

Form = Literal["auto", "dense", "gathered"]


@dataclass(frozen=True)
class Streams:
    """What a layer hands to its attention. Hq query heads share H key-value heads in groups of G = Hq / H.

    The last of N slots is the last query's. query [B, Hq, Q, d] and keys [B, H, n, d], values [B, H, n, d] are the
    window's, of the last n slots; far_query [B, Hq, Q, d], far_keys and far_values [B, H, N, d] are the chunks'.
    scoring [B, Hq, Q, d] is q_hat; summaries [B, H, C, d] and biases [B, H, C] (or None) are k' and b'.
    starts: see `chunks`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    far_query: Tensor
    far_keys: Tensor
    far_values: Tensor
    scoring: Tensor
    summaries: Tensor
    biases: Tensor | None = None
    starts: Tensor | None = None

    @property
    def length(self) -> int:
        return self.far_keys.shape[2]

    @property
    def slots(self) -> Tensor:
        """Slots of the queries, [Q]."""
        return torch.arange(self.length - self.query.shape[2], self.length, device=self.query.device)

    def grouped(self, per_query: Tensor) -> Tensor:
        """[B, Hq, Q, d] -> [B, H, G, Q, d]."""
        return per_query.unflatten(1, (self.far_keys.shape[1], -1))

    def blocks(self, size: int) -> Iterator[Streams]:
        """The same in blocks of queries, each with the slots up to its last query."""
        total = self.query.shape[2]
        for begin in range(0, total, size):
            end = min(begin + size, total)
            later = total - end
            near, far = self.keys.shape[2] - later, self.length - later
            yield replace(
                self,
                query=self.query[:, :, begin:end],
                keys=self.keys[:, :, :near],
                values=self.values[:, :, :near],
                far_query=self.far_query[:, :, begin:end],
                far_keys=self.far_keys[:, :, :far],
                far_values=self.far_values[:, :, :far],
                scoring=self.scoring[:, :, begin:end],
            )


def block_sparse_attention(streams: Streams, sparsity: Sparsity, form: Form = "auto") -> Tensor:
    """The attention's output, [B, Hq, Q, d] in fp32.

    form: "gathered" reads only the selected chunks, for the few queries of a decode step; "dense" computes all chunks
    and gives those not selected no weight, which is faster where queries together select most chunks.
    Raises BlockError for another form, and where complete chunks before the last window have no summary.
    """
    if form not in ("auto", "dense", "gathered"):
        raise BlockError(f"there is no form {form!r}, only 'auto', 'dense' and 'gathered'.")
    _check_summaries(streams, sparsity)
    with torch.autocast(streams.query.device.type, enabled=False):
        outputs = [_attend(block, sparsity, form) for block in streams.blocks(block_size(sparsity))]
    return torch.cat(outputs, dim=2)


def window_attention(
    query: Tensor, keys: Tensor, values: Tensor, sparsity: Sparsity, starts: Tensor | int = 0
) -> Branch:
    """The window's branch: query [B, Hq, Q, d] at the last of n slots, keys and values [B, H, n, d]; [B, H, G, Q, .].

    starts: where rows begin, [B] or one number, counted from the first of the n slots; negative where slots before it
    were left out. A query in the padding sees itself, so that it stays finite.
    """
    Q, first = query.shape[2], max(0, keys.shape[2] - query.shape[2] - sparsity.reach + 1)
    keys, values = keys[:, :, first:], values[:, :, first:]
    slot = torch.arange(keys.shape[2], device=query.device) + first
    own = slot[slot.shape[0] - Q :].unsqueeze(1)
    start = torch.as_tensor(starts, device=query.device).view(-1, 1, 1)
    seen = (slot <= own) & (slot - start >= sparsity.window_begin(own - start)) & (slot >= start)
    mask = seen | (slot == own)
    grouped = query.unflatten(1, (keys.shape[1], -1)).float()
    scores = grouped @ keys.unsqueeze(2).float().mT * query.shape[-1] ** -0.5
    return softmax_branch(scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min), values.unsqueeze(2))


def softmax_branch(scores: Tensor, values: Tensor) -> Branch:
    """`branch_attention` behind its scores, [.., Q, n], with the log-normalizer read off the softmax.

    A window's scores are mostly masked, and exp of the least finite number takes a CPU several times as long as others;
    softmax does not. With m the largest score, log Z = m - log p_m.
    """
    weights = scores.softmax(-1)
    largest, index = scores.max(-1, keepdim=True)
    log_z = largest - weights.gather(-1, index).log()
    return Branch(weights @ values.float(), log_z.squeeze(-1))


def sliding_attention(
    query: Tensor, keys: Tensor, values: Tensor, sparsity: Sparsity, starts: Tensor | int = 0
) -> Tensor:
    """The window alone: the reference without far context. Shapes as in `window_attention`; [B, Hq, Q, d] in fp32."""
    outputs, Q, n, size = [], query.shape[2], keys.shape[2], block_size(sparsity)
    with torch.autocast(query.device.type, enabled=False):
        for begin in range(0, Q, size):
            end = min(begin + size, Q)
            last = n - Q + end
            part = window_attention(query[:, :, begin:end], keys[:, :, :last], values[:, :, :last], sparsity, starts)
            outputs.append(part.output.flatten(1, 2))
    return torch.cat(outputs, dim=2)


def _check_summaries(streams: Streams, sparsity: Sparsity) -> None:
    """Rows that start later have fewer chunks, and where they start is not asked here: a GPU would have to tell."""
    needed = int(sparsity.chunks_before(torch.tensor(streams.length - 1)))
    if streams.starts is None and streams.summaries.shape[2] < needed:
        raise BlockError(
            f"{streams.length} tokens have {needed} chunks of {sparsity.chunk} before the last window, and summaries "
            f"are there for {streams.summaries.shape[2]}."
        )


def block_size(sparsity: Sparsity) -> int:
    """Queries at once: a few windows, so that most of what is computed for one is in it."""
    return min(QUERY_BLOCK, max(64, 2 * sparsity.window))


def _attend(streams: Streams, sparsity: Sparsity, form: Form) -> Tensor:
    starts = (0 if streams.starts is None else streams.starts) - (streams.length - streams.keys.shape[2])
    window = window_attention(streams.query, streams.keys, streams.values, sparsity, starts)
    positions = streams.slots if streams.starts is None else streams.slots - streams.starts.unsqueeze(1)
    available = sparsity.chunks_before(positions).view(-1, positions.shape[-1])  # [B or 1, Q]
    # No row sees more chunks than one that starts at slot 0, and only its last query sees that many.
    count = min(int(sparsity.chunks_before(streams.slots[-1])), streams.summaries.shape[2])
    top_k = min(sparsity.top_k, count)
    if top_k == 0:
        weights = fusion_weights(window.log_z.new_zeros(*window.log_z.shape, 0), window.log_z, sparsity.sink)
        return (weights[..., -1:] * window.output).flatten(1, 2)
    scores = chunk_scores(streams, count)
    visible = torch.arange(count, device=available.device) < available.unsqueeze(-1)  # [B or 1, Q, count]
    scores = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min)
    chosen = select_chunks(scores.detach(), window.log_z.detach(), top_k)
    if form == "gathered" or (form == "auto" and chosen.shape[2] * top_k <= count):
        picked = chosen.unsqueeze(2).expand(-1, -1, scores.shape[2], -1, -1)
        weights = fusion_weights(scores.gather(-1, picked), window.log_z, sparsity.sink)
        far = _gathered(streams, sparsity.chunk, chosen, weights[..., :-1])
    else:
        selected = torch.zeros_like(scores[:, :, 0], dtype=torch.bool).scatter_(-1, chosen, True).unsqueeze(2)
        scores = scores.masked_fill(~selected, torch.finfo(scores.dtype).min)
        weights = fusion_weights(scores, window.log_z, sparsity.sink)
        far = _dense(streams, sparsity.chunk, weights[..., :-1])
    return (far + weights[..., -1:] * window.output).flatten(1, 2)


def chunk_scores(streams: Streams, count: int) -> Tensor:
    """q_hat . k'_c / sqrt(d) + b'_c for the first `count` chunks: [B, H, G, Q, count]."""
    summaries = streams.summaries[:, :, :count].float().unsqueeze(2)
    scores = streams.grouped(streams.scoring).float() @ summaries.mT * streams.scoring.shape[-1] ** -0.5
    if streams.biases is not None:
        scores = scores + streams.biases[:, :, None, None, :count].float()
    return scores


def select_chunks(scores: Tensor, window_log_z: Tensor, top_k: int) -> Tensor:
    """The chunks with the largest share of the softmax in any head of the group: [B, H, G, Q, C] -> [B, H, Q, top_k].

    Where fewer are visible, chunks that are not fill up; their scores are the least there is.
    """
    shares = scores - torch.logaddexp(scores.logsumexp(-1), window_log_z).unsqueeze(-1)
    return shares.amax(2).topk(top_k, dim=-1).indices


def fusion_weights(scores: Tensor, window_log_z: Tensor, sink: bool) -> Tensor:
    """softmax([scores, lse_win, 0]) without the 0's own weight: [.., C] and [..] -> [.., C + 1], the window last."""
    entries = [scores, window_log_z.unsqueeze(-1)]
    if sink:
        entries.append(torch.zeros_like(entries[1]))
    return torch.cat(entries, dim=-1).softmax(-1)[..., : scores.shape[-1] + 1]


def _dense(streams: Streams, chunk: int, weights: Tensor) -> Tensor:
    """sum_c w_c Attn_c(q) over all chunks: weights [B, H, G, Q, C] -> [B, H, G, Q, d]."""
    count = weights.shape[-1]
    keys = all_chunks(streams.far_keys, streams.starts, count, chunk).flatten(2, 3).float()
    values = all_chunks(streams.far_values, streams.starts, count, chunk).flatten(2, 3).float()
    query = streams.grouped(streams.far_query).float()
    scores = query @ keys.unsqueeze(2).mT * query.shape[-1] ** -0.5
    within = scores.unflatten(-1, (count, chunk)).softmax(-1)
    return (weights.unsqueeze(-1) * within).flatten(-2) @ values.unsqueeze(2)


def _gathered(streams: Streams, chunk: int, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same over the chunks chosen [B, H, Q, K] with weights [B, H, G, Q, K]."""
    slots = chunk_slots(chosen, streams.starts, chunk)
    keys = take_slots(streams.far_keys, slots).float()  # [B, H, Q, K, S, d]
    values = take_slots(streams.far_values, slots).float()
    query = streams.grouped(streams.far_query).float().transpose(2, 3)  # [B, H, Q, G, d]
    scores = query @ keys.flatten(3, 4).mT * query.shape[-1] ** -0.5
    within = scores.unflatten(-1, (-1, chunk)).softmax(-1)
    mixed = (weights.transpose(2, 3).unsqueeze(-1) * within).flatten(-2)
    return (mixed @ values.flatten(3, 4)).transpose(2, 3)
