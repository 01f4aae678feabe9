"""Invented names."""

from __future__ import annotations

import datetime
import random

import pytest

from ttmem.errors import TaskError
from ttmem.tasks.vocabulary import FIRST_NAMES, LAST_NAMES, PLACE_ENDS, PLACE_STARTS, Names


def test_lists_hold_nothing_twice() -> None:
    for names in (FIRST_NAMES, LAST_NAMES, PLACE_STARTS, PLACE_ENDS):
        assert len(set(names)) == len(names)


def test_thousands_of_names_without_a_repeat() -> None:
    names = Names(random.Random(0))
    people = [names.person() for _ in range(5000)]
    places = [names.place() for _ in range(5000)]
    assert len({*people, *places}) == 10_000
    assert all(place.isalpha() and place.istitle() for place in places)


def test_dates_exist_and_stand_in_both_orders() -> None:
    names = Names(random.Random(0))
    for _ in range(300):
        date, turned = names.date()
        day, month = date.split()
        assert turned == f"{month} {day}"
        datetime.datetime.strptime(f"{date} 2023", "%d %B %Y")


def test_a_vocabulary_that_is_used_up() -> None:
    names = Names(random.Random(0))
    assert {names.number(1, 3) for _ in range(3)} == {"1", "2", "3"}
    with pytest.raises(TaskError, match="used up"):
        names.number(1, 3)
