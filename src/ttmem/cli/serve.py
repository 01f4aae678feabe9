"""`ttmem serve`: memories behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import typer

from ttmem.cli.common import DEVICE_OPTION, DTYPE_OPTION, MODEL_OPTION


def serve(
    model: str | None = MODEL_OPTION,
    host: str = typer.Option("127.0.0.1", help="Address to listen on; others than this machine's need keys."),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0 takes a free one, which the log names."),
    data: Path = typer.Option(Path("ttmem-data"), help="Folder of memories, jobs and the database."),
    api_key_file: Path | None = typer.Option(None, help="Keys, one per line: KEY or NAME KEY."),
    name: str | None = typer.Option(None, help="The model's name for clients; its own when left out."),
    cors_origin: list[str] = typer.Option([], help="An origin whose web pages may call the server; none by default."),
    static: Path | None = typer.Option(None, help="A folder with another web page, served at / instead of ttmem's."),
    no_page: bool = typer.Option(False, "--no-page", help="Serve no web page."),
    max_running: int = typer.Option(64, min=1, help="Answers written together."),
    max_waiting: int = typer.Option(256, min=1, help="Requests in the queue; beyond, 429."),
    max_jobs: int = typer.Option(32, min=1, help="Compactions in the queue; beyond, 429."),
    max_disk: int = typer.Option(0, min=0, help="Bytes the data folder may take; 0 leaves it to the disk."),
    job_threads: int | None = typer.Option(None, min=1, help="Threads of a compaction; half the cores when left out."),
    dtype: str = DTYPE_OPTION,
    device: str | None = DEVICE_OPTION,
) -> None:
    """Answer from memories over HTTP, as OpenAI's API does, and compact documents in the background.

    Example: ttmem serve --port 8000 --data ./memories
    """
    from dataclasses import replace

    from ttmem.serving.settings import Limits, ServeSettings

    limits = Limits(running=max_running, waiting=max_waiting, jobs=max_jobs, disk_bytes=max_disk)
    settings = ServeSettings(
        data=data,
        model=model,
        dtype=dtype,
        device=device,
        name=name,
        host=host,
        port=port,
        key_file=api_key_file,
        origins=tuple(cors_origin),
        static=static,
        page=not no_page,
        limits=limits,
    )
    if job_threads is not None:
        settings = replace(settings, job_threads=job_threads)
    from ttmem.serving.server import serve as run

    run(settings)
