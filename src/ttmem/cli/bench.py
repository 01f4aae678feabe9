"""`ttmem bench`: methods compared on benchmark tasks at equal budgets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MODEL_OPTION,
    errors,
    load_model,
    output_console,
    print_json,
)

if TYPE_CHECKING:
    from ttmem.evaluation.summary import Row


def bench(
    tasks: list[str] = typer.Argument(None, help="Tasks or groups (ruler); see --list.", show_default=False),
    methods: str = typer.Option("full,latent,kvzip+", help="Methods, with commas between."),
    ratios: str = typer.Option("4,8,16,32", help="Compression ratios."),
    lengths: str = typer.Option("1024,4096", help="Lengths in tokens, questions and answers included."),
    docs: int = typer.Option(20, min=1, help="Documents per task and length."),
    preset: str = typer.Option("quick", help="quick, balanced, thorough or paper: how long latent trains."),
    seed: int = typer.Option(0, min=0, max=2**63 - 1, help="Seed of documents and training."),
    questions: int | None = typer.Option(None, min=1, help="Questions per document, where the task lets one choose."),
    data: Path | None = typer.Option(None, help="Folder with a task's files (LongBench, BABILong, SQuAD, HotpotQA)."),
    output: Path = typer.Option(Path("bench"), "--output", "-o", help="Folder of the results; a run goes on in it."),
    list_tasks: bool = typer.Option(False, "--list", help="List the tasks and stop."),
    model: str | None = MODEL_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Compare methods on benchmark tasks at equal budgets: accuracy, agreement with the full context, seconds.

    Writes results.jsonl (one line per document, method and ratio), table.md and plots. The same command goes on where
    an interrupted run stopped.

    Example: ttmem bench niah_multikey_1 --methods full,latent,kvzip+ --ratios 8,16 --lengths 1024 --docs 5 -o results
    """
    from ttmem.compaction.settings import preset_settings
    from ttmem.evaluation.bench import Plan, run_bench
    from ttmem.evaluation.plots import INSTALL, can_plot, plot
    from ttmem.evaluation.summary import markdown, summarize
    from ttmem.memory.file import atomic_write
    from ttmem.progress import ConsoleProgress
    from ttmem.tasks.registry import expand, make_task, task_names, task_options

    if list_tasks:
        typer.echo("\n".join(task_names()))
        return
    names = expand(tasks or [])
    options = {name: value for name, value in (("questions", questions), ("data", data)) if value is not None}
    plan = Plan(tuple(names), tuple(_words(methods)), _numbers(ratios, float), _numbers(lengths, int), docs, seed)
    made = {
        name: make_task(name, **{key: value for key, value in options.items() if key in task_options(name)})
        for name in names
    }
    settings = preset_settings(preset)
    network = load_model(model, dtype, device)
    rows = summarize(run_bench(network, made, plan, settings, output, ConsoleProgress()))
    atomic_write(output / "table.md", lambda temporary: temporary.write_text(markdown(rows)))
    if can_plot():
        plot(rows, output)
    else:
        errors.print(f"no plots, for matplotlib is not installed: {escape(INSTALL)}")
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    _show(rows, output)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str, kind: Any) -> tuple[Any, ...]:
    """Numbers with commas between; a wrong one is a usage error."""
    try:
        return tuple(kind(word) for word in _words(text))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers with commas between") from error


def _show(rows: list[Row], output: Path) -> None:
    from rich.table import Table

    table = Table("task", "length", "method", "ratio", "accuracy", "KL", "top-1", "seconds")
    for row in rows:
        table.add_row(
            row.task,
            f"{row.length:,}",
            row.method,
            f"{row.ratio:g}x",
            f"{row.accuracy:.1f} ± {row.error:.1f}",
            f"{row.kl:.3f}",
            f"{row.top1:.3f}",
            f"{row.seconds:.1f}",
        )
    console = output_console()
    console.print(table)
    console.print(f"results, table and plots are in {escape(str(output))}")
