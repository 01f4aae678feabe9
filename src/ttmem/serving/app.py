"""The application: routes, errors in one shape, and what starts and stops with it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from ttmem.models import Model
from ttmem.serving.answering import Answering
from ttmem.serving.conversations import Conversations
from ttmem.serving.engine import Engine, check_engine
from ttmem.serving.errors import ApiError, SafeJSON, error_body, storage_full
from ttmem.serving.folds import FoldStore
from ttmem.serving.gate import Gate
from ttmem.serving.jobs import Jobs
from ttmem.serving.keys import Keys
from ttmem.serving.library import Library
from ttmem.serving.logs import failure
from ttmem.serving.metrics import Metrics
from ttmem.serving.settings import ServeSettings
from ttmem.serving.shelf import Shelf, invalid
from ttmem.serving.store import Store
from ttmem.serving.text import Encoder
from ttmem.serving.web_page import add_page
from ttmem.versions import version_of

log = logging.getLogger("ttmem.serving")


def create_app(settings: ServeSettings, model: Model, keys: Keys | None = None) -> FastAPI:
    """The server as an ASGI application, for one model.

    Raises ModelError where the model cannot be batched, ServeError where the data folder cannot be used.
    """
    check_engine(model)
    keys = Keys.read(settings.key_file) if keys is None else keys
    metrics = Metrics()
    store = Store(settings.data, settings.limits.disk_bytes)
    engine = Engine(model, settings.limits, metrics)
    jobs = Jobs(settings, store, metrics)
    library = Library(model, store, settings.limits.loaded_bytes, metrics)
    encoder = Encoder(model)

    folds = FoldStore(settings.data / "conversations", settings.limits.conversation_bytes)
    conversations = Conversations(settings, store, folds, library, encoder, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        jobs.start()
        yield
        await jobs.stop()
        await conversations.stop()
        engine.stop()
        folds.close()
        store.close()

    app = FastAPI(
        title="ttmem", version=version_of("ttmem"), lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.state.engine, app.state.store, app.state.jobs = engine, store, jobs
    name = served_name(settings, model)
    answering = Answering(name, engine, encoder, library, conversations, store, settings.limits)
    app.include_router(answering.router())
    app.include_router(Shelf(model, store, jobs, library, conversations, encoder, settings.limits).router())
    app.include_router(conversations.router())

    @app.get("/healthz")
    async def healthz() -> Response:
        alive = engine.alive
        return SafeJSON({"status": "ok" if alive else "failing"}, 200 if alive else 503)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    if settings.static is not None:
        app.mount("/", StaticFiles(directory=settings.static, html=True))
    elif settings.page:
        add_page(app)
    _handle_errors(app)
    app.add_middleware(Gate, settings=settings, keys=keys, metrics=metrics)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return app


def served_name(settings: ServeSettings, model: Model) -> str:
    """The model's name for clients: a hub id as it is, a path's last part, never the path."""
    if settings.name:
        return settings.name
    name = model.name.removesuffix(" (bundled)")
    return Path(name).name if Path(name).exists() or name.startswith(("/", ".")) else name


def _handle_errors(app: FastAPI) -> None:
    """Every refusal in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return SafeJSON(
            error_body(error.status_code, "http_error", str(error.detail)), error.status_code, headers=error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        return invalid(error.errors()).response()

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return SafeJSON(error_body(499, "client_left", "the client has left"), 499)

    async def storage(request: Request, error: Any) -> Response:
        log.error("storage_failed", extra={"fields": failure(error)})
        return storage_full("the server's storage failed: try again later").response()

    app.add_exception_handler(sqlite3.Error, storage)
    app.add_exception_handler(OSError, storage)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> Response:
        log.error("fault", extra={"fields": failure(error)})
        return SafeJSON(error_body(500, "internal_error", "the server failed at this request"), 500)
