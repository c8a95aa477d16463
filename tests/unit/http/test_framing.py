"""Tests of where a request ends, and of requests that are rejected without parsing."""

from __future__ import annotations

import pytest

from polywire.http.session import BODY_BYTES_MAX, HEAD_BYTES_MAX, HEADERS_MAX, Refusal, request_bytes


def size(data: bytes) -> int | Refusal:
    return request_bytes(memoryview(data))


def test_a_request_ends_after_its_head_and_body() -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    assert size(head) == size(head + head) == len(head)
    posted = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n"
    assert size(posted) == size(posted + b"abcdefgh") == len(posted) + 5
    for end in range(len(posted)):
        assert size(posted[:end]) == 0


@pytest.mark.parametrize(
    ("lines", "refusal"),
    [
        ("Content-Length: x", Refusal.MALFORMED),
        ("Content-Length: -1", Refusal.MALFORMED),
        ("Content-Length: 1e3", Refusal.MALFORMED),
        ("Content-Length:", Refusal.MALFORMED),
        ("Content-Length: ٣", Refusal.MALFORMED),
        (f"Content-Length: {'9' * 40}", Refusal.MALFORMED),
        (f"content-length: {BODY_BYTES_MAX + 1}", Refusal.BODY_TOO_LARGE),
        ("X: a\r\n Content-Length: 4", Refusal.MALFORMED),
        ("X: a\r\n\tContent-Length: 4", Refusal.MALFORMED),
        ("Transfer-Encoding: chunked", Refusal.LENGTH_REQUIRED),
        ("Transfer-Encoding : gzip", Refusal.LENGTH_REQUIRED),
        ("X: " + "y" * HEAD_BYTES_MAX, Refusal.HEAD_TOO_LARGE),
        ("X: y\r\n" * HEADERS_MAX + "Host: a", Refusal.HEAD_TOO_LARGE),
    ],
)
def test_requests_that_are_rejected(lines: str, refusal: Refusal) -> None:
    assert size(f"POST / HTTP/1.1\r\n{lines}\r\n\r\n".encode()) is refusal


def test_a_head_without_an_end_has_a_limit() -> None:
    assert size(b"GET /" + b"x" * (HEAD_BYTES_MAX - 5)) == 0
    assert size(b"GET /" + b"x" * HEAD_BYTES_MAX) is Refusal.HEAD_TOO_LARGE


@pytest.mark.parametrize("refusal", Refusal)
def test_a_rejection_closes_the_connection(refusal: Refusal) -> None:
    assert refusal.answer.startswith(f"HTTP/1.1 {refusal.value}\r\n".encode())
    assert b"Connection: close" in refusal.answer
