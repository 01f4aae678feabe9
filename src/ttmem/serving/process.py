"""Running a worker: a child process that is told one job and tells its progress and its end, line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ttmem.serving.settings import ServeSettings

LINE_BYTES = 2**20


async def run_worker(
    settings: ServeSettings,
    job: dict[str, Any],
    report: Callable[[dict[str, Any]], None],
    started: Callable[[asyncio.subprocess.Process], None] = lambda process: None,
) -> dict[str, Any] | None:
    """Run a worker to its last line: {"done": ...} or {"error": ...}; None when it died without one.

    report is called with every other line: a stage and its fraction, or a step of a curve. The process has ended when
    this returns, or is cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *settings.worker,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=LINE_BYTES,
    )
    started(process)
    assert process.stdin is not None
    assert process.stdout is not None
    place = {
        "model": settings.model,
        "dtype": settings.dtype,
        "device": settings.device,
        "threads": settings.job_threads,
        "niceness": settings.job_niceness,
    }
    try:
        with suppress(ConnectionError):
            process.stdin.write(json.dumps({**place, **job}).encode() + b"\n")
            await process.stdin.drain()
        return await _follow(process.stdout, report, settings.limits.conversion)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _follow(
    lines: asyncio.StreamReader, report: Callable[[dict[str, Any]], None], conversion: float
) -> dict[str, Any] | None:
    """Read its lines. Only turning a document into text has a time limit: a compaction takes as long as it takes."""
    converting = True
    while True:
        try:
            line = await asyncio.wait_for(lines.readline(), conversion if converting else None)
        except asyncio.TimeoutError:
            return {"error": f"converting the document took longer than {conversion:.0f} s", "code": "document_error"}
        except ValueError:  # a line without end: not our worker's
            return None
        if not line.endswith(b"\n"):
            return None
        told = json.loads(line)
        if "stage" in told:
            converting = told["stage"] == "converting" and told["fraction"] < 1
        elif "curve" not in told:
            return dict(told)
        report(told)
