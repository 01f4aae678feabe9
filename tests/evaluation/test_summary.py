"""Tables and plots of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from ttmem.errors import TaskError
from ttmem.evaluation import plots
from ttmem.evaluation.bench import Result
from ttmem.evaluation.summary import markdown, standard_error, summarize


def result(index: int, method: str, ratio: float, scores: list[float], length: int = 100) -> Result:
    return Result("t", length, index, method, ratio, scores, 0.5, 0.75, 2.0 + index, {}, 90, 9, 9, 9)


RESULTS = [
    result(0, "full", 1.0, [1.0, 1.0]),
    result(0, "a", 4.0, [1.0, 0.0]),
    result(0, "a", 8.0, [0.0, 0.0]),
    result(1, "full", 1.0, [1.0, 0.0]),
    result(1, "a", 4.0, [1.0, 1.0]),
    result(1, "a", 8.0, [0.0, 1.0]),
]


def test_rows_are_means_over_documents() -> None:
    rows = {(row.method, row.ratio): row for row in summarize(RESULTS)}
    assert rows["full", 1.0].accuracy == 75.0
    assert rows["a", 4.0].accuracy == 75.0
    assert rows["a", 4.0].error == pytest.approx(25.0)  # of 50 and 100
    assert rows["a", 8.0].accuracy == 25.0
    assert rows["a", 8.0].seconds == 2.5
    assert rows["a", 8.0].docs == 2


def test_one_document_has_no_error() -> None:
    assert standard_error([3.0]) == 0.0


def test_the_table_has_a_column_per_ratio_and_the_full_context_in_each() -> None:
    text = markdown(summarize(RESULTS))
    assert "| method | 4x | 8x |" in text
    assert "| full | 75.0 ± 25.0 | 75.0 ± 25.0 |" in text
    assert "| a | 75.0 ± 25.0 | 25.0 ± 25.0 |" in text


def test_plots(tmp_path: Path) -> None:
    longer = [result(r.index, r.method, r.ratio, r.scores, length=200) for r in RESULTS]
    names = {path.name for path in plots.plot(summarize([*RESULTS, *longer]), tmp_path)}
    assert names == {"t-ratio.svg", "t-length.svg", "t-seconds.svg"}
    assert {path.name for path in plots.plot(summarize(RESULTS), tmp_path)} == {"t-ratio.svg", "t-seconds.svg"}


def test_plots_without_matplotlib_name_the_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    with pytest.raises(TaskError, match="pip install"):
        plots.plot(summarize(RESULTS), tmp_path)
