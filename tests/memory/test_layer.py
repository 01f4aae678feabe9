"""A layer of a memory: what it accepts, how it is cut into heads, and that it holds what it says and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem import Memory, Model
from ttmem.compaction.api import compact
from ttmem.compaction.distillation import trainable
from ttmem.compaction.selection import gather_entries
from ttmem.memory.layer import LayerMemory, WindowMemory


def exact_bytes(layer: LayerMemory) -> int:
    entry = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.dtype.itemsize + 4
    return layer.total * entry


def random_layer(lengths: list[int], key_dim: int = 8, value_dim: int = 4, biased: bool = True) -> LayerMemory:
    return LayerMemory.from_heads(
        [torch.randn(n, key_dim) for n in lengths],
        [torch.randn(n, value_dim) for n in lengths],
        [torch.randn(n) for n in lengths] if biased else None,
    )


@pytest.mark.parametrize("wrong", ["keys", "values", "biases", "lengths"])
def test_parts_that_do_not_fit_are_refused(wrong: str) -> None:
    parts: dict[str, Any] = {
        "keys": torch.zeros(5, 8),
        "values": torch.zeros(5, 8),
        "biases": torch.zeros(5),
        "lengths": (2, 3),
    }
    parts[wrong] = (2, 4) if wrong == "lengths" else parts[wrong][:4]
    with pytest.raises(ValueError, match="lengths sum to"):
        LayerMemory(**parts)


def test_negative_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        LayerMemory(torch.zeros(5, 8), torch.zeros(5, 8), torch.zeros(5), (6, -1))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_heads_are_views_of_consecutive_slices(lengths: list[int]) -> None:
    torch.manual_seed(0)
    keys = [torch.randn(n, 8) for n in lengths]
    values = [torch.randn(n, 4) for n in lengths]
    biases = [torch.randn(n) for n in lengths]
    layer = LayerMemory.from_heads(keys, values, biases)
    assert layer.num_heads == len(lengths)
    assert layer.total == sum(lengths)
    assert list(layer.offsets) == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert layer.is_uniform == (len(set(lengths)) == 1 and lengths[0] > 0)
    heads = list(layer.heads())
    assert len(heads) == len(lengths)
    for found, *expected in zip(heads, keys, values, biases, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert found[0].untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()


def test_a_full_layer_keeps_the_order_of_heads_and_positions() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(3, 5, 8), torch.randn(3, 5, 4)
    layer = LayerMemory.full(keys, values)
    assert layer.lengths == (5, 5, 5)
    assert layer.unbiased
    assert not layer.biases.any()
    for head, (k, v, b) in enumerate(layer.heads()):
        assert torch.equal(k, keys[head])
        assert torch.equal(v, values[head])
        assert b is None


def test_biases_are_fp32_whatever_they_came_as() -> None:
    layer = LayerMemory.from_heads(
        [torch.zeros(2, 4).bfloat16()], [torch.zeros(2, 4).bfloat16()], [torch.ones(2).bfloat16()]
    )
    assert layer.biases.dtype == torch.float32
    assert layer.to(dtype=torch.float16).biases.dtype == torch.float32


def test_head_bias_shows_each_head_its_own_entries() -> None:
    torch.manual_seed(0)
    layer = random_layer([2, 0, 3])
    bias = layer.head_bias[0, :, 0]
    assert bias.shape == (3, 5)
    for head in range(3):
        own = range(layer.offsets[head], layer.offsets[head + 1])
        for entry in range(5):
            assert bias[head, entry] == (layer.biases[entry] if entry in own else torch.finfo(torch.float32).min)


def test_converting_keeps_the_object_where_nothing_changes() -> None:
    layer = random_layer([2, 3], biased=False)
    assert layer.to("cpu", torch.float32) is layer
    half = layer.to(dtype=torch.bfloat16)
    assert half.keys.dtype == half.values.dtype == torch.bfloat16
    assert half.unbiased
    assert half.lengths == layer.lengths
    window = WindowMemory(torch.zeros(2, 3, 8), torch.zeros(2, 3, 4), 4)
    assert window.to(dtype=torch.float16).values.dtype == torch.float16
    assert window.to(dtype=torch.float16).window == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selection_holds_only_its_own_bytes(dtype: torch.dtype) -> None:
    full = LayerMemory.full(torch.randn(2, 500, 8), torch.randn(2, 500, 4)).to(dtype=dtype)
    kept = gather_entries(full, [torch.arange(0, 500, 50), torch.arange(3)])
    assert exact_bytes(kept) <= kept.num_bytes() <= 1.1 * exact_bytes(kept)


def test_a_trained_memory_holds_only_its_own_bytes(
    model: Model, document_text: str, quick_settings: Any, tmp_path: Path
) -> None:
    memory = compact(model, document_text, ratio=8, settings=quick_settings, measure=False)
    exact = sum(map(exact_bytes, memory.compacted))
    assert exact <= memory.num_bytes() <= 1.1 * exact
    memory.save(tmp_path / "trained.ttmem")
    loaded = Memory.load(tmp_path / "trained.ttmem")
    assert exact <= loaded.num_bytes() <= 1.1 * exact
    student, _ = trainable(loaded)
    assert exact <= student.num_bytes() <= 1.1 * exact


def test_a_memory_with_windows_counts_them(gemma: Model, make_full: Any, tmp_path: Path) -> None:
    full = make_full(gemma)
    windows = [layer for layer in full.layers if isinstance(layer, WindowMemory)]
    exact = sum(map(exact_bytes, full.compacted)) + sum((w.keys.numel() + w.values.numel()) * 4 for w in windows)
    assert exact <= full.num_bytes() <= 1.1 * exact
    full.save(tmp_path / "full.ttmem")
    assert exact <= Memory.load(tmp_path / "full.ttmem").num_bytes() <= 1.1 * exact
