"""`ttmem compact`: a text file becomes a memory file."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MODEL_OPTION,
    check_not_a_source,
    check_target,
    load_model,
    megabytes,
    output_console,
    print_json,
    resumable,
)


def compact(
    file: Path = typer.Argument(..., help="The document, UTF-8 text.", show_default=False),
    model: str | None = MODEL_OPTION,
    ratio: float | None = typer.Option(None, help="Times smaller: 16 keeps one sixteenth (the default)."),
    tokens: int | None = typer.Option(None, help="Budget in tokens per layer and head, instead of a ratio."),
    fidelity: float | None = typer.Option(
        None,
        help="Instead of a budget: the smallest one with this top-1 agreement with the full context (0.95) is found.",
    ),
    preset: str = typer.Option("balanced", help="quick, balanced, thorough or paper: how long to train."),
    method: str = typer.Option(
        "latent", help="latent, or to compare: kvzip+, snapkv, pyramidkv, am, am-omp, summary or full."
    ),
    seed: int = typer.Option(0, min=0, max=2**63 - 1, help="Seed of the training."),
    output: Path | None = typer.Option(None, "--output", "-o", help="The memory file; FILE with .ttmem when left out."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the finished steps of a killed run."),
    keep_document: bool = typer.Option(
        True, help="Keep the document's token ids in the file; `ttmem eval` needs them, answering does not."
    ),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Turn a document into a small memory, before any question is known.

    Finished steps are kept beside the output in OUTPUT.partial until the memory is written; a killed run goes on with
    --resume and gives the same memory.

    Example: ttmem compact handbook.txt --ratio 16 -o handbook.ttmem
    """
    from ttmem.compaction.api import compact as run
    from ttmem.compaction.document import read_text
    from ttmem.compaction.workspace import Workspace
    from ttmem.progress import ConsoleProgress

    text = read_text(file)
    target = output or file.with_suffix(".ttmem")
    check_target(target)
    check_not_a_source(target, file)
    partial = target.with_name(target.name + ".partial")
    network = load_model(model, dtype, device)
    progress = ConsoleProgress()
    with resumable():
        memory = run(
            network,
            text,
            ratio=ratio,
            tokens=tokens,
            fidelity=fidelity,
            preset=preset,
            method=method,
            seed=seed,
            name=file.name,
            progress=progress,
            workdir=partial,
            resume=resume,
        )
    memory.save(target, keep_document=keep_document)
    Workspace(partial).discard()
    measured = memory.info.fidelity
    if as_json:
        print_json(
            {"memory": str(target), "bytes": memory.num_bytes(), "seconds": progress.seconds, **vars(memory.info)}
        )
        return
    console = output_console()
    document, budget = memory.info.document, memory.info.budget
    console.print(
        f"[bold]{escape(str(target))}[/]: {document['tokens']:,} tokens -> {budget['tokens']:,} per layer and head "
        f"({budget['ratio']:.1f}x), {megabytes(memory.num_bytes())}, {sum(progress.seconds.values()):.0f} s"
    )
    if measured:
        console.print(
            f"fidelity to the full context on held-out prompts: KL {measured['kl']:.3f} nats, "
            f"same next token {100 * measured['top1']:.1f} %"
        )
