"""Facts: plain sentences about invented places, planted in essays, and a plain question for each.

Our own task, for small models: a needle reads like any sentence of a text, and its question is worded like it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttmem.errors import TaskError
from ttmem.tasks.fact_kinds import MOST_FACTS, make_facts
from ttmem.tasks.haystack import essay_prose, plant, spread_depths
from ttmem.tasks.scoring import any_as_words
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

PROMPT = "\n\nQuestion: {question}\nAnswer:"
ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Facts:
    """Essays with planted sentences at spread depths, and a question for each of them.

    questions: planted sentences, and so questions, of a document.
    Prose is added sentence by sentence. Example `index` begins with another essay than its neighbours.
    """

    name: str = "facts"
    questions: int = 12

    def __post_init__(self) -> None:
        if not 1 <= self.questions <= MOST_FACTS:
            raise TaskError(f"{self.name}: {self.questions} questions: ask 1 to {MOST_FACTS}")

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Document `index` of at most `length` tokens. Raises TaskError when the facts do not fit."""
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        prose = essay_prose(seed + index)
        facts = make_facts(rng, self.questions)
        depths = spread_depths(rng, self.questions)
        needles = [f" {fact.sentence}" for fact in facts]
        questions = tuple(
            Question(PROMPT.format(question=fact.question), fact.answers, ANSWER_TOKENS) for fact in facts
        )

        def build(sentences: int) -> Example:
            gaps = [int(depth * (sentences + 1)) for depth in depths]
            return Example("".join(plant(prose.first_pieces(sentences), needles, gaps)).strip(), questions)

        return fit_example(self.name, build, encode, length, least=self.questions)

    def score(self, answer: str, question: Question) -> float:
        """1 if the answer holds the reference (for a date, in either order) as whole words, whatever its case."""
        return any_as_words(answer, question.references)
