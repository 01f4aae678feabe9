"""Prose without end, and needles planted in it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.tasks.corpora import long_essays
from ttmem.tasks.haystack import Prose, essay_prose, plant, spread_depths

PROSE = Prose(("a b c.", "d.", "e f."), ("\n\na b c.", " d.", "\n\ne f."), (0, 3, 4, 6))


@given(st.integers(0, 40))
def test_the_first_words_are_those_of_the_repeated_text(count: int) -> None:
    sentences = PROSE.first_words(count)
    assert " ".join(sentences).split() == ("a b c. d. e f. " * 7).split()[:count]
    assert [sentence for sentence in sentences if not sentence] == []


def test_the_last_sentence_is_cut_and_the_others_are_whole() -> None:
    assert PROSE.first_words(8) == ["a b c.", "d.", "e f.", "a b"]


@given(st.integers(0, 12))
def test_pieces_are_sentences_with_their_breaks(count: int) -> None:
    pieces = PROSE.first_pieces(count)
    assert len(pieces) == count
    assert "".join(pieces) == ("\n\na b c. d.\n\ne f." * 4)[: sum(map(len, pieces))]


def test_every_number_begins_with_another_essay() -> None:
    beginnings = [essay_prose(number).sentences[0] for number in range(len(long_essays()))]
    assert len(set(beginnings)) == len(beginnings)
    assert essay_prose(3) == essay_prose(3 + len(long_essays()))
    assert sorted(essay_prose(5).sentences) == sorted(essay_prose(6).sentences)


@given(st.lists(st.integers(0, 9), max_size=6).map(sorted))
def test_planted_needles_stand_before_their_sentences(gaps: list[int]) -> None:
    sentences = [f"s{number}" for number in range(9)]
    planted = plant(sentences, [f"n{number}" for number in range(len(gaps))], gaps)
    assert [text for text in planted if text[0] == "s"] == sentences
    for number, gap in enumerate(gaps):
        before = planted[: planted.index(f"n{number}")]
        assert sum(text[0] == "s" for text in before) == gap


def test_a_needle_without_a_gap_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        plant(["s"], ["n", "m"], [0])


@given(st.integers(1, 40), st.integers(0, 99))
def test_depths_are_spread(count: int, seed: int) -> None:
    depths = spread_depths(random.Random(seed), count)
    assert [int(depth * count + 1e-9) for depth in depths] == list(range(count))
