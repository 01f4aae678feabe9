"""RULER's needle tasks: `One of the special magic numbers for KEY is: VALUE.`, hidden in a haystack."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from ttmem.errors import TaskError
from ttmem.tasks.corpora import words
from ttmem.tasks.haystack import essay_prose, plant
from ttmem.tasks.scoring import share_contained
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

ANSWER_TOKENS = 128
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Where needles can stand in essays, in percent of the sentences: 40 depths from 0 to 100."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
LEAST_HAY = {"essays": 40, "noise": 1, "needles": 1}
"""Words of essays, or lines: with less there is nothing to search."""
ONE_VALUE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}",
    "\nWhat is the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text is",
)
SEVERAL_VALUES = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}",
    "\nWhat are all the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text are",
)


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack.

    haystack: "noise" (lines of NOISE), "essays", or "needles" (more needles, whose keys nobody asks for).
    key_kind: "words" or "uuids"; value_kind: "numbers" (7 digits) or "uuids".
    keys: needles with keys that can be asked for; values: values of each key; queries: keys in one question.
    questions: questions about one document, each for other keys. RULER asks one. In a haystack of needles every
    needle can be asked for, else only the planted ones.
    """

    name: str
    haystack: str
    key_kind: str
    value_kind: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    questions: int = 1

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise TaskError(f"{self.name}: {self.questions} questions: ask at least one")
        most = self.keys // self.queries
        if self.haystack != "needles" and self.questions > most:
            raise TaskError(f"{self.name}: {self.questions} questions: its documents answer {most}")

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Document `index` of at most `length` tokens. Raises TaskError when the needles do not fit."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        draw = _Draw(rng)
        needles = {draw(self.key_kind): [draw(self.value_kind) for _ in range(self.values)] for _ in range(self.keys)}
        lines = [self._needle(key, value) for key, values in needles.items() for value in values]
        rng.shuffle(lines)
        asked = rng.sample(list(needles), min(self.queries * self.questions, self.keys))
        if self.haystack == "essays":
            depths = [depth / 100 for depth in sorted(rng.sample(DEPTHS, len(lines)))]
        else:
            depths = sorted(rng.random() for _ in lines)
        prose_number, crowd_seed = seed + index, rng.random()
        crowd: dict[str, list[str]] = {}

        def build(count: int) -> Example:
            more: list[str] = []
            if self.haystack == "essays":
                hay, joint = essay_prose(prose_number).first_words(count), " "
            elif self.haystack == "noise":
                hay, joint = [NOISE] * count, "\n"
            else:
                while len(crowd) < count:
                    crowd[draw(self.key_kind)] = [draw(self.value_kind)]
                others = list(crowd)[:count]
                hay, joint = [self._needle(key, crowd[key][0]) for key in others], "\n"
                more = random.Random(crowd_seed).sample(others, min(self.questions - 1, count))
            context = joint.join(plant(hay, lines, [int(depth * len(hay)) for depth in depths]))
            return self._example(context, needles | crowd, [*asked, *more])

        return fit_example(self.name, build, encode, length, least=LEAST_HAY[self.haystack])

    def score(self, answer: str, question: Question) -> float:
        """Share of the values that are in the answer."""
        return share_contained(answer, question.references)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _example(self, context: str, needles: dict[str, list[str]], asked: Sequence[str]) -> Example:
        single = self.queries * self.values == 1
        head, tail = ONE_VALUE if single else SEVERAL_VALUES
        kind = self.value_kind.removesuffix("s") if single else self.value_kind
        groups = [asked[start : start + self.queries] for start in range(0, len(asked), self.queries)]
        questions = tuple(
            Question(
                tail.format(kind=kind, query=_listed(group)),
                tuple(value for key in group for value in needles[key]),
                ANSWER_TOKENS,
            )
            for group in groups
        )
        return Example(head.format(kind=kind, context=context), questions)


class _Draw:
    """Draws keys and values by kind, none twice."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.drawn: set[str] = set()

    def __call__(self, kind: str) -> str:
        while (text := self._one(kind)) in self.drawn:
            pass
        self.drawn.add(text)
        return text

    def _one(self, kind: str) -> str:
        if kind == "words":
            return f"{self.rng.choice(words('adjective'))}-{self.rng.choice(words('noun'))}"
        if kind == "numbers":
            return str(self.rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))


def _listed(keys: Sequence[str]) -> str:
    """ "a", or "a, b, and c"."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
