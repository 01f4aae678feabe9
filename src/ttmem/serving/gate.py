"""What every request passes before the application sees it, and what is logged of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ttmem.serving.errors import ApiError, too_busy
from ttmem.serving.keys import Keys
from ttmem.serving.metrics import Metrics
from ttmem.serving.settings import ServeSettings

log = logging.getLogger("ttmem.serving")

UPLOADS = ("/v1/memories", "/v1/memories/import")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


class Gate:
    """Connections, host, origin, key, size of a body, in this order; no body is read before the key is known."""

    def __init__(self, app: ASGIApp, settings: ServeSettings, keys: Keys, metrics: Metrics) -> None:
        self.app, self.settings, self.keys, self.metrics = app, settings, keys, metrics
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        passage = Passage(scope, receive, send, self)
        self.open += 1
        try:
            self.check(scope)
            await self.app(scope, passage.receive, passage.send)
        except ApiError as error:
            if passage.status:  # the answer has begun: nothing else can be said
                raise
            await error.response()(scope, receive, passage.send)
        except Exception:
            passage.status = passage.status or 500
            raise
        finally:
            self.open -= 1
            passage.end()

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request that may not come in. Sets `request.state.owner`."""
        headers, path = Headers(scope=scope), scope["path"]
        scope.setdefault("state", {})
        if self.open > self.settings.limits.connections:
            raise too_busy("too many connections")
        if not self.keys.needed and host_name(headers.get("host", "")) not in (*LOOPBACK_NAMES, self.settings.host):
            raise ApiError(403, "host_not_allowed", "without keys this server answers to its loopback names only")
        origin = headers.get("origin")
        if origin is not None and origin not in self.settings.origins and not same_origin(origin, headers):
            raise ApiError(403, "origin_not_allowed", "web pages of this origin may not call this server")
        if path == "/metrics" or path.startswith("/v1/"):
            owner = self.keys.owner(headers.get("authorization"))
            if owner is None:
                raise ApiError(
                    401, "invalid_api_key", "this server needs a valid API key", headers={"WWW-Authenticate": "Bearer"}
                )
            allowed = self.keys.may_read_metrics(owner)
            if (path == "/metrics") != allowed and self.keys.needed:
                raise ApiError(403, "key_not_allowed", "this key does not open this")
            scope["state"]["owner"] = owner
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self.most_bytes(path):
            raise self.too_large(path)

    def most_bytes(self, path: str) -> int:
        limits = self.settings.limits
        return limits.upload_bytes if path.rstrip("/") in UPLOADS else limits.body_bytes

    def too_large(self, path: str) -> ApiError:
        return ApiError(413, "body_too_large", f"a body may have up to {self.most_bytes(path):,} bytes here")


class Passage:
    """One request on its way: counts and times its body, notes its status, writes its line in the log."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, gate: Gate) -> None:
        self.scope, self._receive, self._send, self.gate = scope, receive, send, gate
        self.id = secrets.token_hex(8)
        self.status = 0
        self.size = 0
        self.reading = True
        self.started = time.monotonic()

    async def receive(self) -> Message:
        """The next part of the body. Raises ApiError 413 where it is too large, 408 where it does not come."""
        if not self.reading:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self.gate.settings.limits.stall)
        except asyncio.TimeoutError as error:
            raise ApiError(408, "body_stalled", "the rest of the body did not come in time") from error
        self.size += len(message.get("body", b""))
        self.reading = message["type"] == "http.request" and message.get("more_body", False)
        if self.size > self.gate.most_bytes(self.scope["path"]):
            raise self.gate.too_large(self.scope["path"])
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.id
            headers.setdefault("X-Content-Type-Options", "nosniff")
        await self._send(message)

    def end(self) -> None:
        seconds = time.monotonic() - self.started
        route = route_of(self.scope)
        self.gate.metrics.request(route, method_of(self.scope), self.status, seconds)
        fields = {
            "request": self.id,
            "method": method_of(self.scope),
            "route": route,
            "status": self.status,
            "seconds": round(seconds, 4),
            "body_bytes": self.size,
        }
        log.info("request", extra={"fields": fields})


def route_of(scope: Scope) -> str:
    """The template of the path, not the path, which may hold names."""
    route: Any = scope.get("route")
    return str(getattr(route, "path", "other"))


def method_of(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH") else "other"


def host_name(host: str) -> str:
    """The name of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def same_origin(origin: str, headers: Headers) -> bool:
    """Whether a page of this very server asks."""
    return origin.partition("://")[2] == headers.get("host", "") != ""
