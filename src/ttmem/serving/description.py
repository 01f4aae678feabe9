"""A memory as the API describes it: checked figures, nothing passed on from a file as it is."""

from __future__ import annotations

import math
from typing import Any

from ttmem.memory import Memory


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
        "document_kept": memory.tokens is not None,
        "created": _text(info.created),
    }


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _text(value: Any) -> str:
    return str(value)[:200]
