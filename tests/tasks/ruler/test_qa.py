"""RULER's question answering, generated and from the real files."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.registry import make_task
from ttmem.tasks.ruler.qa_like import PERSON, WORKS, OneHop, TwoHops
from ttmem.tasks.sizing import count_tokens
from ttmem.tasks.task import Example, Question


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def passages(example: Example) -> list[str]:
    context = example.document.split("The following are given documents.\n\n")[1]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", context)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[1::2]


@given(st.sampled_from(["qa_1", "qa_2"]), st.integers(300, 2500), st.integers(0, 60))
def test_generated_documents_are_sound(name: str, length: int, index: int) -> None:
    example = make_task(name).example(encode, length, index, seed=4)
    taken = count_tokens(encode, example)
    assert taken <= length < taken + 90  # a passage has at most 80 words
    (question,) = example.questions
    assert question.max_new_tokens == 32
    assert question.prompt.startswith("\n\nAnswer the question based on the given documents. Only give me")
    assert question.prompt.endswith("? Answer:")
    assert len(question.references) == 1
    found = passages(example)
    assert len(set(found)) == len(found)
    assert sum(question.references[0] in passage for passage in found) >= 1


def test_one_hop_asks_for_a_passage_that_says_it() -> None:
    for seed in range(100):
        asked = OneHop().asked(random.Random(seed), 0)
        (passage,) = asked.needed
        title = next(title for work in WORKS if (title := _title(work.title, passage)))
        assert title in asked.query
        assert asked.answers[0] in passage
        assert asked.answers[0] not in asked.query
        others = list(islice(asked.others, 20))
        assert not any(title in other for other in others)
        assert len(set(others)) == 20


def _title(form: str, passage: str) -> str | None:
    """The title of a passage about a work of this kind, which begins `The Korvath Bridge is`."""
    found = re.match("The (" + form.format(place=r"\w+") + ") is", passage)
    return found and found[1]


def test_two_hops_lead_over_a_person_whom_the_question_does_not_name() -> None:
    for seed in range(100):
        asked = TwoHops().asked(random.Random(seed), 0)
        work, person = asked.needed
        name = person.split("\n")[0]
        assert work.split("\n")[0] in asked.query
        assert name in work
        assert name not in asked.query
        assert asked.answers[0] in person
        assert asked.answers[0] not in work
        others = list(islice(asked.others, 20))
        assert not any(name in other or work.split("\n")[0] in other for other in others)


@pytest.mark.parametrize("subject", [*WORKS, PERSON])
def test_statements_hold_their_answers(subject) -> None:
    for statement in subject.statements:
        assert f"{{{statement.answer}}}" in statement.sentence
        assert f"{{{statement.answer}}}" not in statement.question


SQUAD = {
    "data": [
        {
            "title": title,
            "paragraphs": [
                {
                    "context": f"{title} paragraph {number} has its own words.",
                    "qas": [
                        {
                            "question": f"What is {number} of {title}?",
                            "answers": [{"text": f"{title}{number}"}, {"text": "other"}, {"text": "other"}],
                            "is_impossible": False,
                        },
                        {"question": "Nothing?", "answers": [], "is_impossible": True},
                    ],
                }
                for number in range(4)
            ],
        }
        for title in ("Alpha", "Beta", "Gamma")
    ]
}
HOTPOT = [
    {
        "question": f"Question {number}?",
        "answer": f"answer {number}",
        "context": [[f"Title {number}.{part}", ["One sentence.", " Another one."]] for part in range(10)],
    }
    for number in range(6)
]


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(SQUAD))
    return tmp_path / "dev-v2.0.json"


@pytest.fixture
def hotpot(tmp_path: Path) -> Path:
    (tmp_path / "hotpot_dev_distractor_v1.json").write_text(json.dumps(HOTPOT))
    return tmp_path / "hotpot_dev_distractor_v1.json"


def test_squad(squad: Path) -> None:
    task = make_task("qa_1", data=squad)
    for index in range(12):
        title, number = ("Alpha", "Beta", "Gamma")[index // 4], index % 4
        example = task.example(encode, 160, index, 0)
        (question,) = example.questions
        assert question.references == (f"{title}{number}", "other")
        assert f"What is {number} of {title}? Answer:" in question.prompt
        found = passages(example)
        assert 5 < len(found) < 12
        assert f"{title} paragraph {number} has its own words." in found
        assert sum(title in passage for passage in found) == 4  # the article's own passages come first


def test_all_of_squad_is_not_enough_for_a_long_text(squad: Path) -> None:
    with pytest.raises(TaskError, match="its haystack ends at"):
        make_task("qa_1", data=squad).example(encode, 1000, 0, 0)
    with pytest.raises(TaskError, match="has 12 questions: there is no example 12"):
        make_task("qa_1", data=squad).example(encode, 120, 12, 0)


def test_hotpotqa_keeps_the_ten_passages_of_a_question(hotpot: Path) -> None:
    task = make_task("qa_2", data=hotpot)
    example = task.example(encode, 300, 2, 0)
    found = passages(example)
    assert len(found) > 15
    assert {f"Title 2.{part}\nOne sentence. Another one." for part in range(10)} <= set(found)
    assert example.questions[0].references == ("answer 2",)
    with pytest.raises(TaskError, match="its shortest example takes"):
        task.example(encode, 150, 2, 0)


def test_other_files_are_refused(squad: Path, hotpot: Path, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"not SQuAD 2.0's dev-v2.0.json"):
        make_task("qa_1", data=hotpot).example(encode, 300, 0, 0)
    with pytest.raises(TaskError, match=r"not HotpotQA's hotpot_dev_distractor_v1.json"):
        make_task("qa_2", data=squad).example(encode, 300, 0, 0)
    with pytest.raises(TaskError, match="No such file"):
        make_task("qa_2", data=tmp_path / "none.json").example(encode, 300, 0, 0)


def test_any_reference_is_enough() -> None:
    question = Question("", ("Ada Quist", "Quist"), 32)
    assert make_task("qa_1").score("It was quist.", question) == 1
    assert make_task("qa_2").score("Ada", question) == 0
