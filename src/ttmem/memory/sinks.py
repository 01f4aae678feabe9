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

SAME, SLACK = 0.995, 1e-3
"""A head's most alike entry is the first token's from this cosine on (other tokens reach .993), and so are those that
are as alike up to the slack, since a memory may hold the first token more than once."""
UNKNOWN = 0.99
"""The same where ids were not kept, in heads where the first keys of the probes are as alike among themselves."""
PROBES = (1, 3, 8)
"""Parts of the vocabulary, in tenths, of which the probes are the first ids."""


@torch.no_grad()
def without_repeated_sinks(model: Model, memories: Sequence[Memory]) -> list[Memory]:
    """The memories, the entries of the first token taken out of each head where an earlier memory's head has one.

    A first token's keys depend on itself alone, so the model is run on that one token. Where ids were not kept, the
    keys of some other tokens stand for it, in heads where these agree: above the lowest layers all sinks look alike.
    Heads in which no entry is surely the first token's stay as they are, and so do memories whose keys were trained.
    """
    firsts = [_first_keys(model, memory) for memory in memories]
    parts: list[list[LayerMemory | WindowMemory]] = [[] for _ in memories]
    for index, layer in enumerate(memories[0].layers):
        if isinstance(layer, WindowMemory):
            for memory, part in zip(memories, parts, strict=True):
                part.append(memory.layers[index])
            continue
        has_sink = [False] * layer.num_heads
        for memory, (keys, bounds), part in zip(memories, firsts, parts, strict=True):
            part.append(_drop(memory.layers[index], keys[index], bounds[index], has_sink))  # type: ignore[arg-type]
    return [replace(memory, layers=layers) for memory, layers in zip(memories, parts, strict=True)]


def _first_keys(model: Model, memory: Memory) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer: keys [H, d] of a first token, and the cosines [H] from which on an entry is one (above 1: never)."""
    if memory.tokens is not None:
        keys = _keys_at_0(model, int(memory.tokens[0]))
        return keys, [torch.full(layer.shape[:1], SAME) for layer in keys]
    size = model.network.get_input_embeddings().num_embeddings
    probes = [_keys_at_0(model, size * tenths // 10) for tenths in PROBES]
    keys, bounds = [], []
    for layer in zip(*probes, strict=True):
        mean = torch.stack(layer).mean(0)
        agree = torch.stack([cosine_similarity(each, mean, dim=-1) for each in layer]).amin(0) >= UNKNOWN
        keys.append(mean)
        bounds.append(torch.where(agree, UNKNOWN, 2.0))
    return keys, bounds


def _keys_at_0(model: Model, token: int) -> list[Tensor]:
    """Per layer, the keys [H, d] of one token at position 0, fp32."""
    from ttmem.compaction.prefill import full_memory_layers

    layers = full_memory_layers(model.network, torch.tensor([[token]], device=model.device))
    return [layer.keys.reshape(layer.num_heads, -1).float() for layer in layers]


def _drop(layer: LayerMemory, first: Tensor, bounds: Tensor, has_sink: list[bool]) -> LayerMemory:
    """The layer without the sinks of heads that have one already. Notes in `has_sink` [H] those that it brings."""
    keep = torch.ones(layer.keys.shape[0], dtype=torch.bool, device=layer.keys.device)
    lengths = list(layer.lengths)
    for head, (start, length) in enumerate(zip(layer.offsets, layer.lengths, strict=False)):
        if length == 0:
            continue
        alike = cosine_similarity(layer.keys[start : start + length].float(), first[head], dim=-1)
        if alike.max() < bounds[head]:
            continue
        if has_sink[head]:
            others = alike < alike.max() - SLACK
            keep[start : start + length] = others
            lengths[head] = int(others.sum())
        has_sink[head] = True
    return LayerMemory(layer.keys[keep], layer.values[keep], layer.biases[keep], tuple(lengths), layer.unbiased)
