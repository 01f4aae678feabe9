"""What the server keeps of conversations that compact themselves: a cache, found again by what was said.

    DATA/conversations/conversations.sqlite      one row per folded beginning of a conversation
    DATA/conversations/ID/memory.ttmem           that beginning as one memory, to answer from
    DATA/conversations/ID/parts.json, part-*     its parts, to fold further from

A client sends all its messages each time. The beginning that is folded is found by a digest of the key's owner, the
document, the settings and the messages themselves. Nothing here is lost that a client does not have: what is missing is
folded anew. The least recently used rows go first when the folder has grown too large.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

from ttmem.errors import ServeError

SCHEMA = """
CREATE TABLE IF NOT EXISTS folds (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, document TEXT, digest TEXT NOT NULL, messages INTEGER NOT NULL,
    details TEXT NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS found ON folds (owner, digest);
"""
MESSAGES = 512
"""Beginnings of a conversation that are looked for, the longest first."""


@dataclass(frozen=True)
class Fold:
    """A folded beginning: its first `messages` messages are in the memory of `id`."""

    id: str
    messages: int
    details: dict[str, Any]


class FoldStore:
    """Rows and folders. Its methods block for as long as the disk takes, and may be called from any thread."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self._lock = RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._database = sqlite3.connect(
                folder / "conversations.sqlite", check_same_thread=False, isolation_level=None, timeout=10
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.executescript(SCHEMA)
            self._recover()
        except (OSError, sqlite3.Error) as error:
            raise ServeError(f"cannot use {folder}: {error}; it is only a cache, and may be removed") from error

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def path(self, id: str) -> Path:
        return self.folder / id

    def memory_file(self, id: str) -> Path:
        return self.path(id) / "memory.ttmem"

    def longest(self, owner: str, digests: list[str]) -> Fold | None:
        """The longest folded beginning; digests[i] is of the first i + 1 messages."""
        asked = digests[-MESSAGES:]
        marks = ", ".join("?" * len(asked))
        with self._lock:
            row = self._database.execute(
                f"SELECT id, messages, details FROM folds WHERE owner = ? AND digest IN ({marks}) "
                "ORDER BY messages DESC LIMIT 1",
                (owner, *asked),
            ).fetchone()
            if row is None:
                return None
            self._database.execute("UPDATE folds SET used = ? WHERE id = ?", (time.time(), row[0]))
        return Fold(row[0], row[1], json.loads(row[2]))

    def add(
        self,
        id: str,
        owner: str,
        document: str | None,
        digest: str,
        messages: int,
        details: dict[str, Any],
        fresh: Path,
    ) -> Fold:
        """Keep a finished folder, which is moved to its place, and give up old ones where there is no room."""
        size = sum(file.stat().st_size for file in fresh.iterdir())
        with self._lock:
            os.replace(fresh, self.path(id))
            for (other,) in self._database.execute(
                "SELECT id FROM folds WHERE owner = ? AND digest = ?", (owner, digest)
            ).fetchall():
                self._remove(other)
            self._database.execute(
                "INSERT INTO folds VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (id, owner, document, digest, messages, json.dumps(details), size, time.time()),
            )
            self._make_room(id)
        return Fold(id, messages, details)

    def _make_room(self, newest: str) -> None:
        rows = self._database.execute("SELECT id, bytes FROM folds ORDER BY used").fetchall()
        total = sum(size for _, size in rows)
        for id, size in rows:
            if total <= self.most_bytes or id == newest:
                break
            self._remove(id)
            total -= size

    def page(self, owner: str) -> list[dict[str, Any]]:
        """All of an owner's, the latest used first."""
        with self._lock:
            rows = self._database.execute(
                "SELECT id, messages, details, bytes, used FROM folds WHERE owner = ? ORDER BY used DESC", (owner,)
            ).fetchall()
        return [
            {"id": id, "object": "conversation", **json.loads(details), "bytes": size, "used_at": int(used)}
            for id, _, details, size, used in rows
        ]

    def forget(self, owner: str, id: str | None = None) -> list[str]:
        """Remove one of an owner's, or all. Returns the ids of what there was."""
        chosen, values = ("", ()) if id is None else (" AND id = ?", (id,))
        return self._forget("owner = ?" + chosen, owner, *values)

    def forget_document(self, document: str) -> list[str]:
        """Remove the conversations about a memory that is deleted: they hold its entries."""
        return self._forget("document = ?", document)

    def damaged(self, id: str) -> None:
        """Remove one that cannot be read."""
        self._forget("id = ?", id)

    def _forget(self, where: str, *values: str) -> list[str]:
        with self._lock:
            ids = [str(id) for (id,) in self._database.execute(f"SELECT id FROM folds WHERE {where}", values)]
            for id in ids:
                self._remove(id)
        return ids

    def _remove(self, id: str) -> None:
        self._database.execute("DELETE FROM folds WHERE id = ?", (id,))
        shutil.rmtree(self.path(id), ignore_errors=True)

    def _recover(self) -> None:
        """After a kill: folders without a row go, rows without a memory too."""
        rows = {str(id) for (id,) in self._database.execute("SELECT id FROM folds")}
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in rows:
                shutil.rmtree(path, ignore_errors=True)
        for id in rows:
            if not self.memory_file(id).is_file():
                self._remove(id)


def beginnings(key: list[Any], messages: list[dict[str, str]]) -> list[str]:
    """A digest for the first message, the first two, and so on; `key`: what else they must share."""
    running = hashlib.sha256(json.dumps(key).encode())
    digests = []
    for message in messages:
        running.update(json.dumps([message["role"], message["content"]]).encode() + b"\n")
        digests.append(running.hexdigest())
    return digests
