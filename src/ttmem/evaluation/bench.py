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
from ttmem.errors import BudgetError, MemoryFileError, ResumeError
from ttmem.evaluation.fidelity import agreement
from ttmem.generation import greedy_answers
from ttmem.memory import Memory
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
        """Raise BudgetError for a number that makes no run."""
        for name in ("tasks", "methods", "ratios", "lengths"):
            if not getattr(self, name):
                raise BudgetError(f"the benchmark has no {name}: give at least one")
        if self.docs < 1:
            raise BudgetError(f"the benchmark has {self.docs} documents per task and length; give at least 1")

    def cells(self) -> list[tuple[str, float]]:
        """(method, ratio) of one document, in the order in which they run."""
        ratios = tuple(dict.fromkeys(self.ratios))
        return [
            (method, ratio)
            for method in dict.fromkeys(self.methods)
            for ratio in ((1.0,) if method == "full" else ratios)
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

    Raises ResumeError when the folder holds another run's results, TaskError where a task cannot be built.
    """
    progress = progress or Progress()
    for name in plan.methods:
        make_method(name, settings, plan.seed)
    open_run(folder, model, plan, settings)
    done = {result.key: result for result in read_results(folder / RESULTS)}
    order = [
        (name, length, index, method, ratio)
        for name in plan.tasks
        for length in plan.lengths
        for index in range(plan.docs)
        for method, ratio in plan.cells()
    ]
    for name in plan.tasks:  # a task that cannot be built should say so before hours of computing
        for length in plan.lengths:
            tasks[name].example(model.encode, length, 0, plan.seed)
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
        prepared = self.prepared
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
            method=method.name,
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


def open_run(folder: Path, model: Model, plan: Plan, settings: LatentSettings) -> None:
    """Create the folder, or check that it holds results of the same model, settings and seed."""
    own = {"fingerprint": model.fingerprint, "tokenizer": model.tokenizer_hash}  # its name may be any path to it
    identity = {"model": own, "dtype": str(model.dtype), "settings": asdict(settings), "seed": plan.seed}
    path = folder / RUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if (folder / RESULTS).exists():
                raise ResumeError(f"{folder} holds {RESULTS} without {RUN}: name another folder")
            path.write_text(json.dumps({**identity, "versions": versions()}, indent=1) + "\n")
            return
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ResumeError(f"{path} is damaged ({error}): name another folder") from error
    except OSError as error:
        raise MemoryFileError(f"cannot write {folder}: {error.strerror}") from error
    differing = [name for name, value in identity.items() if _digest(found.get(name)) != _digest(value)]
    if differing:
        raise ResumeError(f"{folder} holds results of another {', '.join(differing)}: name another folder with -o")


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
    """All whole lines of a results file; none where there is no file."""
    if not path.exists():
        return []
    results = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            results.append(Result(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue  # a line cut short by a crash
    return results
