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


ONE_CALL_ELEMENTS = 250_000
"""Up to this many query-entry-channel products per head, one masked call costs less than a call per head."""

MASK_SHARE = 0.08
"""The mask of that one call may take this part of the entries' own bytes."""


def memory_attention(query: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """The memory's branch of the softmax for post-rotary queries [B, H*G, T, d]; output [B, H*G, T, value_dim]."""
    batch, _, length, _ = query.shape
    folded = fold_queries(query, memory.num_heads)
    if torch.is_grad_enabled() and (query.requires_grad or memory.requires_grad):
        branch = plain_memory_attention(folded, memory, scale)
    elif memory.is_uniform:
        branch = _uniform(folded, memory, scale)
    elif fits_one_call(memory, folded.shape[1]):
        branch = _one_call(folded, memory, scale)
    else:
        branch = _per_head(folded, memory, scale)
    return unfold_queries(branch, batch, length)


def fits_one_call(memory: LayerMemory, rows: int) -> bool:
    """Whether `rows` queries per head may see the layer's flat entries at once: few products, mostly masked.

    Not while training, which would leave the cached mask behind; not where a head keeps nothing.

    Nor where the mask, which is kept, would be large beside the entries: memories are to hold what they need.
    """
    mask_bytes = 4 * memory.num_heads
    entry_bytes = (memory.keys.shape[-1] + memory.values.shape[-1]) * memory.keys.element_size()
    return (
        not memory.biases.requires_grad
        and 0 not in memory.lengths
        and mask_bytes <= MASK_SHARE * entry_bytes
        and (rows * memory.total * memory.keys.shape[-1] <= ONE_CALL_ELEMENTS)
    )


def plain_memory_attention(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """Head by head with the plain primitive, differentiable: the reference of the forms below. folded [H, M, d]."""
    parts = [
        branch_attention(query, keys, values, scale, bias) if keys.shape[0] else _nothing(query, values)
        for query, (keys, values, bias) in zip(folded, memory.heads(), strict=True)
    ]
    return Branch(torch.stack([part.output for part in parts]), torch.stack([part.log_z for part in parts]))


def _nothing(query: Tensor, values: Tensor) -> Branch:
    """The branch of a head that keeps no entry: no mass."""
    return Branch(
        query.new_zeros(*query.shape[:-1], values.shape[-1], dtype=torch.float32),
        query.new_full(query.shape[:-1], -torch.inf, dtype=torch.float32),
    )


def _uniform(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """All heads keep the same number of entries (a full cache does): one call for the layer, nothing masked."""
    keys = memory.keys.view(1, memory.num_heads, -1, memory.keys.shape[-1])
    values = memory.values.view(1, memory.num_heads, -1, memory.values.shape[-1])
    bias = None if memory.unbiased else memory.biases.view(1, memory.num_heads, 1, -1)
    output, log_z = fast_attention(folded.unsqueeze(0), keys, values, scale, bias)
    return Branch(output[0], log_z[0])


def _one_call(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """All heads read the layer's flat entries once, as one group, each seeing its own slice through a mask.

    For the few queries of a decode step: the entries are read once as in the other forms, the masked products are
    cheaper than the calls they save.
    """
    keys, values = memory.keys[None, None], memory.values[None, None]
    output, log_z = fast_attention(folded.unsqueeze(0), keys, values, scale, memory.head_bias)
    return Branch(output[0], log_z[0])


def _per_head(folded: Tensor, memory: LayerMemory, scale: float) -> Branch:
    """One call per head on its slice: nothing but the entries kept is read or multiplied."""
    outputs, log_zs = [], []
    for query, (keys, values, bias) in zip(folded, memory.heads(), strict=True):
        if keys.shape[0] == 0:
            output, log_z = _nothing(query[None, None], values)
        else:
            output, log_z = fast_attention(query[None, None], keys[None, None], values[None, None], scale, bias)
        outputs.append(output)
        log_zs.append(log_z)
    return Branch(torch.cat(outputs, dim=1)[0], torch.cat(log_zs, dim=1)[0])
