"""A memory as the API describes it: checked figures, nothing passed on from a file as it is."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ttmem.checks import is_number
from ttmem.memory import Memory
from ttmem.memory.layer import WindowMemory


def describe(memory: Memory) -> dict[str, Any]:
    """JSON of a memory's model, document, budget and fidelity."""
    info = memory.info
    return {
        "method": _text(info.method),
        "document": {"name": _text(info.document["name"]), "tokens": memory.document_length},
        "model": {"name": _text(info.model["name"]), "fingerprint": _text(info.model["fingerprint"])},
        "budget": {"tokens": _number(info.budget["tokens"]), "ratio": _number(info.budget["ratio"])},
        "fidelity": {name: _number(info.fidelity.get(name)) for name in ("kl", "top1", "prompts")}
        if info.fidelity
        else None,
        "entries": memory.entries,
        "loaded_bytes": memory.num_bytes(),
        "full_bytes": full_bytes(memory),
        "document_kept": memory.tokens is not None,
        "created": _text(info.created),
    }


def full_bytes(memory: Memory) -> int:
    """Bytes of the document's whole KV cache in the memory's dtype: every token in a global layer, a sliding layer's
    window as the memory has it."""
    total = 0
    for layer in memory.layers:
        if isinstance(layer, WindowMemory):
            total += layer.num_bytes()
        else:
            per_token = (layer.keys.shape[-1] + layer.values.shape[-1]) * layer.keys.element_size()
            total += memory.document_length * layer.num_heads * per_token
    return total


def budget_map(memory: Memory) -> dict[str, Any]:
    """Where the budget went: entries of each layer and KV head, their biases, and what they began as where that is
    known."""
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(memory.layers):
        if isinstance(layer, WindowMemory):
            layers.append({"layer": index, "window": layer.window, "entries": [layer.keys.shape[1]] * layer.num_heads})
            continue
        biases = [_spread(part) for part in layer.biases.float().split(layer.lengths)]
        layers.append({"layer": index, "window": None, "entries": list(layer.lengths), "biases": biases})
    return {
        "document_tokens": memory.document_length,
        "entries": memory.entries,
        "roles": roles(memory),
        "layers": layers,
    }


def _spread(biases: Tensor) -> dict[str, float] | None:
    """Mean, smallest and largest bias of a head; None where it keeps nothing."""
    if biases.numel() == 0:
        return None
    figures = {"mean": biases.mean(), "least": biases.min(), "most": biases.max()}
    return {name: round(figure.item(), 4) for name, figure in figures.items()}


def roles(memory: Memory) -> dict[str, int] | None:
    """Anchors and diversifiers of each head; the rest of its entries are preservers. None where this is not known:
    for other methods, for memories of several texts, and where the file says what cannot be."""
    latents, anchors = (memory.info.budget.get(name) for name in ("latents", "anchors"))
    if type(latents) is not int or type(anchors) is not int or not 0 <= anchors <= latents:
        return None
    if any(kept < latents for layer in memory.compacted for kept in layer.lengths):
        return None
    return {"anchors": anchors, "diversifiers": latents - anchors}


def _number(value: Any) -> float | int | None:
    return value if is_number(value) and math.isfinite(value) else None


def _text(value: Any) -> str:
    return str(value)[:200]
