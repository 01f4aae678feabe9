"""RULER's two counting tasks: common words of a numbered list (cwe), frequent words of a coded text (fwe)."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from ttmem.tasks.corpora import all_words
from ttmem.tasks.scoring import share_contained
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

COMMON_ANSWER_TOKENS = 120
COMMON = 10
LONG_LIST = 4096
"""Tokens from which on a list is long."""
LONG_REPEATS, SHORT_REPEATS = (30, 3), (6, 1)
"""How often a common and any other word stand in a long and in a short list."""
WORKED_LONG, WORKED_SHORT = (40, (10, 3)), (20, (3, 1))
"""Of the worked example's list: its words, and how often a common and any other one stand in it."""
COMMON_HEAD = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}"
)
COMMON_TAIL = (
    "\nQuestion: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)

FREQUENT_ANSWER_TOKENS = 50
FREQUENT = 3
ALPHA = 2.0
ZETA = math.pi**2 / 6
"""Riemann's zeta at ALPHA."""
CODE_LETTERS = 6
TOKENS_PER_CODE = 50
"""A text has one code in its vocabulary for this many tokens."""
LEAST_FREQUENT_UNITS = 80
"""With fewer drawn words, the third and the fourth word could be equally frequent."""
DOTS = "..."
FREQUENT_HEAD = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}"
)
FREQUENT_TAIL = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which 10 words stand often (30 times; 6 below 4,096 tokens) and others seldom (3; 1).

    A worked example with a short list comes first and is part of the document.
    """

    name: str = "cwe"

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Document `index` of at most `length` tokens. Raises TaskError when the lists do not fit, or words run out."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        repeats, (worked_count, worked_repeats) = (
            (LONG_REPEATS, WORKED_LONG) if length >= LONG_LIST else (SHORT_REPEATS, WORKED_SHORT)
        )
        worked_words = rng.sample(all_words(), worked_count)
        worked = COMMON_HEAD.format(context=_repeated(rng, worked_words, worked_repeats))
        worked += f"{COMMON_TAIL} {_numbered(worked_words[:COMMON])}"
        drawn = rng.sample(all_words(), len(all_words()))
        question = Question(COMMON_TAIL, tuple(drawn[:COMMON]), COMMON_ANSWER_TOKENS)
        order_seed = rng.random()

        def build(count: int) -> Example:
            context = _repeated(random.Random(order_seed), drawn[:count], repeats)
            return Example(f"{worked}\n{COMMON_HEAD.format(context=context)}", (question,))

        return fit_example(self.name, build, encode, length, least=COMMON + 1, most=len(drawn))

    def score(self, answer: str, question: Question) -> float:
        """Share of the ten words that are in the answer."""
        return share_contained(answer, question.references)


@dataclass(frozen=True)
class FrequentWords:
    """Invented words of 6 letters whose frequencies fall with the square of their rank; the most frequent are dots."""

    name: str = "fwe"

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Document `index` of at most `length` tokens. Raises TaskError when the text would be too short to count."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        size = (length - FREQUENT_ANSWER_TOKENS) // TOKENS_PER_CODE
        codes: list[str] = [DOTS]
        while len(codes) < max(size, FREQUENT + 2):
            code = "".join(rng.choices(string.ascii_lowercase, k=CODE_LETTERS))
            if code not in codes:
                codes.append(code)
        question = Question(FREQUENT_TAIL, tuple(codes[1 : FREQUENT + 1]), FREQUENT_ANSWER_TOKENS)
        order_seed = rng.random()

        def build(units: int) -> Example:
            text = [code for rank, code in enumerate(codes, start=1) for _ in range(_frequency(rank, units))]
            random.Random(order_seed).shuffle(text)
            return Example(FREQUENT_HEAD.format(context=" ".join(text)), (question,))

        return fit_example(self.name, build, encode, length, least=LEAST_FREQUENT_UNITS)

    def score(self, answer: str, question: Question) -> float:
        """Share of the three words that are in the answer."""
        return share_contained(answer, question.references)


def _repeated(rng: random.Random, words: list[str], repeats: tuple[int, int]) -> str:
    """A numbered list, in random order, of the first ten words and the others, each as often as `repeats` say."""
    often, seldom = repeats
    entries = words[:COMMON] * often + words[COMMON:] * seldom
    rng.shuffle(entries)
    return _numbered(entries)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _frequency(rank: int, units: int) -> int:
    """How often the code of a rank stands in a text of `units` draws from a zeta distribution: its expectation."""
    return int(units * rank**-ALPHA / ZETA)
