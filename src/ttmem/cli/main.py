"""`ttmem`: the application, its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import typer
from rich.console import Console
from rich.markup import escape

from ttmem.errors import TtmemError

EPILOG = (
    "Exit codes: 0 done, 1 other error, 2 wrong usage, 3 model, 4 document, 5 budget or setting, 6 memory file, "
    "7 memory of another model, 8 partial work of another run, 9 question, 10 task, 11 blocks of tokens, "
    "12 vision, 13 server, 130 interrupted."
)

app = typer.Typer(
    name="ttmem",
    help="Turn a long document into a small trained memory, once, and ask it anything.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _register() -> None:
    """Add every command. Their modules import torch late, so that --help is instant."""
    if app.registered_commands:
        return
    from ttmem.cli import ask, bench, chat, compact, demo, evaluate, extend, info, merge, read, serve

    app.command("compact")(compact.compact)
    app.command("extend")(extend.extend)
    app.command("merge")(merge.merge)
    app.command("read")(read.read)
    app.command("ask")(ask.ask)
    app.command("chat")(chat.chat)
    app.command("info")(info.info)
    app.command("eval")(evaluate.evaluate)
    app.command("bench")(bench.bench)
    app.command("demo")(demo.demo)
    app.command("serve")(serve.serve)


def version(show: bool) -> None:
    if show:
        from ttmem.versions import version_of

        typer.echo(f"ttmem {version_of('ttmem')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors a user can act on are one line on standard error and an exit code, no traceback."""
    _quiet_libraries()
    _register()
    console = Console(stderr=True)
    try:
        app(arguments)
    except TtmemError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.print("interrupted", style="bold red")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _quiet_libraries() -> None:
    """Our output is the answer; transformers' own bars and advice are not."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


if __name__ == "__main__":
    main()
