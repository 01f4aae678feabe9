"""Compactions in the background: one child process at a time, at lower priority, resumed after a kill."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import suppress
from typing import Any

from anyio import to_thread

from ttmem.serving.curves import Curves
from ttmem.serving.errors import ApiError
from ttmem.serving.estimate import Estimate
from ttmem.serving.metrics import Metrics
from ttmem.serving.process import run_worker
from ttmem.serving.settings import ServeSettings
from ttmem.serving.store import Record, Store

log = logging.getLogger("ttmem.serving")

RETRY = 5.0
"""Seconds before the queue is looked at again after the storage failed."""


class Jobs:
    """The queue's runner. The queue itself is the store's."""

    def __init__(self, settings: ServeSettings, store: Store, metrics: Metrics) -> None:
        self.settings, self.store, self.metrics = settings, store, metrics
        self.progress: dict[str, Estimate] = {}
        self.curves: dict[str, Curves] = {}
        self._changed = asyncio.Event()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the running compaction; it goes on from its last finished step at the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """There is a new job."""
        self._changed.set()

    async def cancel(self, record: Record, code: str = "cancelled", message: str = "cancelled on request") -> bool:
        """End an unfinished job for good; False when it has ended already."""
        process = self._processes.get(record.id)
        ended = await to_thread.run_sync(self.store.fail, record.id, code, message, "cancelled", process is None)
        if ended and process is not None:
            with suppress(ProcessLookupError):
                process.kill()
        return ended

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                record = await to_thread.run_sync(self.store.next_job)
                if record is None:
                    await self._changed.wait()
                elif await to_thread.run_sync(self.store.begin, record.id):
                    await self._compact(record)
            except (sqlite3.Error, OSError, ApiError) as error:
                log.error("storage_failed", extra={"fields": {"error": type(error).__name__}})
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), RETRY)
                await to_thread.run_sync(self.store.requeue_all)

    async def _compact(self, record: Record) -> None:
        kind = job_kind(record)
        self.progress[record.id] = Estimate.of(await to_thread.run_sync(self.store.timings, kind))
        self.curves.setdefault(record.id, Curves())  # a job that died goes on
        started = time.monotonic()
        log.info("job_started", extra={"fields": {"memory": record.id, "attempt": record.attempts + 1}})
        outcome: dict[str, Any] | None = None
        try:
            outcome = await self._work(record)
        except asyncio.CancelledError:
            self.store.pause(record.id)
            raise
        finally:
            self._processes.pop(record.id, None)
            self.progress.pop(record.id, None)
        result = await to_thread.run_sync(self._settle, record, kind, outcome)
        if result != "died":
            self.curves.pop(record.id, None)
        seconds = time.monotonic() - started
        self.metrics.job(result, seconds)
        fields = {"memory": record.id, "outcome": result, "seconds": round(seconds, 3)}
        if outcome and "failure" in outcome:
            fields |= outcome["failure"]
        log.info("job_ended", extra={"fields": fields})

    async def _work(self, record: Record) -> dict[str, Any] | None:
        """Run the worker to its last line: {"done": ...} or {"error": ...}; None when it died without one."""
        progress, curves = self.progress[record.id], self.curves[record.id]

        def started(process: asyncio.subprocess.Process) -> None:
            self._processes[record.id] = process

        def report(told: dict[str, Any]) -> None:
            if "curve" in told:
                curves.add(told["curve"], told["step"], told["loss"])
            else:
                progress.update(told["stage"], told["fraction"])

        return await run_worker(self.settings, self._job(record), report, started)

    def _settle(self, record: Record, kind: str, outcome: dict[str, Any] | None) -> str:
        """Write the end of a job into the store."""
        if outcome is None:
            self.store.requeue(record.id)  # does nothing to a cancelled one
            self.store.sweep(record.id)
            return "died"
        if "done" not in outcome:
            return "failed" if self.store.fail(record.id, outcome["code"], outcome["error"]) else "cancelled"
        file = self.store.job_folder(record.id) / "memory.ttmem"
        details = {**outcome["done"], "losses": self.curves.get(record.id, Curves()).body()}
        if "seconds" in outcome:  # before the end is seen: the next job's estimate counts on them
            self.store.set_timings(kind, by_stage(outcome["seconds"]))
        if not self.store.complete(record.id, details, file):
            self.store.sweep(record.id)
            return "cancelled"
        return "ready"

    def _job(self, record: Record) -> dict[str, Any]:
        return {
            "task": "compact",
            "folder": str(self.store.job_folder(record.id).resolve()),
            "options": record.options,
            "document_bytes": self.settings.limits.document_bytes,
        }


def job_kind(record: Record) -> str:
    """What jobs must share for the times of one to say something of another's."""
    return f"{record.options['method']}/{record.options['preset']}"


def by_stage(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds per stage, parts of one stage ("stage 2: ...") taken together."""
    merged: dict[str, float] = {}
    for name, value in seconds.items():
        stage = name.partition(":")[0]
        merged[stage] = merged.get(stage, 0.0) + value
    return merged
