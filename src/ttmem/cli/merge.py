"""`ttmem merge`: one memory over several documents."""

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
    recorded_model,
)


def merge(
    memories: list[Path] = typer.Argument(
        ..., help="Memory files, in the order of their documents.", show_default=False
    ),
    output: Path = typer.Option(..., "--output", "-o", help="The merged memory file.", show_default=False),
    keep_sinks: bool = typer.Option(
        False, "--keep-sinks", help="Keep every document's attention sink; one for all answers better."
    ),
    model: str | None = MODEL_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Put memories of several documents together, without reading or training anything again.

    Keys are moved to the positions behind the earlier documents. Each document was read alone, so answers that need
    two of them together may suffer.

    Example: ttmem merge manual.ttmem errata.ttmem -o both.ttmem
    """
    from ttmem.memory import Memory
    from ttmem.memory.merging import merge as run

    check_target(output)
    check_not_a_source(output, *memories)
    parts = [Memory.load(path) for path in memories]
    network = load_model(model or recorded_model(parts[0]), dtype, device)
    merged = run(network, [part.to(network.device, network.dtype) for part in parts], keep_sinks)
    merged.save(output)
    if as_json:
        print_json({"memory": str(output), "bytes": merged.num_bytes(), **vars(merged.info)})
        return
    document, budget = merged.info.document, merged.info.budget
    output_console().print(
        f"[bold]{escape(str(output))}[/]: {len(parts)} documents, {document['tokens']:,} tokens -> "
        f"{budget['tokens']:,} per layer and head ({budget['ratio']:.1f}x), {megabytes(merged.num_bytes())}"
    )
