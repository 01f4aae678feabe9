"""Extended memories: a text behind a memory is read, taught and compacted as if both were one document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem.compaction.extend import extend
from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import LatentSettings
from ttmem.errors import BudgetError, DocumentError, MemoryMismatchError, ResumeError
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory
from ttmem.models import Model

FIRST = "Anna keeps the red boat in Lisbon. The harbour closes at nine. Nobody knows why it does, least of all Anna."
MORE = " Bruno sold seven clocks in March. The shop is on Mill Street, and it has a green door that never opens."

Make = Callable[..., Memory]


def logits(model: Model, memory: Memory, question: str = "Where is the shop?") -> torch.Tensor:
    ids = torch.tensor([model.encode(question)])
    return model.network(**memory.inputs(ids), **{model.cache_keyword: memory.cache()}).logits


def test_kept_whole_it_is_the_memory_of_both(any_model: Model, make_full: Make) -> None:
    """Extending a full memory by all entries of a text is reading both at once."""
    extended = extend(any_model, make_full(any_model, FIRST), MORE, ratio=1)
    ids = any_model.encode(FIRST) + any_model.encode(MORE)
    assert extended.tokens is not None
    assert extended.tokens.tolist() == ids
    assert extended.document_length == len(ids)
    expected = full_memory_layers(any_model.network, torch.tensor([ids]))
    for layer, whole in zip(extended.layers, expected, strict=True):
        torch.testing.assert_close(layer.keys, whole.keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.values, whole.values, rtol=1e-3, atol=1e-4)


def test_a_memory_before_is_the_same_apart_or_joined(any_model: Model, make_full: Make) -> None:
    first = make_full(any_model, FIRST)
    layers = [
        replace(layer, biases=torch.linspace(-1, 1, layer.total), unbiased=False)
        if isinstance(layer, LayerMemory)
        else layer
        for layer in first.layers
    ]
    before = replace(first, layers=layers)
    ids = torch.tensor(any_model.encode(MORE))
    from ttmem.compaction.document import Document

    prepared = Prepared(any_model, Document("more", "", ids), LatentSettings(), before=before)
    apart = prepared.full
    assert apart.before is before
    assert apart.document_length == first.document_length + len(ids)
    torch.testing.assert_close(logits(any_model, apart.joined()), logits(any_model, apart), rtol=1e-4, atol=1e-4)
    changed = replace(apart, before=replace(before, layers=first.layers))
    assert not torch.allclose(logits(any_model, changed), logits(any_model, apart), rtol=1e-3)


@pytest.mark.parametrize("method", ["latent", "kvzip+", "am"])
def test_methods_compact_the_new_part_and_leave_the_old(
    any_model: Model, make_full: Make, quick_settings: LatentSettings, method: str
) -> None:
    first = make_full(any_model, FIRST)
    extended = extend(any_model, first, MORE, ratio=4, settings=quick_settings, method=method)
    added = len(any_model.encode(MORE)) // 4
    assert extended.info.method == "extended"
    assert extended.info.budget["tokens"] == first.info.budget["tokens"] + added
    assert extended.info.fidelity["kl"] >= 0
    assert [part["name"] for part in extended.info.document["parts"]] == ["text", "more"]
    for layer, old in zip(extended.compacted, first.compacted, strict=True):
        for (keys, values, _), (old_keys, old_values, _) in zip(layer.heads(), old.heads(), strict=True):
            torch.testing.assert_close(keys[: len(old_keys)], old_keys)
            torch.testing.assert_close(values[: len(old_values)], old_values)
    total = sum(layer.total for layer in first.compacted)
    heads = sum(layer.num_heads for layer in first.compacted)
    assert extended.entries == total + added * heads
    assert logits(any_model, extended).isfinite().all()


def test_it_can_be_extended_again_and_saved(
    model: Model, make_full: Make, quick_settings: LatentSettings, tmp_path: Path
) -> None:
    once = extend(model, make_full(model, FIRST), MORE, ratio=4, settings=quick_settings)
    twice = extend(model, once, MORE, ratio=4, settings=quick_settings, measure=False)
    assert len(twice.info.document["parts"]) == 3
    twice.save(tmp_path / "grown.ttmem")
    loaded = Memory.load(tmp_path / "grown.ttmem")
    torch.testing.assert_close(logits(model, loaded), logits(model, twice))


def test_a_killed_run_goes_on(
    model: Model, make_full: Make, quick_settings: LatentSettings, tmp_path: Path
) -> None:
    first = make_full(model, FIRST)
    options: dict[str, Any] = {"ratio": 4, "settings": quick_settings, "measure": False}
    whole = extend(model, first, MORE, **options)
    extend(model, first, MORE, **options, workdir=tmp_path / "work")
    again = extend(model, first, MORE, **options, workdir=tmp_path / "work", resume=True)
    for one, other in zip(again.layers, whole.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
    with pytest.raises(ResumeError):
        extend(model, first, MORE + "x", **options, workdir=tmp_path / "work", resume=True)


def test_what_cannot_be_extended(
    model: Model, make_full: Make, make_network: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_full(model, FIRST)
    with pytest.raises(BudgetError, match="snapkv"):
        extend(model, first, MORE, method="snapkv")
    with pytest.raises(DocumentError, match="empty"):
        extend(model, first, " ")
    with pytest.raises(MemoryMismatchError, match="equal"):
        extend(model, replace(first, merging="equal"), MORE)
    with pytest.raises(MemoryMismatchError, match="made with"):
        extend(Model(make_network("llama", seed=5), tokenizer), first, MORE)
    monkeypatch.setattr(Model, "max_positions", first.document_length + 256 + 20)
    with pytest.raises(DocumentError, match="with the memory's"):
        extend(model, first, MORE)
