"""Several memories as one: their documents one behind the other, each read without the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone

import torch
from torch import Tensor

from ttmem.errors import BudgetError, MemoryMismatchError
from ttmem.memory.layer import LayerMemory, WindowMemory
from ttmem.memory.memory import Memory, MemoryInfo
from ttmem.memory.sinks import without_repeated_sinks
from ttmem.models import ANSWER_ROOM, Model
from ttmem.models.rotary import rotary_rates, rotate
from ttmem.versions import versions


@torch.no_grad()
def merge(model: Model, memories: Sequence[Memory], keep_sinks: bool = False) -> Memory:
    """One memory over several documents, in their order. Nothing is trained, nothing is read again.

    Keys are turned to the positions they have with the other documents before them. What a document's tokens would
    have seen in the documents before them is missing: each was read alone. Entries of a later document's first token
    are left out where an earlier one has such (`sinks.py`), unless `keep_sinks`. A layer with a sliding window keeps
    what its window has of the last documents. Token ids are kept if all memories have theirs.

    The result has the model's device and dtype. Raises BudgetError for fewer than two memories, or where the documents
    do not fit the model's positions together; MemoryMismatchError for memories of another model and those that cannot
    be joined; ModelError for a model whose keys cannot be moved.
    """
    if len(memories) < 2:
        raise BudgetError(f"{len(memories)} memories cannot be merged: give two or more")
    for memory in memories:
        memory.check_model(model)
        check_joinable(memory)
    memories = [memory.joined().to(model.device, model.dtype) for memory in memories]
    total = sum(memory.document_length for memory in memories)
    limit = model.max_positions
    if limit is not None and total + ANSWER_ROOM > limit:
        raise BudgetError(
            f"the documents have {total:,} tokens together, and {model.name} reaches {limit:,} positions, of which "
            f"{ANSWER_ROOM} are kept for questions and answers: merge fewer of them"
        )
    rates = rotary_rates(model.network)
    shifts = [sum(memory.document_length for memory in memories[:i]) for i in range(len(memories))]
    if not keep_sinks:
        memories = without_repeated_sinks(model, memories)
    layers: list[LayerMemory | WindowMemory] = []
    for index, rate in enumerate(rates):
        parts = [memory.layers[index] for memory in memories]
        join = _join_windows if isinstance(parts[0], WindowMemory) else _join_entries
        layers.append(join(parts, shifts, rate))  # type: ignore[arg-type]
    kept = [memory.tokens for memory in memories]
    tokens = torch.cat([ids for ids in kept if ids is not None]) if all(ids is not None for ids in kept) else None
    return Memory(layers, total, _info(memories, total), tokens, memories[0].merging)


def check_joinable(memory: Memory) -> None:
    """Raise MemoryMismatchError for a memory that others cannot stand beside."""
    name = memory.info.document.get("name", "text")
    if memory.merging != "normalizer":
        raise MemoryMismatchError(
            f"the memory of {name} has merging {memory.merging!r}; only memories with normalizers can be joined"
        )
    if memory.info.document.get("tokens", memory.document_length) != memory.document_length:
        raise MemoryMismatchError(
            f"the memory of {name} is of a summary, which has positions of its own: compact the document by another "
            "method than summary"
        )


def join_behind(before: Memory, after: Memory) -> Memory:
    """One memory of one whose tokens were read behind another, at the positions they have: nothing is moved.

    A window of `after` holds what its layer needs of `before`. The fidelity is that of `after`, behind `before`.
    """
    layers: list[LayerMemory | WindowMemory] = []
    for earlier, later in zip(before.layers, after.layers, strict=True):
        if isinstance(earlier, LayerMemory) and isinstance(later, LayerMemory):
            layers.append(_join_entries([earlier, later], [0, 0], None))
        else:
            layers.append(later)
    tokens = None
    if before.tokens is not None and after.tokens is not None:
        tokens = torch.cat([before.tokens, after.tokens])
    info = _info([before, after], after.document_length)
    info.method, info.fidelity = "extended", after.info.fidelity
    return Memory(layers, after.document_length, info, tokens, after.merging)


def _join_entries(parts: Sequence[LayerMemory], shifts: Sequence[int], rates: Tensor | None) -> LayerMemory:
    """Head by head, the entries of all parts behind one another."""
    moved = [(rotate(part.keys, shift, rates), part) for part, shift in zip(parts, shifts, strict=True)]
    keys, values, biases = [], [], []
    for head in range(parts[0].num_heads):
        for part_keys, part in moved:
            own = slice(part.offsets[head], part.offsets[head + 1])
            keys.append(part_keys[own])
            values.append(part.values[own])
            biases.append(part.biases[own])
    lengths = tuple(sum(part.lengths[head] for part in parts) for head in range(parts[0].num_heads))
    unbiased = all(part.unbiased for part in parts)
    return LayerMemory(torch.cat(keys), torch.cat(values), torch.cat(biases), lengths, unbiased)


def _join_windows(parts: Sequence[WindowMemory], shifts: Sequence[int], rates: Tensor | None) -> WindowMemory:
    """The last entries of all parts that the window holds."""
    joined = parts[0]
    for part, shift in zip(parts[1:], shifts[1:], strict=True):
        joined = joined.behind(rotate(part.keys, shift, rates), part.values)
    return joined


def _info(memories: Sequence[Memory], total: int) -> MemoryInfo:
    """The documents by name and hash; the budget is what all of them have together."""
    parts = [memory.info for memory in memories]
    names = [str(part.document.get("name", "text")) for part in parts]
    hashes = [str(part.document.get("sha256", "")) for part in parts]
    budget = sum(int(part.budget.get("tokens", 0)) for part in parts)
    return MemoryInfo(
        method="merged",
        model=parts[-1].model,
        document={
            "name": " + ".join(names),
            "sha256": hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
            "tokens": total,
            "parts": [own for part in parts for own in part.document.get("parts", [part.document])],
        },
        budget={"tokens": budget, "ratio": total / max(1, budget)},
        settings={
            "parts": [
                own
                for part in parts
                for own in part.settings.get("parts", [{"method": part.method, "settings": part.settings}])
            ]
        },
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
