"""`/v1/memories`: documents in, compaction jobs with progress, memories out."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import APIRouter, Query
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response, StreamingResponse

from ttmem.compaction.api import make_method
from ttmem.compaction.document import Document
from ttmem.compaction.settings import Budget
from ttmem.errors import BudgetError, DocumentError, MemoryFileError, MemoryMismatchError
from ttmem.models import Model
from ttmem.serving.answering import EVENT_STREAM, NO_BUFFER, sse
from ttmem.serving.conversations import Conversations
from ttmem.serving.description import budget_map, describe
from ttmem.serving.documents import TEXT_KINDS, decode, kind_of
from ttmem.serving.errors import ApiError, SafeJSON, refused
from ttmem.serving.jobs import Jobs
from ttmem.serving.library import Library, check_ready, read_checked
from ttmem.serving.options import job_settings
from ttmem.serving.schemas import AUTO, ID, JobOptions, NamedOptions, Naming, NewMemory, described_body
from ttmem.serving.settings import Limits
from ttmem.serving.store import UNFINISHED, Record, Store
from ttmem.serving.text import Encoder

Body = TypeVar("Body", bound=BaseModel)

TICK = 0.25
"""Seconds between two looks at a job whose events are followed."""

BUDGETS = 64
"""Maps of budgets that are kept; each is a few kilobytes."""

KINDS = "txt, md, pdf, html or docx"


class Shelf:
    """Routes that make, show and remove memories."""

    def __init__(
        self,
        model: Model,
        store: Store,
        jobs: Jobs,
        library: Library,
        conversations: Conversations,
        encoder: Encoder,
        limits: Limits,
    ) -> None:
        self.model, self.store, self.jobs, self.library = model, store, jobs, library
        self.conversations, self.encoder, self.limits = conversations, encoder, limits
        self.budgets: dict[str, dict[str, Any]] = {}

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1/memories")

        @router.post("", status_code=202, openapi_extra=described_body(NamedOptions, NewMemory))
        async def create(request: HttpRequest) -> Response:
            """Compact a document: JSON with `text`, or a form with a `file`; options are fields beside it."""
            kind = content_type(request)
            if kind == "application/json":
                record = await self.from_json(request)
            elif kind == "multipart/form-data":
                record = await self.from_form(request)
            else:
                raise ApiError(415, "unsupported_content_type", "send application/json or multipart/form-data")
            self.jobs.wake()
            return SafeJSON(self.describe(record), 202)

        @router.post("/import", status_code=201, openapi_extra=described_body(Naming))
        async def bring(request: HttpRequest) -> Response:
            """Take a finished `.ttmem` file, as a form's `file`."""
            if content_type(request) != "multipart/form-data":
                raise ApiError(415, "unsupported_content_type", "send multipart/form-data with a file")
            async with self.form(request) as (file, fields):
                naming = validated(Naming, fields)
                check_name(naming.name)
                record = await to_thread.run_sync(self.keep, request.state.owner, naming.name, file)
            return SafeJSON(self.describe(record), 201)

        @router.get("")
        async def all(
            request: HttpRequest,
            limit: int = Query(100, ge=1, le=1000),
            after: str | None = Query(None, max_length=100),
        ) -> Response:
            """Memories and jobs, oldest first; `after` an id for the next page."""
            records = await to_thread.run_sync(self.store.page, request.state.owner, limit + 1, after)
            data = [self.describe(record, with_losses=False) for record in records[:limit]]
            return SafeJSON({"object": "list", "data": data, "has_more": len(records) > limit})

        @router.get("/{reference}")
        async def show(request: HttpRequest, reference: str) -> Response:
            """A memory or its job, by id or name."""
            return SafeJSON(self.describe(await self.find(request, reference)))

        @router.get("/{reference}/events")
        async def events(request: HttpRequest, reference: str) -> Response:
            """Server-sent events of a job until it has ended."""
            record = await self.find(request, reference)
            return StreamingResponse(self.follow(record), media_type=EVENT_STREAM, headers=NO_BUFFER)

        @router.get("/{reference}/budget")
        async def budget(request: HttpRequest, reference: str) -> Response:
            """Where a memory's budget went: entries and biases by layer and KV head."""
            record = await self.find(request, reference)
            return SafeJSON({"id": record.id, "object": "memory.budget", **await self.budget(record)})

        @router.post("/{reference}/cancel")
        async def cancel(request: HttpRequest, reference: str) -> Response:
            """End a job that has not ended."""
            record = await self.find(request, reference)
            if not await self.jobs.cancel(record):
                raise ApiError(409, "not_running", f"there is nothing to cancel: it is {record.status}")
            return SafeJSON(self.describe(await self.find(request, record.id)))

        @router.get("/{reference}/file")
        async def download(request: HttpRequest, reference: str) -> Response:
            """The `.ttmem` file."""
            record = await self.find(request, reference)
            check_ready(record)
            path = self.store.memory_file(record.id)
            if not await to_thread.run_sync(path.is_file):
                raise ApiError(409, "memory_unusable", "its file is gone: delete it and compact the document again")
            return FileResponse(path, media_type="application/octet-stream", filename=f"{record.id}.ttmem")

        @router.delete("/{reference}")
        async def delete(request: HttpRequest, reference: str) -> Response:
            """Remove a memory, its job and its files."""
            record = await self.find(request, reference)
            await self.jobs.cancel(record)
            await to_thread.run_sync(self.store.delete, record.id)
            self.library.forget(record.id)
            await self.conversations.forget_document(record.id)
            self.jobs.curves.pop(record.id, None)
            self.budgets.pop(record.id, None)
            return SafeJSON({"id": record.id, "object": "memory", "deleted": True})

        return router

    async def find(self, request: HttpRequest, reference: str) -> Record:
        return await to_thread.run_sync(self.store.find, request.state.owner, reference)

    def describe(self, record: Record, with_losses: bool = True) -> dict[str, Any]:
        """A memory as JSON. progress: of a job under way. losses: of its training, left out of lists."""
        estimate = self.jobs.progress.get(record.id)
        progress = None
        if estimate is not None and record.status == "running":
            left = estimate.seconds_left
            progress = {
                "stage": estimate.stage,
                "stage_fraction": round(estimate.stage_fraction, 4),
                "fraction": round(estimate.fraction, 4),
                "seconds_left": None if left is None else round(left, 1),
                "stages": [{"stage": name, "fraction": round(part, 4)} for name, part in estimate.stages.items()],
            }
        details = {name: value for name, value in record.details.items() if name != "losses"}
        body = {
            "id": record.id,
            "object": "memory",
            "name": record.name,
            "status": record.status,
            "created_at": int(record.created),
            "finished_at": None if record.finished is None else int(record.finished),
            "bytes": record.bytes,
            "progress": progress,
            "error": record.error,
            "details": details or None,
        }
        if with_losses:
            curves = self.jobs.curves.get(record.id)
            body["losses"] = record.details.get("losses", {}) if curves is None else curves.body()
        return body

    async def budget(self, record: Record) -> dict[str, Any]:
        """A ready memory's budget, worked out once. Raises ApiError 409 while it is not ready, or is damaged."""
        check_ready(record)
        if record.id not in self.budgets:
            memory = await self.library.get(record)
            self.budgets[record.id] = await to_thread.run_sync(budget_map, memory)
            while len(self.budgets) > BUDGETS:
                self.budgets.pop(next(iter(self.budgets)))
        return self.budgets[record.id]

    async def from_json(self, request: HttpRequest) -> Record:
        data = await to_thread.run_sync(parse_json, await request.body())
        body = validated(NewMemory, data)
        options = {**body.model_dump(exclude={"text", "name"}), "document_name": body.name or "text"}
        await to_thread.run_sync(self.check, body, body.text)
        return await to_thread.run_sync(self.queue, request.state.owner, body.name, options, body.text.encode(), "txt")

    async def from_form(self, request: HttpRequest) -> Record:
        async with self.form(request) as (file, fields):
            if "settings" in fields:
                fields["settings"] = parse_json(fields["settings"].encode("utf-8", "replace"), "settings")
            body = validated(NamedOptions, fields)
            kind = kind_of(file.filename, file.content_type)
            if kind is None:
                raise ApiError(415, "unsupported_document", f"the document must be {KINDS}, by its file name", "file")
            if kind in TEXT_KINDS:
                data = await file.read()
                await to_thread.run_sync(lambda: self.check(body, decoded(data)))
            else:
                await to_thread.run_sync(self.check, body, None)
            options = {**body.model_dump(exclude={"name"}), "document_name": body.name or f"upload.{kind}"}
            return await to_thread.run_sync(self.queue, request.state.owner, body.name, options, file, kind)

    def check(self, options: JobOptions, text: str | None) -> None:
        """Refuse at once what the worker would refuse later, as far as it can be seen. Raises ApiError."""
        check_name(getattr(options, "name", None))
        try:
            make_method(options.method, job_settings(options.preset, options.settings), options.seed)
            if text is None:
                return
            most = self.limits.document_bytes
            if len(text) > most or len(text.encode("utf-8", "replace")) > most:
                raise ApiError(413, "document_too_large", f"this server takes documents of up to {most:,} bytes")
            with self.encoder.lock:
                document = Document.of(self.model, text, "the document")
            if options.fidelity is None and options.method != "full":
                ratio = 16.0 if options.ratio is None and options.tokens is None else options.ratio
                Budget.of(document.length, ratio, options.tokens)
        except DocumentError as error:
            raise refused(error, "document_error") from error
        except BudgetError as error:
            raise refused(error, "budget_error") from error

    def queue(self, owner: str, name: str | None, options: dict[str, Any], source: Any, kind: str) -> Record:
        """Store a source (bytes or an upload) and queue its job."""
        size = len(source) if isinstance(source, bytes) else source.size or 0
        with self.store.upload(size) as path:
            fill(path, source)
            id = self.store.add_job(owner, name, options, path, kind, self.limits.jobs)
        return self.store.find(owner, id)

    def keep(self, owner: str, name: str | None, file: UploadFile) -> Record:
        """Verify an uploaded memory and store it. No pickle is read; what does not fit the model is refused."""
        with self.store.upload(file.size or 0) as path:
            fill(path, file)
            try:
                memory = read_checked(self.model, path)
            except MemoryFileError as error:
                raise ApiError(400, "memory_file_error", str(error).replace(str(path), "the file"), "file") from error
            except MemoryMismatchError as error:
                raise refused(error, "memory_mismatch_error", param="file") from error
            id = self.store.add_memory(owner, name, describe(memory), path)
        return self.store.find(owner, id)

    @asynccontextmanager
    async def form(self, request: HttpRequest) -> AsyncIterator[tuple[UploadFile, dict[str, Any]]]:
        """A form's one file and its other fields."""
        async with request.form(max_files=1, max_fields=40, max_part_size=2**16) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "no_file", "the form needs a file in its field `file`", "file")
            fields = {name: value for name, value in form.multi_items() if name != "file"}
            if len(fields) + 1 != len(form.multi_items()):
                raise ApiError(400, "repeated_field", "a field is there twice")
            yield file, fields

    async def follow(self, record: Record) -> AsyncIterator[bytes]:
        """A job's descriptions whenever they change, the last one of its end."""
        last = None
        while True:
            described = self.describe(record)
            if described != last:
                yield sse(described)
                last = described
            if record.status not in UNFINISHED:
                yield b"data: [DONE]\n\n"
                return
            await asyncio.sleep(TICK)
            try:
                record = await to_thread.run_sync(partial(self.store.find, record.owner, record.id))
            except ApiError as error:  # deleted meanwhile
                yield sse(error.body())
                return


