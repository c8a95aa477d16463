"""The files of the console. Only the files listed here are served; each is read from disk once."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from starlette.responses import PlainTextResponse, Response

FILES: Final = {
    "index.html": "text/html; charset=utf-8",
    "console.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
} | {
    f"{name}.js": "text/javascript; charset=utf-8"
    for name in (
        "avro",
        "bucket",
        "bytes",
        "clients",
        "console",
        "frame",
        "groups",
        "letters",
        "overview",
        "parts",
        "produce",
        "records",
        "topics",
        "users",
        "views",
    )
}


@cache
def _content(name: str) -> bytes:
    return (files("polywire.http") / "static" / name).read_bytes()


def console_file(name: str) -> Response:
    """Return a file of the console, or 404."""
    media_type = FILES.get(name)
    if media_type is None:
        return PlainTextResponse("no such file\n", status_code=404)
    return Response(_content(name), media_type=media_type, headers={"Cache-Control": "no-cache"})
