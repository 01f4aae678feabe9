"""How much haystack fits a wanted number of tokens: a search that encodes little and always ends."""

from __future__ import annotations

import random
from collections.abc import Callable

from ttmem.errors import TaskError
from ttmem.tasks.task import Encode, Example

LEAST_FILLED = 0.9
"""A haystack that runs out must have filled at least this share of the wanted length."""
MOST_UNITS_PER_TOKEN = 16
"""Where a haystack has no end of its own, the search stops at this many units per wanted token."""


def example_random(name: str, seed: int, index: int) -> random.Random:
    """The random numbers of one example: they depend on these arguments alone, not on the process or its history."""
    return random.Random(f"{name}/{seed}/{index}")


def check_request(name: str, length: int, index: int) -> None:
    """Raises TaskError for a length or an index that no example can have."""
    if length < 1:
        raise TaskError(f"{name}: a length of {length} tokens is not positive")
    if index < 0:
        raise TaskError(f"{name}: examples are counted from 0, and {index} was asked for")


def count_tokens(encode: Encode, example: Example) -> int:
    """Tokens of the document, of the longest question behind it, and of that question's answer.

    Questions are asked one by one behind the same document, so only the longest of them takes room.
    """
    questions = max(len(encode(question.prompt)) + question.max_new_tokens for question in example.questions)
    return len(encode(example.document)) + questions


def fit_example(
    name: str, build: Callable[[int], Example], encode: Encode, length: int, least: int, most: int | None = None
) -> Example:
    """The example with as much haystack as `length` tokens allow.

    build: units of haystack -> example, the same for the same number. least, most: the units it can be built with.
    Raises TaskError when `least` units already take more than `length` (with the smallest length that works), and
    when `most` units leave more than a tenth of it empty.
    """
    end = MOST_UNITS_PER_TOKEN * length + least if most is None else most
    units = largest_fit(lambda number: count_tokens(encode, build(number)), length, least, end)
    if units is None:
        shortest = count_tokens(encode, build(least))
        raise TaskError(f"{name} cannot be built with {length:,} tokens: its shortest example takes {shortest:,}")
    example = build(units)
    if units == end and (longest := count_tokens(encode, example)) < LEAST_FILLED * length:
        raise TaskError(f"{name} cannot be built with {length:,} tokens: its haystack ends at {longest:,}")
    return example


def largest_fit(cost: Callable[[int], int], limit: int, least: int, most: int) -> int | None:
    """An n in [least, most] with cost(n) <= limit < cost(n + 1), or `most` where that fits; None if `least` does not.

    Steps of Newton's kind from the nearer end of a bracket, every third one a bisection, so it ends for any cost and
    takes a handful of steps for one that grows evenly. Where the cost dips now and then, as token counts do, there may
    be a fitting n a little above.
    """
    low, low_cost = least, cost(least)
    if low_cost > limit:
        return None
    high, high_cost = most + 1, limit  # of this end no cost is known, and none is needed
    per_unit = 0.0
    step = 0
    while high - low > 1:
        step += 1
        if step % 3 == 0 and high_cost > limit:
            guess = (low + high) // 2
        elif not per_unit:
            guess = low + 4 * 2**step
        elif high_cost > limit and high_cost - limit < limit - low_cost:
            guess = high - 1 - int((high_cost - limit) / per_unit)
        else:
            guess = low + 1 + int((limit - low_cost) / per_unit)
        guess = min(max(guess, low + 1), high - 1)
        guess_cost = cost(guess)
        per_unit = max(0.0, (guess_cost - low_cost) / (guess - low))
        if guess_cost <= limit:
            low, low_cost = guess, guess_cost
        else:
            high, high_cost = guess, guess_cost
    return low
