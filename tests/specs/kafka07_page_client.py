"""A small client of Kafka 0.7, written from the wiki's page on its protocol and the design page on its messages alone.

A 0.7 broker has no groups: a consumer keeps its offsets itself, here in a file. Producers get no responses either: a
set is known to be stored once a later request of the same connection gets a response. Broken connections are
re-created, and sets not known to be stored are sent again, perhaps in duplicate.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

PRODUCE, FETCH, MULTIFETCH, MULTIPRODUCE, OFFSETS = range(5)
LATEST, EARLIEST = -1, -2
GZIP: Final = 1
TRIES, PAUSE_S = 600, 0.1


class Failed(Exception):
    """A response with an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code={code}")
        self.code = code


def message(payload: bytes, magic: int = 1, attributes: int = 0) -> bytes:
    """Encode a message after its length."""
    head = bytes((magic, attributes) if magic else (magic,)) + struct.pack(">I", zlib.crc32(payload))
    return struct.pack(">i", len(head) + len(payload)) + head + payload


def place(topic: bytes, partition: int) -> bytes:
    """Encode a topic and a partition."""
    return struct.pack(">h", len(topic)) + topic + struct.pack(">i", partition)


def produced(topic: bytes, partition: int, messages: bytes) -> bytes:
    """Encode the body of a PRODUCE, or an entry of a MULTIPRODUCE."""
    return place(topic, partition) + struct.pack(">i", len(messages)) + messages


def fetched(topic: bytes, partition: int, offset: int, size: int) -> bytes:
    """Encode the body of a FETCH, or an entry of a MULTIFETCH."""
    return place(topic, partition) + struct.pack(">qi", offset, size)


def asked(topic: bytes, partition: int, moment: int, most: int) -> bytes:
    """Encode the body of an OFFSETS."""
    return place(topic, partition) + struct.pack(">qi", moment, most)


def frame(kind: int, *body: bytes) -> bytes:
    """Encode a whole request."""
    said = struct.pack(">h", kind) + b"".join(body)
    return struct.pack(">i", len(said)) + said


def opened(messages: bytes) -> tuple[list[bytes], int]:
    """Return the payloads of a message set, and of compressed messages in it, and the size of its complete messages."""
    payloads, at = list[bytes](), 0
    while len(messages) >= at + 4:
        end = at + 4 + int.from_bytes(messages[at : at + 4], "big")
        if end > len(messages):
            break
        magic, attributes = messages[at + 4], messages[at + 5]
        start = at + 10 if magic else at + 9
        payload = messages[start:end]
        assert zlib.crc32(payload) == int.from_bytes(messages[start - 4 : start], "big")
        packed = magic == 1 and attributes & 3 == GZIP
        payloads += opened(gzip.decompress(payload))[0] if packed else [payload]
        at = end
    return payloads, at


class Client:
    """Consecutive connections, and the offsets of consumed messages."""

    def __init__(self, address: tuple[str, int], kept: Path | None = None) -> None:
        self._address, self._kept = address, kept
        self.offsets: dict[str, int] = json.loads(kept.read_text()) if kept and kept.exists() else {}
        self.socket = socket.create_connection(address, 60)

    def produce(self, topic: bytes, partition: int, *payloads: bytes) -> None:
        """Store a message set; the end of the partition, requested next, arrives once it is stored."""
        said = produced(topic, partition, b"".join(map(message, payloads)))
        self._persist(frame(PRODUCE, said) + frame(OFFSETS, asked(topic, max(partition, 0), LATEST, 1)))

    def consume(self, topic: bytes, partition: int, size: int = 65_536) -> list[bytes]:
        """Return the next messages; repeat with twice the size if none fits."""
        key = f"{topic.decode()}-{partition}"
        offset = self.offsets.get(key, 0)
        found = self._persist(frame(FETCH, fetched(topic, partition, offset, size)))
        payloads, end = opened(found)
        if found and not end:
            return self.consume(topic, partition, size * 2)
        self.offsets[key] = offset + end
        if self._kept:
            self._kept.write_text(json.dumps(self.offsets))
        return payloads

    def ask(self, requests: bytes) -> bytes:
        """Return the only response to these requests after its error code. Raises Failed."""
        self.socket.sendall(requests)
        return self.answer()

    def answer(self) -> bytes:
        """Return the next response after its error code. Raises Failed."""
        body = self.take(int.from_bytes(self.take(4), "big"))
        code = int.from_bytes(body[:2], "big", signed=True)
        if code:
            raise Failed(code)
        return body[2:]

    def take(self, size: int) -> bytes:
        """Return that many bytes from the broker."""
        taken = b""
        while len(taken) < size:
            part = self.socket.recv(size - len(taken))
            if not part:
                raise ConnectionError("the broker closed the connection")
            taken += part
        return taken

    def connect_again(self) -> None:
        """Replace the connection by a new one."""
        self.socket.close()
        self.socket = socket.create_connection(self._address, 60)

    def _persist(self, requests: bytes) -> bytes:
        for _ in range(TRIES):
            try:
                return self.ask(requests)
            except OSError:
                time.sleep(PAUSE_S)
            with suppress(OSError):
                self.connect_again()
        raise TimeoutError("the broker does not come back")
