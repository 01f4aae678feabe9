"""`ttmem chat`: a conversation on one memory."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from ttmem.cli.common import DEVICE_OPTION, DTYPE_OPTION, MEMORY_ARGUMENT, MODEL_OPTION, load_pair
from ttmem.errors import QuestionError


def chat(
    memory: Path = MEMORY_ARGUMENT,
    model: str | None = MODEL_OPTION,
    system: str | None = typer.Option(None, help="A system message, where the model's template takes one."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Tokens of a reply at most."),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
) -> None:
    """Talk about a document, turn after turn, in the model's own chat template.

    One message per line; /reset forgets the turns, /quit or end of input leaves. Works from a pipe too.

    Example: ttmem chat handbook.ttmem
    """
    from ttmem.conversation import Conversation

    network, loaded = load_pair(memory, model, dtype, device)
    console = Console(stderr=True)
    conversation = Conversation(network, loaded, system=system, max_new_tokens=max_tokens)
    console.print(f"{escape(loaded.info.document['name'])}: /reset forgets the turns, /quit leaves", style="dim")
    while True:
        message = _read(console)
        if message is None or message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
        elif message:
            for piece in conversation.stream(message):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")


def _read(console: Console) -> str | None:
    """One line of input, None at its end."""
    if sys.stdin.isatty():
        console.print("[bold cyan]you>[/] ", end="")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise QuestionError("the input is not UTF-8 text") from error
    return line.strip() if line else None
