"""What a server is told at its start."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ttmem.errors import BudgetError

WORKER = (sys.executable, "-m", "ttmem.serving.worker")


@dataclass(frozen=True)
class Limits:
    """What one server takes on at most; beyond it, requests are refused with a 4xx.

    running: sequences decoded together; waiting: requests in the queue; jobs: compactions queued or running; folds:
    conversations whose older turns are queued to be compacted, or are.
    step_tokens: tokens of one forward, so that a long prompt delays the others' next token by no more.
    batch_tokens: prompt and answer tokens of all running sequences, which bounds the memory they take.
    answer_tokens: of one answer; prompts: of one request. *_bytes: of a JSON body, of an upload, of a document's text,
    of the memories held ready in RAM, of the conversations that are compacted (the least recently used go first), and
    of all that lies in the data folder (0: the disk's size).
    stall: seconds without a byte of a body. conversion: seconds for a document to become text.
    """

    running: int = 64
    waiting: int = 256
    step_tokens: int = 256
    batch_tokens: int = 32768
    answer_tokens: int = 4096
    prompts: int = 16
    connections: int = 512
    jobs: int = 32
    folds: int = 16
    body_bytes: int = 2**20
    upload_bytes: int = 64 * 2**20
    document_bytes: int = 16 * 2**20
    loaded_bytes: int = 2 * 2**30
    conversation_bytes: int = 2**30
    disk_bytes: int = 0
    stall: float = 30.0
    conversion: float = 300.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "disk_bytes" else 1
            if value < least:
                raise BudgetError(f"the limit {name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class ServeSettings:
    """Model, address, folder and limits of a server.

    origins: web pages' origins that may call it, none by default. static: a folder of a web page, served at `/` in
    place of ttmem's own; without `page` there is none.
    job_threads, job_niceness: of a compaction, which runs in a process of its own, at lower priority by default.
    """

    data: Path
    model: str | None = None
    dtype: str = "auto"
    device: str | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    key_file: Path | None = None
    origins: tuple[str, ...] = ()
    static: Path | None = None
    page: bool = True
    job_threads: int = max(1, (os.cpu_count() or 1) // 2)
    job_niceness: int = 10
    worker: tuple[str, ...] = WORKER
    limits: Limits = field(default_factory=Limits)
