"""SnapKV against eager attention weights and loops over positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ttmem import Model
from ttmem.compaction.settings import Budget
from ttmem.compaction.snapkv import SnapKV, window_scores
from ttmem.memory.layer import LayerMemory


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def observed(request: pytest.FixtureRequest, make_network: Any, tokenizer: Any) -> tuple[Model, Any]:
    """A model, and the same weights with eager attention, which shows its weights."""
    eager = make_network(request.param)
    eager.set_attn_implementation("eager")
    return Model(make_network(request.param), tokenizer), eager


@torch.no_grad()
def direct_scores(model: Model, eager: Any, ids: list[int], window: int, kernel: int) -> list[list[list[float]]]:
    """Per compacted layer and KV head, the score of every position before the window."""
    attentions = eager(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    before = len(ids) - window
    found = []
    for layer in model.compacted_layers:
        weights: Tensor = attentions[layer.index][0]  # [query heads, N, N]
        group = layer.num_heads // layer.num_kv_heads
        heads = []
        for head in range(layer.num_kv_heads):
            scores = [0.0] * before
            for query_head in range(head * group, (head + 1) * group):
                means = [weights[query_head, before:, i].mean().item() for i in range(before)]
                for i in range(before):
                    near = [means[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < before]
                    scores[i] += sum(near) / kernel / group
            heads.append(scores)
        found.append(heads)
    return found


@pytest.mark.parametrize(("window", "kernel"), [(32, 5), (7, 1)])
def test_scores_equal_the_formula_with_eager_weights(
    observed: tuple[Model, Any], make_prepared: Any, window: int, kernel: int
) -> None:
    model, eager = observed
    prepared = make_prepared(model)
    ids = prepared.document.ids.tolist()
    expected = direct_scores(model, eager, ids, window, kernel)
    found = window_scores(prepared, window, kernel)
    assert len(found) == len(expected)
    for scores, wanted in zip(found, expected, strict=True):
        assert scores.shape == (2, len(ids))
        torch.testing.assert_close(scores[:, :-window], torch.tensor(wanted), atol=1e-6, rtol=1e-3)
        assert scores[:, :-window].max() <= 1
        assert (scores[:, -window:] > 1).all()
        assert (scores[:, -window:].diff() > 0).all()


def test_the_method_keeps_the_window_and_the_highest_scores(observed: tuple[Model, Any], make_prepared: Any) -> None:
    model, eager = observed
    prepared = make_prepared(model)
    ids = prepared.document.ids.tolist()
    memory = SnapKV()(prepared, Budget.of(len(ids), tokens=45))
    expected = direct_scores(model, eager, ids, 32, 5)
    for layer, full, scores in zip(memory.compacted, prepared.full.compacted, expected, strict=True):
        assert layer.lengths == (45, 45)
        for (keys, values, bias), (all_keys, all_values, _), row in zip(
            layer.heads(), full.heads(), scores, strict=True
        ):
            best = sorted(range(len(row)), key=lambda i: -row[i])[: 45 - 32]
            positions = sorted(best) + list(range(len(ids) - 32, len(ids)))
            assert bias is None
            assert torch.equal(keys, all_keys[positions])
            assert torch.equal(values, all_values[positions])
    assert memory.info.method == "snapkv"
    assert memory.info.settings == {"window": 32, "kernel": 5}


@pytest.mark.parametrize("tokens", [4, 31, 32])
def test_a_budget_within_the_window_keeps_the_last_tokens(model: Model, make_prepared: Any, tokens: int) -> None:
    prepared = make_prepared(model)
    memory = SnapKV()(prepared, Budget.of(prepared.document.length, tokens=tokens))
    for layer, full in zip(memory.compacted, prepared.full.compacted, strict=True):
        for (keys, _, _), (all_keys, _, _) in zip(layer.heads(), full.heads(), strict=True):
            assert torch.equal(keys, all_keys[-tokens:])


@pytest.mark.parametrize("length", [5, 32, 33])
def test_documents_about_as_long_as_the_window(any_model: Model, make_prepared: Any, length: int) -> None:
    prepared = make_prepared(any_model, "z" * length)
    memory = SnapKV()(prepared, Budget.of(length, tokens=length - 1))
    assert all(layer.lengths == (length - 1,) * 2 for layer in memory.compacted)
    if length < 33:
        assert torch.equal(memory.compacted[0].keys[: length - 1], prepared.full.compacted[0].keys[1:length])


def test_windows_of_sliding_layers_are_the_whole_documents(gemma: Model, make_prepared: Any) -> None:
    prepared = make_prepared(gemma)
    memory = SnapKV()(prepared, Budget.of(prepared.document.length, tokens=40))
    assert memory.layers[0] is prepared.full.layers[0]
    assert isinstance(memory.layers[1], LayerMemory)
