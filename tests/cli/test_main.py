"""The command line as a whole: help, exit codes, one line per error."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ttmem
from ttmem.cli.main import app
from ttmem.compaction import api

COMMANDS = ["compact", "ask", "chat", "info", "eval", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(run: Any, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert f"Example: ttmem {command}" in outcome.out
    assert outcome.err == ""


def test_help_lists_the_commands_and_exit_codes(run: Any) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    for command in COMMANDS:
        assert command in outcome.out
    assert "8 partial work of another run" in " ".join(outcome.out.split())


def test_version(run: Any) -> None:
    assert run("--version") == (0, f"ttmem {ttmem.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["ask"], ["ask", "a.ttmem"], ["compact"], ["ask", "a.ttmem", "Q", "--no-such-option"],
     ["compact", "a.txt", "--ratio", "much"], ["ask", "a.ttmem", "Q", "--max-tokens", "0"]],
)  # fmt: skip
def test_wrong_usage_is_two(run: Any, arguments: list[str]) -> None:
    assert run(*arguments).code == 2


def test_a_missing_model_is_three(run: Any, document: Path, memory: Path) -> None:
    for arguments in (("compact", document), ("ask", memory, "Who?"), ("chat", memory), ("eval", memory)):
        outcome = run(*arguments, "-m", "nowhere/at-all")
        assert outcome.code == 3
        assert "error: cannot load the model 'nowhere/at-all'" in outcome.err
        assert outcome.out == ""
    assert run("ask", memory, "Who?", "--dtype", "int4").code == 3


def test_a_bad_document_is_four(run: Any, tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin1"))
    (tmp_path / "long.txt").write_text("z" * 3000)
    for name, words in {"none": "No such file", "empty": "is empty", "latin": "not UTF-8", "long": "reaches"}.items():
        outcome = run("compact", tmp_path / f"{name}.txt", "-m", model_folder)
        assert outcome.code == 4
        assert f"{name}.txt" in outcome.err
        assert words in outcome.err
        assert not (tmp_path / f"{name}.ttmem").exists()
        assert not (tmp_path / f"{name}.ttmem.partial").exists()


@pytest.mark.parametrize(
    "options",
    [["--ratio", "0.5"], ["--ratio", "nan"], ["--ratio", "500"], ["--tokens", "2"], ["--ratio", "8", "--tokens", "20"],
     ["--preset", "slow"], ["--method", "snap"]],
)  # fmt: skip
def test_a_bad_budget_or_setting_is_five(run: Any, document: Path, model_folder: Path, options: list[str]) -> None:
    outcome = run("compact", document, "-m", model_folder, *options)
    assert outcome.code == 5
    assert "error:" in outcome.err
    assert sorted(path.name for path in document.parent.iterdir()) == ["ferry.txt"]


def test_a_bad_memory_file_is_six(run: Any, tmp_path: Path, memory: Path, document: Path, model_folder: Path) -> None:
    (tmp_path / "cut.ttmem").write_bytes(memory.read_bytes()[:-9])
    for path, words in ((tmp_path / "none.ttmem", "no such file"), (tmp_path / "cut.ttmem", "cut short")):
        for arguments in (("ask", path, "Who?"), ("chat", path), ("info", path), ("eval", path)):
            outcome = run(*arguments)
            assert outcome.code == 6
            assert words in outcome.err
            assert path.name in outcome.err
    outcome = run("compact", document, "-m", model_folder, "-o", tmp_path / "nowhere" / "a.ttmem")
    assert outcome.code == 6
    assert "does not exist" in outcome.err


def test_another_models_memory_is_seven(run: Any, memory: Path, other_folder: Path) -> None:
    for arguments in (("ask", memory, "Who?"), ("chat", memory), ("eval", memory)):
        outcome = run(*arguments, "-m", other_folder)
        assert outcome.code == 7
        assert "this memory was made with" in outcome.err


def test_another_runs_partial_work_is_eight(run: Any, document: Path, model_folder: Path, monkeypatch: Any) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api, "measure_fidelity", interrupted)
        assert run("compact", document, "-m", model_folder, "--ratio", "8").code == 130
    outcome = run("compact", document, "-m", model_folder, "--ratio", "9", "--resume")
    assert outcome.code == 8
    assert "holds partial work for another document, model, budget, seed" in outcome.err
    assert run("compact", document, "-m", model_folder, "--ratio", "9").code == 0


def test_brackets_in_messages_are_shown_as_they_are(run: Any) -> None:
    outcome = run("info", "[bold]x[/].ttmem")
    assert outcome.code == 6
    assert "error: [bold]x[/].ttmem: no such file" in outcome.err


def test_errors_are_one_line_of_text(run: Any) -> None:
    outcome = run("info", "/a/very/long/path" * 20)
    assert outcome.err.count("\n") == 1


def test_an_error_that_is_none_of_ours_is_not_hidden(memory: Path, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("ttmem.cli.info.summary", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        ttmem.cli.main.main(["info", str(memory)])  # type: ignore[attr-defined]


@pytest.mark.slow
def test_help_does_not_load_torch() -> None:
    code = "import sys; from ttmem.cli import main; main._register(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_it_runs_as_a_program(memory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ttmem.cli.main", "info", str(memory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "ferry.txt" in done.stdout
    gone = subprocess.run(
        [sys.executable, "-m", "ttmem.cli.main", "info", "gone.ttmem"], capture_output=True, text=True, check=False
    )
    assert gone.returncode == 6
    assert "Traceback" not in gone.stderr


def test_no_help_text_is_read_as_markup(run: Any) -> None:
    """`[its own]` in a help text would be taken for a style, and vanish."""
    import typer

    assert run("--help").code == 0  # commands are registered at the first call
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    helps = {
        f"{name} {parameter.name}": getattr(parameter, "help", None) or ""
        for name, command in commands.items()
        for parameter in command.params
    }
    assert len(helps) > 50
    assert [where for where, text in helps.items() if "[" in text] == []
