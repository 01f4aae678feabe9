"""`model.generate` behind a full memory gives what it gives with the document in its input, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ttmem import Memory, MemoryMismatchError, Model
from ttmem.models.layers import cache_keyword

QUESTION = [40, 77, 12, 260, 9]
GREEDY = {"do_sample": False, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def full(any_model: Model, make_full: Any) -> Memory:
    memory: Memory = make_full(any_model)
    return memory


def from_context(model: Model, memory: Memory, question: list[int], **options: Any) -> list[list[int]]:
    """New tokens of a plain generation with the document's ids in the input."""
    assert memory.tokens is not None
    ids = torch.tensor([memory.tokens.tolist() + question])
    output = model.network.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return [row[ids.shape[1] :] for row in output.tolist()]


def behind(model: Model, memory: Memory, question: list[int], cache: Any = None, **options: Any) -> list[list[int]]:
    cache = memory.cache() if cache is None else cache
    inputs = memory.inputs(torch.tensor(question), cache=cache)
    output = model.network.generate(**inputs, **{cache_keyword(model.network): cache}, **options)
    return [row[len(question) :] for row in output.tolist()]


@pytest.mark.parametrize("length", [1, 5, 20])
def test_greedy_text_is_the_same(any_model: Model, full: Memory, length: int) -> None:
    question = [(29 * i + 40) % 250 for i in range(length)]
    found = behind(any_model, full, question, **GREEDY)
    assert found == from_context(any_model, full, question, **GREEDY)
    assert len(found[0]) > 1


def test_the_question_may_hold_the_whole_document(any_model: Model, full: Memory) -> None:
    """transformers cuts off what is cached already."""
    assert full.tokens is not None
    ids = torch.cat([full.tokens, torch.tensor(QUESTION)]).unsqueeze(0)
    options = {cache_keyword(any_model.network): full.cache(), **GREEDY}
    output = any_model.network.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert output[:, ids.shape[1] :].tolist() == from_context(any_model, full, QUESTION, **GREEDY)


@pytest.mark.parametrize("document", [[9, 8, 7, 6, 5], [(7 * i + 3) % 250 for i in range(15)]])
def test_a_document_shorter_than_the_window(any_model: Model, make_full: Any, document: list[int]) -> None:
    memory = make_full(any_model, document)
    options = {"do_sample": False, "max_new_tokens": 20}
    assert behind(any_model, memory, QUESTION, **options) == from_context(any_model, memory, QUESTION, **options)


def test_left_padded_questions_equal_single_ones(any_model: Model, full: Memory) -> None:
    questions = [QUESTION, [3, 91], [11, 12, 13, 14, 15, 16, 17, 18]]
    ids = torch.tensor([[0] * (8 - len(q)) + q for q in questions])
    mask = torch.tensor([[0] * (8 - len(q)) + [1] * len(q) for q in questions])
    options = {cache_keyword(any_model.network): full.cache(), **GREEDY}
    output = any_model.network.generate(**full.inputs(ids, mask), **options)
    for row, question in zip(output[:, 8:].tolist(), questions, strict=True):
        single = from_context(any_model, full, question, **GREEDY)[0]
        assert row[: len(single)] == single


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "top_p": 0.8, "temperature": 0.7}])
def test_sampling_with_a_seed_is_the_same(any_model: Model, full: Memory, options: dict[str, Any]) -> None:
    options = {"do_sample": True, "max_new_tokens": 12, **options}
    torch.manual_seed(7)
    found = behind(any_model, full, QUESTION, **options)
    torch.manual_seed(7)
    assert found == from_context(any_model, full, QUESTION, **options)


def test_a_repetition_penalty_counts_the_document_where_the_input_holds_it(model: Model, make_full: Any) -> None:
    memory = make_full(model)
    options: dict[str, Any] = {"repetition_penalty": 1.3, **GREEDY}
    ids = torch.cat([memory.tokens, torch.tensor(QUESTION)]).unsqueeze(0)
    cache = {cache_keyword(model.network): memory.cache()}
    output = model.network.generate(ids, attention_mask=torch.ones_like(ids), **cache, **options)
    assert output[:, ids.shape[1] :].tolist() == from_context(model, memory, QUESTION, **options)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_past_key_values_is_the_name_that_every_release_takes(model: Model, make_full: Any) -> None:
    memory = make_full(model)
    inputs = memory.inputs(torch.tensor(QUESTION))
    output = model.network.generate(**inputs, past_key_values=memory.cache(), **GREEDY)
    assert output[:, len(QUESTION) :].tolist() == from_context(model, memory, QUESTION, **GREEDY)


