"""Global ranking, anchors and farthest-first traversal, each against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ttmem import LatentSettings, Memory, Model
from ttmem.compaction.selection import (
    choose_anchors,
    farthest_first,
    gather_entries,
    global_top,
    initial_layers,
    select,
)
from ttmem.compaction.settings import Budget
from ttmem.memory import MemoryInfo
from ttmem.memory.layer import LayerMemory, WindowMemory


def farthest_by_definition(points: list[list[float]], start: list[int], count: int) -> list[int]:
    """Each next one maximises the squared distance to the nearest chosen; none twice; ties to the lowest."""
    chosen = list(start)
    while len(chosen) < count:
        best, best_distance = -1, -1.0
        for i, point in enumerate(points):
            if i in chosen:
                continue
            nearest = min(sum((a - b) ** 2 for a, b in zip(point, points[c], strict=True)) for c in chosen)
            if nearest > best_distance:
                best, best_distance = i, nearest
        chosen.append(best)
    return chosen


@given(
    points=st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=2, max_size=14),
    other=st.integers(0, 10**6),
    anchors=st.integers(1, 3),
    share=st.floats(0, 1),
)
def test_farthest_first_is_its_definition_also_with_duplicates(
    points: list[tuple[int, int]], other: int, anchors: int, share: float
) -> None:
    torch.manual_seed(other)
    anchors = min(anchors, len(points))
    count = anchors + round(share * (len(points) - anchors))
    keys = torch.stack([torch.tensor(points, dtype=torch.float32), torch.randint(-9, 9, (len(points), 2)).float()])
    start = torch.stack([torch.randperm(len(points))[:anchors] for _ in range(2)])
    found = farthest_first(keys, start, count)
    assert found.shape == (2, count)
    for head in range(2):
        assert found[head].tolist() == farthest_by_definition(keys[head].tolist(), start[head].tolist(), count)


def test_farthest_first_on_random_keys_in_bf16() -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 40, 16).bfloat16()
    start = torch.tensor([[0, 5], [0, 9], [0, 30]])
    found = farthest_first(keys, start, 12)
    for head in range(3):
        assert found[head].tolist() == farthest_by_definition(keys[head].float().tolist(), start[head].tolist(), 12)


def test_anchors_start_with_the_first_position_and_go_by_attention() -> None:
    attention = torch.tensor([[-9.0, -1.0, -3.0, -2.0], [-0.1, -5.0, -4.0, -6.0]])
    assert choose_anchors(attention, 1).tolist() == [[0], [0]]
    assert choose_anchors(attention, 3).tolist() == [[0, 1, 3], [0, 2, 1]]
    assert attention[0, 0] == -9.0


@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8)), min_size=1, max_size=4),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_ranking_is_global_over_layers_heads_and_positions(
    shapes: list[tuple[int, int]], share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    scores = [torch.rand(shape) for shape in shapes]
    total = sum(score.numel() for score in scores)
    count = round(share * total)
    flat = [
        (score[h, i].item(), layer, h, i)
        for layer, score in enumerate(scores)
        for h in range(score.shape[0])
        for i in range(score.shape[1])
    ]
    expected = {entry[1:] for entry in sorted(flat, reverse=True)[:count]}
    found = {
        (layer, h, i)
        for layer, heads in enumerate(global_top(scores, count))
        for h, positions in enumerate(heads)
        for i in positions.tolist()
    }
    assert found == expected
    for heads in global_top(scores, count):
        for positions in heads:
            assert positions.tolist() == sorted(positions.tolist())


def random_memory(layers: int, heads: int, length: int) -> Memory:
    parts: list[LayerMemory | WindowMemory] = [
        LayerMemory.full(torch.randn(heads, length, 4), torch.randn(heads, length, 4)) for _ in range(layers)
    ]
    parts.insert(1, WindowMemory(torch.randn(heads, 3, 4), torch.randn(heads, 3, 4), 4))
    return Memory(parts, length, MemoryInfo("full", {}, {}, {}))


@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    length=st.integers(6, 40),
    share=st.floats(0, 1),
    latent=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    initializer=st.sampled_from(["mixed", "random"]),
    seed=st.integers(0, 99),
)
def test_the_initial_memory_holds_exactly_its_budget(
    layers: int, heads: int, length: int, share: float, latent: float, initializer: str, seed: int
) -> None:
    torch.manual_seed(seed)
    memory = random_memory(layers, heads, length)
    budget = Budget.of(length, tokens=4 + round(share * (length - 5)))
    attention = [torch.randn(heads, length) for _ in range(layers)]
    scores: list[Tensor] = [torch.rand(heads, length) for _ in range(layers)]
    settings = replace(LatentSettings(), latent_fraction=latent, initializer=initializer)
    selections = select(memory, scores, attention, budget, settings, seed)
    initial = Memory(initial_layers(memory, selections), length, memory.info)
    assert initial.entries == layers * heads * budget.tokens
    assert initial.layers[1] is memory.layers[1]
    for selection in selections:
        assert selection.latents.shape == (heads, settings.latents(budget))
        for row in selection.latents.tolist():
            assert row[0] == 0 or initializer == "random"
            assert len(set(row)) == len(row)


def test_initial_entries_are_copies_of_the_chosen_ones_preservers_first(model: Model, make_prepared: Any) -> None:
    prepared = make_prepared(model)
    full = prepared.full
    budget = Budget.of(full.document_length, ratio=8)
    selections = select(full, prepared.scores, prepared.rollouts.max_log_attention, budget, prepared.settings)
    layers = initial_layers(full, selections)
    assert sum(layer.total for layer in layers if isinstance(layer, LayerMemory)) == 3 * 2 * budget.tokens
    for layer, source, selection in zip(layers, full.compacted, selections, strict=True):
        assert isinstance(layer, LayerMemory)
        assert layer.unbiased
        for head, (keys, values, _) in enumerate(layer.heads()):
            positions = selection.preservers[head].tolist() + selection.latents[head].tolist()
            own_keys, own_values, _ = list(source.heads())[head]
            assert torch.equal(keys, own_keys[positions])
            assert torch.equal(values, own_values[positions])
    assert layers[0].keys.untyped_storage().data_ptr() != full.layers[0].keys.untyped_storage().data_ptr()


def test_gathering_nothing_for_a_head() -> None:
    layer = LayerMemory.full(torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    kept = gather_entries(layer, [torch.tensor([], dtype=torch.long), torch.tensor([4, 0])])
    assert kept.lengths == (0, 2)
    assert torch.equal(kept.keys, layer.keys[[9, 5]])


@pytest.mark.parametrize("count", [2, 9])
def test_all_keys_alike(count: int) -> None:
    keys = torch.ones(1, 9, 4)
    assert sorted(farthest_first(keys, torch.tensor([[0]]), count)[0].tolist()) == list(range(count))
