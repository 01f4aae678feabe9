"""A benchmark run on a tiny model: every cell once, the same figures as by hand, resumed where it stopped."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ttmem import BudgetError, LatentSettings, Model, ResumeError, ask
from ttmem.compaction.api import make_method
from ttmem.compaction.document import Document
from ttmem.compaction.prepared import Prepared
from ttmem.compaction.settings import Budget
from ttmem.errors import DocumentError, MemoryFileError, TaskError
from ttmem.evaluation import bench
from ttmem.evaluation.bench import Plan, Result, append, read_results, run_bench, timed
from ttmem.tasks.phonebook import Phonebook

TASK = Phonebook(questions=3)
PLAN = Plan(("phonebook",), ("full", "kvzip+", "snapkv"), (4.0, 8.0), (400,), docs=2)


def run(model: Model, settings: LatentSettings, folder: Path, plan: Plan = PLAN, **others: Any) -> list[Result]:
    return run_bench(model, {"phonebook": TASK}, plan, settings, folder, **others)


@pytest.fixture(scope="module")
def results(model: Model, quick_settings: LatentSettings, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return run(model, quick_settings, tmp_path_factory.mktemp("bench"))


def test_every_cell_runs_once(results: list[Result]) -> None:
    assert [(r.index, r.method, r.ratio) for r in results] == [
        (index, method, ratio)
        for index in range(2)
        for method, ratio in [("full", 1), ("kvzip+", 4), ("kvzip+", 8), ("snapkv", 4), ("snapkv", 8)]
    ]


def test_figures_equal_those_by_hand(model: Model, results: list[Result], quick_settings: LatentSettings) -> None:
    found = next(r for r in results if (r.index, r.method, r.ratio) == (1, "kvzip+", 8))
    example = TASK.example(model.encode, 400, 1, 0)
    prepared = Prepared(model, Document.of(model, example.document), quick_settings)
    budget = Budget.of(prepared.document.length, 8)
    memory = make_method("kvzip+", quick_settings, 0)(prepared, budget)
    assert (found.entries, found.budget_tokens) == (memory.entries, budget.tokens)
    for question, text, score in zip(example.questions, found.answers, found.scores, strict=True):
        alone = ask(model, memory, ["x"], question_format=question.prompt, max_new_tokens=question.max_new_tokens)
        assert text.strip().partition("\n")[0].strip() == alone[0]
        assert score == TASK.score(text, question)


def test_the_full_context_agrees_with_itself(results: list[Result]) -> None:
    for result in results:
        if result.method == "full":
            assert result.top1 == 1.0
            assert result.kl == pytest.approx(0.0, abs=1e-6)
        else:
            assert result.kl > 0


def test_seconds_count_what_a_method_uses(make_prepared: Any, model: Model, quick_settings: LatentSettings) -> None:
    prepared = make_prepared(model)
    budget = Budget.of(prepared.document.length, 4)
    _, latent = timed(prepared, make_method("latent", quick_settings, 0), budget)
    _, again = timed(prepared, make_method("kvzip+", quick_settings, 0), budget)
    assert set(latent) == {"full", "replay", "rollouts", "own"}
    assert set(again) == {"full", "replay", "own"}
    assert again["replay"] == latent["replay"] > 0
    assert latent["own"] > again["own"] > 0


def test_a_run_goes_on_where_it_stopped(
    model: Model, quick_settings: LatentSettings, results: list[Result], tmp_path: Path, monkeypatch: Any
) -> None:
    run(model, quick_settings, tmp_path, replace(PLAN, docs=1))
    path = tmp_path / bench.RESULTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:40])  # killed while writing
    made: list[int] = []
    subject = bench.Subject
    monkeypatch.setattr(bench, "Subject", lambda *a: made.append(a[3]) or subject(*a))
    resumed = run(model, quick_settings, tmp_path)
    assert made == [0, 1]
    assert len(read_results(path)) == 10
    for found, expected in zip(resumed, results, strict=True):
        assert replace(found, seconds=0, steps={}) == replace(expected, seconds=0, steps={})
    made.clear()
    assert run(model, quick_settings, tmp_path) == resumed
    assert made == []


def test_results_of_another_run_are_refused(model: Model, quick_settings: LatentSettings, tmp_path: Path) -> None:
    run(model, quick_settings, tmp_path, replace(PLAN, docs=1, methods=("full",)))
    with pytest.raises(ResumeError, match="settings"):
        run(model, replace(quick_settings, rollouts=4), tmp_path)
    with pytest.raises(ResumeError, match="seed"):
        run(model, quick_settings, tmp_path, replace(PLAN, seed=1))
    (tmp_path / bench.RUN).write_text("{")
    with pytest.raises(ResumeError, match="damaged"):
        run(model, quick_settings, tmp_path)


def test_a_task_that_cannot_be_built_stops_before_any_work(
    model: Model, quick_settings: LatentSettings, tmp_path: Path
) -> None:
    with pytest.raises(TaskError):
        run(model, quick_settings, tmp_path, replace(PLAN, lengths=(400, 20)))
    assert read_results(tmp_path / bench.RESULTS) == []


@pytest.mark.parametrize("change", [{"docs": 0}, {"tasks": ()}, {"methods": ()}, {"ratios": ()}, {"lengths": ()}])
def test_an_empty_plan_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BudgetError):
        replace(PLAN, **change)


def test_results_survive_the_file(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for result in results:
        append(path, result)
    assert read_results(path) == results
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_documents_do_not_depend_on_each_other(
    model: Model, quick_settings: LatentSettings, results: list[Result], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    second = run(model, quick_settings, tmp_path, replace(PLAN, methods=("snapkv",)))
    expected = [r for r in results if r.method == "snapkv"]
    for found, wanted in zip(second, expected, strict=True):
        assert found.answers == wanted.answers


def test_a_ratio_that_keeps_everything_has_its_method(
    model: Model, quick_settings: LatentSettings, tmp_path: Path
) -> None:
    plan = replace(PLAN, methods=("kvzip+",), ratios=(1.0, 1.001), docs=1)
    found = run(model, quick_settings, tmp_path, plan)
    assert [(r.method, r.ratio) for r in found] == [("kvzip+", 1.0), ("kvzip+", 1.001)]
    assert found[0].top1 == 1.0


def test_what_is_named_twice_runs_once(model: Model, quick_settings: LatentSettings, tmp_path: Path) -> None:
    plan = replace(PLAN, tasks=("phonebook",) * 2, methods=("full",) * 2, ratios=(4.0, 4.0), lengths=(400, 400), docs=1)
    assert len(run(model, quick_settings, tmp_path, plan)) == 1


def test_other_questions_are_another_run(model: Model, quick_settings: LatentSettings, tmp_path: Path) -> None:
    plan = replace(PLAN, methods=("full",), docs=1)
    run(model, quick_settings, tmp_path, plan)
    with pytest.raises(ResumeError, match="task phonebook"):
        run_bench(model, {"phonebook": Phonebook(questions=2)}, plan, quick_settings, tmp_path)
    assert run(model, quick_settings, tmp_path, plan)


@pytest.mark.parametrize("content", ["[]", "{", "3", b"\xff\xfe\x00", '{"tasks": []}'])
def test_a_damaged_run_is_refused(
    model: Model, quick_settings: LatentSettings, tmp_path: Path, content: str | bytes
) -> None:
    (tmp_path / bench.RUN).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ResumeError):
        run(model, quick_settings, tmp_path)


def test_lines_that_are_no_results_are_computed_again(results: list[Result], tmp_path: Path) -> None:
    path = tmp_path / bench.RESULTS
    kept = replace(results[0], answers=["one\u2028two\x85three"])
    for result in (kept, replace(kept, scores=[]), replace(kept, scores="x"), replace(kept, kl=None)):  # type: ignore[arg-type]
        append(path, result)
    assert read_results(path) == [kept]
    path.unlink()
    path.mkdir()
    with pytest.raises(MemoryFileError):
        read_results(path)


@pytest.mark.parametrize(
    "change", [{"ratios": (4.0, 0.0)}, {"ratios": (float("nan"),)}, {"ratios": (1e9,)}, {"lengths": (400, 10**8)}]
)
def test_what_cannot_be_is_refused_before_any_work(
    model: Model, quick_settings: LatentSettings, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises((BudgetError, DocumentError)):
        run(model, quick_settings, tmp_path / "folder", replace(PLAN, **change))
    assert not (tmp_path / "folder").exists()
