"""`ttmem read`: a model with fast weights reads a text file, and what it keeps becomes a state file."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    check_not_a_source,
    check_target,
    errors,
    megabytes,
    output_console,
    print_json,
)


def read(
    file: Path = typer.Argument(..., help="The document, UTF-8 text.", show_default=False),
    model: str = typer.Option(
        ..., "--model", "-m", help="Hub id or folder of a model with fast weights.", show_default=False
    ),
    output: Path | None = typer.Option(None, "--output", "-o", help="The state file; FILE with .state when left out."),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Let a model with fast weights read a document once, and keep its state: a memory that needs no training.

    Example: ttmem read handbook.txt -m ./my-ttcd-model -o handbook.state
    """
    from ttmem.compaction.document import read_text
    from ttmem.fast_weights import load_reader
    from ttmem.progress import ConsoleProgress

    text = read_text(file)
    target = output or file.with_suffix(".state")
    check_target(target)
    check_not_a_source(target, file)
    with errors.status("loading the model"):
        reader = load_reader(model, dtype=dtype, device=device)
    progress = ConsoleProgress()
    reading = reader.read(text, file.name, progress)
    reading.save(target)
    if as_json:
        print_json({"state": str(target), "seconds": progress.seconds, **reading.describe()})
        return
    output_console().print(
        f"[bold]{escape(str(target))}[/]: {reading.info.document['tokens']:,} tokens read into "
        f"{megabytes(reading.num_bytes())}, {sum(progress.seconds.values()):.0f} s"
    )
