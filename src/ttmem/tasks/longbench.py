"""LongBench (Bai et al., 2024) from the user's copy: prompts and scores as published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from os import PathLike

from ttmem.errors import TaskError
from ttmem.tasks import longbench_metrics as metrics
from ttmem.tasks.local_data import Record, pick_record, read_records, text_of, texts_of
from ttmem.tasks.longbench_prompts import ANSWER_TOKENS, PROMPTS
from ttmem.tasks.sizing import check_request, count_tokens, fit_example
from ttmem.tasks.task import Encode, Example, Question

FIELDS = ("context", "input", "answers")
FIRST_LINE_ONLY = ("trec", "triviaqa", "samsum", "lsht")
"""Few-shot datasets: of an answer only the first line counts, since models go on with examples of their own."""
CLASSIFICATION = ("trec", "lsht")
METRICS: dict[str, Callable[[str, str], float]] = {
    "narrativeqa": metrics.qa_f1,
    "qasper": metrics.qa_f1,
    "multifieldqa_en": metrics.qa_f1,
    "multifieldqa_zh": metrics.qa_f1_zh,
    "hotpotqa": metrics.qa_f1,
    "2wikimqa": metrics.qa_f1,
    "musique": metrics.qa_f1,
    "dureader": metrics.rouge_l_zh,
    "gov_report": metrics.rouge_l,
    "qmsum": metrics.rouge_l,
    "multi_news": metrics.rouge_l,
    "vcsum": metrics.rouge_l_zh,
    "triviaqa": metrics.qa_f1,
    "samsum": metrics.rouge_l,
    "passage_count": metrics.count,
    "passage_retrieval_en": metrics.retrieval,
    "passage_retrieval_zh": metrics.retrieval,
    "lcc": metrics.code_similarity,
    "repobench-p": metrics.code_similarity,
}


@dataclass(frozen=True)
class LongBench:
    """One dataset of LongBench, or of LongBench-E ("qasper_e").

    data: the folder with its files (`qasper.jsonl`, also in `data/`), one file, a folder saved by `datasets`, or a hub
    id. The document is the prompt up to the end of the context; a context that is too long loses its middle.
    """

    dataset: str
    data: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.base not in PROMPTS:
            raise TaskError(f"LongBench has no dataset {self.dataset!r}, only {', '.join(PROMPTS)}")

    @property
    def name(self) -> str:
        return f"longbench:{self.dataset}"

    @property
    def base(self) -> str:
        """The dataset's name without LongBench-E's "_e"."""
        return self.dataset.removesuffix("_e")

    @cached_property
    def records(self) -> list[Record]:
        files = [f"{folder}{self.dataset}.jsonl" for folder in ("", "data/")]
        return read_records(self.data, files, (self.dataset, "test"), FIELDS, self.name)

    def example(self, encode: Encode, length: int, index: int, seed: int) -> Example:
        """Record `index`; the seed changes nothing.

        Raises TaskError without data or such a record, and when the question alone takes more than `length` tokens.
        """
        check_request(self.name, length, index)
        record = pick_record(self.records, index, self.name)
        context = text_of(record, "context", self.name, index)
        before, behind = PROMPTS[self.base].split("{context}")
        references = texts_of(record, "answers", self.name, index)
        asked = text_of(record, "input", self.name, index)
        question = Question(behind.replace("{input}", asked), references, ANSWER_TOKENS[self.base])
        characters = len(context)

        def build(kept: int) -> Example:
            half = kept // 2
            return Example(before + context[: kept - half] + context[characters - half :], (question,))

        whole = build(characters)
        if count_tokens(encode, whole) <= length:
            return whole
        return fit_example(self.name, build, encode, length, least=0, most=characters)

    def score(self, answer: str, question: Question) -> float:
        """The best score over the references, by the dataset's metric."""
        if self.base in FIRST_LINE_ONLY:
            answer = answer.lstrip("\n").split("\n")[0]
        if self.base in CLASSIFICATION:
            classes = [str(each) for each in self.records[0].get("all_classes") or ()]
            scores = [metrics.classification(answer, reference, classes) for reference in question.references]
        else:
            scores = [METRICS[self.base](answer, reference) for reference in question.references]
        return max(scores, default=0.0)
