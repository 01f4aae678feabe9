"""Attention over a memory whose heads keep different numbers of entries.

Entries of one layer lie in one flat tensor, head after head; a head's slice is read as it lies, without padding,
so the arithmetic is proportional to the entries kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ttmem.attention.branches import Branch, branch_attention, fold_queries, unfold_queries
from ttmem.attention.kernels import fast_attention

if TYPE_CHECKING:
    from ttmem.memory.layer import LayerMemory


def memory_attention(query: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """The memory's branch of the softmax for post-rotary queries [B, H*G, T, d]; output [B, H*G, T, value_dim]."""
    batch, _, length, _ = query.shape
    folded = fold_queries(query, memory.num_heads)
    if memory.is_uniform:
        branch = _uniform(folded, memory, scale)
    else:
        branch = _per_head(folded, memory, scale)
    return unfold_queries(branch, batch, length)


def _needs_grad(folded: Tensor, memory: LayerMemory) -> bool:
    return torch.is_grad_enabled() and (folded.requires_grad or memory.keys.requires_grad)


def _uniform(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """All heads keep the same number of entries (a full cache does): one call for the layer."""
    keys = memory.keys.unflatten(0, (memory.num_heads, -1))
    values = memory.values.unflatten(0, (memory.num_heads, -1))
    bias = None if memory.unbiased else memory.biases.view(memory.num_heads, 1, -1)
    if _needs_grad(folded, memory):
        return branch_attention(folded, keys, values, scale, bias)
    output, log_z = fast_attention(
        folded.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale, None if bias is None else bias.unsqueeze(0)
    )
    return Branch(output[0], log_z[0])


def _per_head(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    outputs, log_zs = [], []
    needs_grad = _needs_grad(folded, memory)
    for head, (keys, values, bias) in enumerate(memory.heads()):
        query = folded[head]
        if keys.shape[0] == 0:  # nothing kept: no mass
            outputs.append(query.new_zeros(query.shape[0], values.shape[-1], dtype=torch.float32))
            log_zs.append(query.new_full((query.shape[0],), -torch.inf, dtype=torch.float32))
        elif needs_grad:
            output, log_z = branch_attention(query, keys, values, scale, bias)
            outputs.append(output)
            log_zs.append(log_z)
        else:
            output, log_z = fast_attention(query[None, None], keys[None, None], values[None, None], scale, bias)
            outputs.append(output[0, 0])
            log_zs.append(log_z[0, 0])
    return Branch(torch.stack(outputs), torch.stack(log_zs))
