"""Sinks of documents that were read apart: the first memory's stays, later ones go where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.merging import merge
from ttmem.memory.sinks import without_repeated_sinks
from ttmem.models import Model

TEXTS = (
    "Anna keeps the red boat in Lisbon. The harbour closes at nine.",
    "Bruno sold seven clocks in March. The shop is on Mill Street, and it has a green door.",
    "Clara writes to Hanoi.",
)

Make = Callable[..., Memory]


def with_layers(memory: Memory, change: Callable[[LayerMemory], LayerMemory]) -> Memory:
    """The memory, its compacted layers changed."""
    layers = [layer if isinstance(layer, WindowMemory) else change(layer) for layer in memory.layers]
    return replace(memory, layers=layers)


def reordered(layer: LayerMemory, rows: Callable[[int, int], list[int]]) -> LayerMemory:
    """Each head's entries at rows(head, length)."""
    heads = [rows(head, length) for head, length in enumerate(layer.lengths)]
    places = torch.tensor([start + row for start, own in zip(layer.offsets, heads, strict=False) for row in own])
    lengths = tuple(len(own) for own in heads)
    return LayerMemory(layer.keys[places], layer.values[places], layer.biases[places], lengths, layer.unbiased)


def test_only_the_first_token_of_later_documents_goes(any_model: Model, make_full: Make) -> None:
    parts = [make_full(any_model, text) for text in TEXTS]
    found = without_repeated_sinks(any_model, parts)
    for place, (before, after) in enumerate(zip(parts, found, strict=True)):
        for old, new in zip(before.layers, after.layers, strict=True):
            if isinstance(old, WindowMemory):
                assert new is old
                continue
            expected = old if place == 0 else reordered(old, lambda _, length: list(range(1, length)))
            assert new.lengths == expected.lengths
            assert torch.equal(new.keys, expected.keys)
            assert torch.equal(new.values, expected.values)
            assert torch.equal(new.biases, expected.biases)
    merged, kept = merge(any_model, parts), merge(any_model, parts, keep_sinks=True)
    heads = sum(layer.num_heads for layer in merged.compacted)
    assert kept.entries - merged.entries == 2 * heads
    assert merged.document_length == kept.document_length


def test_a_sink_stays_where_no_earlier_memory_has_one(model: Model, make_full: Make) -> None:
    first, second, third = (make_full(model, text) for text in TEXTS)

    def head_0_without(layer: LayerMemory) -> LayerMemory:
        return reordered(layer, lambda head, length: list(range(1 if head == 0 else 0, length)))

    _, middle, last = without_repeated_sinks(model, [with_layers(first, head_0_without), second, third])
    for layer in middle.compacted:
        assert layer.lengths == (second.document_length, *[second.document_length - 1] * (layer.num_heads - 1))
    for layer in last.compacted:
        assert set(layer.lengths) == {third.document_length - 1}


def test_copies_go_together_and_empty_heads_stay(model: Model, make_full: Make) -> None:
    first, second, _ = (make_full(model, text) for text in TEXTS)

    def twice_or_nothing(layer: LayerMemory) -> LayerMemory:
        return reordered(layer, lambda head, length: [] if head == 0 else [3, 0, 5, 0])

    _, changed = without_repeated_sinks(model, [first, with_layers(second, twice_or_nothing)])
    for old, new in zip(second.compacted, changed.compacted, strict=True):
        assert new.lengths == (0, *[2] * (old.num_heads - 1))
        keys = [keys for keys, _, _ in old.heads()]
        for head in range(1, old.num_heads):
            assert torch.equal(list(new.heads())[head][0], keys[head][[3, 5]])


def test_without_ids_only_what_is_surely_a_first_token_goes(model: Model, make_full: Make) -> None:
    """In a random model first keys differ by token, and nothing is sure."""
    first, second, _ = (make_full(model, text) for text in TEXTS)
    found = without_repeated_sinks(model, [first, replace(second, tokens=None)])[1]
    assert [layer.lengths for layer in found.compacted] == [layer.lengths for layer in second.compacted]


def test_without_ids_alike_first_keys_are_found(model: Model, make_full: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in trained models above the lowest layers: whatever the token, its keys at position 0 are nearly the same."""
    second = replace(make_full(model, TEXTS[1]), tokens=None)
    own = [torch.stack([keys[0] for keys, _, _ in layer.heads()]).float() for layer in second.compacted]
    monkeypatch.setattr("ttmem.memory.sinks._keys_at_0", lambda model, token: own)
    found = without_repeated_sinks(model, [second, second])[1]
    assert all(set(layer.lengths) == {second.document_length - 1} for layer in found.compacted)


def test_other_entries_stay_in_trained_memories(model: Model, make_full: Make) -> None:
    first, second, _ = (make_full(model, text) for text in TEXTS)
    noise = torch.Generator().manual_seed(0)

    def trained(layer: LayerMemory) -> LayerMemory:
        return replace(layer, keys=layer.keys + layer.keys.std() * torch.randn(layer.keys.shape, generator=noise))

    _, found = without_repeated_sinks(model, [first, with_layers(second, trained)])
    assert [layer.lengths for layer in found.compacted] == [layer.lengths for layer in second.compacted]
