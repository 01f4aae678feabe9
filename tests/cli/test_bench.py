"""`ttmem bench` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttmem.evaluation import plots

ARGUMENTS = ("bench", "phonebook", "--methods", "full,kvzip+", "--ratios", "4,8", "--lengths", "400", "--docs", "1")
OPTIONS = ("--questions", "2", "--dtype", "float32")


def test_results_table_and_rows(run: Any, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    outcome = run(*ARGUMENTS, *OPTIONS, "-m", model_folder, "-o", folder)
    assert outcome.code == 0
    assert "phonebook" in outcome.out
    assert "kvzip+" in outcome.out
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(line["method"], line["ratio"], len(line["scores"])) for line in lines] == [
        ("full", 1.0, 2),
        ("kvzip+", 4.0, 2),
        ("kvzip+", 8.0, 2),
    ]
    assert "| kvzip+ |" in (folder / "table.md").read_text()
    again = run(*ARGUMENTS, *OPTIONS, "-m", model_folder, "-o", folder, "--json")
    rows = json.loads(again.out)
    assert [row["method"] for row in rows] == ["full", "kvzip+", "kvzip+"]
    assert len((folder / "results.jsonl").read_text().splitlines()) == 3


def test_without_matplotlib_the_results_come_without_plots(
    run: Any, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    outcome = run(*ARGUMENTS, *OPTIONS, "-m", model_folder, "-o", tmp_path / "out")
    assert outcome.code == 0
    assert "pip install" in outcome.err
    assert not list((tmp_path / "out").glob("*.svg"))


def test_the_list_needs_no_model(run: Any) -> None:
    outcome = run("bench", "--list")
    assert outcome.code == 0
    assert {"phonebook", "niah_multikey_1", "ruler", "facts"} <= set(outcome.out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("bench", "nothing"), 10, "there is no task 'nothing'"),
        (("bench",), 5, "no tasks"),
        (("bench", "phonebook", "--methods", "zip"), 5, "'zip' is not one of"),
        (("bench", "phonebook", "--ratios", "4,x"), 2, "not a list of numbers"),
        (("bench", "phonebook", "--lengths", "5"), 10, "phonebook"),
        (("bench", "phonebook", "--preset", "slow"), 5, "'slow' is not one of"),
    ],
)
def test_wrong_requests_say_what_to_do(
    run: Any, model_folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    outcome = run(*arguments, "-m", model_folder, "-o", tmp_path / "out")
    assert outcome.code == code
    assert said in outcome.err
    assert not (tmp_path / "out" / "results.jsonl").exists()
