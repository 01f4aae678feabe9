"""Facts planted in essays."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.fact_kinds import KINDS, MOST_FACTS, Fact, make_facts
from ttmem.tasks.facts import Facts
from ttmem.tasks.haystack import essay_prose
from ttmem.tasks.sizing import count_tokens, example_random
from ttmem.tasks.task import Question
from ttmem.tasks.vocabulary import Names


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fact_answers_its_question(kind: Callable[[Names], Fact]) -> None:
    """The answer is in the sentence and not in the question, and the question names what the sentence is about."""
    for seed in range(20):
        fact = kind(Names(random.Random(seed)))
        assert fact.answers[0] in fact.sentence
        assert not any(answer in fact.question for answer in fact.answers)
        assert fact.sentence.endswith(".")
        assert fact.question.endswith("?")
        about = set(re.findall(r"\w+", fact.sentence)) - set(re.findall(r"\w+", fact.answers[0]))
        named = {word for word in about if word[0].isupper() and word not in ("The", "A")}
        assert named <= set(re.findall(r"\w+", fact.question))


def test_guessing_fails() -> None:
    """Every kind has many answers: the commonest of 300 drawn ones is rare."""
    for kind in KINDS:
        answers = [kind(Names(random.Random(seed))).answers[0] for seed in range(300)]
        assert max(answers.count(answer) for answer in set(answers)) < 30


@given(st.integers(1, MOST_FACTS), st.integers(0, 99))
def test_facts_differ_and_kinds_are_even(count: int, seed: int) -> None:
    facts = make_facts(random.Random(seed), count)
    assert len({fact.question for fact in facts}) == count
    assert len({fact.answers[0] for fact in facts}) == count


@given(st.integers(320, 1500), st.integers(0, 60), st.integers(1, 12))
def test_every_document_is_sound(length: int, index: int, questions: int) -> None:
    example = Facts(questions=questions).example(encode, length, index, seed=2)
    taken = count_tokens(encode, example)
    assert taken <= length
    assert taken > length - 130  # the longest sentence of the essays has 124 words
    assert len(example.questions) == questions
    prose = essay_prose(2 + index)
    assert example.document.count(prose.sentences[0]) == 1


def test_facts_are_planted_once_at_spread_depths_between_sentences() -> None:
    task = Facts()
    for index in range(8):
        example = task.example(encode, 1500, index, 0)
        facts = make_facts_of(index)
        assert [question.references for question in example.questions] == [fact.answers for fact in facts]
        for part, fact in enumerate(facts):
            assert example.document.count(fact.sentence) == 1
            place = example.document.index(fact.sentence)
            assert abs(place / len(example.document) - (part + 0.5) / 12) < 0.1


def make_facts_of(index: int) -> list[Fact]:
    """The facts of example `index` with seed 0: the first thing drawn for it."""
    return make_facts(example_random("facts", 0, index), 12)


def test_without_facts_the_essays_remain_in_paragraphs() -> None:
    text = " " + Facts().example(encode, 1000, 1, 0).document
    for fact in make_facts_of(1):
        text = text.replace(f" {fact.sentence}", "")
    assert "".join(essay_prose(1).pieces).strip().startswith(text.strip())
    assert text.count("\n\n") > 3


def test_other_indices_and_seeds_give_other_documents() -> None:
    documents = {Facts().example(encode, 500, index, seed).document for index in range(3) for seed in range(3)}
    assert len(documents) == 9


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TaskError, match="facts cannot be built with 200 tokens"):
        Facts().example(encode, 200, 0, 0)
    for questions in (0, MOST_FACTS + 1):
        with pytest.raises(TaskError, match="ask 1 to"):
            Facts(questions=questions)


def test_score() -> None:
    task = Facts()
    date = Question("", ("14 March", "March 14"), 24)
    assert task.score(" It was opened on march 14.", date) == 1
    assert task.score(" It was opened on March 1.", date) == 0
    assert task.score("In room 5120.", Question("", ("512",), 24)) == 0
