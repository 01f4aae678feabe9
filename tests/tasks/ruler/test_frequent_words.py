"""RULER's counting tasks."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.corpora import all_words
from ttmem.tasks.ruler.frequent_words import CommonWords, FrequentWords
from ttmem.tasks.sizing import count_tokens

COMMON, FREQUENT = CommonWords(), FrequentWords()


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def listed(text: str) -> list[str]:
    """The words of a numbered list, after checking its numbers."""
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@given(st.integers(500, 9000), st.integers(0, 40))
def test_common_words(length: int, index: int) -> None:
    example = COMMON.example(encode, length, index, seed=1)
    taken = count_tokens(encode, example)
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    assert taken <= length < taken + 6 * 2 * seldom
    (question,) = example.questions
    worked, text = example.document.removeprefix("Below is a").split("\nBelow is a")
    counts = Counter(listed(text.split("\n")[1]))
    common = {word for word, count in counts.items() if count == often}
    assert set(question.references) == common
    assert len(question.references) == 10
    assert set(counts.values()) == {often, seldom}
    assert set(counts) <= set(all_words())
    assert question.prompt.endswith("Answer: The top 10 words that appear most often in the list are:")
    assert question.max_new_tokens == 120

    worked_list, answer = worked.split("\n")[1:]
    worked_counts = Counter(listed(worked_list))
    worked_often, worked_seldom, distinct = (10, 3, 40) if length >= 4096 else (3, 1, 20)
    assert len(worked_counts) == distinct
    assert set(worked_counts.values()) == {worked_often, worked_seldom}
    assert {word for word, count in worked_counts.items() if count == worked_often} == set(
        listed(answer.split("are: ")[1])
    )


def test_common_words_run_out() -> None:
    with pytest.raises(TaskError, match="its haystack ends at"):
        COMMON.example(encode, 100_000, 0, 0)


@given(st.integers(300, 9000), st.integers(0, 40))
def test_frequent_words(length: int, index: int) -> None:
    example = FREQUENT.example(encode, length, index, seed=1)
    taken = count_tokens(encode, example)
    assert taken <= length < taken + 16  # the counts of many ranks can rise at once
    (question,) = example.questions
    head, text = example.document.split("most frequently appeared coded words. ")
    assert head.startswith("Read the following coded text")
    counts = Counter(text.split())
    (dots, dot_count), *ranked = counts.most_common()
    assert dots == "..."
    assert question.references == tuple(word for word, _ in ranked[:3])
    assert ranked[2][1] > ranked[3][1]
    assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked)
    assert len(ranked) <= max((length - 50) // 50 - 1, 4)
    for rank, (_, count) in enumerate(ranked, start=2):
        assert abs(count - dot_count / rank**2) < 1.1
    assert question.max_new_tokens == 50


def test_short_texts_are_refused() -> None:
    for task in (COMMON, FREQUENT):
        with pytest.raises(TaskError, match="its shortest example takes") as refused:
            task.example(encode, 150, 0, 0)
        smallest = int(str(refused.value).rsplit(" ", 1)[1])
        assert count_tokens(encode, task.example(encode, smallest, 0, 0)) == smallest


def test_scores() -> None:
    (question,) = COMMON.example(encode, 700, 0, 0).questions
    assert COMMON.score(" ".join(question.references), question) == 1
    (question,) = FREQUENT.example(encode, 700, 0, 0).questions
    assert FREQUENT.score(f"1. {question.references[2]}", question) == pytest.approx(1 / 3)
