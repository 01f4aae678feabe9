"""Memories held in RAM, ready to answer: read and verified once, the least recently used given up first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from pathlib import Path

from anyio import to_thread

from ttmem.errors import MemoryFileError, MemoryMismatchError
from ttmem.memory import Memory
from ttmem.memory.batch import check_layers
from ttmem.models import Model
from ttmem.serving.errors import ApiError
from ttmem.serving.metrics import Metrics
from ttmem.serving.store import Record, Store


class Library:
    """One server's memories for its one model, by id; ids are never used again and files never change."""

    def __init__(self, model: Model, store: Store, most_bytes: int, metrics: Metrics) -> None:
        self.model, self.store, self.most_bytes, self.metrics = model, store, most_bytes, metrics
        self._held: OrderedDict[str, Memory] = OrderedDict()
        self._loading: dict[str, asyncio.Lock] = {}

    async def get(self, record: Record) -> Memory:
        """A ready memory. Raises ApiError 409 while it is not ready, or where its file is damaged."""
        check_ready(record)
        try:
            return await self.read(record.id, self.store.memory_file(record.id))
        except (MemoryFileError, MemoryMismatchError) as error:
            kept = self.store.memory_file(record.id).exists()
            message = "its file is damaged: delete it and compact the document again"
            if isinstance(error, MemoryMismatchError):
                message = "it was made with another model than this server's"
            elif kept:
                await to_thread.run_sync(partial(self.store.damaged, record.id, message))
            raise ApiError(409, "memory_unusable", f"this memory cannot be used: {message}", "memory") from error

    async def read(self, id: str, path: Path) -> Memory:
        """The memory in a file, held by its id. Raises MemoryFileError, MemoryMismatchError."""
        lock = self._loading.setdefault(id, asyncio.Lock())
        try:
            async with lock:
                if id in self._held:
                    self._held.move_to_end(id)
                    return self._held[id]
                return await self._load(id, path)
        finally:
            self._loading.pop(id, None)

    async def _load(self, id: str, path: Path) -> Memory:
        memory = await to_thread.run_sync(read_checked, self.model, path)
        self._held[id] = memory
        while len(self._held) > 1 and self.bytes > self.most_bytes:
            self._held.popitem(last=False)  # answers that use it keep it until they end
        self.metrics.loaded(self.bytes)
        return memory

    def forget(self, id: str) -> None:
        """A memory that was deleted."""
        self._held.pop(id, None)
        self.metrics.loaded(self.bytes)

    @property
    def bytes(self) -> int:
        return sum(memory.num_bytes() for memory in self._held.values())


def read_checked(model: Model, path: Path) -> Memory:
    """Read a memory file that this model can answer from, in a batch with others.

    Raises MemoryFileError where it is not sound, MemoryMismatchError where it is another model's.
    """
    memory = Memory.load(path)
    memory.check_model(model)
    memory = memory.to(model.device, model.dtype)
    check_layers(model, memory)
    limit = model.max_positions
    if limit is not None and memory.document_length >= limit:
        raise MemoryMismatchError(f"its document has {memory.document_length} tokens, beyond the model's {limit}")
    return memory


def check_ready(record: Record) -> None:
    """Raise ApiError 409 unless the memory can be asked."""
    if record.status == "ready":
        return
    if record.status in ("queued", "running"):
        message = "this memory is not ready yet: its document is being compacted"
    else:
        reason = f": {record.error['message']}" if record.error else ""
        message = f"this memory's compaction {record.status.replace('cancelled', 'was cancelled')}{reason}"
    raise ApiError(409, f"memory_{record.status}", message, "memory")
