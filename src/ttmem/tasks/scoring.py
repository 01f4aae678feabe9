"""Scores that several tasks share: which of the references does an answer hold?"""

from __future__ import annotations

import re
from collections.abc import Sequence


def share_contained(answer: str, references: Sequence[str]) -> float:
    """Share of the references that are substrings of the answer, whatever their case: RULER's `string_match_all`."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_contained(answer: str, references: Sequence[str]) -> float:
    """1 if any reference is a substring of the answer, whatever its case: RULER's `string_match_part`."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def any_as_words(answer: str, references: Sequence[str]) -> float:
    """1 if any reference stands in the answer as whole words, whatever its case: "12" is not in "120"."""
    return float(any(stands_in(reference, answer) for reference in references))


def stands_in(words: str, text: str) -> bool:
    """Whether `words` stand in the text with no letter or digit right before or behind them, whatever their case."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, re.IGNORECASE) is not None
