"""A full memory behind the unmodified model: the model's own logits and positions, and the cache's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ttmem import Memory, Model
from ttmem.memory.cache import MemoryCache, MemoryLayer, WindowLayer
from ttmem.models.layers import cache_keyword

LONG = [200, 14, 5, 6, 7, 8, 33, 41, 100, 222, 17, 19, 64, 65, 66, 67, 68, 69, 70]
QUESTIONS = [[40, 77, 12, 260, 9], [3, 91, 265], LONG]


@pytest.fixture(scope="module")
def full(any_model: Model, make_full: Any) -> Memory:
    memory: Memory = make_full(any_model)
    return memory


@torch.no_grad()
def from_context(model: Model, ids: list[int]) -> Tensor:
    """Logits [len(ids), V] of the plain model without any cache."""
    logits: Tensor = model.network(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@torch.no_grad()
def behind(model: Model, memory: Memory, ids: list[int], cache: MemoryCache | None = None) -> Tensor:
    cache = memory.cache() if cache is None else cache
    inputs = memory.inputs(torch.tensor([ids]), cache=cache)
    logits: Tensor = model.forward(cache=cache, **inputs).logits[0]
    return logits


def expected(model: Model, memory: Memory, question: list[int]) -> Tensor:
    assert memory.tokens is not None
    return from_context(model, memory.tokens.tolist() + question)[memory.document_length :]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("question", QUESTIONS)
def test_logits_are_those_of_the_full_context(any_model: Model, full: Memory, question: list[int]) -> None:
    assert_close(behind(any_model, full, question), expected(any_model, full, question))


def test_the_document_matters(any_model: Model, full: Memory) -> None:
    """Or else the other tests here would show nothing."""
    alone = from_context(any_model, QUESTIONS[0])
    assert (alone - expected(any_model, full, QUESTIONS[0])).abs().mean() > 0.05


@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 40])
def test_documents_around_the_window(any_model: Model, make_full: Any, length: int) -> None:
    memory = make_full(any_model, [(37 * i + 11) % 250 for i in range(length)])
    for question in QUESTIONS:
        assert_close(behind(any_model, memory, question), expected(any_model, memory, question))


def test_without_a_mask_or_positions(any_model: Model, full: Memory) -> None:
    with torch.no_grad():
        found = any_model.forward(torch.tensor([QUESTIONS[0]]), full.cache()).logits[0]
    assert_close(found, expected(any_model, full, QUESTIONS[0]))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("pieces", [[1, 1, 1, 1], [3, 16], [1, 18], [18, 1], [4, 5, 10]])
def test_a_question_in_pieces_is_the_question(any_model: Model, full: Memory, pieces: list[int], masked: bool) -> None:
    question = LONG[: sum(pieces)]
    cache, parts, start = full.cache(), [], 0
    for piece in pieces:
        part = question[start : start + piece]
        if masked:
            parts.append(behind(any_model, full, part, cache))
        else:
            with torch.no_grad():
                parts.append(any_model.forward(torch.tensor([part]), cache).logits[0])
        start += piece
        assert cache.get_seq_length() == full.document_length + start
    assert_close(torch.cat(parts), expected(any_model, full, question))


def test_left_padded_questions_equal_single_ones(any_model: Model, full: Memory) -> None:
    width = max(map(len, QUESTIONS))
    ids = torch.tensor([[0] * (width - len(q)) + q for q in QUESTIONS])
    mask = torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in QUESTIONS])
    positions = full.document_length + (mask.cumsum(-1) - 1).clamp_min(0)
    cache = full.cache()
    with torch.no_grad():
        found = any_model.forward(**full.inputs(ids, mask), position_ids=positions, cache=cache).logits
    for row, question in zip(found, QUESTIONS, strict=True):
        assert torch.isfinite(row).all()
        assert_close(row[width - len(question) :], expected(any_model, full, question))


def test_question_tokens_have_the_positions_behind_the_document(any_model: Model, full: Memory) -> None:
    """As transformers itself gives them to the rotary embedding, in a forward and over a whole generation."""
    seen: list[Tensor] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[1] if len(args) > 1 else kwargs["position_ids"])

    rotary = [m for m in any_model.network.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in rotary]
    try:
        behind(any_model, full, [4, 5, 6])
        n = full.document_length
        assert seen
        assert all(positions.tolist() == [[n, n + 1, n + 2]] for positions in seen)
        seen.clear()
        ids, mask = torch.tensor([[0, 4, 5], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        cache = {cache_keyword(any_model.network): full.cache()}
        generate = {**cache, "max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
        any_model.network.generate(**full.inputs(ids, mask), **generate)
        unique = [positions.tolist() for i, positions in enumerate(seen) if i == 0 or positions is not seen[i - 1]]
        steps = [step for i, step in enumerate(unique) if i == 0 or step != unique[i - 1]]
        assert steps[0][0][1:] == [n, n + 1]
        assert steps[0][1] == [n, n + 1, n + 2]
        assert steps[1:] == [[[n + 2], [n + 3]], [[n + 3], [n + 4]]]
    finally:
        for handle in handles:
            handle.remove()


def test_answering_leaves_the_memory_as_it_is(any_model: Model, full: Memory) -> None:
    before = [(layer.keys.clone(), layer.values.clone()) for layer in full.layers]
    first = behind(any_model, full, LONG)
    second = behind(any_model, full, LONG)
    assert torch.equal(first, second)
    for layer, (keys, values) in zip(full.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


def test_reset_forgets_the_question(any_model: Model, full: Memory) -> None:
    cache = full.cache()
    behind(any_model, full, LONG, cache)
    cache.reset()
    assert cache.get_seq_length() == full.document_length
    assert_close(behind(any_model, full, QUESTIONS[0], cache), expected(any_model, full, QUESTIONS[0]))


def test_reordering_selects_sequences(any_model: Model, full: Memory) -> None:
    cache = full.cache()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with torch.no_grad():
        any_model.forward(ids, cache)
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        logits = any_model.forward(torch.tensor([[20], [21], [22]]), cache).logits[:, 0]
    for row, question in zip(logits, ([8, 9, 10, 20], [8, 9, 10, 21], [5, 6, 7, 22]), strict=True):
        assert_close(row, expected(any_model, full, question)[-1])


def test_sequences_can_be_repeated_and_selected(any_model: Model, full: Memory) -> None:
    cache = full.cache()
    with torch.no_grad():
        any_model.forward(torch.tensor([[5, 6, 7], [8, 9, 10]]), cache)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
        logits = any_model.forward(torch.tensor([[20], [21]]), cache).logits[:, 0]
    assert_close(logits[0], expected(any_model, full, [5, 6, 7, 20])[-1])
    assert_close(logits[1], expected(any_model, full, [8, 9, 10, 21])[-1])


@pytest.mark.parametrize("operation", ["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
def test_operations_on_a_fresh_cache_change_nothing(any_model: Model, full: Memory, operation: str) -> None:
    """transformers may expand or reorder before the first token is run."""
    argument = 1 if operation == "batch_repeat_interleave" else torch.tensor([0])
    cache = full.cache()
    getattr(cache, operation)(argument)
    assert_close(behind(any_model, full, QUESTIONS[0], cache), expected(any_model, full, QUESTIONS[0]))


def test_lengths_and_kinds_of_layers(any_model: Model, full: Memory) -> None:
    cache = full.cache()
    assert len(cache.layers) == len(full.layers)
    assert cache.get_seq_length() == full.document_length
    kinds = {True: MemoryLayer, False: WindowLayer}
    for layer, attention in zip(cache.layers, any_model.layers, strict=True):
        assert type(layer) is kinds[attention.window is None]
        assert layer.get_seq_length() == full.document_length
    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            assert layer.get_mask_sizes(4) == (4, full.document_length)
