"""Conversations that compact themselves, for clients that send all their messages each time (`memory: "auto"`).

What is folded is found again by what was said (`folds.py`). A folding runs in a process of its own, like a compaction;
meanwhile the conversation is answered with more of its turns whole, unless the request would rather wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import sqlite3
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ttmem.errors import BudgetError, MemoryFileError, MemoryMismatchError, ModelError, QuestionError
from ttmem.long_conversation import Folding
from ttmem.memory import Memory
from ttmem.serving.errors import ApiError, SafeJSON, refused, too_busy
from ttmem.serving.folds import Fold, FoldStore, beginnings
from ttmem.serving.library import Library
from ttmem.serving.metrics import Metrics
from ttmem.serving.process import run_worker
from ttmem.serving.schemas import AutoOptions
from ttmem.serving.settings import ServeSettings
from ttmem.serving.store import Record, Store
from ttmem.serving.text import Encoder

log = logging.getLogger("ttmem.serving")
FOLDED = "folded"


@dataclass
class Turns:
    """What answers a conversation: the memory of its document and folded turns (None: neither), the tokens of the
    others, and what is told of it."""

    memory: Memory | None
    prompt: list[int]
    told: dict[str, Any]


class Conversations:
    """Finds, folds and forgets conversations, for one model."""

    def __init__(
        self,
        settings: ServeSettings,
        store: Store,
        folds: FoldStore,
        library: Library,
        encoder: Encoder,
        metrics: Metrics,
    ) -> None:
        self.settings, self.store, self.folds = settings, store, folds
        self.library, self.encoder, self.metrics = library, encoder, metrics
        self._one = asyncio.Semaphore(1)
        self._tasks: dict[tuple[str, str], asyncio.Task[str]] = {}

    async def stop(self) -> None:
        """End what is being folded; it is folded anew when it is next asked for."""
        await self._end(list(self._tasks.values()))

    async def _end(self, tasks: list[asyncio.Task[str]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/conversations")

        @router.get("")
        async def all(request: HttpRequest) -> Response:
            """Folded conversations of this key, the latest used first."""
            data = await to_thread.run_sync(self.folds.page, request.state.owner)
            return SafeJSON({"object": "list", "data": data})

        @router.delete("")
        async def forget_all(request: HttpRequest) -> Response:
            """Forget every folded conversation of this key."""
            return SafeJSON({"object": "list", "deleted": len(await self.forget(request.state.owner))})

        @router.delete("/{id}")
        async def forget(request: HttpRequest, id: str) -> Response:
            """Forget one."""
            if not await self.forget(request.state.owner, id):
                raise ApiError(404, "conversation_not_found", "there is no such conversation", "id")
            return SafeJSON({"id": id, "object": "conversation", "deleted": True})

        return router

    async def forget(self, owner: str, id: str | None = None) -> list[str]:
        """Remove one of an owner's, or all, and then what is being folded too. Returns the ids of what there was."""
        if id is None:
            await self._end([task for (whose, _), task in self._tasks.items() if whose == owner])
        return self._drop(await to_thread.run_sync(self.folds.forget, owner, id))

    async def forget_document(self, document: str) -> None:
        """A memory is deleted: what holds its entries goes with it."""
        self._drop(await to_thread.run_sync(self.folds.forget_document, document))

    def _drop(self, ids: list[str]) -> list[str]:
        for id in ids:
            self.library.forget(id)
        return ids

    async def turns(
        self, owner: str, document: Record | None, messages: list[dict[str, str]], options: AutoOptions
    ) -> Turns:
        """Memory and prompt of a conversation, after folding it where that is due and is to be waited for.

        Raises ApiError 400 for settings that make no sense and chat templates that cannot be cut.
        """
        try:
            folding = Folding(options.threshold, options.keep, tuple(options.ratios), options.preset, options.method)
        except BudgetError as error:
            raise refused(error, "invalid_options", param="auto") from error
        about = None if document is None else document.id
        digests = beginnings([about, asdict(folding)], messages)
        turns, fold = await self._known(owner, document, digests, messages)
        if len(turns.prompt) <= options.threshold or not foldable(messages, 0 if fold is None else fold.messages):
            return turns
        root = (owner, digests[1])
        if root not in self._tasks:
            if len(self._tasks) >= self.settings.limits.folds:
                if options.wait:
                    raise too_busy("too many conversations are being compacted: try again later", "too_many_jobs")
                return turns
            task = asyncio.create_task(self._fold(owner, document, fold, digests, messages, folding))
            self._tasks[root] = task
            task.add_done_callback(lambda _: self._tasks.pop(root, None))
        if not (options.wait or len(turns.prompt) >= self.settings.limits.batch_tokens):
            turns.told["folding"] = True
            return turns
        (done,) = await asyncio.gather(asyncio.shield(self._tasks[root]), return_exceptions=True)
        outcome = done if isinstance(done, str) else "forgotten"
        turns, _ = await self._known(owner, document, digests, messages)
        if outcome != FOLDED:
            turns.told["failed"] = outcome
        return turns

    async def _known(
        self, owner: str, document: Record | None, digests: list[str], messages: list[dict[str, str]]
    ) -> tuple[Turns, Fold | None]:
        """What is folded already, and the turns behind it."""
        base = None if document is None else await self.library.get(document)
        fold = await to_thread.run_sync(self.folds.longest, owner, digests[:-1])
        memory = base
        if fold is not None:
            try:
                memory = await self.library.read(fold.id, self.folds.memory_file(fold.id))
            except (MemoryFileError, MemoryMismatchError):
                await to_thread.run_sync(self.folds.damaged, fold.id)
                fold, memory = None, base
        folded = 0 if fold is None else fold.messages
        try:
            prompt = await to_thread.run_sync(self.encoder.behind, messages, folded, document is not None)
        except (QuestionError, ModelError) as error:
            raise refused(error, "invalid_prompt") from error
        details = {"folded_messages": 0, "folded_tokens": 0, "parts": []} if fold is None else fold.details
        told = {"id": None if fold is None else fold.id, **details, "folding": False}
        return Turns(memory, prompt, told), fold

    async def _fold(
        self,
        owner: str,
        document: Record | None,
        previous: Fold | None,
        digests: list[str],
        messages: list[dict[str, str]],
        folding: Folding,
    ) -> str:
        """One folding, from start to end: "folded", or why not. A failure leaves the conversation as it is."""
        id = f"conv-{secrets.token_hex(12)}"
        fresh = self.folds.path(f"{id}.partial")
        job = {
            "task": "fold",
            "folder": str(fresh.resolve()),
            "messages": messages,
            "document": None if document is None else str(self.store.memory_file(document.id).resolve()),
            "previous": None if previous is None else str(self.folds.path(previous.id).resolve()),
            "folded": 0 if previous is None else previous.messages,
            "folding": asdict(folding),
        }
        started, outcome, result = time.monotonic(), None, "worker_died"
        try:
            async with self._one:
                await to_thread.run_sync(self.store.check_room, 0)
                outcome = await run_worker(self.settings, job, lambda told: None)
            result = (outcome or {}).get("code", result)
            done = (outcome or {}).get("done")
            if document is not None and not self.store.memory_file(document.id).exists():
                result = "memory_deleted"
            elif done is not None and fresh.is_dir():
                count = done["folded_messages"]
                about = None if document is None else document.id
                await to_thread.run_sync(self.folds.add, id, owner, about, digests[count - 1], count, done, fresh)
                result = FOLDED
        except (OSError, sqlite3.Error, ApiError):
            result = "storage_full"
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            self.metrics.job(result if result == FOLDED else "fold_failed", time.monotonic() - started)
            fields: dict[str, Any] = {"outcome": result, "seconds": round(time.monotonic() - started, 3)}
            with suppress(TypeError, KeyError):
                fields |= (outcome or {})["failure"]
            log.info("fold_ended", extra={"fields": fields})
        return result


def foldable(messages: list[dict[str, str]], folded: int) -> bool:
    """Whether a whole exchange lies between what is folded and the last message."""
    return any(message["role"] == "assistant" for message in messages[folded:-1])
