"""The search for how much haystack fits: it ends, never exceeds, and stops only where one unit more would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.sizing import check_request, count_tokens, example_random, fit_example, largest_fit
from ttmem.tasks.task import Example, Question


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def words(number: int) -> Example:
    """`number` words of document, questions of 2 + 3 and 1 + 7 tokens."""
    return Example("word " * number, (Question("a b", ("x",), 3), Question("a", ("x",), 7)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=80), st.integers(0, 300))
def test_the_largest_fit_is_that_of_a_plain_search(steps: list[int], limit: int) -> None:
    costs = [sum(steps[: number + 1]) for number in range(len(steps))]
    fitting = [number for number, cost in enumerate(costs) if cost <= limit]
    assert largest_fit(costs.__getitem__, limit, 0, len(steps) - 1) == (max(fitting) if fitting else None)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60), st.integers(0, 50))
def test_it_ends_for_costs_that_rise_and_fall(costs: list[int], limit: int) -> None:
    found = largest_fit(costs.__getitem__, limit, 0, len(costs) - 1)
    if found is None:
        assert costs[0] > limit
    else:
        assert costs[found] <= limit
        assert found == len(costs) - 1 or costs[found + 1] > limit


@pytest.mark.parametrize(
    "cost",
    [lambda n: 30 * n + 40, lambda n: n + 200, lambda n: 0, lambda n: int(n**0.5), lambda n: 10 if n < 300 else 10**6],
)
@pytest.mark.parametrize("limit", [500, 131_072])
def test_a_few_steps_are_enough(cost: Callable[[int], int], limit: int) -> None:
    steps: list[int] = []
    largest_fit(lambda n: steps.append(n) or cost(n), limit, 1, 16 * limit)
    assert len(steps) < 30
    assert len(set(steps)) == len(steps)


def test_only_the_longest_question_takes_room() -> None:
    assert count_tokens(encode, words(5)) == 5 + 1 + 7


def test_the_longest_example_that_fits() -> None:
    example = fit_example("t", words, encode, 100, least=1)
    assert example == words(92)


def test_too_short_a_length_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(TaskError, match=r"t cannot be built with 17 tokens: its shortest example takes 18"):
        fit_example("t", words, encode, 17, least=10)
    assert fit_example("t", words, encode, 18, least=10) == words(10)


def test_a_haystack_that_ends_too_early_is_refused() -> None:
    with pytest.raises(TaskError, match=r"its haystack ends at 58"):
        fit_example("t", words, encode, 100, least=1, most=50)
    assert fit_example("t", words, encode, 60, least=1, most=50) == words(50)


def test_an_encoder_that_counts_nothing_is_refused() -> None:
    with pytest.raises(TaskError, match="ends at 7"):
        fit_example("t", words, lambda text: [], 100, least=1)


@pytest.mark.parametrize(("length", "index"), [(0, 0), (-5, 0), (10, -1)])
def test_lengths_and_indices_that_make_no_sense(length: int, index: int) -> None:
    with pytest.raises(TaskError):
        check_request("t", length, index)


def test_random_numbers_depend_on_their_arguments_alone() -> None:
    draws = [example_random(*key).random() for key in (("a", 0, 0), ("a", 0, 1), ("a", 1, 0), ("b", 0, 0))]
    assert len(set(draws)) == 4
    assert draws[0] == example_random("a", 0, 0).random()
