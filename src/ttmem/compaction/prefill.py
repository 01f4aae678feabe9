"""Document tokens -> full memory: the model's own cache, in chunks, so that activations stay bounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
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
    before: Memory | None = None,
) -> list[LayerMemory | WindowMemory]:
    """Run the document's ids [1, N] through the model and return its uncompacted layers.

    `on_chunk` is told the number of tokens of each chunk as it is done. start: the first token's position.
    before: a memory that the tokens see, at the positions behind its document. Global layers then hold the new tokens
    alone, while a sliding layer's window may also hold tokens of the memory's.
    """
    cache: Cache = DynamicCache(config=network.config) if before is None else before.cache()
    first = start if before is None else before.document_length
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).unsqueeze(0)
    for part, places in zip(ids.split(chunk, dim=1), positions.split(chunk, dim=1), strict=True):
        first += part.shape[1]
        mask = None if before is None else part.new_ones(1, first)
        network(
            input_ids=part,
            attention_mask=mask,
            position_ids=places,
            use_cache=True,
            logits_to_keep=1,
            **{cache_keyword(network): cache},
        )
        on_chunk(part.shape[1])
    layers: list[LayerMemory | WindowMemory] = []
    for index, layer in enumerate(cache.layers):
        keys, values = layer.keys[0].clone(), layer.values[0].clone()
        earlier = None if before is None else before.layers[index]
        if isinstance(earlier, WindowMemory):
            layers.append(earlier.behind(keys, values))
        elif isinstance(layer, DynamicSlidingWindowLayer):
            layers.append(WindowMemory(keys, values, layer.sliding_window))
        else:
            layers.append(LayerMemory.full(keys, values))
    return layers
