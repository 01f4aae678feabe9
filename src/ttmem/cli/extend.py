"""`ttmem extend`: a memory whose document has grown."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MEMORY_ARGUMENT,
    MODEL_OPTION,
    check_not_a_source,
    check_target,
    load_pair,
    megabytes,
    output_console,
    print_json,
    resumable,
)


def extend(
    memory: Path = MEMORY_ARGUMENT,
    file: Path = typer.Argument(..., help="The text that was added, UTF-8.", show_default=False),
    output: Path = typer.Option(..., "--output", "-o", help="The new memory file.", show_default=False),
    model: str | None = MODEL_OPTION,
    ratio: float | None = typer.Option(None, help="Times smaller, of the added text (16 if nothing is given)."),
    tokens: int | None = typer.Option(None, help="Budget of the added text in tokens, instead of a ratio."),
    preset: str = typer.Option("balanced", help="quick, balanced, thorough or paper: how long to train."),
    method: str = typer.Option("latent", help="latent, or to compare: kvzip+, am, am-omp or full."),
    seed: int = typer.Option(0, min=0, max=2**63 - 1, help="Seed of the training."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the finished steps of a killed run."),
    keep_document: bool = typer.Option(True, help="Keep the token ids in the file."),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Add text to a memory's document, without compacting the document again.

    The text is read behind the memory and compacted there. The old file stays as it is.

    Example: ttmem extend minutes.ttmem minutes-may.txt -o minutes-2.ttmem
    """
    from ttmem.compaction.document import read_text
    from ttmem.compaction.extend import extend as run
    from ttmem.compaction.workspace import Workspace
    from ttmem.progress import ConsoleProgress

    text = read_text(file)
    check_target(output)
    check_not_a_source(output, memory, file)
    partial = output.with_name(output.name + ".partial")
    network, loaded = load_pair(memory, model, dtype, device)
    progress = ConsoleProgress()
    with resumable():
        grown = run(
            network,
            loaded,
            text,
            ratio=ratio,
            tokens=tokens,
            preset=preset,
            method=method,
            seed=seed,
            name=file.name,
            progress=progress,
            workdir=partial,
            resume=resume,
        )
    grown.save(output, keep_document=keep_document)
    Workspace(partial).discard()
    if as_json:
        print_json({"memory": str(output), "bytes": grown.num_bytes(), "seconds": progress.seconds, **vars(grown.info)})
        return
    console = output_console()
    document, measured = grown.info.document, grown.info.fidelity
    console.print(
        f"[bold]{escape(str(output))}[/]: {loaded.document_length:,} + "
        f"{document['tokens'] - loaded.document_length:,} tokens, {megabytes(grown.num_bytes())}, "
        f"{sum(progress.seconds.values()):.0f} s"
    )
    if measured:
        console.print(
            f"fidelity of the new part: KL {measured['kl']:.3f} nats, same next token {100 * measured['top1']:.1f} %"
        )
