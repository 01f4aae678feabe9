"""RULER's needle tasks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.haystack import essay_prose
from ttmem.tasks.registry import GROUPS, make_task
from ttmem.tasks.ruler.niah import DEPTHS, NOISE, Niah
from ttmem.tasks.sizing import count_tokens
from ttmem.tasks.task import Example

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.(?=\s|$)")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NAMES = [name for name in GROUPS["ruler"] if name.startswith("niah")]


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def needles(example: Example) -> list[tuple[str, str]]:
    return [(key, value) for _, key, value in NEEDLE.findall(example.document)]


def test_a_known_document() -> None:
    example = make_task("niah_single_1").example(encode, 260, index=0, seed=0)
    lines = example.document.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    needle = "One of the special magic numbers for eatable-poison is: 2219099."
    assert lines[1:] == [NOISE, NOISE, needle, NOISE]
    (question,) = example.questions
    assert question.prompt == (
        "\nWhat is the special magic number for eatable-poison mentioned in the provided text? "
        "The special magic number for eatable-poison mentioned in the provided text is"
    )
    assert question.references == ("2219099",)
    assert question.max_new_tokens == 128


@pytest.mark.parametrize(
    ("name", "planted", "keys", "values", "value", "queries"),
    [
        ("niah_single_1", 1, 1, 1, r"[1-9]\d{6}", 1),
        ("niah_single_2", 1, 1, 1, r"[1-9]\d{6}", 1),
        ("niah_single_3", 1, 1, 1, UUID, 1),
        ("niah_multikey_1", 4, 4, 1, r"[1-9]\d{6}", 1),
        ("niah_multikey_2", None, None, 1, r"[1-9]\d{6}", 1),
        ("niah_multikey_3", None, None, 1, UUID, 1),
        ("niah_multivalue", 4, 1, 4, r"[1-9]\d{6}", 1),
        ("niah_multiquery", 4, 4, 1, r"[1-9]\d{6}", 4),
    ],
)
def test_each_task_has_its_needles(
    name: str, planted: int | None, keys: int | None, values: int, value: str, queries: int
) -> None:
    example = make_task(name).example(encode, 1200, 3, 7)
    found = needles(example)
    count = len(found) if planted is None else planted
    assert count > 1 or "single" in name
    assert len(found) == len(set(found)) == count
    assert len({key for key, _ in found}) == (count if keys is None else keys)
    assert len({text for _, text in found}) == count
    assert all(re.fullmatch(value, text) for _, text in found)
    key = UUID if name == "niah_multikey_3" else r"[\w.' -]+-[\w.' -]+"
    assert all(re.fullmatch(key, text) for text, _ in found)
    (question,) = example.questions
    asked = [key for key in {key for key, _ in found} if key in question.prompt]
    assert len(asked) == queries
    assert sorted(question.references) == sorted(text for key, text in found if key in asked)
    assert len(question.references) == queries * values
    plural = queries * values > 1
    assert ("What are all the special magic numbers for" in question.prompt) == plural
    assert ("mentioned in the provided text are" in question.prompt) == plural
    assert question.prompt.endswith(" are" if plural else " is")
    assert example.document.startswith("Some special" if plural else "A special")


@given(st.sampled_from(NAMES), st.integers(300, 1500), st.integers(0, 40))
def test_lengths_are_met_and_answers_are_there(name: str, length: int, index: int) -> None:
    example = make_task(name).example(encode, length, index, seed=1)
    taken = count_tokens(encode, example)
    assert taken <= length
    unit = 1 if make_task(name).haystack == "essays" else len(NOISE.split())
    assert taken > length - unit - 2  # a key of several words makes its line longer
    for question in example.questions:
        for reference in question.references:
            assert example.document.count(reference) == 1


def test_there_are_40_depths_from_the_first_to_the_last_sentence() -> None:
    assert len(set(DEPTHS)) == 40
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-1]) == (0, 3, 100)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_needles_are_found_at_every_depth(name: str) -> None:
    task = make_task(name)
    depths = []
    for index in range(60):
        example = task.example(encode, 700, index, 0)
        depths.append(example.document.index(example.questions[0].references[0]) / len(example.document))
    assert [sum(part <= 4 * depth < part + 1 for depth in depths) > 5 for part in range(4)] == [True] * 4


def test_essays_keep_their_words_around_the_needles() -> None:
    example = make_task("niah_multivalue").example(encode, 900, 2, 0)
    context = example.document.split("\n", 1)[1]
    words = NEEDLE.sub("", context).split()
    assert words == " ".join(essay_prose(2).sentences).split()[: len(words)]


def test_several_questions_ask_for_several_keys() -> None:
    for name, questions in (("niah_multikey_1", 4), ("niah_multikey_2", 6), ("niah_multikey_3", 3)):
        single = make_task(name).example(encode, 1000, 0, 0)
        several = make_task(name, questions=questions).example(encode, 1000, 0, 0)
        assert len(several.questions) == questions
        assert several.questions[0] == single.questions[0]
        assert len({question.references for question in several.questions}) == questions
        found = dict(needles(several))
        for question in several.questions:
            assert [found[key] for key in found if f"for {key} mentioned" in question.prompt] == [*question.references]


def test_a_haystack_with_fewer_needles_asks_for_them_all() -> None:
    example = make_task("niah_multikey_2", questions=500).example(encode, 400, 0, 0)
    assert len(example.questions) == len(needles(example))


@pytest.mark.parametrize(
    ("name", "questions"),
    [("niah_single_1", 2), ("niah_multikey_1", 5), ("niah_multiquery", 2), ("niah_multivalue", 2)],
)
def test_more_questions_than_keys_are_refused(name: str, questions: int) -> None:
    with pytest.raises(TaskError, match="its documents answer"):
        make_task(name, questions=questions)
    with pytest.raises(TaskError, match="at least one"):
        make_task(name, questions=0)


@pytest.mark.parametrize("name", NAMES)
def test_impossible_lengths_are_refused_with_the_smallest_possible_one(name: str) -> None:
    with pytest.raises(TaskError, match="its shortest example takes") as refused:
        make_task(name).example(encode, 150, 0, 0)
    smallest = int(str(refused.value).rsplit(" ", 1)[1])
    assert count_tokens(encode, make_task(name).example(encode, smallest, 0, 0)) == smallest
    with pytest.raises(TaskError):
        make_task(name).example(encode, smallest - 1, 0, 0)


def test_scores_count_values() -> None:
    task = make_task("niah_multivalue")
    assert isinstance(task, Niah)
    (question,) = task.example(encode, 500, 0, 0).questions
    assert task.score(" ".join(question.references), question) == 1
    assert task.score(f"They are {question.references[1]} and 1.", question) == 0.25
    assert task.score("none", question) == 0
