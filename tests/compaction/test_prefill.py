"""The full memory is the model's own cache, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from ttmem import Model
from ttmem.compaction.prefill import full_memory_layers
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.models.layers import cache_keyword


@pytest.mark.parametrize("chunk", [1000, 64, 7])
def test_it_is_the_models_own_cache(any_model: Model, document_text: str, chunk: int) -> None:
    ids = torch.tensor([any_model.encode(document_text)])
    cache = DynamicCache(config=any_model.network.config)
    with torch.no_grad():
        any_model.network(input_ids=ids, use_cache=True, **{cache_keyword(any_model.network): cache})
    told: list[int] = []
    layers = full_memory_layers(any_model.network, ids, chunk, told.append)
    assert sum(told) == ids.shape[1]
    assert max(told) <= chunk
    for layer, expected in zip(layers, cache.layers, strict=True):
        keys, values = layer.keys, layer.values
        if isinstance(layer, LayerMemory):
            assert layer.lengths == (ids.shape[1],) * 2
            assert layer.unbiased
            keys, values = (t.unflatten(0, (layer.num_heads, -1)) for t in (keys, values))
        else:
            assert layer.keys.shape[1] == layer.window - 1
        torch.testing.assert_close(keys, expected.keys[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(values, expected.values[0], atol=1e-5, rtol=1e-4)


def test_a_document_shorter_than_the_window_keeps_all_of_it(gemma: Model) -> None:
    layers: list[Any] = full_memory_layers(gemma.network, torch.tensor([[5, 6, 7]]))
    assert isinstance(layers[0], WindowMemory)
    assert layers[0].keys.shape[1] == 3
    assert layers[0].window == 16


def test_nothing_of_it_wants_gradients(model: Model) -> None:
    for layer in full_memory_layers(model.network, torch.tensor([[5, 6, 7]])):
        assert not layer.keys.requires_grad
        assert not layer.values.requires_grad
