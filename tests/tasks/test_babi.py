"""Generated facts in the manner of bAbI: an interpreter that reads the facts must come to the same answers."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttmem.errors import TaskError
from ttmem.tasks.babi import Babi
from ttmem.tasks.babi_world import STORIES, Story
from ttmem.tasks.babilong_labels import LABELS
from ttmem.tasks.registry import make_task
from ttmem.tasks.sizing import count_tokens

MOVE = re.compile(r"(\w+) (?:moved|went|travelled|journeyed)(?: back)? to the (\w+)\.")
TAKE = re.compile(r"(\w+) (?:took|got|picked up|grabbed) the (\w+) there\.")
DROP = re.compile(r"(\w+) (?:dropped|discarded|put down|left) the (\w+) there\.")
GIVE = re.compile(r"(\w+) (?:gave|passed|handed) the (\w+) to (\w+)\.")
LIE = re.compile(r"The (\w+) is (\w+) of the (\w+)\.")


def encode(text: str) -> list[int]:
    return [0] * len(text.split())


def answers(facts: tuple[str, ...], question: str) -> set[str]:
    """Every answer that the facts allow."""
    place: dict[str, str] = {}
    holder: dict[str, str] = {}
    path: dict[str, list[str]] = {}
    gifts: list[tuple[str, str, str]] = []
    relations: list[tuple[str, str, str]] = []
    for fact in facts:
        if match := MOVE.fullmatch(fact):
            person, place[match[1]] = match[1], match[2]
            for thing in [thing for thing, owner in holder.items() if owner == person]:
                path[thing].append(match[2])
        elif match := TAKE.fullmatch(fact):
            assert match[2] not in holder
            assert path.setdefault(match[2], [place[match[1]]])[-1] == place[match[1]]
            holder[match[2]] = match[1]
        elif match := DROP.fullmatch(fact):
            assert holder.pop(match[2]) == match[1]
        elif match := GIVE.fullmatch(fact):
            assert holder[match[2]] == match[1] != match[3]
            holder[match[2]] = match[3]
            gifts.append((match[1], match[2], match[3]))
        else:
            relations.append(LIE.fullmatch(fact).groups())
    forms = {
        r"Where is (\w+)\?": lambda who: {place[who]},
        r"Where is the (\w+)\?": lambda what: {path[what][-1]},
        r"Where was the (\w+) before the (\w+)\?": lambda what, there: {
            path[what][i - 1] for i in range(1, len(path[what])) if path[what][i] == there
        },
        r"What is (\w+) of the (\w+)\?": lambda way, of: {x for x, d, y in relations if (d, y) == (way, of)},
        r"What is the (\w+) (\w+) of\?": lambda what, way: {y for x, d, y in relations if (x, d) == (what, way)},
        r"What did (\w+) give to (\w+)\?": lambda giver, to: {t for g, t, r in gifts if (g, r) == (giver, to)},
        r"Who gave the (\w+) to (\w+)\?": lambda what, to: {g for g, t, r in gifts if (t, r) == (what, to)},
        r"Who did (\w+) give the (\w+) to\?": lambda giver, what: {r for g, t, r in gifts if (g, t) == (giver, what)},
        r"Who gave the (\w+)\?": lambda what: {g for g, t, _ in gifts if t == what},
        r"Who received the (\w+)\?": lambda what: {r for _, t, r in gifts if t == what},
    }
    ((solve, found),) = [(solve, match) for form, solve in forms.items() if (match := re.fullmatch(form, question))]
    return solve(*found.groups())


@pytest.mark.parametrize("task", STORIES)
def test_the_facts_give_the_answer_and_no_other(task: str) -> None:
    given_answers = []
    for seed in range(300):
        story: Story = STORIES[task](random.Random(seed))
        assert answers(story.facts, story.question) == {story.answer}
        assert story.answer in LABELS[task]
        assert story.answer not in story.question
        assert 2 <= len(story.facts) <= 60
        given_answers.append(story.answer)
    assert set(given_answers) == LABELS[task]
    assert max(given_answers.count(answer) for answer in LABELS[task]) < 150


@given(st.sampled_from(list(STORIES)), st.sampled_from(["essays", "noise"]), st.integers(500, 1500), st.integers(0, 40))
def test_the_facts_stand_in_the_background_in_their_order(task: str, background: str, length: int, index: int) -> None:
    made = Babi(task, background)
    example = made.example(encode, length, index, seed=1)
    taken = count_tokens(encode, example)
    assert taken <= length
    assert taken > length - 130
    (question,) = example.questions
    context = example.document.split("<context>\n")[1]
    fact = "|".join(form.pattern for form in (MOVE, TAKE, DROP, GIVE, LIE))
    told = tuple(match.group() for match in re.finditer(fact, context))
    assert len(told) >= 2
    asked = question.prompt.split("Question: ")[1].removesuffix("\nAnswer:")
    assert answers(told, asked) == {*question.references}
    assert made.score(f"{question.references[0]}.", question) == 1


def test_refusals() -> None:
    with pytest.raises(TaskError, match="only for qa1"):
        Babi("qa6")
    with pytest.raises(TaskError, match="background 'pg19' is not one of"):
        Babi("qa1", "pg19")
    with pytest.raises(TaskError, match="its shortest example takes"):
        make_task("babi_qa3").example(encode, 60, 0, 0)
