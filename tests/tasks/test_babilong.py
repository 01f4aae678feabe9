"""BABILong from files of the user, and its score."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttmem.errors import TaskError
from ttmem.tasks.babilong import Babilong, hidden_example, labels_match
from ttmem.tasks.babilong_labels import FORMATS, LABELS, TOPICS
from ttmem.tasks.registry import make_task

TASKS = [f"qa{number}" for number in range(1, 21)]
RECORD = {
    "input": " Some text. Mary went to the kitchen. More text. ",
    "question": "Where is Mary? ",
    "target": "kitchen",
}


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def write(path: Path, *records: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records))


def score(task: str, answer: str, question: str, target: str) -> float:
    (asked,) = hidden_example("", "", question, target).questions
    return labels_match(answer, asked, LABELS[task])


def test_all_tasks_are_known() -> None:
    assert list(LABELS) == list(TOPICS) == list(FORMATS) == TASKS


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" kitchen", True),
        (" The most recent location of Mary is Kitchen. She was in the garden.", True),
        ("Mary is in the kitchen, not in the garden.", False),
        ("garden", False),
        ("", False),
        ("kitchen\nQuestion: Where is John?\nAnswer: garden", True),
        ("kitchen<example>garden", True),
    ],
)
def test_the_first_sentence_names_the_target_alone(answer: str, right: bool) -> None:
    assert score("qa1", answer, "Where is Mary?", "kitchen") == right


def test_labels_of_the_question_do_not_count() -> None:
    answer = "Before the kitchen the apple was in the office."
    assert score("qa3", answer, "Where was the apple before the kitchen?", "office") == 1
    assert score("qa3", "The kitchen.", "Where was the apple before the kitchen?", "office") == 0
    assert score("qa5", "Fred gave it to Bill.", "Who did Fred give the apple to?", "Bill") == 1


@pytest.mark.parametrize(
    ("task", "answer", "target", "right"),
    [
        ("qa7", "none", "none", True),
        ("qa7", "one", "none", False),
        ("qa7", "two, or three", "two", False),
        ("qa8", "apple and milk", "milk,apple", True),
        ("qa8", "apple", "milk,apple", False),
        ("qa8", "apple, milk, football", "milk,apple", False),
        ("qa8", "nothing", "nothing", True),
        ("qa10", "maybe", "maybe", True),
        ("qa19", "s,e", "s,e", True),
        ("qa19", "s,s", "s,e", False),
    ],
)
def test_nested_and_several_labels(task: str, answer: str, target: str, right: bool) -> None:
    assert score(task, answer, "What?", target) == right


@pytest.mark.parametrize("place", ["qa1/4k.json", "4k/qa1.json", "data/qa1/4k.json", "qa1_4k.jsonl"])
def test_files_of_the_size_that_fits(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, RECORD)
    example = make_task("babilong:qa1", data=tmp_path).example(encode, 5000, 0, 0)
    assert example.document.endswith("<context>\nSome text. Mary went to the kitchen. More text.")
    (question,) = example.questions
    assert question.prompt == "\n</context>\n\nQuestion: Where is Mary?\nAnswer:"
    assert question.references == ("kitchen",)


def test_the_published_prompts_from_a_file(tmp_path: Path) -> None:
    write(tmp_path / "4k/qa1.json", RECORD)
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"qa1": {"instruction": "I", "examples": "E", "post_prompt": "P"}}))
    task = make_task("babilong:qa1", data=tmp_path, prompts=prompts, size="4k")
    example = task.example(encode, 100, 0, 0)
    assert example.document == "I\n\nE\n\nP\n\n<context>\nSome text. Mary went to the kitchen. More text."
    with pytest.raises(TaskError, match="holds no instruction"):
        make_task("babilong:qa2", data=tmp_path / "4k/qa1.json", prompts=prompts).example(encode, 100, 0, 0)


def test_nothing_is_cut(tmp_path: Path) -> None:
    write(tmp_path / "0k/qa1.json", RECORD)
    task = make_task("babilong:qa1", data=tmp_path)
    with pytest.raises(TaskError, match=r"example 0 of size 0k takes 7\d tokens, more than 60"):
        task.example(encode, 60, 0, 0)


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no task 'qa21'"):
        Babilong("qa21")
    with pytest.raises(TaskError, match="no size '3k'"):
        Babilong("qa1", size="3k")
    with pytest.raises(TaskError, match=r"needs its data: give a folder with qa1/1k.json"):
        Babilong("qa1").example(encode, 1024, 0, 0)
    write(tmp_path / "0k/qa1.json", RECORD)
    with pytest.raises(TaskError, match="no example 3"):
        make_task("babilong:qa1", data=tmp_path).example(encode, 500, 3, 0)
