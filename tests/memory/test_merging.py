"""Merged memories: keys are where they would be if the documents had been read behind one another, each alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.prefill import full_memory_layers
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.errors import BudgetError, MemoryMismatchError, ModelError
from ttmem.memory import Memory
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.merging import merge
from ttmem.models import Model
from ttmem.models.rotary import rotary_rates

FIRST = "Anna keeps the red boat in Lisbon. The harbour closes at nine."
SECOND = "Bruno sold seven clocks in March. The shop is on Mill Street, and it has a green door."
THIRD = "Clara writes to Hanoi."

Make = Callable[..., Memory]


def test_keys_are_where_they_would_be(any_model: Model, make_full: Make) -> None:
    parts = [make_full(any_model, text) for text in (FIRST, SECOND, THIRD)]
    merged = merge(any_model, parts, keep_sinks=True)
    assert merged.document_length == sum(part.document_length for part in parts)
    assert merged.tokens is not None
    assert merged.tokens.tolist() == [i for part in parts for i in part.tokens.tolist()]
    start, expected = 0, []
    for part in parts:
        expected.append(full_memory_layers(any_model.network, part.tokens[None], start=start))
        start += part.document_length
    for index, layer in enumerate(merged.layers):
        own = [layers[index] for layers in expected]
        if isinstance(layer, WindowMemory):
            keys, values = (torch.cat([getattr(p, name) for p in own], 1) for name in ("keys", "values"))
            kept = min(layer.window - 1, keys.shape[1])
            torch.testing.assert_close(layer.keys, keys[:, -kept:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(layer.values, values[:, -kept:], rtol=1e-4, atol=1e-4)
            continue
        assert layer.lengths == (merged.document_length,) * layer.num_heads
        assert layer.unbiased
        for head, (keys, values, _) in enumerate(layer.heads()):
            heads = [list(p.heads())[head] for p in own]
            torch.testing.assert_close(keys, torch.cat([h[0] for h in heads]), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values, torch.cat([h[1] for h in heads]), rtol=1e-4, atol=1e-4)


def test_ragged_entries_and_biases_stay_with_their_heads(model: Model, make_prepared: Callable[..., Prepared]) -> None:
    parts = []
    for text in (FIRST, SECOND):
        prepared = make_prepared(model, text)
        memory = KVzipPlus()(prepared, Budget.of(prepared.document.length, 3))
        layers = [
            replace(layer, biases=torch.rand(layer.total, generator=torch.Generator().manual_seed(i)), unbiased=False)
            for i, layer in enumerate(memory.layers)
        ]
        parts.append(replace(memory, layers=layers))
    merged = merge(model, parts, keep_sinks=True)
    assert merged.info.budget["tokens"] == sum(part.info.budget["tokens"] for part in parts)
    for layer, first, second in zip(merged.layers, parts[0].layers, parts[1].layers, strict=True):
        assert isinstance(layer, LayerMemory)
        for whole, one, other in zip(layer.heads(), first.heads(), second.heads(), strict=True):
            torch.testing.assert_close(whole[0][: len(one[0])], one[0])
            torch.testing.assert_close(whole[1], torch.cat([one[1], other[1]]))
            torch.testing.assert_close(whole[2], torch.cat([one[2], other[2]]))


def test_the_order_does_not_matter_to_a_single_document(model: Model, make_full: Make) -> None:
    """Rotary attention sees distances: behind itself alone, a document at other positions answers the same."""
    first, second = make_full(model, FIRST), make_full(model, SECOND)
    merged = merge(model, [first, second], keep_sinks=True)
    moved = replace(
        second,
        document_length=merged.document_length,
        layers=[
            LayerMemory.from_heads(*zip(*[(k[-second.document_length :], v[-second.document_length :])
                                          for k, v, _ in layer.heads()], strict=True))
            for layer in merged.layers
        ],
    )  # fmt: skip
    ids = torch.tensor([model.encode("Where is the shop?")])

    def logits(memory: Memory) -> torch.Tensor:
        return model.network(**memory.inputs(ids), **{model.cache_keyword: memory.cache()}).logits

    torch.testing.assert_close(logits(moved), logits(second), rtol=1e-3, atol=1e-3)


def test_what_cannot_be_merged(
    model: Model, make_full: Make, make_network: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_full(model, FIRST), make_full(model, SECOND)
    with pytest.raises(BudgetError, match="two or more"):
        merge(model, [first])
    with pytest.raises(MemoryMismatchError, match="merging"):
        merge(model, [first, replace(second, merging="equal")])
    assert merge(model, [first, second.to(dtype=torch.bfloat16)]).dtype == torch.float32
    with pytest.raises(MemoryMismatchError, match="summary"):
        merge(model, [first, replace(second, document_length=3)])
    other = Model(make_network("llama", seed=5), tokenizer)
    with pytest.raises(MemoryMismatchError, match="made with"):
        merge(other, [first, second])
    monkeypatch.setattr(Model, "max_positions", 300)
    with pytest.raises(BudgetError, match="merge fewer"):
        merge(model, [first, second])


def test_models_whose_keys_cannot_be_moved(make_network: Callable[..., Any]) -> None:
    network = make_network("llama")
    network.model.rotary_emb.inv_freq.mul_(2.0)
    assert all(rates is not None for rates in rotary_rates(network))
    network.config.rope_parameters = {**network.config.rope_parameters, "rope_type": "dynamic"}
    with pytest.raises(ModelError, match="depend on the length"):
        rotary_rates(network)

    network = make_network("llama")
    turn = network.model.rotary_emb.forward
    network.model.rotary_emb.forward = lambda x, position_ids: turn(x, position_ids**2)
    with pytest.raises(ModelError, match="layer 0"):
        rotary_rates(network)


def test_a_layer_without_positions_is_left_alone(make_network: Callable[..., Any]) -> None:
    network = make_network("llama")
    turn = network.model.rotary_emb.forward
    network.model.rotary_emb.forward = lambda x, position_ids: turn(x, 0 * position_ids)
    assert rotary_rates(network)[0] is None


def test_a_merged_memory_is_saved_like_any_other(model: Model, make_full: Make, tmp_path: Path) -> None:
    merged = merge(model, [make_full(model, FIRST), make_full(model, SECOND)])
    merged.save(tmp_path / "both.ttmem")
    loaded = Memory.load(tmp_path / "both.ttmem")
    assert loaded.info == merged.info
    for one, other in zip(loaded.layers, merged.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
