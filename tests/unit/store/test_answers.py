"""Responses of stores, for every method: only conditional writes raise "exists", and only reads raise "missing"."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polywire.errors import Unavailable
from polywire.store.base import BlobExists, BlobMissing
from polywire.store.objects import ObjectChanged, Objects
from polywire.store.url import open_bucket

STATUSES = (
    301,
    304,
    307,
    400,
    401,
    403,
    404,
    405,
    408,
    409,
    410,
    411,
    412,
    413,
    416,
    429,
    500,
    501,
    502,
    503,
    504,
    507,
)
VERBS: Mapping[str, Callable[[Objects], object]] = {
    "create": lambda objects: objects.create("a/one", [b"content"]),
    "replace": lambda objects: objects.replace("a/one", b"content", '"tag"\n'),
    "put": lambda objects: objects.put("a/one", b"content"),
    "read": lambda objects: objects.read("a/one"),
    "read_range": lambda objects: objects.read_range("a/one", 0, 7),
    "size": lambda objects: objects.size("a/one"),
    "list": lambda objects: objects.list("a/"),
    "delete": lambda objects: objects.delete("a/one"),
}
MEANT: Mapping[tuple[str, int], type[Exception] | None] = {
    ("create", 304): BlobExists,  # no store replies so to a put, and the caller reads after "exists"
    ("create", 409): BlobExists,
    ("create", 412): BlobExists,
    ("replace", 404): ObjectChanged,
    ("replace", 409): ObjectChanged,
    ("replace", 412): ObjectChanged,
    ("read", 404): BlobMissing,
    ("read_range", 404): BlobMissing,
    ("size", 404): BlobMissing,
    ("delete", 404): None,
}
"""The meaning of a response to a method; every other response is Unavailable."""
PAGE = b"<html><body>log in to use this network</body></html>"


class Answer(BaseHTTPRequestHandler):
    """Gives every request the same response, on a new connection. ``server.answer``: (status, body, ETag)."""

    def do_PUT(self) -> None:
        received = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.is_signed = self.headers["x-amz-content-sha256"] == hashlib.sha256(received).hexdigest()  # type: ignore[attr-defined]
        status, body, tag = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        if tag:
            self.send_header("ETag", tag)
        if status in (301, 307):
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        if self.command != "HEAD" and status != 304:
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_DELETE = do_PUT

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Store:
    """A server whose responses a test sets, and the bucket there."""

    def __init__(self, server: ThreadingHTTPServer, objects: Objects) -> None:
        self._server = server
        self.objects = objects

    def answer(self, status: int, body: bytes = b"", tag: str = "") -> None:
        """Respond like this from now on."""
        self._server.answer = (status, body, tag)  # type: ignore[attr-defined]

    @property
    def is_signed(self) -> bool:
        """Whether the signature of the last request had the digest of its body."""
        return bool(self._server.is_signed)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    pytest.importorskip("obstore", reason="buckets need the extra `bucket`")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "REGION": "us-east-1"}
    environment |= {"ACCESS_KEY_ID": "user", "SECRET_ACCESS_KEY": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(f"AWS_{name}", value)
        objects = open_bucket("s3://bucket/prefix")
    try:
        yield Store(server, objects)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("status", STATUSES)
def test_every_response_has_one_meaning_per_method(store: Store, status: int, verb: str) -> None:
    store.answer(status, b"<?xml version='1.0'?><Error><Code>Injected</Code></Error>")
    meant = MEANT.get((verb, status), Unavailable)
    if meant is None:
        VERBS[verb](store.objects)
        return
    with pytest.raises(meant) as raised:
        VERBS[verb](store.objects)
    assert type(raised.value) is meant


@pytest.mark.parametrize("verb", ["create", "replace", "put"])
@pytest.mark.parametrize("tag", ["", '"x"', '"0x8DB"'])
def test_an_html_page_is_not_taken_for_a_stored_object(store: Store, verb: str, tag: str) -> None:
    """A proxy that replies to every request with 200 and its own page has stored nothing."""
    store.answer(200, PAGE, tag)
    with pytest.raises(Unavailable, match="object is missing" if tag else "ETag"):
        VERBS[verb](store.objects)


@pytest.mark.parametrize("verb", ["create", "replace", "put"])
def test_an_acknowledged_object_costs_one_request(store: Store, verb: str) -> None:
    store.answer(200, b"", f'"{hashlib.md5(b"content").hexdigest()}"')
    VERBS[verb](store.objects)


@pytest.mark.parametrize("size", [7, 4 << 20])
def test_a_body_over_plain_http_is_signed(store: Store, size: int) -> None:
    """Otherwise the store would keep bytes that changed on the way, and the journal file would be used again."""
    content = b"c" * size
    store.answer(200, b"", f'"{hashlib.md5(content).hexdigest()}"')
    store.objects.create("a/one", [content[: size // 2], content[size // 2 :]])
    assert store.is_signed
