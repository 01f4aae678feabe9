"""Phonebook Lookup: names with phone numbers, and questions for some of them (Jelassi et al., 2024)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from ttmem.errors import TaskError
from ttmem.tasks.scoring import share_contained
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

NAME_LETTERS = 10
NUMBER_DIGITS = 10
ANSWER_TOKENS = 24
"""Room for ten digits, a token each, and some words around them."""
PROMPT = "\n\nQuestion: What is the phone number of {name}?\nAnswer:"


@dataclass(frozen=True)
class Phonebook:
    """As many lines `The phone number of NAME is NUMBER.` as fit; NAME is ten capital letters, NUMBER ten digits.

    questions: names asked for in a document, drawn at random; all of them where it has fewer.
    """

    name: str = "phonebook"
    questions: int = 20

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise TaskError(f"{self.name}: {self.questions} questions: ask at least one")

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Phonebook `index` of at most `length` tokens. Raises TaskError when not even one line fits."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        asking_seed = rng.random()
        book: dict[str, str] = {}
        numbers: set[str] = set()

        def build(lines: int) -> Example:
            while len(book) < lines:
                name = "".join(rng.choices(string.ascii_uppercase, k=NAME_LETTERS))
                number = "".join(rng.choices(string.digits, k=NUMBER_DIGITS))
                if name not in book and number not in numbers:
                    book[name] = number
                    numbers.add(number)
            entries = list(book.items())[:lines]
            asked = random.Random(asking_seed).sample(range(lines), min(self.questions, lines))
            return Example(
                document="\n".join(f"The phone number of {name} is {number}." for name, number in entries),
                questions=tuple(_question(*entries[i]) for i in asked),
            )

        return fit_example(self.name, build, encode, length, least=1)

    def score(self, answer: str, question: Question) -> float:
        """1 if the number is in the answer."""
        return share_contained(answer, question.references)


def _question(name: str, number: str) -> Question:
    return Question(PROMPT.format(name=name), (number,), ANSWER_TOKENS)
