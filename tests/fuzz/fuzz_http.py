"""Fuzz HTTP requests: where a head, parameters and body end, and the response.

Run as ``python -m tests.fuzz.fuzz_http``; FUZZ_SECONDS limits it, FUZZ_SEED repeats a run. The seed is printed first.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final
from urllib.parse import quote

from polywire.clock import SystemClock
from polywire.http.application import HttpApplication
from polywire.http.session import Refusal, request_bytes
from polywire.testing.memory_broker import MemoryBroker
from tests.fuzz.chance import cuts_of, fuzz
from tests.fuzz.decoders import Decoder, check
from tests.unit.http.site import Peer, Process, request

INPUTS: Final = 48  # of a round
ANSWER_S: Final = 10.0
STATUSES: Final = frozenset({200, 307, 400, 401, 403, 404, 405, 409, 503})
CHANGE: Final = {"X-Polywire": "1", "Content-Type": "application/json"}
WORDS: Final = (
    "t",
    "s.t",
    "0",
    "1",
    "-1",
    "9" * 19,
    "9" * 40,
    "earliest",
    "latest",
    "2026-11-22T12:00:00Z",
    "0001-01-01T00:00:00+23:59",
    "true",
    "",
    "ä/ö",
    "..",
    "a b",
    "\0",
    "x" * 300,
    "%",
    "٣",
)
PATHS: Final = (
    "/",
    "/livez",
    "/readyz",
    "/metrics",
    "/static/{}",
    "/api/v1/openapi.json",
    "/api/v1/overview",
    "/api/v1/settings",
    "/api/v1/connections",
    "/api/v1/users",
    "/api/v1/topics",
    "/api/v1/topics/{}",
    "/api/v1/topics/{}/records",
    "/api/v1/topics/{}/partitions/{}/records",
    "/api/v1/groups",
    "/api/v1/topics/{}/groups/{}",
    "/api/v1/topics/{}/groups/{}/reset",
)
FIELDS: Final = (
    "offset",
    "time",
    "tail",
    "key",
    "limit",
    "whole",
    "topic",
    "group",
    "after",
    "partition",
    "partitions",
    "value",
    "value_base64",
    "key_base64",
    "headers",
    "to",
    "dry_run",
)
VALUES: Final = (
    "null",
    "true",
    "0",
    "-1",
    "3",
    "1e400",
    "9" * 30,
    '"text"',
    '"YQ=="',
    '"%%%"',
    '"earliest"',
    '"2026-11-22T12:00:00Z"',
    '"\\ud800"',
    "{}",
    '{"a": "b"}',
    '{"a": null, "": 1}',
    "[1]",
    "[" * 2000,
)


class Served:
    """A broker in memory with HTTP. Guards: one broker at a time, on one loop."""

    loop: Final = asyncio.new_event_loop()

    def __init__(self) -> None:
        self._memory = MemoryBroker(loop=self.loop, clock=SystemClock())
        self._memory.broker.ensure_topic("t")
        self._application = HttpApplication(self._memory.broker, Process(), names=())

    def answer(self, data: bytes) -> bytes:
        """Return the response to one request."""
        peer = Peer()
        exchange = self._application.exchange(peer, asyncio.Event())
        self.loop.run_until_complete(asyncio.wait_for(exchange.run(data), ANSWER_S))
        return bytes(peer.sent)

    def close(self) -> None:
        """Close the connection."""
        self._memory.broker.close()


_served = Served()


def ask(data: bytes) -> None:
    """Check that a complete request gets one response with a documented status."""
    size = request_bytes(memoryview(data))
    if isinstance(size, Refusal) or not 0 < size <= len(data):
        return
    answered = _served.answer(data[:size])
    assert answered, "a complete request gets a response"
    status = int(answered.split(b" ", 2)[1])
    assert status in STATUSES, f"status={status}"


def frame(data: bytes) -> None:
    """Check that a request ends at the same byte however it is split, or is refused for good."""
    whole = request_bytes(memoryview(data))
    for end in cuts_of(data, random.Random(len(data))):
        part = request_bytes(memoryview(data)[:end])
        assert part in (0, whole), f"first {end} bytes: {part}, all: {whole}"


def with_length(data: bytes) -> bytes:
    """Return a request with the length of its body."""
    head, end, body = data.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + end + body


def made(chance: random.Random) -> bytes:
    """Return a request to an endpoint with arbitrary parameters."""
    path = chance.choice(PATHS)
    path = path.format(*(quote(chance.choice(WORDS[: chance.choice((2, len(WORDS)))]), safe="") for _ in range(2)))
    query = "&".join(
        f"{chance.choice(FIELDS)}={quote(chance.choice(WORDS))}" for _ in range(chance.choice((0, 0, 1, 3)))
    )
    fields = ", ".join(f'"{chance.choice(FIELDS)}": {chance.choice(VALUES)}' for _ in range(chance.choice((0, 1, 3))))
    method = chance.choice(("GET", "GET", "POST", "POST", "DELETE", "HEAD", "PUT"))
    body = b"" if method == "GET" else f"{{{fields}}}".encode()
    return request(method, f"{path}?{query}" if query else path, CHANGE, body)


SAMPLES: Final = tuple(made(random.Random(seed)) for seed in range(400))
ASK: Final = Decoder("http", ask, SAMPLES, seal=with_length)
DECODERS: Final = (ASK, Decoder("http-frame", frame, SAMPLES))


def check_all(chance: random.Random) -> None:
    """Run one round with a new broker."""
    global _served
    _served.close()
    _served = Served()
    for _ in range(INPUTS // 4):
        for decoder in DECODERS:
            check(decoder, chance)
        for decoder in DECODERS:
            check(Decoder(decoder.name, decoder.decode, [made(chance)], seal=decoder.seal), chance)


if __name__ == "__main__":
    fuzz(check_all)
