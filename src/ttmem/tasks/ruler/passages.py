"""What a question-answering task of RULER is made from: a question, its passages, and passages about other things."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Asked:
    """A question, its accepted answers, the passages it needs, and any number of others, the nearest first."""

    query: str
    answers: tuple[str, ...]
    needed: tuple[str, ...]
    others: Iterator[str]


class Passages(Protocol):
    """A source of questions with passages."""

    def asked(self, rng: random.Random, index: int) -> Asked:
        """Question `index`. Raises TaskError when there is none of that index."""
        ...

    @property
    def most(self) -> int | None:
        """Passages there are in all, None where they are generated without end."""
        ...
