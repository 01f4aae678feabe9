"""PyramidKV: exact totals, the pyramid's shape, and SnapKV's scores within a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem import Model
from ttmem.compaction.pyramidkv import PyramidKV, pyramid
from ttmem.compaction.settings import Budget
from ttmem.compaction.snapkv import window_scores

sizes = st.tuples(st.integers(1, 40), st.integers(5, 3000)).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), st.just(pair[1]), st.integers(4, pair[1] - 1))
)


@given(sizes=sizes, window=st.sampled_from([0, 1, 8, 32, 64]), beta=st.sampled_from([1, 2, 3, 7, 20]))
def test_the_pyramid_by_its_definition(sizes: tuple[int, int, int], window: int, beta: int) -> None:
    layers, length, tokens = sizes
    counts = pyramid(layers, tokens, length, window, beta)
    assert len(counts) == layers
    assert sum(counts) == layers * tokens
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1
    assert counts[0] <= length
    if tokens <= window or layers == 1:
        assert set(counts) == {tokens}
        return
    last = (tokens - window) / beta
    first = 2 * (tokens - window) - last
    if first > length - window:
        first, last = length - window, 2 * (tokens - window) - (length - window)
    for index, count in enumerate(counts):
        exact = window + first + (last - first) * index / (layers - 1)
        assert abs(count - exact) < 1 + 1e-9


def test_known_pyramids() -> None:
    assert pyramid(3, 52, 1000, 32, 20) == [71, 52, 33]
    assert pyramid(4, 52, 1000, 32, 20) == [71, 58, 46, 33]
    assert pyramid(3, 92, 100, 32, 20) == [100, 92, 84]
    assert pyramid(2, 33, 100, 32, 20) == [34, 32]


@pytest.mark.parametrize("tokens", [10, 45, 150])
def test_each_layer_keeps_its_highest_scores(any_model: Model, make_prepared: Any, tokens: int) -> None:
    prepared = make_prepared(any_model)
    memory = PyramidKV()(prepared, Budget.of(prepared.document.length, tokens=tokens))
    layers = len(any_model.compacted_layers)
    counts = pyramid(layers, tokens, prepared.document.length, 32, 20)
    assert [layer.lengths for layer in memory.compacted] == [(count, count) for count in counts]
    assert memory.entries == layers * 2 * tokens
    scores = window_scores(prepared, 32, 5)
    for layer, full, score, count in zip(memory.compacted, prepared.full.compacted, scores, counts, strict=True):
        for (keys, _, _), (all_keys, _, _), row in zip(layer.heads(), full.heads(), score, strict=True):
            threshold = row.sort(descending=True).values[count - 1]
            assert torch.equal(keys, all_keys[row >= threshold])
    assert memory.info.settings == {"beta": 20, "window": 32, "kernel": 5}


def test_early_layers_keep_more(model: Model, make_prepared: Any) -> None:
    prepared = make_prepared(model)
    memory = PyramidKV()(prepared, Budget.of(prepared.document.length, tokens=52))
    assert [layer.lengths[0] for layer in memory.compacted] == [71, 52, 33]
