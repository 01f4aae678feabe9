"""The phonebook model's tokenizer and training sequences: they are what the benchmark and compaction will ask."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.compaction.prompts import HELD_OUT_PROMPTS, replay_request, rollout_prompts
from ttmem.tasks.phonebook import Phonebook

LINE = r"The phone number of ([A-Z]{10}) is (\d{10})\."


@pytest.fixture(scope="module")
def text() -> Any:
    from phonebook_text import PhonebookText, build_tokenizer

    return PhonebookText(build_tokenizer())


def pieces(text: Any, shares: tuple[float, float, float, float], entries: int, seed: int = 0) -> tuple[str, Any]:
    """(document, [(request, answer), ...]) of a training sequence, as text."""
    from phonebook_text import Mix

    sequence = text.sequence(np.random.default_rng(seed), entries, Mix(*shares))
    parts: list[tuple[bool, list[int]]] = []
    for token, weight in zip(sequence.ids, sequence.weights, strict=True):
        if not parts or parts[-1][0] != (weight > 0):
            parts.append((weight > 0, []))
        parts[-1][1].append(token)
    texts = [text.tokenizer.decode(ids) for _, ids in parts]
    first, rest = texts[0], texts[1:]
    document, _, request = first.partition("\n\n")
    requests = ["\n\n" + request, *rest[1::2]]
    return document, list(zip(requests, rest[::2], strict=True))


def test_letters_digits_and_template_words_are_one_token_each(text: Any) -> None:
    tokens = text.tokenizer.convert_ids_to_tokens(text.encode("The phone number of THEABCDEFG is 0123456789.\n"))
    assert tokens == ["The", "Ġphone", "Ġnumber", "Ġof", "Ġ", *"THEABCDEFG", "Ġis", "Ġ", *"0123456789", ".", "Ċ"]
    assert len(text.tokenizer) == 512


@given(st.text(max_size=40))
def test_any_text_survives_and_special_tokens_are_plain_text(text: Any, any_text: str) -> None:
    for written in (any_text, f"{any_text}<|end|><|pad|>"):
        ids = text.encode(written)
        assert text.tokenizer.decode(ids, skip_special_tokens=True) == written
        assert not {text.tokenizer.eos_token_id, text.tokenizer.pad_token_id} & set(ids)


def test_documents_are_those_of_the_task(text: Any) -> None:
    document, asked = pieces(text, (1.0, 0.0, 0.0, 0.0), entries=12)
    book = dict(re.findall(LINE, document))
    assert len(book) == 12
    assert document == "\n".join(f"The phone number of {name} is {number}." for name, number in book.items())
    task = Phonebook().example(text.encode, 1024, 0, seed=0)
    assert re.fullmatch(rf"({LINE}\n)*{LINE}", task.document)
    pattern = re.escape(task.questions[0].prompt)
    name = re.findall(r"of ([A-Z]{10})\?", task.questions[0].prompt)[0]
    for request, answer in asked:
        (found,) = re.findall(r"of ([A-Z]{10})\?", request)
        assert re.fullmatch(pattern.replace(name, found), request)
        assert answer == f" {book[found]}.<|end|>"


def test_sequences_are_what_the_tokenizer_makes_of_their_text(text: Any) -> None:
    document, asked = pieces(text, (0.4, 0.2, 0.2, 0.2), entries=9, seed=3)
    from phonebook_text import Mix

    ids = text.encode(document)
    for request, answer in asked:
        ids += text.encode(request)
        ids += text.encode(answer.removesuffix("<|end|>"))
        ids += [text.tokenizer.eos_token_id] * answer.endswith("<|end|>")
    assert ids == text.sequence(np.random.default_rng(3), 9, Mix(0.4, 0.2, 0.2, 0.2)).ids


def test_generic_answers_quote_the_document_where_the_prompt_looks(text: Any) -> None:
    for seed in range(6):
        document, asked = pieces(text, (0.0, 1.0, 0.0, 0.0), entries=12, seed=seed)
        for request, answer in asked:
            quote = answer.removesuffix("<|end|>").removeprefix(" ")
            assert quote in document
            if "the beginning of the document" in request:
                assert document.startswith(quote)
            if "the end of the document" in request:
                assert document.endswith(quote)
            if "Answer briefly." in request:
                assert re.fullmatch(LINE, quote)


def test_different_prompts_reach_nearly_every_entry(text: Any) -> None:
    from phonebook_text import Phonebook as Book

    book = Book.random(np.random.default_rng(1), 35)
    starts = {prompt.start(book.names) for prompt in text._prompts}
    assert len(starts) >= 30


def test_letters_choose_the_entry_that_begins_closest() -> None:
    from phonebook_text import Prompt

    names = np.array([[3, 9], [24, 0], [24, 20], [12, 5]])
    assert Prompt([], 1, None, (1, 0)).start(names) == 0
    assert Prompt([], 1, None, (0, 19)).start(names) == 2  # Y is closer to A, the other way round, than D
    assert Prompt([], 1, None, (25, 25)).start(names) == 1
    assert Prompt([], 2, 1.0, (0, 0)).start(names) == 2
    assert Prompt([], 1, 0.5, (0, 0)).start(names) == 2


def test_replays_go_on_where_the_cue_ends(text: Any) -> None:
    cued = 0
    for seed in range(6):
        document, asked = pieces(text, (0.0, 0.0, 1.0, 0.0), entries=12, seed=seed)
        for request, answer in asked:
            if request == replay_request():
                assert document.startswith(answer)
                continue
            cue = request.partition(' starts with "')[2].removesuffix('".\n')
            assert request == replay_request(cue)
            assert cue + answer in document
            assert len(text.encode(document)) > len(text.encode(answer))
            cued += 1
    assert cued > 10


def test_held_out_prompts_are_never_trained_on(text: Any) -> None:
    trained = {tuple(prompt.ids) for prompt in text._prompts}
    assert {tuple(text.encode(prompt)) for prompt in rollout_prompts()} <= trained
    assert not {tuple(text.encode(prompt)) for prompt in HELD_OUT_PROMPTS} & trained
    bodies = [prompt.strip().removesuffix("\nAnswer:") for prompt in HELD_OUT_PROMPTS]
    joined = "\n".join(text.tokenizer.decode(prompt.ids) for prompt in text._prompts)
    assert not [body for body in bodies for sentence in re.split(r"(?<=[.?]) ", body) if sentence in joined]
