"""Run methods on tasks: every document is prepared once, compacted by every method at every ratio, and asked.

Results are JSON lines, one per document, method and ratio, written as soon as they are known; a run that is started
again in the same folder does only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ttmem.compaction.api import FullMemory, make_method
from ttmem.compaction.document import Document
from ttmem.compaction.method import Method
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget, LatentSettings
from ttmem.errors import BudgetError, DocumentError, MemoryFileError, ResumeError
from ttmem.evaluation.fidelity import agreement
from ttmem.generation import greedy_answers
from ttmem.memory import Memory
from ttmem.memory.file import atomic_write
from ttmem.models import Model
from ttmem.progress import Progress
from ttmem.tasks.task import Question, Task
from ttmem.versions import versions

RESULTS = "results.jsonl"
RUN = "run.json"
BATCH = 20
"""Questions answered at once."""


@dataclass(frozen=True)
class Plan:
    """What is run: every task at every length, `docs` documents each, every method at every ratio.

    `full`, where it is among the methods, runs once per document, whatever the ratios.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    ratios: tuple[float, ...]
    lengths: tuple[int, ...]
    docs: int
    seed: int = 0

    def __post_init__(self) -> None:
        """Drop what is named twice. Raise BudgetError for a number that makes no run."""
        for name in ("tasks", "methods", "ratios", "lengths"):
            if not getattr(self, name):
                raise BudgetError(f"the benchmark has no {name}: give at least one")
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        if self.docs < 1:
            raise BudgetError(f"the benchmark has {self.docs} documents per task and length; give at least 1")

    def cells(self) -> list[tuple[str, float]]:
        """(method, ratio) of one document, in the order in which they run."""
        return [
            (method, ratio)
            for method in self.methods
            for ratio in ((1.0,) if method == "full" else self.ratios)
        ]


@dataclass
class Result:
    """One document under one method and ratio.

    scores: 0 to 1 per question. kl, top1: agreement with the full context's own greedy answers to the questions.
    seconds: preparing this memory, what it shares with other methods included. steps: the same by step.
    """

    task: str
    length: int
    index: int
    method: str
    ratio: float
    scores: list[float]
    kl: float
    top1: float
    seconds: float
    steps: dict[str, float]
    document_tokens: int
    budget_tokens: int
    entries: int
    bytes: int
    answers: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, int, str, float]:
        return self.task, self.length, self.index, self.method, self.ratio


def run_bench(
    model: Model,
    tasks: dict[str, Task],
    plan: Plan,
    settings: LatentSettings,
    folder: Path,
    progress: Progress | None = None,
) -> list[Result]:
    """Run what `folder` does not hold yet. Returns all results of the plan, in the plan's order.

    Raises, before anything is computed: ResumeError when the folder holds another run's results, TaskError where a task
    cannot be built, BudgetError for a ratio or method that cannot be, DocumentError for a length beyond the model.
    """
    progress = progress or Progress()
    check_plan(model, tasks, plan, settings)
    open_run(folder, model, plan, settings, tasks)
    done = {result.key: result for result in read_results(folder / RESULTS)}
    order = [
        (name, length, index, method, ratio)
        for name in plan.tasks
        for length in plan.lengths
        for index in range(plan.docs)
        for method, ratio in plan.cells()
    ]
    with progress.stage("benchmark", len(order)) as advance:
        advance(sum(key in done for key in order))
        for name in plan.tasks:
            for length in plan.lengths:
                for index in range(plan.docs):
                    cells = [cell for cell in plan.cells() if (name, length, index, *cell) not in done]
                    if not cells:
                        continue
                    subject = Subject(model, tasks[name], length, index, plan.seed, settings)
                    for method, ratio in cells:
                        result = subject.result(make_method(method, settings, plan.seed), ratio)
                        append(folder / RESULTS, result)
                        done[result.key] = result
                        advance(1)
    return [done[key] for key in order]


def check_plan(model: Model, tasks: dict[str, Task], plan: Plan, settings: LatentSettings) -> None:
    """Raise for what could only fail after hours of computing."""
    for name in plan.methods:
        make_method(name, settings, plan.seed)
    limit = model.max_positions
    if limit is not None and max(plan.lengths) > limit:
        raise DocumentError(f"documents of {max(plan.lengths):,} tokens: {model.name} reaches {limit:,} positions")
    for name in plan.tasks:
        for length in plan.lengths:
            for index in sorted({0, plan.docs - 1}):
                tasks[name].example(model.encode, length, index, plan.seed)
    for _, ratio in plan.cells():
        Budget.of(max(plan.lengths), ratio)


