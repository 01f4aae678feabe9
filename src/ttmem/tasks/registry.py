"""Tasks by name, for the command line and for benchmark scripts."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ttmem.errors import TaskError
from ttmem.tasks.babi import Babi
from ttmem.tasks.babi_world import STORIES
from ttmem.tasks.babilong import Babilong
from ttmem.tasks.babilong_labels import LABELS
from ttmem.tasks.facts import Facts
from ttmem.tasks.longbench import LongBench
from ttmem.tasks.longbench_prompts import EVEN_LENGTHS, PROMPTS
from ttmem.tasks.phonebook import Phonebook
from ttmem.tasks.ruler.frequent_words import CommonWords, FrequentWords
from ttmem.tasks.ruler.niah import Niah
from ttmem.tasks.ruler.qa import DocumentQA
from ttmem.tasks.ruler.qa_files import read_hotpotqa, read_squad
from ttmem.tasks.ruler.qa_like import OneHop, TwoHops
from ttmem.tasks.ruler.variable_tracking import VariableTracking
from ttmem.tasks.task import Task

Factory = Callable[..., Task]
"""Options by name -> task."""

RULER: dict[str, Factory] = {
    "niah_single_1": partial(Niah, "niah_single_1", "noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": partial(Niah, "niah_single_2", "essays", "words", "numbers", 1, 1, 1),
    "niah_single_3": partial(Niah, "niah_single_3", "essays", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": partial(Niah, "niah_multikey_1", "essays", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": partial(Niah, "niah_multikey_2", "needles", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": partial(Niah, "niah_multikey_3", "needles", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": partial(Niah, "niah_multivalue", "essays", "words", "numbers", 1, 4, 1),
    "niah_multiquery": partial(Niah, "niah_multiquery", "essays", "words", "numbers", 4, 1, 4),
    "vt": partial(VariableTracking, "vt"),
    "cwe": partial(CommonWords, "cwe"),
    "fwe": partial(FrequentWords, "fwe"),
    "qa_1": partial(DocumentQA, "qa_1", OneHop, read_squad),
    "qa_2": partial(DocumentQA, "qa_2", TwoHops, read_hotpotqa),
}
BABI: dict[str, Factory] = {f"babi_{task}": partial(Babi, task) for task in STORIES}
LONGBENCH: dict[str, Factory] = {f"longbench:{dataset}": partial(LongBench, dataset) for dataset in PROMPTS}
LONGBENCH_E: dict[str, Factory] = {
    f"longbench:{dataset}_e": partial(LongBench, f"{dataset}_e") for dataset in EVEN_LENGTHS
}
BABILONG: dict[str, Factory] = {f"babilong:{task}": partial(Babilong, task) for task in LABELS}

TASKS: dict[str, Factory] = {
    "phonebook": partial(Phonebook, "phonebook"),
    "facts": partial(Facts, "facts"),
    **RULER,
    **BABI,
    **LONGBENCH,
    **LONGBENCH_E,
    **BABILONG,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(RULER),
    "babi": tuple(BABI),
    "longbench": tuple(LONGBENCH),
    "longbench_e": tuple(LONGBENCH_E),
    "babilong": tuple(BABILONG),
}


def make_task(name: str, **options: Any) -> Task:
    """A task by name. Options are its fields, such as `questions=4`, or `data="folder"` for published datasets.

    Raises TaskError for a name or an option that there is not.
    """
    if name in GROUPS:
        raise TaskError(f"{name!r} is a group of {len(GROUPS[name])} tasks: name one, such as {GROUPS[name][0]!r}")
    if name not in TASKS:
        raise TaskError(_unknown(name))
    try:
        inspect.signature(TASKS[name]).bind(**options)
    except TypeError as error:
        known = ", ".join(task_options(name)) or "no options"
        raise TaskError(f"{name} takes {known}: {error}") from error
    return TASKS[name](**options)


def task_options(name: str) -> tuple[str, ...]:
    """Names of the options that a task takes."""
    return tuple(inspect.signature(TASKS[name]).parameters)


def expand(names: Iterable[str]) -> list[str]:
    """Task names, with groups replaced by their tasks, each once. Raises TaskError for a name that there is not."""
    expanded: dict[str, None] = {}
    for name in names:
        if name not in TASKS and name not in GROUPS:
            raise TaskError(_unknown(name))
        expanded |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(expanded)


def task_names() -> list[str]:
    """Every name that `expand` knows: tasks, then groups."""
    return [*TASKS, *GROUPS]


def _unknown(name: str) -> str:
    """What is wrong with a name, and which names there are."""
    near = difflib.get_close_matches(name, task_names(), n=1)
    meant = f", did you mean {near[0]!r}?" if near else "."
    prefix = name.partition(":")[0]
    known = GROUPS[prefix] if ":" in name and prefix in GROUPS else [task for task in TASKS if ":" not in task]
    return f"there is no task {name!r}{meant} There are {', '.join(known)}, and the groups {', '.join(GROUPS)}"
