"""Bytes and the budget's map against the plain definitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ttmem import LatentSettings, Memory, Model, compact, extend, merge
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.serving.description import budget_map, describe, full_bytes

TEXT = "The ferry to Lerwick leaves at nine on Mondays and at ten on Fridays, from the east quay. " * 2


def test_the_bytes_of_full_context_are_those_of_the_full_memory(served: Model, gemma: Model, make_full: Any) -> None:
    for model in (served, gemma):
        full = make_full(model, TEXT)
        assert full_bytes(full) == sum(
            tensor.numel() * tensor.element_size() for layer in full.layers for tensor in (layer.keys, layer.values)
        )
    small = compact(served, TEXT, ratio=3, method="kvzip+", measure=False)
    assert full_bytes(small) == full_bytes(make_full(served, TEXT))
    assert describe(small)["full_bytes"] > describe(small)["loaded_bytes"] == small.num_bytes()


def test_the_map_has_every_head(gemma: Model) -> None:
    memory = compact(gemma, TEXT, ratio=2, method="kvzip+", measure=False)
    found = budget_map(memory)
    assert (found["entries"], found["document_tokens"]) == (memory.entries, memory.document_length)
    assert found["roles"] is None
    assert [layer["layer"] for layer in found["layers"]] == list(range(len(memory.layers)))
    for told, layer in zip(found["layers"], memory.layers, strict=True):
        if isinstance(layer, WindowMemory):
            assert told == {"layer": told["layer"], "window": 16, "entries": [layer.keys.shape[1]] * layer.num_heads}
        else:
            assert told["entries"] == list(layer.lengths)


def test_biases_are_told_per_head(memories: dict[str, Memory]) -> None:
    memory = memories["ferry"]
    layers = []
    for layer in memory.compacted:
        biases = layer.biases.clone()
        for head, (start, end) in enumerate(zip(layer.offsets, layer.offsets[1:], strict=False)):
            biases[start:end] = head + 1.0
            if end > start:
                biases[start] = -1.0
        layers.append(LayerMemory(layer.keys, layer.values, biases, layer.lengths))
    found = budget_map(replace(memory, layers=layers))
    for told, layer in zip(found["layers"], layers, strict=True):
        for head, (figures, kept) in enumerate(zip(told["biases"], layer.lengths, strict=True)):
            if kept == 0:
                assert figures is None
                continue
            mean = (-1.0 + (kept - 1) * (head + 1.0)) / kept
            assert figures["least"] == -1.0
            assert figures["mean"] == pytest.approx(mean, abs=1e-4)
            assert figures["most"] == (head + 1.0 if kept > 1 else -1.0)


def test_roles_are_told_where_they_are_known(served: Model) -> None:
    settings = LatentSettings(rollouts=2, rollout_tokens=3, top_k=4, pool=32, fit_updates=1, distill_updates=0)
    memory = compact(served, TEXT, tokens=16, settings=settings, measure=False)
    assert budget_map(memory)["roles"] == {"anchors": 1, "diversifiers": 3}  # a quarter of 16, a quarter of that
    for forged in (
        {"latents": "many"},
        {"latents": None},
        {"latents": 17},  # more than some head keeps
        {"latents": True, "anchors": False},
        {"anchors": 5},
        {"anchors": -1},
    ):
        info = replace(memory.info, budget={**memory.info.budget, **forged})
        assert budget_map(replace(memory, info=info))["roles"] is None, forged
    merged = merge(served, [memory, memory])
    assert budget_map(merged)["roles"] is None
    extended = extend(served, memory, TEXT, tokens=16, settings=settings, measure=False)
    assert budget_map(extended)["roles"] is None
    random = compact(served, TEXT, tokens=16, settings=replace(settings, initializer="random"), measure=False)
    assert budget_map(random)["roles"] is None


def test_the_roles_of_a_chosen_split_are_those_that_were_used(
    served: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = LatentSettings(
        rollouts=2, rollout_tokens=3, top_k=4, pool=32, closed_form=True, choose_split=True, fit_updates=0,
        distill_updates=0,
    )  # fmt: skip
    for fraction, found in ((0.5, {"anchors": 2, "diversifiers": 6}), (0.125, {"anchors": 1, "diversifiers": 1})):
        monkeypatch.setattr("ttmem.compaction.choice.SPLITS", ((fraction, 0.0),))
        folder = tmp_path / str(fraction)
        made = [  # the second from the steps that the first has left
            compact(served, TEXT, tokens=16, settings=settings, measure=False, workdir=folder, resume=resume)
            for resume in (False, True)
        ]
        assert [budget_map(memory)["roles"] for memory in made] == [found, found]
        assert made[0].info.settings["latent_fraction"] == 0.25  # what was asked for stays as it is
