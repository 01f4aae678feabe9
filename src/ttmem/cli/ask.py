"""`ttmem ask`: questions to a memory."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.markup import escape

from ttmem.cli.common import (
    DEVICE_OPTION,
    DTYPE_OPTION,
    JSON_OPTION,
    MAX_TOKENS_OPTION,
    MODEL_OPTION,
    load_answering,
    output_console,
    print_json,
)


def ask(
    memory: Path = typer.Argument(
        ..., help="A memory made by `ttmem compact`, or a state made by `ttmem read`.", show_default=False
    ),
    questions: list[str] = typer.Argument(..., help="One or more questions.", show_default=False),
    model: str | None = MODEL_OPTION,
    max_tokens: int = MAX_TOKENS_OPTION,
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Answer questions from a memory; several are answered in one batch, one is streamed.

    Example: ttmem ask handbook.ttmem "Who runs the kitchen?" "When is the boat due?"
    """
    from ttmem.generation import ask as answer
    from ttmem.generation import stream

    network, loaded = load_answering(memory, model, dtype, device)
    if len(questions) == 1 and not as_json:
        for piece in stream(network, loaded, questions[0], max_new_tokens=max_tokens):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    answers = answer(network, loaded, questions, max_new_tokens=max_tokens)
    pairs = list(zip(questions, answers, strict=True))
    if as_json:
        print_json([{"question": question, "answer": text} for question, text in pairs])
        return
    console = output_console()
    for question, text in pairs:
        console.print(f"[bold]{escape(question)}[/]\n  {escape(text)}")