class Subject:
    """One document with its questions, prepared once for all methods."""

    def __init__(
        self, model: Model, task: Task, length: int, index: int, seed: int, settings: LatentSettings
    ) -> None:
        self.model, self.task, self.length, self.index = model, task, length, index
        example = task.example(model.encode, length, index, seed)
        self.questions = example.questions
        self.prompts = [model.encode(question.prompt) for question in example.questions]
        document = Document.of(model, example.document, f"{task.name} {length} {index}")
        self.prepared = Prepared(model, document, settings)
        self.teacher = greedy(model, self.prepared.full, self.prompts, self.questions)

    def result(self, method: Method, ratio: float) -> Result:
        prepared, asked = self.prepared, method.name
        budget = Budget.of(prepared.document.length, ratio)
        if budget.tokens >= prepared.document.length:
            method = FullMemory()
        memory, steps = timed(prepared, method, budget)
        answers = (
            self.teacher
            if memory is prepared.full
            else greedy(self.model, memory, self.prompts, self.questions)
        )
        texts = [self.model.decode(answer) for answer in answers]
        against = agreement(self.model, prepared.full, {"memory": memory}, self.prompts, self.teacher)["memory"]
        return Result(
            task=self.task.name,
            length=self.length,
            index=self.index,
            method=asked,
            ratio=ratio,
            scores=[self.task.score(text, question) for text, question in zip(texts, self.questions, strict=True)],
            kl=against.kl,
            top1=against.top1,
            seconds=sum(steps.values()),
            steps=steps,
            document_tokens=prepared.document.length,
            budget_tokens=budget.tokens,
            entries=memory.entries,
            bytes=memory.num_bytes(),
            answers=texts,
        )


def timed(prepared: Prepared, method: Method, budget: Budget) -> tuple[Memory, dict[str, float]]:
    """A memory, and the seconds of its steps as if prepared alone: shared artifacts count for every user."""
    prepared.used.clear()
    start, shared = time.perf_counter(), sum(prepared.seconds.values())
    memory = method(prepared, budget)
    own = time.perf_counter() - start - (sum(prepared.seconds.values()) - shared)
    return memory, {**{name: prepared.seconds[name] for name in sorted(prepared.used)}, "own": own}


def greedy(model: Model, memory: Memory, prompts: list[list[int]], questions: Sequence[Question]) -> list[list[int]]:
    """Greedy answers in batches of questions that have the same room."""
    answers: list[list[int]] = [[] for _ in prompts]
    for room in sorted({question.max_new_tokens for question in questions}):
        rows = [i for i, question in enumerate(questions) if question.max_new_tokens == room]
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            for i, answer in zip(part, greedy_answers(model, memory, [prompts[i] for i in part], room), strict=True):
                answers[i] = answer
    return answers


def open_run(
    folder: Path, model: Model, plan: Plan, settings: LatentSettings, tasks: dict[str, Task] | None = None
) -> None:
    """Create the folder, or check that it holds results of the same model, settings and seed.

    Tasks may come in later calls; one that is there already must have the options it had.
    """
    own = {"fingerprint": model.fingerprint, "tokenizer": model.tokenizer_hash}  # its name may be any path to it
    identity = {"model": own, "dtype": str(model.dtype), "settings": asdict(settings), "seed": plan.seed}
    options = {name: task_settings(task) for name, task in (tasks or {}).items()}
    path = folder / RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() and (folder / RESULTS).exists():
            raise ResumeError(f"{folder} holds {RESULTS} without {RUN}: name another folder")
        fresh: dict[str, Any] = {**identity, "versions": versions()}
        found = json.loads(path.read_text()) if path.exists() else fresh
        known = found.get("tasks", {})
        differing = [name for name, value in identity.items() if _digest(found.get(name)) != _digest(value)]
        differing += [f"task {name}" for name, value in options.items() if known.get(name, value) != value]
        if differing:
            raise ResumeError(f"{folder} holds results of another {', '.join(differing)}: name another folder with -o")
        if not path.exists() or not options.keys() <= known.keys():
            text = json.dumps({**found, "tasks": {**known, **options}}, indent=1) + "\n"
            atomic_write(path, lambda temporary: temporary.write_text(text))
    except (ValueError, AttributeError, TypeError) as error:
        raise ResumeError(f"{path} is damaged ({error}): name another folder") from error
    except OSError as error:
        raise MemoryFileError(f"cannot write {folder}: {error.strerror}") from error


def task_settings(task: Task) -> dict[str, str]:
    """What a task was made with, as text."""
    return {name: str(getattr(task, name)) for name in getattr(task, "__dataclass_fields__", {})}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def append(path: Path, result: Result) -> None:
    """Add one line in one write. A line that a crash cut short is taken up again by the next run."""
    text = json.dumps(asdict(result), ensure_ascii=False) + "\n"
    with path.open("a+b") as file:
        file.seek(0, 2)
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()


def read_results(path: Path) -> list[Result]:
    """All whole lines of a results file; none where there is no file. Raises MemoryFileError when it cannot be read."""
    if not path.exists():
        return []
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror}") from error
    results = []
    for line in text.split("\n"):  # not splitlines: answers may hold other marks that end a line
        try:
            result = Result(**json.loads(line))
            figures = [*result.scores, result.ratio, result.kl, result.top1, result.seconds]
            if result.scores and sum(figures) == sum(figures):  # numbers, all of them
                results.append(result)
        except (ValueError, TypeError):
            continue  # a line cut short by a crash
    return results
