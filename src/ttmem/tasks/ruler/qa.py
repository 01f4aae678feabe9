"""RULER's question answering: a question, the passages that answer it, and other passages around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike

from ttmem.tasks.ruler.passages import Passages
from ttmem.tasks.scoring import any_contained
from ttmem.tasks.sizing import check_request, example_random, fit_example
from ttmem.tasks.task import Encode, Example, Question

ANSWER_TOKENS = 32
HEAD = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}"
)
TAIL = (
    "\n\nAnswer the question based on the given documents. "
    "Only give me the answer and do not output any other words.\n\nQuestion: {query} Answer:"
)


@dataclass(frozen=True)
class DocumentQA:
    """Numbered passages in random order, among them those that a question needs.

    generated: makes passages and questions when no file is given ("qa-like": no dataset, but the same shape).
    reader: reads the real dataset, for its users. data: the dataset's JSON file.
    """

    name: str
    generated: Callable[[], Passages]
    reader: Callable[[str | PathLike[str]], Passages]
    data: str | PathLike[str] | None = None

    @cached_property
    def passages(self) -> Passages:
        return self.generated() if self.data is None else self.reader(self.data)

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Question `index` with as many passages as `length` tokens hold.

        Raises TaskError when its own passages do not fit, when the file has too few others, or no such question.
        """
        check_request(self.name, length, index)
        rng = example_random(self.name, seed, index)
        asked = self.passages.asked(rng, index)
        question = Question(TAIL.format(query=asked.query), asked.answers, ANSWER_TOKENS)
        drawn = list(asked.needed)
        ranks = [rng.random() for _ in drawn]
        most = self.passages.most

        def build(count: int) -> Example:
            for passage in islice(asked.others, max(0, count - len(drawn))):
                drawn.append(passage)
                ranks.append(rng.random())
            ordered = [drawn[place] for place in sorted(range(count), key=ranks.__getitem__)]
            passages = [f"Document {number}:\n{passage}" for number, passage in enumerate(ordered, start=1)]
            return Example(HEAD.format(context="\n\n".join(passages)), (question,))

        return fit_example(self.name, build, encode, length, least=len(drawn), most=most)

    def score(self, answer: str, question: Question) -> float:
        """1 if any of the accepted answers is in the answer."""
        return any_contained(answer, question.references)
