"""What every method has in common: exact budgets, files, determinism, every architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ttmem import LatentSettings, Memory, Model, ask, compact
from ttmem.compaction.api import METHODS, make_method
from ttmem.compaction.settings import Budget

UNTRAINED = sorted(set(METHODS) - {"latent", "full"})
CACHE: dict[str, Any] = {}


def test_the_baselines_are_there() -> None:
    assert {"summary", "am", "am-omp", "snapkv", "pyramidkv", "kvzip+"} <= set(METHODS)
    for name in METHODS:
        assert make_method(name, LatentSettings(), 0).name == name


@hypothesis_settings(max_examples=12)
@given(ratio=st.floats(1.2, 60), method=st.sampled_from(UNTRAINED))
def test_budgets_are_exact_for_every_ratio(
    model: Model, make_prepared: Any, quick_settings: LatentSettings, ratio: float, method: str
) -> None:
    if "prepared" not in CACHE:
        CACHE["prepared"] = make_prepared(model)
    prepared = CACHE["prepared"]
    budget = Budget.of(prepared.document.length, ratio=min(ratio, prepared.document.length / 4))
    memory = make_method(method, quick_settings, 0)(prepared, budget)
    if method == "summary":
        assert 3 * 2 <= memory.entries <= 3 * 2 * budget.tokens
    else:
        assert memory.entries == 3 * 2 * budget.tokens
    assert memory.info.budget["tokens"] == budget.tokens
    for layer in memory.compacted:
        assert torch.isfinite(layer.values).all()
        assert torch.isfinite(layer.biases).all()


@pytest.mark.parametrize("method", UNTRAINED)
def test_every_architecture_runs_and_its_memory_survives_a_file(
    any_model: Model, document_text: str, quick_settings: LatentSettings, method: str, tmp_path: Path
) -> None:
    memory = compact(any_model, document_text, tokens=40, method=method, settings=quick_settings)
    assert memory.info.method == method
    assert memory.info.fidelity["kl"] > 0
    memory.save(tmp_path / "a.ttmem")
    loaded = Memory.load(tmp_path / "a.ttmem")
    assert loaded.info == memory.info
    assert loaded.document_length == memory.document_length
    assert loaded.tokens is not None
    assert memory.tokens is not None
    assert torch.equal(loaded.tokens, memory.tokens)
    for found, expected in zip(loaded.layers, memory.layers, strict=True):
        assert torch.equal(found.keys, expected.keys)
        assert torch.equal(found.values, expected.values)
    questions = ["Who keeps the store?", "When?"]
    assert ask(any_model, loaded, questions, max_new_tokens=4) == ask(any_model, memory, questions, max_new_tokens=4)


@pytest.mark.parametrize("method", UNTRAINED)
def test_the_same_document_gives_the_same_memory(
    model: Model, make_prepared: Any, quick_settings: LatentSettings, method: str
) -> None:
    def make(state: int) -> Memory:
        torch.manual_seed(state)
        prepared = make_prepared(model)
        return make_method(method, quick_settings, 0)(prepared, Budget.of(prepared.document.length, tokens=37))

    first, second = make(1), make(2)
    assert first.document_length == second.document_length
    for a, b in zip(first.compacted, second.compacted, strict=True):
        assert a.lengths == b.lengths
        assert all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("keys", "values", "biases"))


@pytest.mark.parametrize("method", UNTRAINED)
def test_memories_have_their_models_dtype(
    make_network: Any, tokenizer: Any, document_text: str, quick_settings: LatentSettings, method: str
) -> None:
    model = Model(make_network("qwen3").bfloat16(), tokenizer)
    memory = compact(model, document_text, ratio=6, method=method, settings=quick_settings, measure=False)
    assert all(layer.keys.dtype == layer.values.dtype == torch.bfloat16 for layer in memory.compacted)
    assert all(layer.biases.dtype == torch.float32 for layer in memory.compacted)
