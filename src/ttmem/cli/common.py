"""What several commands share: options, loading with a message, printing JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from ttmem.fast_weights import Reading
    from ttmem.memory import Memory
    from ttmem.models import Model

MODEL_OPTION = typer.Option(
    None, "--model", "-m", help="Hub id, folder or GGUF file; the bundled SmolLM2-135M-Instruct when left out."
)
DTYPE_OPTION = typer.Option("auto", "--dtype", help="auto, float32, bfloat16 or float16.")
DEVICE_OPTION = typer.Option(None, "--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
JSON_OPTION = typer.Option(False, "--json", help="Print one JSON document on standard output.")
MEMORY_ARGUMENT = typer.Argument(..., help="A memory file made by `ttmem compact`.", show_default=False)
MAX_TOKENS_OPTION = typer.Option(64, "--max-tokens", min=1, help="Tokens of an answer at most.")

errors = Console(stderr=True)


def load_model(name: str | None, dtype: str = "auto", device: str | None = None) -> Model:
    """Load a model, saying so on standard error."""
    from ttmem.models import load_model as load

    with errors.status("loading the model"):
        return load(name, dtype=dtype, device=device)


def load_pair(
    path: Path, model_name: str | None, dtype: str = "auto", device: str | None = None
) -> tuple[Model, Memory]:
    """A memory and its model, checked to belong together. The file is read first: its errors come fast."""
    from ttmem.memory import Memory

    memory = Memory.load(path)
    model = load_model(model_name or recorded_model(memory), dtype, device)
    memory.check_model(model)
    return model, memory.to(model.device, model.dtype)


def load_answering(
    path: Path, model_name: str | None, dtype: str = "auto", device: str | None = None
) -> tuple[Model, Memory | Reading]:
    """What answers questions: a memory with its model, or a state with the model that read it."""
    from ttmem.errors import ModelError
    from ttmem.memory.file import is_state_file

    if not is_state_file(path):
        return load_pair(path, model_name, dtype, device)
    from ttmem.fast_weights import Reading, load_reader

    reading = Reading.load(path)
    name = model_name or reading.info.model["name"]
    if not name:
        raise ModelError(f"{path} does not say where its model is: name the model with -m")
    with errors.status("loading the model"):
        reader = load_reader(name, dtype=dtype, device=device)
    reading.check_model(reader)
    return reader, reading.to(reader.device, reader.dtype)


def recorded_model(memory: Memory) -> str | None:
    """The model the memory names, where it can be loaded by that name; None for the bundled one."""
    name = str(memory.info.model["name"])
    return None if name.endswith("(bundled)") else name


def print_json(data: Any) -> None:
    """One JSON document on standard output, for programs."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def output_console() -> Console:
    """Standard output for people: text as it is, no wrapping in a pipe, no emoji codes, no highlighting."""
    return Console(emoji=False, highlight=False, soft_wrap=not sys.stdout.isatty())


def check_target(path: Path) -> None:
    """Raise MemoryFileError before any work when `path` cannot become a file."""
    from ttmem.errors import MemoryFileError

    try:
        if path.name in ("", "..") or path.is_dir():
            raise MemoryFileError(f"cannot write {str(path)!r}: it is a folder; name a file")
        if not path.parent.is_dir():
            raise MemoryFileError(f"cannot write {path}: the folder {path.parent} does not exist")
        if not os.access(path.parent, os.W_OK):
            raise MemoryFileError(f"cannot write {path}: the folder {path.parent} is not writable")
    except OSError as error:
        raise MemoryFileError(f"cannot write {str(path)[:80]!r}: {error.strerror}") from error


def check_not_a_source(target: Path, *sources: Path) -> None:
    """Raise MemoryFileError when writing `target` would overwrite what it is made of."""
    from ttmem.errors import MemoryFileError

    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise MemoryFileError(f"{target} would overwrite {source}, which it is made of: name another file with -o")


@contextmanager
def resumable() -> Iterator[None]:
    """Say, where the user interrupts, that --resume goes on."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("[bold red]interrupted[/]; the same command with --resume goes on from the last finished step")
        raise



def megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
