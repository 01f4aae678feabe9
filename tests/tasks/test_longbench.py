"""LongBench from files of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.longbench import CLASSIFICATION, METRICS, LongBench
from ttmem.tasks.longbench_prompts import ANSWER_TOKENS, EVEN_LENGTHS, PROMPTS
from ttmem.tasks.registry import make_task
from ttmem.tasks.sizing import count_tokens
from ttmem.tasks.task import Question

CONTEXT = "one two three {four} five six seven eight nine ten"


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def record(**changes: Any) -> dict[str, Any]:
    own = {"input": "Who {x} is it?", "context": CONTEXT, "answers": ["Ada", "Ada Quist"], "all_classes": None}
    return {**own, **changes}


def write(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")


def test_every_dataset_has_a_prompt_a_metric_and_a_length() -> None:
    assert len(PROMPTS) == 21
    assert set(PROMPTS) == set(ANSWER_TOKENS) == {*METRICS, *CLASSIFICATION}
    assert len(EVEN_LENGTHS) == 13
    for prompt in PROMPTS.values():
        assert prompt.count("{context}") == 1
        assert "{input}" not in prompt.split("{context}")[0]


@pytest.mark.parametrize("folder", ["", "data"])
def test_the_prompt_is_cut_behind_the_context(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "hotpotqa.jsonl", record(), record(input="second"))
    task = make_task("longbench:hotpotqa", data=tmp_path)
    example = task.example(encode, 500, 0, 0)
    (question,) = example.questions
    assert example.document == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        f"\n\nThe following are given passages.\n{CONTEXT}"
    )
    assert question.prompt == (
        "\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other "
        "words.\n\nQuestion: Who {x} is it?\nAnswer:"
    )
    assert question.references == ("Ada", "Ada Quist")
    assert question.max_new_tokens == 32
    assert "second" in task.example(encode, 500, 1, 0).questions[0].prompt


@pytest.mark.parametrize("dataset", PROMPTS)
def test_document_and_question_make_the_published_prompt(tmp_path: Path, dataset: str) -> None:
    write(tmp_path / f"{dataset}.jsonl", record(context="C", input="I"))
    example = make_task(f"longbench:{dataset}", data=tmp_path).example(encode, 9000, 0, 0)
    assert example.document + example.questions[0].prompt == PROMPTS[dataset].format(context="C", input="I")


@given(st.integers(40, 120))
def test_long_contexts_lose_their_middle(length: int) -> None:
    context = " ".join(f"w{number}" for number in range(300))
    task = LongBench("multifieldqa_en")
    task.__dict__["records"] = [record(context=context)]
    if length < 99:  # the prompt has 35 words beside the context, the answer 64 tokens
        with pytest.raises(TaskError, match="its shortest example takes"):
            task.example(encode, length, 0, 0)
        return
    example = task.example(encode, length, 0, 0)
    assert count_tokens(encode, example) <= length
    kept = example.document.split("briefly.\n\n")[1]
    half = (len(kept) + 1) // 2
    assert context.startswith(kept[:half])
    assert context.endswith(kept[half:])


def test_an_example_that_fits_is_whole_however_long_the_length(tmp_path: Path) -> None:
    write(tmp_path / "qasper_e.jsonl", record())
    task = make_task("longbench:qasper_e", data=tmp_path)
    assert task.example(encode, 10**6, 0, 5).document.endswith(CONTEXT)
    assert task.name == "longbench:qasper_e"


def test_the_best_reference_counts(tmp_path: Path) -> None:
    task = LongBench("qasper")
    question = Question("", ("Ada", "Ada Quist of Lerwick"), 128)
    assert task.score("Ada Quist", question) == pytest.approx(2 / 3)
    assert task.score("Ada", question) == 1
    assert task.score("x", Question("", (), 1)) == 0


def test_few_shot_answers_end_with_their_line(tmp_path: Path) -> None:
    answer = "\n\nDate\nQuestion: When?\nType: Number"
    write(tmp_path / "trec.jsonl", record(answers=["Date"], all_classes=["Date", "Number"]))
    task = make_task("longbench:trec", data=tmp_path / "trec.jsonl")
    (question,) = task.example(encode, 500, 0, 0).questions
    assert task.score(answer, question) == 1
    assert LongBench("triviaqa").score("Ada\nand more", Question("", ("Ada",), 32)) == 1
    assert LongBench("hotpotqa").score("Ada\nand more", Question("", ("Ada",), 32)) == 0.5


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"longbench:qasper needs its data: give a folder with qasper.jsonl"):
        make_task("longbench:qasper").example(encode, 100, 0, 0)
    with pytest.raises(TaskError, match=r"holds none of qasper.jsonl"):
        make_task("longbench:qasper", data=tmp_path).example(encode, 100, 0, 0)
    with pytest.raises(TaskError, match="no file or folder"):
        make_task("longbench:qasper", data=tmp_path / "nowhere").example(encode, 100, 0, 0)
    write(tmp_path / "qasper.jsonl", record(), {"context": "", "input": ""})
    with pytest.raises(TaskError, match="example 2 lacks 'answers'"):
        make_task("longbench:qasper", data=tmp_path).example(encode, 100, 0, 0)
    write(tmp_path / "qasper.jsonl", record())
    with pytest.raises(TaskError, match="has 1 examples, counted from 0: there is no example 1"):
        make_task("longbench:qasper", data=tmp_path).example(encode, 100, 1, 0)
    with pytest.raises(TaskError, match="no dataset 'nq'"):
        LongBench("nq")
