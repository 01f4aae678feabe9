"""Sequences in one batch, whatever joins and leaves, get what each gets alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ttmem import Memory, MemoryMismatchError, Model
from ttmem.compaction.kvzip_plus import KVzipPlus
from ttmem.compaction.settings import Budget
from ttmem.memory.batch import BatchCache, Row, check_layers

TEXTS = ("The ferry to Lerwick leaves at nine on Mondays.", "Ada Quist keeps the store; its number is 4417.")


@pytest.fixture(scope="module")
def memories(any_model: Model, make_prepared: Any) -> list[Memory | None]:
    """Ragged, full, longer than a window, and none."""
    ragged = [
        KVzipPlus()(prepared, Budget.of(prepared.document.length, 3))
        for prepared in (make_prepared(any_model, text) for text in TEXTS)
    ]
    return [*ragged, make_prepared(any_model).full, None]


@torch.no_grad()
def alone(model: Model, memory: Memory | None, ids: list[int]) -> Tensor:
    """Logits behind every token of a sequence that runs alone, by the cache of a single conversation."""
    tokens = torch.tensor([ids])
    if memory is None:
        return model.network(input_ids=tokens, use_cache=False).logits[0]
    cache = memory.cache()
    logits: Tensor = model.forward(cache=cache, **memory.inputs(tokens, cache=cache)).logits[0]
    return logits


def numbers(count: int, seed: int) -> list[int]:
    return [(31 * seed + 17 * i * i + 5 * i) % 250 for i in range(count)]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("pieces", [[1] * 6, [9], [30], [3, 1, 1, 20, 1], [40, 30, 1, 1], [1, 70, 70]])
def test_one_sequence_in_pieces(any_model: Model, memories: list[Memory | None], pieces: list[int]) -> None:
    ids = numbers(sum(pieces), 3)
    for memory in memories:
        cache, start = BatchCache(any_model), 0
        row = cache.join(memory)
        expected = alone(any_model, memory, ids)
        for piece in pieces:
            found = cache.run([(row, ids[start : start + piece])])
            start += piece
            assert_close(found[0], expected[start - 1])
        cache.leave(row)
        assert cache.held == 0


@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_sequences_that_come_and_go(any_model: Model, memories: list[Memory | None], seed: int) -> None:
    """A random schedule of chunks and single tokens; every logit is that of the sequence alone."""
    choose = random.Random(seed)
    cache = BatchCache(any_model)
    running: list[tuple[Row, list[int], Tensor, int]] = []
    for turn in range(12):
        while len(running) < 7 and choose.random() < 0.6:
            memory = choose.choice(memories)
            ids = numbers(choose.choice([2, 9, 66, 70, 140]), turn + len(running))
            running.append((cache.join(memory), ids, alone(any_model, memory, ids), 0))
        chosen = [i for i in range(len(running)) if choose.random() < 0.8]
        takes = [1 if choose.random() < 0.6 else choose.randint(2, 70) for _ in chosen]
        parts = [(running[i][0], running[i][1][running[i][3] :][:take]) for i, take in zip(chosen, takes, strict=True)]
        if not parts:
            continue
        found = cache.run(parts)
        for logits, i, (_, tokens) in zip(found, chosen, parts, strict=True):
            row, ids, expected, done = running[i]
            running[i] = (row, ids, expected, done + len(tokens))
            assert_close(logits, expected[done + len(tokens) - 1])
        for row, ids, _, done in list(running):
            if done == len(ids) or choose.random() < 0.1:
                cache.leave(row)
                running = [entry for entry in running if entry[0] is not row]
    assert cache.held == sum(row.length > 0 for row, *_ in running)


def test_the_memories_matter(any_model: Model, memories: list[Memory | None]) -> None:
    """Or else sequences that got another's memory would go unnoticed."""
    ids = numbers(9, 1)
    logits = [alone(any_model, memory, ids)[-1] for memory in memories]
    for i in range(len(logits)):
        for j in range(i):
            assert (logits[i] - logits[j]).abs().max() > 1e-2


def test_blocks_are_freed(model: Model) -> None:
    cache = BatchCache(model)
    rows = [cache.join(None) for _ in range(5)]
    cache.run([(row, numbers(3 + 40 * i, i)) for i, row in enumerate(rows)])
    assert sorted(cache.rows) == [64, 128, 256]
    for row in rows:
        cache.leave(row)
        cache.leave(row)  # leaving twice is leaving
    assert cache.rows == {}
    assert all(layer.blocks == {} for layer in cache.layers)


def test_a_memory_of_other_shape_is_refused(model: Model, gemma: Model, make_full: Any, make_network: Any) -> None:
    memory = make_full(model)
    check_layers(model, memory)
    for other in (
        replace(memory, layers=memory.layers[:-1]),
        replace(memory, merging="equal"),
        memory.to(dtype=torch.bfloat16),
        make_full(gemma),
        make_full(Model(make_network("llama", num_key_value_heads=3), model.tokenizer)),
        make_full(Model(make_network("llama", head_dim=8), model.tokenizer)),
    ):
        with pytest.raises(MemoryMismatchError):
            BatchCache(model).join(other)
