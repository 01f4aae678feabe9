"""Refusals over HTTP, in the shape of OpenAI's errors."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ttmem.errors import TtmemError

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class SafeJSON(JSONResponse):
    """JSON in ASCII: a lone surrogate in a user's text must not break the answer that quotes it."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(HTTPException):
    """A request that is refused. `code` is for programs, `message` for people; `param` names the field."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.message, self.param = code, message, param

    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.code, self.message, self.param)

    def response(self) -> SafeJSON:
        return SafeJSON(self.body(), self.status_code, headers=dict(self.headers or {}))


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refused(error: TtmemError, code: str, status: int = 400, param: str | None = None) -> ApiError:
    """An error a user can act on, as a refusal."""
    return ApiError(status, code, str(error), param)


def too_busy(message: str, code: str = "too_many_requests") -> ApiError:
    """429: there is no room now; the same request may be taken a little later."""
    return ApiError(429, code, message, headers={"Retry-After": "1"})


def storage_full(message: str = "the server's storage is full: delete memories that are not needed") -> ApiError:
    """413, not 429: trying again changes nothing until something is deleted."""
    return ApiError(413, "storage_full", message)


def not_found(param: str | None = None) -> ApiError:
    """The same words for what is not there and for what is another key's."""
    return ApiError(404, "memory_not_found", "there is no such memory", param)
