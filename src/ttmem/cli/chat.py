"""`ttmem chat`: a conversation on one memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from ttmem.cli.common import DEVICE_OPTION, DTYPE_OPTION, MODEL_OPTION, load_model, load_pair
from ttmem.errors import QuestionError

if TYPE_CHECKING:
    from ttmem.conversation import Conversation


def chat(
    memory: Path | None = typer.Argument(
        None, help="A memory file made by `ttmem compact`; may be left out with --auto.", show_default=False
    ),
    model: str | None = MODEL_OPTION,
    auto: bool = typer.Option(False, "--auto", help="Compact older turns once the conversation has become long."),
    threshold: int = typer.Option(2048, min=1, help="With --auto: tokens of turns that are kept whole, at most."),
    keep: int = typer.Option(512, min=0, help="With --auto: tokens of the latest turns that then stay whole."),
    system: str | None = typer.Option(None, help="A system message, where the model's template takes one."),
    max_tokens: int = typer.Option(256, "--max-tokens", min=1, help="Tokens of a reply at most."),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
) -> None:
    """Talk about a document, turn after turn, in the model's own chat template.

    One message per line; /reset forgets the turns, /quit or end of input leaves. Works from a pipe too. With --auto,
    older turns are compacted instead of filling the context: at 8x when they are folded, at 16x and 32x later.

    Example: ttmem chat handbook.ttmem --auto
    """
    from ttmem.conversation import Conversation
    from ttmem.long_conversation import Folding, LongConversation
    from ttmem.progress import ConsoleProgress

    if memory is None and not auto:
        raise typer.BadParameter("name a memory file, or talk without a document with --auto")
    console = Console(stderr=True)
    settings: dict[str, Any] = {"system": system, "max_new_tokens": max_tokens}
    long: dict[str, Any] = (
        {"folding": Folding(threshold, keep), "progress": ConsoleProgress(console)} if auto else {}
    )
    conversation: Conversation
    if memory is None:
        conversation = LongConversation.start(load_model(model, dtype, device), **settings, **long)
        name = "no document"
    else:
        network, loaded = load_pair(memory, model, dtype, device)
        conversation = (LongConversation if auto else Conversation)(network, loaded, **settings, **long)
        name = loaded.info.document["name"]
    console.print(f"{escape(name)}: /reset forgets the turns, /quit leaves", style="dim")
    talk(conversation, console)


def talk(conversation: Conversation, console: Console) -> None:
    """Messages from standard input, replies to standard output, until there are no more."""
    told = 0
    while True:
        message = _read(console)
        if message is None or message == "/quit":
            return
        if message == "/reset":
            conversation.reset()
            told = 0
        elif message:
            for piece in conversation.stream(message):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            folds = getattr(conversation, "folds", [])
            for fold in folds[told:]:
                console.print(
                    f"{fold.messages} messages ({fold.tokens:,} tokens) were compacted {fold.ratio:g}x in "
                    f"{fold.seconds:.0f} s",
                    style="dim",
                )
            told = len(folds)


def _read(console: Console) -> str | None:
    """One line of input, None at its end."""
    if sys.stdin.isatty():
        console.print("[bold cyan]you>[/] ", end="")
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise QuestionError("the input is not UTF-8 text") from error
    return line.strip() if line else None
