"""`ttmem eval`: a memory's fidelity to the full context."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MEMORY_ARGUMENT,
    MODEL_OPTION,
    load_pair,
    output_console,
    print_json,
)


def evaluate(
    memory: Path = MEMORY_ARGUMENT,
    document: Path | None = typer.Option(None, help="The document, for memories saved without it."),
    model: str | None = MODEL_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Compare a memory with the full context on held-out generic prompts: KL divergence and top-1 agreement.

    Example: ttmem eval handbook.ttmem
    """
    from ttmem.compaction.document import Document, read_text
    from ttmem.compaction.prepared import Prepared
    from ttmem.errors import DocumentError
    from ttmem.evaluation.fidelity import measure_fidelity
    from ttmem.progress import ConsoleProgress

    network, loaded = load_pair(memory, model, dtype, device)
    record = loaded.info.document
    if loaded.tokens is None and "parts" in record:
        raise DocumentError(
            f"{memory} is of several texts and was saved without them; only one that kept its ids can be evaluated"
        )
    if document is not None and "parts" not in record:
        source = Document.of(network, read_text(document), document.name)
        if source.sha256 != record["sha256"]:
            raise DocumentError(f"{document}: not the document this memory was made of ({record['name']})")
    elif loaded.tokens is not None:
        source = Document(record["name"], record["sha256"], loaded.tokens)
    else:
        raise DocumentError(f"{memory} was saved without its document: name it with --document")
    progress = ConsoleProgress()
    fidelity = measure_fidelity(network, Prepared(network, source, progress=progress).full, loaded, progress)
    if as_json:
        print_json(asdict(fidelity))
        return
    output_console().print(
        f"KL to the full context {fidelity.kl:.4f} nats, same next token {100 * fidelity.top1:.1f} % "
        f"({fidelity.steps} steps of {fidelity.prompts} held-out prompts)"
    )
