"""What a benchmark task is: examples of a document with questions, and the score of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Encode = Callable[[str], list[int]]
"""Text -> token ids of the model that is measured: lengths are counted in its tokens."""


@dataclass(frozen=True)
class Question:
    """One question about a document.

    prompt: the raw text that follows the document, answer prefix included. references: what a right answer holds;
    how they count is the task's business. max_new_tokens: the answer's room.
    """

    prompt: str
    references: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Example:
    """A document and its questions."""

    document: str
    questions: tuple[Question, ...]


class Task(Protocol):
    """A named source of examples with its scoring."""

    @property
    def name(self) -> str: ...

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Example `index` of at most `length` tokens, questions and generated tokens included.

        The same arguments give the same example, whatever was generated before.
        Raises TaskError when there is none of that length or index.
        """
        ...

    def score(self, answer: str, question: Question) -> float:
        """0 to 1 for the text generated after the question's prompt."""
        ...