@pytest.mark.parametrize("sampled", [True, False])
def test_several_sequences_of_one_question(any_model: Model, full: Memory, sampled: bool) -> None:
    options: dict[str, Any] = {"do_sample": sampled, "num_beams": 1 if sampled else 3, "num_return_sequences": 3}
    torch.manual_seed(3)
    found = behind(any_model, full, QUESTION, max_new_tokens=8, **options)
    torch.manual_seed(3)
    assert found == from_context(any_model, full, QUESTION, max_new_tokens=8, **options)
    assert len({tuple(row) for row in found}) > 1


def test_beam_search_is_the_same(any_model: Model, full: Memory) -> None:
    options = {"do_sample": False, "num_beams": 2, "max_new_tokens": 10}
    assert behind(any_model, full, QUESTION, **options) == from_context(any_model, full, QUESTION, **options)


def test_a_streamer_gets_every_token(model: Model, make_full: Any, capsys: pytest.CaptureFixture[str]) -> None:
    memory = make_full(model)
    streamer = TextStreamer(model.tokenizer, skip_prompt=True)
    found = behind(model, memory, QUESTION, streamer=streamer, **GREEDY)
    assert capsys.readouterr().out.strip() == model.tokenizer.decode(found[0]).strip()


def test_answering_twice_is_the_same(any_model: Model, full: Memory) -> None:
    before: list[Tensor] = [tensor.clone() for layer in full.layers for tensor in (layer.keys, layer.values)]
    assert behind(any_model, full, QUESTION, **GREEDY) == behind(any_model, full, QUESTION, **GREEDY)
    after = [tensor for layer in full.layers for tensor in (layer.keys, layer.values)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_conversation_goes_on_in_its_cache(any_model: Model, full: Memory) -> None:
    options = {"do_sample": False, "max_new_tokens": 6}
    cache = full.cache()
    first = behind(any_model, full, QUESTION, cache, **options)[0]
    assert cache.get_seq_length() == full.document_length + len(QUESTION) + len(first) - 1
    more = [first[-1], 50, 51, 52]  # the last token of an answer has not been run yet
    second = behind(any_model, full, more, cache, **options)
    assert second == from_context(any_model, full, QUESTION + first[:-1] + more, **options)


def test_going_back_in_a_conversation(model: Model, make_full: Any) -> None:
    memory, cache = make_full(model), None
    cache = memory.cache()
    first = behind(model, memory, QUESTION, cache, **GREEDY)[0]
    cache.crop(-(len(first) - 1))
    assert cache.get_seq_length() == memory.document_length + len(QUESTION)
    found = behind(model, memory, [8, 9], cache, **GREEDY)
    assert found == from_context(model, memory, [*QUESTION, 8, 9], **GREEDY)
    with pytest.raises(MemoryMismatchError, match="cannot remove"):
        cache.crop(-200)


def test_one_memory_serves_models_side_by_side(any_model: Model, full: Memory) -> None:
    """Two caches of one memory do not disturb each other."""
    one, other = full.cache(), full.cache()
    a = behind(any_model, full, QUESTION, one, **GREEDY)
    b = behind(any_model, full, [3, 91], other, **GREEDY)
    assert a == from_context(any_model, full, QUESTION, **GREEDY)
    assert b == from_context(any_model, full, [3, 91], **GREEDY)


def test_neither_the_model_nor_transformers_is_patched(any_model: Model, full: Memory) -> None:
    attention = dict(ALL_ATTENTION_FUNCTIONS)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    forwards = {type(m): type(m).forward for m in any_model.network.modules()}
    behind(any_model, full, QUESTION, **GREEDY)
    assert dict(ALL_ATTENTION_FUNCTIONS) == attention
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    for module in any_model.network.modules():
        assert type(module).forward is forwards[type(module)]
        assert "forward" not in vars(module)
        assert type(module).__module__.split(".")[0] in ("torch", "transformers")
