"""Benchmark tasks: they generate or read examples and score answers. No model inside."""

from ttmem.tasks.registry import GROUPS, TASKS, expand, make_task, task_names, task_options
from ttmem.tasks.task import Encode, Example, Question, Task

__all__ = [
    "GROUPS",
    "TASKS",
    "Encode",
    "Example",
    "Question",
    "Task",
    "expand",
    "make_task",
    "task_names",
    "task_options",
]