def content_type(request: HttpRequest) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def parse_json(data: bytes, field: str | None = None) -> Any:
    """JSON of a body, or of a form's field; else ApiError 400."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "invalid_json", f"{field or 'the body'} is not JSON", field) from error


def validated(kind: type[Body], data: Any) -> Body:
    """A body of this kind, or ApiError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_input=False, include_context=False)) from error


def invalid(errors: Any) -> ApiError:
    """What a validation found, in a sentence; values are not repeated."""
    first = errors[0] if errors else {"loc": (), "msg": "not valid"}
    where = ".".join(str(part)[:60] for part in first["loc"] if part != "body") or None
    message = f"{where}: {first['msg']}" if where else str(first["msg"])
    return ApiError(400, "invalid_request", message, where)


def check_name(name: str | None) -> None:
    """Raise ApiError for a name that means something else in requests."""
    if name is not None and (name == AUTO or name.startswith(ID)):
        raise ApiError(400, "name_reserved", f"a memory cannot be called {name}: that means something else", "name")


def decoded(data: bytes) -> str:
    try:
        return decode(data)
    except DocumentError as error:
        raise refused(error, "document_error", param="file") from error


def fill(path: Path, source: Any) -> None:
    """Write bytes, or an upload from its beginning, to a file."""
    if isinstance(source, bytes):
        path.write_bytes(source)
        return
    source.file.seek(0)
    with open(path, "wb") as target:
        shutil.copyfileobj(source.file, target, 2**20)
