"""What the server keeps: one row per memory in SQLite (WAL), its files beside it.

    DATA/ttmem.sqlite            every memory and its job
    DATA/memories/ID.ttmem       finished memories, never changed
    DATA/jobs/ID/                a job's source, its text, and the workspace it resumes from
    DATA/incoming/               uploads that are not complete

Ids are ours and random; no name, path or key of a user becomes part of a path. A row is written after its files are on
disk, and deleted before them, so that a crash leaves files without a row at worst; `open` removes those.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from ttmem.errors import ServeError
from ttmem.serving.errors import ApiError, not_found, storage_full, too_busy

SCHEMA = """
CREATE TABLE IF NOT EXISTS memories (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT,
    status TEXT NOT NULL,
    created REAL NOT NULL,
    finished REAL,
    options TEXT NOT NULL,
    details TEXT NOT NULL DEFAULT '{}',
    error TEXT,
    bytes INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    started REAL NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS names ON memories (owner, name) WHERE name IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_owner ON memories (owner, created, id);
CREATE TABLE IF NOT EXISTS timings (
    kind TEXT NOT NULL, stage TEXT NOT NULL, seconds REAL NOT NULL, PRIMARY KEY (kind, stage)
);
"""
VERSION = 1
ATTEMPTS = 3
"""Starts of one job without a finished step between them; a job whose process dies each time is given up."""

COARSE = 0.05
"""Seconds by which a file's time may lie before that of the clock: file systems take a coarser one."""

RESERVE = 64 * 2**20
"""Bytes of the disk that uploads leave free, so that answers, logs and the database go on."""

UNFINISHED = ("queued", "running")


@dataclass(frozen=True)
class Record:
    """A memory as the database has it. status: queued, running, ready, failed or cancelled."""

    id: str
    owner: str
    name: str | None
    status: str
    created: float
    finished: float | None
    options: dict[str, Any]
    details: dict[str, Any]
    error: dict[str, str] | None
    bytes: int
    attempts: int
    started: float


class Store:
    """Rows and files. Its methods block for as long as the disk takes, and may be called from any thread."""

    def __init__(self, folder: Path, disk_bytes: int = 0) -> None:
        self.folder, self.disk_bytes = folder, disk_bytes
        self._lock = RLock()
        try:
            for part in (folder, self.memories, self.jobs, self.incoming):
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._claim = sqlite3.connect(folder / "lock.sqlite", timeout=0, check_same_thread=False)
            self._claim.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._claim.execute("BEGIN EXCLUSIVE")
            self._database = sqlite3.connect(
                folder / "ttmem.sqlite", check_same_thread=False, isolation_level=None, timeout=10
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version > VERSION:
                raise ServeError(f"{folder} was written by a newer ttmem: upgrade it, or name another --data folder")
            self._database.executescript(SCHEMA)
            self._database.execute(f"PRAGMA user_version={VERSION}")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ServeError(f"another server uses {folder}: stop it, or name another --data folder") from error
            raise ServeError(f"cannot use {folder}: {error}") from error
        except (OSError, sqlite3.Error) as error:
            raise ServeError(f"cannot use {folder}: {error}") from error
        self._recover()

    @property
    def memories(self) -> Path:
        return self.folder / "memories"

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    @property
    def incoming(self) -> Path:
        return self.folder / "incoming"

    def close(self) -> None:
        with self._lock:
            self._database.close()
            self._claim.close()

    # Files

    def memory_file(self, id: str) -> Path:
        return self.memories / f"{id}.ttmem"

    def job_folder(self, id: str) -> Path:
        return self.jobs / id

    @contextmanager
    def upload(self, expected: int = 0) -> Iterator[Path]:
        """A file to fill; deleted at the end unless it was moved. Raises ApiError 413 when the disk has no room."""
        with _disk_errors():
            self.check_room(expected)
            handle, name = tempfile.mkstemp(dir=self.incoming)
            os.close(handle)
            try:
                yield Path(name)
            finally:
                Path(name).unlink(missing_ok=True)

    def check_room(self, expected: int) -> None:
        """Raise ApiError 413 unless `expected` bytes fit the disk, and the server's own limit where it has one."""
        if shutil.disk_usage(self.folder).free < expected + RESERVE:
            raise storage_full()
        if self.disk_bytes and self.used_bytes() + expected > self.disk_bytes:
            raise storage_full()

    def used_bytes(self) -> int:
        """Bytes of everything in the folder."""
        total = 0
        for path in self.folder.rglob("*"):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    # Rows

    def add_job(self, owner: str, name: str | None, options: dict[str, Any], source: Path, kind: str, most: int) -> str:
        """A queued job for an uploaded source, which is moved. Raises ApiError: 429 at `most` jobs, 409 for a name."""
        id = new_id()
        with _disk_errors(), self._lock:
            (unfinished,) = self._database.execute(
                "SELECT COUNT(*) FROM memories WHERE status IN ('queued', 'running')"
            ).fetchone()
            if unfinished >= most:
                raise too_busy(f"{unfinished} compactions are queued: try again later", "too_many_jobs")
            folder = self.job_folder(id)
            try:
                folder.mkdir(mode=0o700)
                durable_move(source, folder / f"source.{kind}")
                self._insert(id, owner, name, "queued", {**options, "kind": kind}, {}, 0)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        return id

    def add_memory(self, owner: str, name: str | None, details: dict[str, Any], file: Path) -> str:
        """A finished memory from a verified file, which is moved. Raises ApiError 409 for a name that is taken."""
        id = new_id()
        with _disk_errors(), self._lock:
            size = file.stat().st_size
            try:
                durable_move(file, self.memory_file(id))
                self._insert(id, owner, name, "ready", {}, details, size)
            except BaseException:
                self.memory_file(id).unlink(missing_ok=True)
                raise
        return id

    def _insert(
        self,
        id: str,
        owner: str,
        name: str | None,
        status: str,
        options: dict[str, Any],
        details: dict[str, Any],
        size: int,
    ) -> None:
        now = time.time()
        finished = now if status == "ready" else None
        try:
            self._database.execute(
                "INSERT INTO memories (id, owner, name, status, created, finished, options, details, bytes) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (id, owner, name, status, now, finished, json.dumps(options), json.dumps(details), size),
            )
        except sqlite3.IntegrityError as error:
            raise ApiError(
                409, "name_taken", "there is a memory of this name: delete it, or choose another name", "name"
            ) from error

    def find(self, owner: str, reference: str, param: str | None = None) -> Record:
        """A memory of this owner by id or name. Raises ApiError 404, the same for what is another's and what is not."""
        rows = self._read("WHERE owner = ? AND (id = ? OR name = ?)", owner, reference, reference)
        if not rows:
            raise not_found(param)
        return rows[0]

    def page(self, owner: str, limit: int, after: str | None = None, status: str | None = None) -> list[Record]:
        """Memories of this owner, oldest first, behind the one with id `after`."""
        where, values = "WHERE owner = ?", list[Any]([owner])
        if after is not None:
            first = self.find(owner, after, "after")
            where, values = where + " AND (created, id) > (?, ?)", [*values, first.created, first.id]
        if status is not None:
            where, values = where + " AND status = ?", [*values, status]
        return self._read(f"{where} ORDER BY created, id LIMIT ?", *values, limit)

    def next_job(self) -> Record | None:
        """The oldest queued job."""
        rows = self._read("WHERE status = 'queued' ORDER BY created, id LIMIT 1")
        return rows[0] if rows else None

    def _read(self, where: str, *values: Any) -> list[Record]:
        columns = ", ".join(Record.__dataclass_fields__)
        with self._lock:
            rows = self._database.execute(f"SELECT {columns} FROM memories {where}", values).fetchall()
        return [_record(row) for row in rows]

    # The life of a job

    def begin(self, id: str) -> bool:
        """Queued to running; False when it is not queued any more."""
        with self._lock:
            changed = self._database.execute(
                "UPDATE memories SET status = 'running', attempts = attempts + 1, started = ? "
                "WHERE id = ? AND status = 'queued'",
                (time.time(), id),
            )
            return changed.rowcount == 1

    def requeue(self, id: str) -> None:
        """Running to queued, after its process died; failed when it died too often without getting any further."""
        with self._lock:
            for record in self._read("WHERE id = ?", id):
                steps = (self.job_folder(id) / "work").glob("*.safetensors")
                if any(step.stat().st_mtime >= record.started - COARSE for step in steps):
                    self._database.execute("UPDATE memories SET attempts = 0 WHERE id = ?", (id,))
            self._database.execute(
                "UPDATE memories SET status = 'queued' WHERE id = ? AND status = 'running' AND attempts < ?",
                (id, ATTEMPTS),
            )
        self.fail(id, "worker_died", f"the compaction's process died {ATTEMPTS} times, perhaps for lack of memory")

    def requeue_all(self) -> None:
        """Running to queued, when no process works on them: the storage failed at their end."""
        with self._lock:
            for record in self._read("WHERE status = 'running'"):
                self.requeue(record.id)

    def pause(self, id: str) -> None:
        """Running to queued when the server stops; the attempt does not count."""
        with self._lock:
            self._database.execute(
                "UPDATE memories SET status = 'queued', attempts = attempts - 1 WHERE id = ? AND status = 'running'",
                (id,),
            )

    def complete(self, id: str, details: dict[str, Any], file: Path) -> bool:
        """Running to ready with the job's memory file, which is moved; False when the job is not running any more."""
        with _disk_errors(), self._lock:
            size = file.stat().st_size
            durable_move(file, self.memory_file(id))
            changed = self._database.execute(
                "UPDATE memories SET status = 'ready', finished = ?, details = ?, bytes = ? "
                "WHERE id = ? AND status = 'running'",
                (time.time(), json.dumps(details), size, id),
            )
            if changed.rowcount != 1:
                self.memory_file(id).unlink(missing_ok=True)
            shutil.rmtree(self.job_folder(id), ignore_errors=True)
            return changed.rowcount == 1

    def fail(self, id: str, code: str, message: str, status: str = "failed", sweep: bool = True) -> bool:
        """Give up an unfinished job (status "failed" or "cancelled"); False when it is not unfinished any more.

        Its files go at once, unless a process still works on them.
        """
        error = json.dumps({"code": code, "message": message})
        with self._lock:
            states = ("running",) if code == "worker_died" else UNFINISHED
            marks = ", ".join("?" * len(states))
            changed = self._database.execute(
                f"UPDATE memories SET status = ?, finished = ?, error = ? WHERE id = ? AND status IN ({marks})",
                (status, time.time(), error, id, *states),
            )
            if changed.rowcount and sweep:
                self.sweep(id)
            return changed.rowcount == 1

    def sweep(self, id: str) -> None:
        """Remove what a job has left in its folder, unless it is to go on."""
        with self._lock:
            if not any(record.status in UNFINISHED for record in self._read("WHERE id = ?", id)):
                shutil.rmtree(self.job_folder(id), ignore_errors=True)

    def damaged(self, id: str, message: str) -> None:
        """Ready to failed: its file cannot be read any more. The file stays where it is."""
        error = json.dumps({"code": "memory_damaged", "message": message})
        with self._lock:
            self._database.execute(
                "UPDATE memories SET status = 'failed', error = ? WHERE id = ? AND status = 'ready'", (error, id)
            )

    def delete(self, id: str) -> None:
        with self._lock:
            self._database.execute("DELETE FROM memories WHERE id = ?", (id,))
            self.memory_file(id).unlink(missing_ok=True)
            shutil.rmtree(self.job_folder(id), ignore_errors=True)

    def timings(self, kind: str) -> dict[str, float]:
        """Seconds that each stage took in the last job of a kind, in the order of the stages."""
        with self._lock:
            rows = self._database.execute(
                "SELECT stage, seconds FROM timings WHERE kind = ? ORDER BY rowid", (kind,)
            ).fetchall()
        return dict(rows)

    def set_timings(self, kind: str, seconds: dict[str, float]) -> None:
        with self._lock:
            self._database.execute("DELETE FROM timings WHERE kind = ?", (kind,))
            self._database.executemany(
                "INSERT INTO timings (kind, stage, seconds) VALUES (?, ?, ?)",
                [(kind, stage, value) for stage, value in seconds.items()],
            )

    def _recover(self) -> None:
        """After a kill: jobs go on or end, files without a row go, rows without a file say so."""
        rows = {record.id: record for record in self._read("")}
        for path in self.incoming.iterdir():
            path.unlink(missing_ok=True)
        for path in self.memories.iterdir():
            record = rows.get(path.name.removesuffix(".ttmem"))
            if record is None or (record.status != "ready" and record.status != "failed"):
                if record is not None and record.status == "running" and self.job_folder(record.id).is_dir():
                    durable_move(path, self.job_folder(record.id) / "memory.ttmem")  # moved, but not yet in the row
                else:
                    path.unlink(missing_ok=True)
        for folder in self.jobs.iterdir():
            if folder.name not in rows or rows[folder.name].status not in UNFINISHED:
                shutil.rmtree(folder, ignore_errors=True)
        for record in rows.values():
            if record.status == "running":
                self.requeue(record.id)
            if record.status == "ready" and not self.memory_file(record.id).is_file():
                self.damaged(record.id, "its file is gone from the server's data folder")


def _record(row: tuple[Any, ...]) -> Record:
    id, owner, name, status, created, finished, options, details, error, *figures = row
    told = json.loads(error) if error else None
    return Record(id, owner, name, status, created, finished, json.loads(options), json.loads(details), told, *figures)


def new_id() -> str:
    return f"mem-{secrets.token_hex(12)}"


def durable_move(source: Path, target: Path) -> None:
    """Move a file so that after a crash it is at one place or the other, whole."""
    with open(source, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A disk that cannot take more is a refusal, not a fault."""
    try:
        yield
    except ApiError:
        raise
    except (OSError, sqlite3.OperationalError) as error:
        raise storage_full("the server cannot write to its storage: try again later") from error
