"""Asking and streaming: the model's own answers, batched or alone, whole or in pieces."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ttmem import Memory, MemoryMismatchError, Model, ask, stream
from ttmem.generation import QUESTION_FORMAT, cut_at_end, first_line, greedy_answers, stream_tokens, until_line_end

QUESTIONS = ["Who?", "When does the ferry to Lerwick leave on Fridays?", "What is {not} a <|im_end|> field?"]


@pytest.fixture(scope="module")
def full(any_model: Model, make_full: Any) -> Memory:
    memory: Memory = make_full(any_model)
    return memory


def plain_answer(model: Model, memory: Memory, question: str, tokens: int = 8) -> list[int]:
    """Token ids of a plain generation with the document in the input."""
    assert memory.tokens is not None
    text = QUESTION_FORMAT.replace("{question}", question)
    ids = torch.tensor([memory.tokens.tolist() + model.encode(text)])
    output = model.network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return list(output[0, ids.shape[1] :].tolist())


def test_one_question_is_answered_as_with_the_whole_context(any_model: Model, full: Memory) -> None:
    for question in QUESTIONS:
        expected = first_line(any_model.decode(plain_answer(any_model, full, question)))
        assert ask(any_model, full, question, max_new_tokens=8) == [expected]
        assert ask(any_model, full, [question], max_new_tokens=8) == [expected]


def test_many_questions_are_answered_as_each(any_model: Model, full: Memory) -> None:
    prompts = [any_model.encode(QUESTION_FORMAT.format(question=question)) for question in QUESTIONS]
    expected = [plain_answer(any_model, full, question) for question in QUESTIONS]
    assert greedy_answers(any_model, full, prompts, 8) == expected
    each = [ask(any_model, full, question, max_new_tokens=8)[0] for question in QUESTIONS]
    assert ask(any_model, full, QUESTIONS, max_new_tokens=8) == each


def test_no_questions_no_answers(model: Model, make_full: Any) -> None:
    assert ask(model, make_full(model), []) == []


def test_an_answer_that_ends_early_in_a_batch(make_network: Any, tokenizer: Any, make_full: Any) -> None:
    network = make_network("llama")
    memory = make_full(Model(network, tokenizer))
    answers = [plain_answer(Model(network, tokenizer), memory, question) for question in QUESTIONS]
    network.generation_config.eos_token_id = [answers[0][1]]
    model = Model(network, tokenizer)
    prompts = [model.encode(QUESTION_FORMAT.format(question=question)) for question in QUESTIONS]
    found = greedy_answers(model, memory, prompts, 8)
    assert found == [plain_answer(model, memory, question) for question in QUESTIONS]
    assert len(found[0]) <= 2 < max(map(len, found))


def test_options_go_to_generate(model: Model, make_full: Any) -> None:
    memory = make_full(model)
    torch.manual_seed(0)
    sampled = ask(model, memory, QUESTIONS[1], do_sample=True, temperature=1.5, max_new_tokens=12)
    torch.manual_seed(0)
    assert ask(model, memory, QUESTIONS[1], do_sample=True, temperature=1.5, max_new_tokens=12) == sampled
    assert sampled != ask(model, memory, QUESTIONS[1], max_new_tokens=12)
    other = ask(model, memory, "Who?", question_format="{question} Say:", max_new_tokens=12)
    assert other != ask(model, memory, "Who?", max_new_tokens=12)


def test_beams_answer_as_many_questions_as_were_asked(model: Model, make_full: Any) -> None:
    memory = make_full(model)
    assert len(ask(model, memory, QUESTIONS, num_beams=2, max_new_tokens=4)) == 3


def test_a_models_sampling_defaults_do_not_disturb_greedy_answers(
    make_network: Any, tokenizer: Any, make_full: Any, caplog: pytest.LogCaptureFixture
) -> None:
    network = make_network("llama")
    model = Model(network, tokenizer)
    memory = make_full(model)
    expected = ask(model, memory, "Who?", max_new_tokens=6)
    network.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, top_k=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert ask(model, memory, "Who?", max_new_tokens=6) == expected
    assert caplog.records == []


def test_a_memory_of_another_model_is_refused(make_network: Any, tokenizer: Any, model: Model, make_full: Any) -> None:
    other = Model(make_network("llama", seed=1), tokenizer)
    with pytest.raises(MemoryMismatchError):
        ask(other, make_full(model), "Who?")
    with pytest.raises(MemoryMismatchError):
        list(stream(other, make_full(model), "Who?"))


def test_a_stream_is_the_answer_in_pieces(any_model: Model, full: Memory) -> None:
    for question in QUESTIONS:
        pieces = list(stream(any_model, full, question, max_new_tokens=16))
        assert "".join(pieces).strip() == ask(any_model, full, question, max_new_tokens=16)[0]


def test_streamed_tokens_are_returned(model: Model, make_full: Any) -> None:
    memory = make_full(model)

    returned: list[list[int]] = []

    def consume() -> Generator[str, None, None]:
        returned.append((yield from stream_tokens(model, memory, model.encode("Who?"), 8)))

    pieces = list(consume())
    assert returned == greedy_answers(model, memory, [model.encode("Who?")], 8)
    assert "".join(pieces) == model.decode(returned[0])


def test_an_error_in_the_thread_is_raised_here(model: Model, make_full: Any) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        list(stream(model, make_full(model), "Who?", max_new_tokens=4, num_beams=2))
    assert only_this_thread()


def test_an_error_after_some_pieces_is_raised_after_them(model: Model, make_full: Any) -> None:
    memory, calls = make_full(model), []

    def fail_later(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("out of luck")

    handle = model.network.register_forward_pre_hook(fail_later)
    try:
        with pytest.raises(RuntimeError, match="out of luck"):
            list(stream_tokens(model, memory, model.encode("Who?"), 20))
    finally:
        handle.remove()
    assert only_this_thread()


def test_closing_a_stream_stops_the_generation(model: Model, make_full: Any) -> None:
    steps: list[int] = []
    handle = model.network.register_forward_pre_hook(lambda *_: steps.append(1))
    try:
        pieces = stream_tokens(model, make_full(model), model.encode("Who?"), 1500)
        next(pieces)
        pieces.close()
    finally:
        handle.remove()
    assert only_this_thread()
    assert len(steps) < 1000


def only_this_thread() -> bool:
    return threading.active_count() == 1 or all(
        not thread.name.startswith("Thread-") for thread in threading.enumerate()
    )


def pieces_of(text: str, cuts: list[int]) -> Generator[str, None, None]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(bounds):
        yield text[start:end]


@given(text=st.text(alphabet="ab \t\n", max_size=20), cuts=st.lists(st.integers(0, 30), max_size=6))
def test_a_line_in_pieces_is_the_line(text: str, cuts: list[int]) -> None:
    assert "".join(until_line_end(pieces_of(text, cuts))).rstrip() == first_line(text)


@pytest.mark.parametrize("line_break", ["\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"])
def test_every_line_break_ends_a_stream_as_it_ends_an_answer(line_break: str) -> None:
    text = f" one{line_break}two\nthree"
    assert "".join(until_line_end(pieces_of(text, [2, 3, 5]))).rstrip() == first_line(text)


def test_nothing_more_is_read_after_the_line() -> None:
    read: list[str] = []

    def pieces() -> Generator[str, None, None]:
        for piece in (" ", "\n", "one", " two\nth", "ree", "four"):
            read.append(piece)
            yield piece

    assert list(until_line_end(pieces())) == ["one", " two"]
    assert read == [" ", "\n", "one", " two\nth"]


def test_first_line() -> None:
    assert first_line("") == first_line(" \n\t\n ") == ""
    assert first_line("\n  one \n two") == "one"


def test_cutting_at_the_first_end_token() -> None:
    assert cut_at_end([5, 6, 7, 6], frozenset({6, 9})) == [5, 6]
    assert cut_at_end([5, 6], frozenset({9})) == [5, 6]
    assert cut_at_end([5, 6], frozenset()) == [5, 6]
    assert cut_at_end([], frozenset({1})) == []
