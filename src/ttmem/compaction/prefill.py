"""Document tokens -> full memory: the model's own cache, in chunks, so that activations stay bounded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from ttmem.memory.layer import LayerMemory, WindowMemory
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
