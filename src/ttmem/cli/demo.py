"""`ttmem demo`: the whole way on a document that comes with ttmem."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    MODEL_OPTION,
    check_target,
    load_model,
    megabytes,
    output_console,
)


def demo(
    model: str | None = MODEL_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    ratio: float = typer.Option(16.0, help="Times smaller."),
    preset: str = typer.Option("quick", help="quick, balanced, thorough or paper."),
    output: Path = typer.Option(Path("demo.ttmem"), "--output", "-o", help="Where the memory is written."),
) -> None:
    """Compact the built-in document, ask it, and compare answers, bytes and speed with the full context.

    Example: ttmem demo --ratio 16
    """
    from ttmem.compaction.document import Document
    from ttmem.compaction.kvzip_plus import KVzipPlus
    from ttmem.compaction.latent import LatentCompaction
    from ttmem.compaction.prepared import Prepared
    from ttmem.compaction.settings import Budget, preset_settings
    from ttmem.demo import document, questions
    from ttmem.evaluation.fidelity import measure_fidelities
    from ttmem.evaluation.speed import decode_speed
    from ttmem.generation import ask
    from ttmem.progress import ConsoleProgress

    check_target(output)
    console = output_console()
    start = time.perf_counter()
    network = load_model(model, dtype, device)
    progress = ConsoleProgress()
    settings = preset_settings(preset)
    source = Document.of(network, document(), "the demo document")
    budget = Budget.of(source.length, ratio)
    console.print(
        f"compacting {source.length:,} tokens {budget.ratio:.1f}x with [bold]{escape(network.name)}[/], preset {preset}"
    )
    prepared = Prepared(network, source, settings, progress)
    method = LatentCompaction(settings)
    memory = method(prepared, budget)
    memory.save(output)

    asked = [item.question for item in questions()]
    with console.status("answering"):
        from_full = ask(network, prepared.full, asked, max_new_tokens=24)
        from_memory = ask(network, memory, asked, max_new_tokens=24)
    answers = Table("question", "full context", "memory", title=f"answers at {budget.ratio:.1f}x", show_lines=True)
    for row in zip(asked, from_full, from_memory, strict=True):
        answers.add_row(*map(escape, row))
    console.print(answers)

    compared = {
        f"memory ({preset})": memory,
        "  before training": method.initial(prepared, budget),
        "  KVzip+, same budget": KVzipPlus()(prepared, budget),
    }
    fidelities = measure_fidelities(network, prepared.full, compared, progress)
    memory.info.fidelity = asdict(fidelities[f"memory ({preset})"])
    memory.save(output)
    with console.status("measuring decode speed"):
        speeds = decode_speed(network, {"full context": prepared.full, **compared})
    table = Table("", "bytes", "tokens/s", "KL to full", "same next token", title="cost and fidelity")
    table.add_row("full context", megabytes(prepared.full.num_bytes()), f"{speeds['full context']:.1f}", "0", "100.0 %")
    for name, compacted in compared.items():
        fidelity = fidelities[name]
        table.add_row(
            name,
            megabytes(compacted.num_bytes()),
            f"{speeds[name]:.1f}",
            f"{fidelity.kl:.3f}",
            f"{100 * fidelity.top1:.1f} %",
        )
    console.print(table)
    console.print(f"{time.perf_counter() - start:.0f} s in all. The memory is in [bold]{escape(str(output))}[/]; try:")
    console.print(f'  ttmem ask {escape(str(output))} "{escape(asked[0])}"')
