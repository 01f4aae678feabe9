"""A short document and questions about it, for demonstrations and checks that need no download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class DemoQuestion:
    """A question about the demo document and the short phrase of the document that answers it."""

    question: str
    answer: str


def document() -> str:
    """Return the demo document, a handbook of an invented research station."""
    return _read("document.txt")


def questions() -> list[DemoQuestion]:
    """Return the questions about the demo document, in the order in which it answers them."""
    return [DemoQuestion(entry["question"], entry["answer"]) for entry in json.loads(_read("questions.json"))]


def _read(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
