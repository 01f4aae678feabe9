"""`ttmem info`: what a memory file holds, with its budget as a picture."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ttmem.cli.common import JSON_OPTION, MEMORY_ARGUMENT, megabytes, print_json

if TYPE_CHECKING:
    from ttmem.memory import Memory

SHADES = " ▁▂▃▄▅▆▇█"
MAX_HEADS = 64


def info(memory: Path = MEMORY_ARGUMENT, as_json: bool = JSON_OPTION) -> None:
    """Show a memory's model, document, budget per layer and head, bytes and fidelity. Needs no model.

    Example: ttmem info handbook.ttmem
    """
    from ttmem.memory import Memory
    from ttmem.memory.file import is_state_file
    from ttmem.memory.layer import LayerMemory

    if is_state_file(memory):
        show_state(memory, as_json)
        return
    loaded = Memory.load(memory)
    if as_json:
        lengths = [list(layer.lengths) if isinstance(layer, LayerMemory) else None for layer in loaded.layers]
        print_json(
            {
                **asdict(loaded.info),
                "bytes": {"file": memory.stat().st_size, "memory": loaded.num_bytes()},
                "entries": loaded.entries,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "lengths": lengths,
                "document_kept": loaded.tokens is not None,
            }
        )
        return
    console = Console()
    console.print(summary(loaded, memory))
    console.print(picture(loaded))


def show_state(path: Path, as_json: bool) -> None:
    """The facts of a state that `ttmem read` has made."""
    from ttmem.fast_weights import Reading

    reading = Reading.load(path)
    if as_json:
        print_json({**reading.describe(), "bytes": {"file": path.stat().st_size, "memory": reading.num_bytes()}})
        return
    info = reading.info
    read = f"{info.document['name']}, {info.document['tokens']:,} tokens" if info.document else "not recorded"
    settings = info.settings
    rows = {
        "document": read,
        "model": f"{info.model['name']} ({info.model['architecture']}, weights {info.model['fingerprint'][:12]})",
        "fast weights": f"{settings['rule']} in layers {', '.join(map(str, settings['fast_layers']))}, chunks of "
        f"{settings['chunk_size']:,} tokens",
        "bytes": f"{megabytes(reading.num_bytes())} in memory, {megabytes(path.stat().st_size)} on disk",
        "created": info.created,
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
    }
    Console().print(facts(rows))


def summary(memory: Memory, path: Path) -> Table:
    """The facts, one per row."""
    info = memory.info
    full = info.document["tokens"] * sum(
        layer.num_heads * (layer.keys.shape[-1] + layer.values.shape[-1]) for layer in memory.compacted
    )
    kept = "kept in the file" if memory.tokens is not None else "not kept in the file"
    rows = {
        "document": f"{info.document['name']}, {info.document['tokens']:,} tokens ({kept})",
        "model": f"{info.model['name']} ({info.model['architecture']}, weights {info.model['fingerprint'][:12]})",
        "method": f"{info.method}, seed {info.seed}",
        "budget": f"{info.budget['tokens']:,} entries per layer and head, {info.budget['ratio']:.1f}x smaller",
        "bytes": f"{megabytes(memory.num_bytes())} in memory as {str(memory.dtype).removeprefix('torch.')}, "
        f"{megabytes(path.stat().st_size)} on disk, {megabytes(full * memory.dtype.itemsize)} uncompacted",
        "fidelity": fidelity_line(info.fidelity),
        "created": info.created or "unknown",
        "versions": ", ".join(f"{name} {version}" for name, version in info.versions.items()),
    }
    return facts(rows)


def facts(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    return table


def fidelity_line(fidelity: dict[str, float]) -> str:
    if not fidelity:
        return "not measured; see ttmem eval"
    return (
        f"KL {fidelity['kl']:.3f} nats, same next token {100 * fidelity['top1']:.1f} % on {fidelity['prompts']:.0f} "
        "held-out prompts"
    )


def picture(memory: Memory) -> Text:
    """Entries kept per layer (columns) and head (rows), as bars relative to the largest head."""
    longest = max(max(layer.lengths) for layer in memory.compacted)
    heads = max(layer.num_heads for layer in memory.layers)
    text = Text(f"\nentries per layer (left to right) and KV head (rows); tallest bar: {longest:,}\n")
    for head in range(min(heads, MAX_HEADS)):
        bars = "".join(_bar(layer, head, longest) for layer in memory.layers)
        text.append(f"  {head:>3} ", style="dim")
        text.append(bars + "\n", style="cyan")
    if heads > MAX_HEADS:
        text.append(f"  ... and {heads - MAX_HEADS} more heads\n", style="dim")
    if len(memory.compacted) < len(memory.layers):
        text.append("  ~ a sliding-window layer, which keeps its window\n", style="dim")
    return text


def _bar(layer: object, head: int, longest: int) -> str:
    from ttmem.memory.layer import LayerMemory

    if not isinstance(layer, LayerMemory):
        return "~"
    if head >= layer.num_heads:
        return " "
    length = layer.lengths[head]
    return SHADES[0] if length == 0 else SHADES[max(1, round(length / longest * (len(SHADES) - 1)))]
