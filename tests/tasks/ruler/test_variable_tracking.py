"""RULER's variable tracking."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.ruler.niah import NOISE
from ttmem.tasks.ruler.variable_tracking import VariableTracking
from ttmem.tasks.sizing import count_tokens

TASK = VariableTracking()
INSTRUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def values(text: str) -> dict[str, str]:
    """Runs the assignments of a text, in their order."""
    known: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE):
        known[name] = known.get(source, source)
    return known


@given(st.integers(750, 2500), st.integers(0, 40))
def test_the_chain_gives_the_references(length: int, index: int) -> None:
    example = TASK.example(encode, length, index, seed=3)
    taken = count_tokens(encode, example)
    assert taken <= length < taken + len(NOISE.split())
    (question,) = example.questions
    _, text = example.document.removeprefix(INSTRUCTION).split(INSTRUCTION)
    wanted = re.search(r"assigned the value (\d{5}) in the text above", question.prompt).group(1)
    found = values(text)
    assert question.references == tuple(found)
    assert set(found.values()) == {wanted}
    assert len(found) == 5
    assert all(re.fullmatch(r"[A-Z]{5}", name) for name in found)
    assert set(text.strip().split("\n")) - {NOISE} == {line for line in text.split("\n") if line.startswith("VAR")}
    assert question.prompt.startswith("\nQuestion: Find all variables that are assigned the value")
    assert question.prompt.endswith(f"5 variables are assigned the value {wanted}, they are:")
    assert question.max_new_tokens == 30


def test_the_worked_example_is_right_and_has_at_most_500_tokens() -> None:
    for index in range(10):
        worked = TASK.example(encode, 900, index, 0).document.split(INSTRUCTION)[1]
        found = values(worked)
        question, answer = worked.strip().rsplit("they are:", 1)
        assert answer.split() == list(found)
        assert len(found) == 5
        assert f"the value {next(iter(found.values()))} in the text above" in question
        assert all(re.fullmatch(r"[A-Z]{3}", name) for name in found)
        assert 470 < len(encode(INSTRUCTION + worked)) <= 500


def test_a_length_without_room_behind_the_worked_example() -> None:
    with pytest.raises(TaskError, match="its shortest example takes") as refused:
        TASK.example(encode, 600, 0, 0)
    smallest = int(str(refused.value).rsplit(" ", 1)[1])
    assert count_tokens(encode, TASK.example(encode, smallest, 0, 0)) == smallest


def test_tokens_by_the_letter_still_have_a_worked_example() -> None:
    example = TASK.example(lambda text: [0] * len(text), 4096, 0, 0)
    assert example.document.count(NOISE) >= 10


def test_score() -> None:
    (question,) = TASK.example(encode, 900, 0, 0).questions
    assert TASK.score(" ".join(question.references[:2]).lower(), question) == 0.4
