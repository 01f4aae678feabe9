"""BABILong (Kuratov et al., 2024) from the user's copy: facts of bAbI hidden in books, and its score."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike

from ttmem.errors import TaskError
from ttmem.tasks.babilong_labels import FORMATS, LABELS, TOPICS
from ttmem.tasks.local_data import Record, pick_record, read_json, read_records, text_of
from ttmem.tasks.scoring import stands_in
from ttmem.tasks.sizing import check_request, count_tokens
from ttmem.tasks.task import Encode, Example, Question

ANSWER_TOKENS = 20
SIZES = {f"{size}k": size * 1000 for size in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)} | {
    "1M": 1_000_000,
    "2M": 2_000_000,
    "10M": 10_000_000,
}
"""The published sizes, in tokens."""
FIELDS = ("input", "question", "target")
PROMPT_PARTS = ("instruction", "examples", "post_prompt")
TAIL = "\n</context>\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True)
class Babilong:
    """One task of BABILong, "qa1" to "qa20".

    data: the folder with its files (`qa1/4k.json`, also in `data/`), one file, a folder saved by `datasets`, or a hub
    id. size: the published size to read, such as "4k"; by default the largest that `length` can hold.
    prompts: a JSON file {"qa1": {"instruction": ..., "examples": ..., "post_prompt": ...}, ...} with the published
    prompts, for figures to be compared with published ones; by default an instruction in our own words.
    """

    task: str
    data: str | PathLike[str] | None = None
    size: str | None = None
    prompts: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.task not in LABELS:
            raise TaskError(f"BABILong has no task {self.task!r}, only {', '.join(LABELS)}")
        if self.size is not None and self.size not in SIZES:
            raise TaskError(f"BABILong has no size {self.size!r}, only {', '.join(SIZES)}")

    @property
    def name(self) -> str:
        return f"babilong:{self.task}"

    @cached_property
    def head(self) -> str:
        """What comes before the context."""
        return default_head(self.task) if self.prompts is None else _published_head(self.task, self.prompts)

    @cached_property
    def _read(self) -> dict[str, list[Record]]:
        """Records by size, as far as they have been read."""
        return {}

    def records(self, size: str) -> list[Record]:
        """The records of one size."""
        if size not in self._read:
            files = [
                f"{folder}{name}.{ending}"
                for folder in ("", "data/")
                for name in (f"{self.task}/{size}", f"{size}/{self.task}", f"{self.task}_{size}")
                for ending in ("json", "jsonl")
            ]
            self._read[size] = read_records(self.data, files, (size, self.task), FIELDS, self.name)
        return self._read[size]

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Record `index`; the seed changes nothing.

        Raises TaskError without data or such a record, and when it takes more than `length` tokens: nothing may be cut,
        since facts can be anywhere.
        """
        check_request(self.name, length, index)
        size = self.size or [name for name, tokens in SIZES.items() if tokens <= length][-1]
        record = pick_record(self.records(size), index, self.name)
        texts = [text_of(record, field, self.name, index) for field in ("input", "question", "target")]
        example = hidden_example(self.head, *texts)
        taken = count_tokens(encode, example)
        if taken > length:
            raise TaskError(
                f"{self.name}: example {index} of size {size} takes {taken:,} tokens, more than {length:,}: "
                f"ask for {taken:,} with size={size!r}, or for a smaller size"
            )
        return example

    def score(self, answer: str, question: Question) -> float:
        """1 if the answer's first sentence names the target and no other label: see `labels_match`."""
        return labels_match(answer, question, LABELS[self.task])


def default_head(task: str) -> str:
    """An instruction in our own words: what the facts tell, and what an answer looks like."""
    return (
        f"The text below hides facts about {TOPICS[task]} between other sentences. Answer the question behind it from "
        f"these facts alone; where a fact has changed, the latest one counts. {FORMATS[task]}\n\n<context>\n"
    )


def hidden_example(head: str, context: str, question: str, target: str) -> Example:
    """The document that ends with the context, and its question. A target with commas has several labels."""
    labels = (target,) if len(target) <= 3 else tuple(target.split(","))
    prompt = TAIL.format(question=question.strip())
    return Example(head + context.strip(), (Question(prompt, labels, ANSWER_TOKENS),))


def labels_match(answer: str, question: Question, labels: frozenset[str]) -> float:
    """BABILong's score: 1 if the labels named in the answer's first sentence are the target's, no more and no less.

    Labels that the question names do not count: they are never the target. Where one label is a part of another
    ("one", "none"), labels are looked for as whole words, or the longer ones could never be right.
    """
    asked = question.prompt.rsplit("Question:", 1)[-1].removesuffix("Answer:")
    sentence = re.split(r"\.|<context>|<example>|question", answer.lower())[0]
    named = _named(sentence, labels) - _named(asked.lower(), labels)
    return float(named == {reference.lower().strip() for reference in question.references})


def _named(text: str, labels: frozenset[str]) -> set[str]:
    lower = {label.lower() for label in labels}
    nested = any(one != other and one in other for one in lower for other in lower)
    return {label for label in lower if (stands_in(label, text) if nested else label in text)}


def _published_head(task: str, path: str | PathLike[str]) -> str:
    prompts = read_json(path)
    own = prompts.get(task) if isinstance(prompts, Mapping) else None
    if not isinstance(own, Mapping) or any(part not in own for part in PROMPT_PARTS):
        raise TaskError(f"{path}: holds no {', '.join(PROMPT_PARTS)} of {task!r}")
    return "\n\n".join(str(own[part]) for part in PROMPT_PARTS).strip() + "\n\n<context>\n"
