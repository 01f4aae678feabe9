"""Document tokens -> full memory: the model's own cache, in chunks, so that activations stay bounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.memory import Memory
from ttmem.models.layers import cache_keyword

CHUNK = 1024


@torch.no_grad()
def full_memory_layers(
    network: PreTrainedModel,
    ids: Tensor,
    chunk: int = CHUNK,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    start: int = 0,
) -> list[LayerMemory | WindowMemory]:
    """Run the document's ids [1, N] through the model and return its uncompacted layers.

    `on_chunk` is told the number of tokens of each chunk as it is done. start: the first token's position.
    """
    cache = DynamicCache(config=network.config)
    positions = torch.arange(start, start + ids.shape[1], device=ids.device).unsqueeze(0)
    for part, places in zip(ids.split(chunk, dim=1), positions.split(chunk, dim=1), strict=True):
        network(
            input_ids=part,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            **{cache_keyword(network): cache},
        )
        on_chunk(part.shape[1])
    layers: list[LayerMemory | WindowMemory] = []
    for layer in cache.layers:
        keys, values = layer.keys[0].clone(), layer.values[0].clone()
        if isinstance(layer, DynamicSlidingWindowLayer):
            layers.append(WindowMemory(keys, values, layer.sliding_window))
        else:
            layers.append(LayerMemory.full(keys, values))
    return layers


@torch.no_grad()
def full_memory_layers_behind(
    network: PreTrainedModel,
    before: Memory,
    ids: Tensor,
    chunk: int = CHUNK,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> list[LayerMemory | WindowMemory]:
    """The same for ids [1, M] that follow a memory's document: they see the memory, at positions N to N + M.

    Global layers hold the M new tokens alone; a sliding layer's window may also hold tokens of the memory's.
    """
    cache = before.cache()
    positions = torch.arange(before.document_length, before.document_length + ids.shape[1], device=ids.device)
    done = 0
    for part, places in zip(ids.split(chunk, dim=1), positions.split(chunk), strict=True):
        done += part.shape[1]
        network(
            input_ids=part,
            attention_mask=torch.ones_like(ids[:, :1]).expand(1, before.document_length + done),
            position_ids=places.unsqueeze(0),
            use_cache=True,
            logits_to_keep=1,
            **{cache_keyword(network): cache},
        )
        on_chunk(part.shape[1])
    layers: list[LayerMemory | WindowMemory] = []
    for layer, earlier in zip(cache.layers, before.layers, strict=True):
        keys, values = layer.keys[0].clone(), layer.values[0].clone()
        if isinstance(earlier, WindowMemory):
            kept = earlier.window - 1
            keys, values = torch.cat([earlier.keys, keys], dim=1), torch.cat([earlier.values, values], dim=1)
            first = max(0, keys.shape[1] - kept)
            keys, values = keys[:, first:].clone(), values[:, first:].clone()
            layers.append(WindowMemory(keys, values, earlier.window))
        else:
            layers.append(LayerMemory.full(keys, values))
    return layers
