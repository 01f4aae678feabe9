"""Phonebook Lookup."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.phonebook import Phonebook
from ttmem.tasks.sizing import count_tokens

LINE = re.compile(r"The phone number of ([A-Z]{10}) is ([0-9]{10})\.")


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def test_a_known_phonebook() -> None:
    example = Phonebook(questions=2).example(encode, 60, index=0, seed=0)
    assert example.document.splitlines() == [
        "The phone number of HBDZAEKBDE is 8939357903.",
        "The phone number of FBFTZTSKVV is 1637941150.",
        "The phone number of VIXUNRGZUM is 5042358177.",
    ]
    question = example.questions[0]
    assert question.prompt == "\n\nQuestion: What is the phone number of FBFTZTSKVV?\nAnswer:"
    assert question.references == ("1637941150",)


@given(st.integers(42, 900), st.integers(0, 30), st.integers(1, 30))
def test_every_phonebook_is_sound(length: int, index: int, questions: int) -> None:
    example = Phonebook(questions=questions).example(encode, length, index, seed=1)
    taken = count_tokens(encode, example)
    assert taken <= length < taken + 8
    entries = [LINE.fullmatch(line).groups() for line in example.document.split("\n")]
    book = dict(entries)
    assert len(book) == len(entries) == len(set(book.values()))
    asked = [re.search(r"of (\w+)\?", question.prompt).group(1) for question in example.questions]
    assert len(set(asked)) == len(asked) == min(questions, len(entries))
    assert [question.references for question in example.questions] == [(book[name],) for name in asked]


def test_questions_are_spread_over_the_book() -> None:
    example = Phonebook().example(encode, 3000, 0, 0)
    depths = [example.document.index(question.references[0]) / len(example.document) for question in example.questions]
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_a_longer_book_begins_like_a_shorter_one() -> None:
    short, long = (Phonebook().example(encode, length, 3, 5).document for length in (200, 400))
    assert long.startswith(short + "\n")


def test_no_room_for_a_line() -> None:
    with pytest.raises(TaskError, match=r"cannot be built with 39 tokens: its shortest example takes 40"):
        Phonebook().example(encode, 39, 0, 0)
    assert Phonebook().example(encode, 40, 0, 0).document.count("\n") == 0


@pytest.mark.parametrize("questions", [0, -1])
def test_no_questions(questions: int) -> None:
    with pytest.raises(TaskError, match="at least one"):
        Phonebook(questions=questions)


def test_score() -> None:
    task = Phonebook()
    question = task.example(encode, 60, 0, 0).questions[0]
    number = question.references[0]
    assert task.score(f" The number is {number}.\n", question) == 1
    assert task.score(f" {number[:-1]}", question) == 0
    assert task.score("", question) == 0
