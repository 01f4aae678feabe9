"""Structured logs: one JSON object per line. No text of documents, questions or answers, no keys, no names."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import datetime, timezone
from typing import Any, TextIO


class JsonLines(logging.Formatter):
    """A record as JSON: time, level, event, and the fields given as `extra={"fields": {...}}`.

    An exception is logged by its kind and the lines it passed, never by its message, which may quote a user's text.
    Messages of other libraries are left out for the same reason; where they come from is kept.
    """

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.startswith("ttmem")
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage() if own else f"{record.name}:{record.funcName}:{record.lineno}",
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry |= failure(record.exc_info[1])
        return json.dumps(entry)


def failure(error: BaseException) -> dict[str, Any]:
    """What may be logged of an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "at": [f"{frame.filename}:{frame.lineno}" for frame in frames[-12:]]}


def configure_logs(stream: TextIO = sys.stderr, level: int = logging.INFO) -> None:
    """Send our own log and uvicorn's to `stream`. Called by the command, never by the library."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name, own_level in (("ttmem.serving", level), ("uvicorn", logging.WARNING), ("asyncio", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(own_level)
        logger.propagate = False
