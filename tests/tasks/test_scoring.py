"""Scores that several tasks share."""

from __future__ import annotations

from ttmem.tasks.scoring import any_as_words, any_contained, share_contained, stands_in


def test_share_of_references() -> None:
    assert share_contained("It is Alpha and 12345.", ("alpha", "2345", "gamma", "delta")) == 0.5
    assert share_contained("", ("x",)) == 0
    assert share_contained("x", ("X",)) == 1


def test_any_reference() -> None:
    assert any_contained("the Eiffel Tower", ("tower bridge", "eiffel")) == 1
    assert any_contained("the Eiffel Tower", ("London",)) == 0


def test_whole_words() -> None:
    assert any_as_words("It has 120 books", ("12",)) == 0
    assert any_as_words("It has 12 books", ("12",)) == 1
    assert any_as_words("On june 5.", ("5 June", "June 5")) == 1
    assert any_as_words("a tealight", ("teal",)) == 0
    assert stands_in("C++", "I like c++.")
    assert not stands_in("one", "none")
