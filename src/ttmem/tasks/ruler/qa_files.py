"""The datasets of RULER's question answering, read from the files that their authors publish."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from os import PathLike

from ttmem.errors import TaskError
from ttmem.tasks.local_data import read_json
from ttmem.tasks.ruler.passages import Asked


@dataclass(frozen=True)
class FileQuestion:
    """A question with its answers, and numbers of passages: those it needs, and others from the same article."""

    query: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class FilePassages:
    """Passages and questions of a file, in the file's order of questions."""

    source: str
    passages: tuple[str, ...]
    questions: tuple[FileQuestion, ...]

    @property
    def most(self) -> int:
        return len(self.passages)

    def asked(self, rng: random.Random, index: int) -> Asked:
        """Question `index`. The other passages: those of its article, then all the rest, both in random order."""
        if index >= len(self.questions):
            raise TaskError(f"{self.source} has {len(self.questions):,} questions: there is no example {index}")
        question = self.questions[index]
        near = [number for number in question.related if number not in question.needed]
        taken = {*near, *question.needed}
        far = [number for number in range(len(self.passages)) if number not in taken]
        order = chain(rng.sample(near, len(near)), rng.sample(far, len(far)))
        return Asked(
            question.query,
            question.answers,
            tuple(self.passages[number] for number in question.needed),
            (self.passages[number] for number in order),
        )


def read_squad(path: str | PathLike[str]) -> FilePassages:
    """SQuAD 2.0's dev-v2.0.json: the questions that have an answer."""
    file = read_json(path)
    try:
        articles = [article["paragraphs"] for article in file["data"]]
        numbers = _number(paragraph["context"] for paragraphs in articles for paragraph in paragraphs)
        questions = [
            FileQuestion(
                entry["question"],
                tuple(dict.fromkeys(answer["text"] for answer in entry["answers"])),
                (numbers[paragraph["context"]],),
                tuple(dict.fromkeys(numbers[other["context"]] for other in paragraphs)),
            )
            for paragraphs in articles
            for paragraph in paragraphs
            for entry in paragraph["qas"]
            if not entry["is_impossible"]
        ]
    except (KeyError, TypeError) as error:
        raise TaskError(f"{path}: not SQuAD 2.0's dev-v2.0.json: {error!r}") from error
    return FilePassages(str(path), tuple(numbers), tuple(questions))


def read_hotpotqa(path: str | PathLike[str]) -> FilePassages:
    """HotpotQA's hotpot_dev_distractor_v1.json: each question needs the ten passages it comes with."""
    file = read_json(path)
    try:
        contexts = [[f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]] for entry in file]
        numbers = _number(chain.from_iterable(contexts))
        questions = [
            FileQuestion(
                entry["question"],
                (entry["answer"],),
                tuple(dict.fromkeys(numbers[passage] for passage in context)),
            )
            for entry, context in zip(file, contexts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise TaskError(f"{path}: not HotpotQA's hotpot_dev_distractor_v1.json: {error!r}") from error
    return FilePassages(str(path), tuple(numbers), tuple(questions))


def _number(passages: Iterable[str]) -> dict[str, int]:
    """Distinct passages with numbers, sorted by their text."""
    return {passage: number for number, passage in enumerate(sorted(set(passages)))}
