"""Attention sinks of documents that were read apart: one is enough.

Models give a large part of their attention to the first token of what they read, whatever it is. Where memories of
several documents stand behind one another, each brings such an entry; together they draw twice and more of what one
draws, and the rest of the memory gets less (`benchmarks/grown_documents.py` measures it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.memory import Memory
from ttmem.models import Model

SAME, SLACK = 0.9, 1e-3
"""The most alike entry of a head is the first token's from this cosine on (training may have moved it, or the token is
not known); so are those that are as alike up to the slack, since a memory may hold the first token more than once."""


@torch.no_grad()
def without_repeated_sinks(model: Model, memories: Sequence[Memory]) -> list[Memory]:
    """The memories, the entries of the first token taken out of each head where an earlier memory's head has one.

    A first token's keys depend on itself alone, so the model is run on that one token; where ids were not kept, on the
    model's first: behind the lowest layers sinks of all tokens look alike. Heads with no such entry stay as they are.
    """
    firsts = [_first_keys(model, memory) for memory in memories]
    parts: list[list[LayerMemory | WindowMemory]] = [[] for _ in memories]
    for index, layer in enumerate(memories[0].layers):
        if isinstance(layer, WindowMemory):
            for memory, part in zip(memories, parts, strict=True):
                part.append(memory.layers[index])
            continue
        has_sink = [False] * layer.num_heads
        for memory, keys, part in zip(memories, firsts, parts, strict=True):
            part.append(_drop(memory.layers[index], keys[index], has_sink))  # type: ignore[arg-type]
    return [replace(memory, layers=layers) for memory, layers in zip(memories, parts, strict=True)]


def _first_keys(model: Model, memory: Memory) -> list[Tensor]:
    """Per layer, the keys [H, d] of the document's first token, at position 0."""
    from ttmem.compaction.prefill import full_memory_layers

    first = 0 if memory.tokens is None else int(memory.tokens[0])
    layers = full_memory_layers(model.network, torch.tensor([[first]], device=model.device))
    return [layer.keys.reshape(layer.num_heads, -1) for layer in layers]


def _drop(layer: LayerMemory, first: Tensor, has_sink: list[bool]) -> LayerMemory:
    """The layer without the sinks of heads that have one already. Notes in `has_sink` [H] those that it brings."""
    keep = torch.ones(layer.keys.shape[0], dtype=torch.bool, device=layer.keys.device)
    lengths = list(layer.lengths)
    for head, (start, length) in enumerate(zip(layer.offsets, layer.lengths, strict=False)):
        if length == 0:
            continue
        alike = cosine_similarity(layer.keys[start : start + length].float(), first[head].float(), dim=-1)
        if alike.max() < SAME:
            continue
        if has_sink[head]:
            own = alike < alike.max() - SLACK
            keep[start : start + length] = own
            lengths[head] = int(own.sum())
        has_sink[head] = True
    return LayerMemory(layer.keys[keep], layer.values[keep], layer.biases[keep], tuple(lengths), layer.unbiased)
