"""The one attention primitive: two branches, one softmax.

A query attends to the document's memory and to the tokens after it. Each branch returns its own attention
output and log-normalizer, and the two are merged as if one softmax had run over both (paper eq. 4-5):

    log Z = logaddexp(log Z_mem, log Z_new)
    A     = exp(log Z_mem - log Z) A_mem + exp(log Z_new - log Z) A_new

These functions read like the formulas and are differentiable. The fused kernels in `kernels.py` must equal them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Branch(NamedTuple):
    """What one set of entries contributes to a softmax, in fp32.

    output: [..., queries, value_dim], the attention output within the branch.
    log_z: [..., queries], the log of the sum of exponentiated scores.
    """

    output: Tensor
    log_z: Tensor


def branch_attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None, mask: Tensor | None = None
) -> Branch:
    """Attention over one set of entries: scores `scale * q.k_j + b_j` (paper eq. 2-3).

    query [..., Q, d], keys [..., n, d], values [..., n, value_dim]; bias broadcasts to [..., Q, n] and so does the
    boolean mask (True = visible). Scores and normalizers are fp32 whatever the inputs are. A masked score is the
    most negative finite number, so that a query with nothing to see gives a weight of zero in a merge, never NaN.
    """
    scores = scale * (query.float() @ keys.float().transpose(-1, -2))
    if bias is not None:
        scores = scores + bias.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    log_z = scores.logsumexp(dim=-1)
    output = torch.exp(scores - log_z.unsqueeze(-1)) @ values.float()
    return Branch(output, log_z)


def merge_branches(memory: Branch, new: Branch) -> Branch:
    """The softmax over the entries of both branches, from what each contributes (paper eq. 5)."""
    return Branch(merge_outputs(memory, new), torch.logaddexp(memory.log_z, new.log_z))


def merge_outputs(memory: Branch, new: Branch) -> Tensor:
    """The output of `merge_branches` alone, in as few passes as a decode step wants.

    exp(log Z_new - log Z) is sigmoid(log Z_new - log Z_mem), and the two weights sum to one.
    """
    new_weight = torch.sigmoid(new.log_z - memory.log_z).unsqueeze(-1)
    return torch.lerp(memory.output, new.output, new_weight)


def fold_queries(query: Tensor, num_kv_heads: int) -> Tensor:
    """Put batch and query group on the query axis: [B, H*G, T, d] -> [H, B*G*T, d].

    Every sequence that shares a memory then reads its keys in one product, once per batch.
    """
    batch, num_heads, length, dim = query.shape
    if batch == 1:
        return query.reshape(num_kv_heads, -1, dim)
    grouped = query.view(batch, num_kv_heads, num_heads // num_kv_heads, length, dim)
    return grouped.transpose(0, 1).reshape(num_kv_heads, -1, dim)


def unfold_queries(branch: Branch, batch: int, length: int) -> Branch:
    """Undo `fold_queries` for a branch: [H, B*G*T, .] -> [B, H*G, T, .]."""
    output, log_z = branch
    num_kv_heads, _, dim = output.shape
    if batch == 1:
        return Branch(output.reshape(1, -1, length, dim), log_z.reshape(1, -1, length))
    output = output.view(num_kv_heads, batch, -1, length, dim).transpose(0, 1).reshape(batch, -1, length, dim)
    log_z = log_z.view(num_kv_heads, batch, -1, length).transpose(0, 1).reshape(batch, -1, length)
    return Branch(output, log_z)


def fold_bias(keys: Tensor, bias: Tensor, scale: float, multiple: int = 8) -> Tensor:
    """Keys that carry their bias in an extra channel, for kernels that take no bias: k' = [k, b/s, 0...].

    With `fold_ones` on the query side, `scale * q'.k' = scale * q.k + b`. In half precision b/s is split over two
    channels (a rounded part and its remainder), which keeps the error at that of the key product itself.
    Channels are padded with zeros to a multiple of `multiple`. keys [..., n, d], bias [..., n].
    """
    folded = bias.float() / scale
    high = folded.to(keys.dtype)
    channels = [high]
    if keys.dtype != torch.float32:
        channels.append((folded - high.float()).to(keys.dtype))
    padding = -(keys.shape[-1] + len(channels)) % multiple
    wide = torch.cat([keys, torch.stack(channels, dim=-1)], dim=-1)
    return torch.nn.functional.pad(wide, (0, padding))


def fold_ones(query: Tensor, key_dim: int) -> Tensor:
    """The query side of `fold_bias`: q' = [q, 1 (, 1), 0...], widened to `key_dim` channels."""
    ones = 1 if query.dtype == torch.float32 else 2
    wide = torch.nn.functional.pad(query, (0, ones), value=1.0)
    return torch.nn.functional.pad(wide, (0, key_dim - wide.shape[-1]))
