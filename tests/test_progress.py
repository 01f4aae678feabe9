"""Progress: silent by default, timed always, bars on request."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from ttmem import ConsoleProgress, Progress, __version__
from ttmem.versions import version_of, versions


def test_stages_are_timed_and_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for _ in range(2):
        with progress.stage("reading", 2) as advance:
            time.sleep(0.01)
            advance(1)
            advance(1)
    assert list(progress.seconds) == ["reading"]
    assert progress.seconds["reading"] >= 0.02
    assert capsys.readouterr() == ("", "")


def test_bars_show_name_and_amount() -> None:
    out = io.StringIO()
    progress = ConsoleProgress(Console(file=out, force_terminal=True, width=100))
    with progress.stage("teacher rollouts", 4) as advance:
        advance(4)
    assert "teacher rollouts" in out.getvalue()
    assert "4/4" in out.getvalue()
    assert progress.seconds["teacher rollouts"] > 0


def test_bars_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress().stage("reading", 1) as advance:
        advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reading" in captured.err


def test_without_a_terminal_there_are_lines_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr("ttmem.progress.time.perf_counter", lambda: now[0])
    with ConsoleProgress(Console(file=out)).stage("training [bold]", 8) as advance:
        for _ in range(8):
            now[0] += 20.0
            advance(1)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines == [
        "training [bold] 2/8 0:00:40 left 0:02:00",
        "training [bold] 4/8 0:01:20 left 0:01:20",
        "training [bold] 6/8 0:02:00 left 0:00:40",
        "training [bold] 8/8 0:02:40",
    ]


def test_an_error_within_a_stage_passes_through() -> None:
    for progress in (Progress(), ConsoleProgress(Console(file=io.StringIO()))):
        with pytest.raises(KeyboardInterrupt), progress.stage("reading", 1):
            raise KeyboardInterrupt


def test_versions() -> None:
    assert version_of("a-package-that-is-not-there") == "unknown"
    assert versions()["ttmem"] == __version__
    assert versions()["torch"].startswith("2.")
