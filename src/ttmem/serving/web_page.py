"""ttmem's own web page: the files of the folder `page`, as they are, under a strict content security policy."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"

HTML = "text/html; charset=utf-8"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""The kinds of file the page loads. Browsers run no module of another type, and a system's own table may differ."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """The page's files with its headers; what is of another kind is not there."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        kind = TYPES.get(Path(full_path).suffix)
        if kind is None:
            raise HTTPException(404)
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update({**HEADERS, "Content-Type": kind})
        return response


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and what it loads below `/page`; other paths stay the API's."""

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index() -> Response:
        return FileResponse(FOLDER / "index.html", media_type=HTML, headers=HEADERS)

    app.mount("/page", PageFiles(directory=FOLDER))
