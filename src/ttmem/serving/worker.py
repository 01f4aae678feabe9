"""The process of one compaction, or of one folding: `python -m ttmem.serving.worker`.

It reads one JSON line from standard input, and tells its progress and its end by JSON lines on standard output. When
standard input ends, the server is gone, and so is the worker. Finished steps lie in the job's workspace, so that the
next worker goes on from them.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, SupportsFloat

from ttmem.errors import MemoryFileError, ResumeError, TtmemError
from ttmem.progress import Advance, Progress
from ttmem.serving.folding import fold

EVERY = 0.2
"""Seconds between two reports of one stage."""


class PipeProgress(Progress):
    """Progress as JSON lines."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__()
        self.pipe = pipe
        self.told = -math.inf
        self.untold: tuple[str, int, SupportsFloat] | None = None

    def tell(self, **fields: Any) -> None:
        self.pipe.write(json.dumps(fields) + "\n")
        self.pipe.flush()

    @contextmanager
    def show(self, name: str, total: int) -> Iterator[Advance]:
        done, told = 0, time.monotonic()
        self.tell(stage=name, fraction=0.0)

        def advance(units: int) -> None:
            nonlocal done, told
            done += units
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                self.tell(stage=name, fraction=min(done / max(total, 1), 1.0))

        yield advance
        self._tell_figure()
        self.tell(stage=name, fraction=1.0)

    def figure(self, stage: str, step: int, value: SupportsFloat) -> None:
        """Tell a loss, now and then: reading one from a GPU waits for it."""
        self.untold = (stage, step, value)
        if step == 1 or time.monotonic() - self.told >= EVERY:
            self._tell_figure()

    def _tell_figure(self) -> None:
        if self.untold is None:
            return
        (stage, step, value), self.untold = self.untold, None
        self.told = time.monotonic()
        loss = float(value)
        if math.isfinite(loss):
            self.tell(loss=loss, step=step, curve=stage)


def work(job: dict[str, Any], progress: PipeProgress) -> dict[str, Any]:
    """Compact `job["folder"]/source.KIND` into `memory.ttmem` there. Returns the memory's description."""
    from ttmem.memory import Memory
    from ttmem.serving.description import describe
    from ttmem.serving.documents import document_text

    folder, options = Path(job["folder"]), job["options"]
    finished = folder / "memory.ttmem"
    if finished.exists():  # the server was killed before it took it over
        with suppress(MemoryFileError):
            return describe(Memory.load(finished))
    with progress.stage("converting", 1):
        text = document_text(folder / f"source.{options['kind']}", options["kind"], job["document_bytes"])
    import torch

    from ttmem.compaction.api import compact
    from ttmem.models import load_model
    from ttmem.serving.options import job_settings

    torch.set_num_threads(job["threads"])
    with progress.stage("loading the model", 1):
        model = load_model(job["model"], dtype=job["dtype"], device=job["device"])

    def run() -> Any:
        return compact(
            model,
            text,
            ratio=options["ratio"],
            tokens=options["tokens"],
            fidelity=options["fidelity"],
            settings=job_settings(options["preset"], options["settings"]),
            method=options["method"],
            seed=options["seed"],
            name=options["document_name"],
            measure=options["measure"],
            progress=progress,
            workdir=folder / "work",
            resume=True,
        )

    try:
        memory = run()
    except ResumeError:  # other versions, or steps that a crash has damaged: start over
        import shutil

        shutil.rmtree(folder / "work", ignore_errors=True)
        memory = run()
    memory.save(finished, keep_document=options["keep_document"])
    return describe(Memory.load(finished))  # what the file holds: a document that is not kept is only in RAM


TASKS = {"compact": work, "fold": fold}


def main() -> None:
    """Read a job, work, tell the end. Exit code 0 when the end was told, be it good or bad."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not for the server
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server decides
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_server, daemon=True).start()
    progress = PipeProgress(pipe)
    try:
        job = json.loads(line)
        with suppress(OSError, AttributeError):  # answers come first
            os.nice(job["niceness"])
        details = TASKS[job["task"]](job, progress)
        progress.tell(done=details, seconds=progress.seconds)
    except TtmemError as error:
        progress.tell(error=str(error), code=f"{type(error).__name__.removesuffix('Error').lower()}_error")
    except OSError as error:
        progress.tell(error=f"the server's storage failed ({error.strerror})", code="storage_full")
    except MemoryError:
        progress.tell(error="not enough memory for this document", code="out_of_memory")
    except Exception as error:
        from ttmem.serving.logs import failure

        progress.tell(error="the compaction failed", code="internal_error", failure=failure(error))


def _end_with_server() -> None:
    while sys.stdin.readline():
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
