"""Tasks by name."""

from __future__ import annotations

import pytest

from ttmem.errors import TaskError
from ttmem.tasks import GROUPS, TASKS, Task, expand, make_task, task_names, task_options


def test_every_name_makes_its_task() -> None:
    for name in TASKS:
        task: Task = make_task(name)
        assert task.name == name


def test_groups() -> None:
    assert GROUPS["ruler"] == (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    )  # fmt: skip
    assert [len(GROUPS[group]) for group in ("longbench", "longbench_e", "babilong", "babi")] == [21, 13, 20, 5]
    assert all(name in TASKS for group in GROUPS.values() for name in group)


def test_expansion_keeps_the_order_and_drops_repeats() -> None:
    assert expand(["facts", "babi", "babi_qa2", "facts"]) == ["facts", *GROUPS["babi"]]
    assert expand([]) == []
    assert expand(task_names()) == list(TASKS)


def test_options() -> None:
    assert task_options("niah_multikey_1") == ("questions",)
    assert task_options("phonebook") == task_options("facts") == ("questions",)
    assert task_options("qa_1") == task_options("longbench:trec") == ("data",)
    assert task_options("babilong:qa1") == ("data", "size", "prompts")
    assert task_options("vt") == ()
    assert make_task("facts", questions=3) == make_task("facts", questions=3)
    with pytest.raises(TaskError, match=r"vt takes no options: .*'questions'"):
        make_task("vt", questions=2)
    with pytest.raises(TaskError, match=r"niah_multikey_2 takes questions: .*'keys'"):
        make_task("niah_multikey_2", keys=2)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(TaskError, match=r"no task 'phonbook', did you mean 'phonebook'\? There are phonebook, fa"):
        make_task("phonbook")
    with pytest.raises(TaskError, match=r"no task 'longbench:nq'.* There are longbench:narrativeqa, "):
        make_task("longbench:nq")
    with pytest.raises(TaskError, match=r"the groups ruler, babi, longbench, longbench_e, babilong$"):
        expand(["facts", "???"])
    with pytest.raises(TaskError, match="'ruler' is a group of 13 tasks"):
        make_task("ruler")
