"""RULER's variable tracking: one chain of assignments in noise, and which variables share its value."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

from ttmem.tasks.haystack import plant
from ttmem.tasks.ruler.niah import NOISE
from ttmem.tasks.scoring import share_contained
from ttmem.tasks.sizing import check_request, example_random, fit_example, largest_fit
from ttmem.tasks.task import Encode, Example, Question

ANSWER_TOKENS = 30
HOPS = 4
LETTERS, WORKED_LETTERS = 5, 3
"""Letters of a variable's name, in the example to be answered and in the worked one before it."""
WORKED_TOKENS = 500
HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
TAIL = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. "
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)


@dataclass(frozen=True)
class Chain:
    """Variables that get one value, each from the one before, and the places in the noise where that is said.

    depths: one per variable, in rising order, in [0, 1).
    """

    value: str
    variables: list[str]
    depths: list[float]

    @classmethod
    def draw(cls, rng: random.Random, letters: int) -> Chain:
        variables: list[str] = []
        while len(variables) < HOPS + 1:
            variable = "".join(rng.choices(string.ascii_uppercase, k=letters))
            if variable not in variables:
                variables.append(variable)
        depths = sorted(rng.random() for _ in variables)
        return cls(str(rng.randint(10000, 99999)), variables, depths)

    def document(self, lines: int) -> str:
        """The instruction and `lines` lines of noise with the assignments between them."""
        sources = [self.value, *(f"VAR {variable}" for variable in self.variables)]
        assignments = [f"VAR {variable} = {source}" for variable, source in zip(self.variables, sources, strict=False)]
        gaps = [int(depth * lines) for depth in self.depths]
        return HEAD.format(context="\n".join(plant([NOISE] * lines, assignments, gaps)))

    @property
    def question(self) -> str:
        return TAIL.format(value=self.value, count=len(self.variables))


@dataclass(frozen=True)
class VariableTracking:
    """One chain of 4 hops in lines of noise, behind a worked example of at most 500 tokens, part of the document."""

    name: str = "vt"

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Document `index` of at most `length` tokens. Raises TaskError when the worked example leaves no room."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        worked = _worked_example(encode, Chain.draw(rng, WORKED_LETTERS))
        chain = Chain.draw(rng, LETTERS)
        question = Question(chain.question, tuple(chain.variables), ANSWER_TOKENS)

        def build(lines: int) -> Example:
            return Example(f"{worked}\n\n{chain.document(lines)}", (question,))

        return fit_example(self.name, build, encode, length, least=HOPS + 1)

    def score(self, answer: str, question: Question) -> float:
        """Share of the variables that are in the answer."""
        return share_contained(answer, question.references)


def _worked_example(encode: Encode, chain: Chain) -> str:
    """A chain with its answer, in as much noise as 500 tokens hold, though never in less than a line per variable."""

    def text(lines: int) -> str:
        return f"{chain.document(lines)}{chain.question} {' '.join(chain.variables)}"

    least = HOPS + 1
    lines = largest_fit(lambda lines: len(encode(text(lines))), WORKED_TOKENS, least, WORKED_TOKENS)
    return text(lines or least)
