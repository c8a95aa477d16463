"""A small client of Kafka 0.7, written from the wiki's page on its wire format and the design page's on its messages alone.

There are no groups on a 0.7 broker: a consumer keeps its offsets itself, here in a file. There are no answers to producers either: a set is
known to be stored once a later request of the same connection is answered. Connections that break are made again, and what was not known to
be stored is sent again: it may come twice.
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
    """An answer has an error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code={code}")
        self.code = code


def message(payload: bytes, magic: int = 1, attributes: int = 0) -> bytes:
    """A message behind its length."""
    head = bytes((magic, attributes) if magic else (magic,)) + struct.pack(">I", zlib.crc32(payload))
    return struct.pack(">i", len(head) + len(payload)) + head + payload


def place(topic: bytes, partition: int) -> bytes:
    """A topic and a partition."""
    return struct.pack(">h", len(topic)) + topic + struct.pack(">i", partition)


def produced(topic: bytes, partition: int, messages: bytes) -> bytes:
    """What a PRODUCE says, and each entry of a MULTIPRODUCE."""
    return place(topic, partition) + struct.pack(">i", len(messages)) + messages


def fetched(topic: bytes, partition: int, offset: int, size: int) -> bytes:
    """What a FETCH says, and each entry of a MULTIFETCH."""
    return place(topic, partition) + struct.pack(">qi", offset, size)


def asked(topic: bytes, partition: int, moment: int, most: int) -> bytes:
    """What an OFFSETS says."""
    return place(topic, partition) + struct.pack(">qi", moment, most)


def frame(kind: int, *body: bytes) -> bytes:
    """A whole request."""
    said = struct.pack(">h", kind) + b"".join(body)
    return struct.pack(">i", len(said)) + said


def opened(messages: bytes) -> tuple[list[bytes], int]:
    """Payloads of a message set, those of compressed messages too, and how many bytes its whole messages take."""
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
    """One connection after the other, and the offsets of what it consumed."""

    def __init__(self, address: tuple[str, int], kept: Path | None = None) -> None:
        self._address, self._kept = address, kept
        self.offsets: dict[str, int] = json.loads(kept.read_text()) if kept and kept.exists() else {}
        self.socket = socket.create_connection(address, 60)

    def produce(self, topic: bytes, partition: int, *payloads: bytes) -> None:
        """Store a message set: asked for behind it, the end of the partition is told once it is."""
        said = produced(topic, partition, b"".join(map(message, payloads)))
        self._persist(frame(PRODUCE, said) + frame(OFFSETS, asked(topic, max(partition, 0), LATEST, 1)))

    def consume(self, topic: bytes, partition: int, size: int = 65_536) -> list[bytes]:
        """The next messages; what fits in no answer is asked for with twice the size."""
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
        """What the one answer to these requests says behind its error code. Raises Failed."""
        self.socket.sendall(requests)
        return self.answer()

    def answer(self) -> bytes:
        """What the next answer says behind its error code. Raises Failed."""
        body = self.take(int.from_bytes(self.take(4), "big"))
        code = int.from_bytes(body[:2], "big", signed=True)
        if code:
            raise Failed(code)
        return body[2:]

    def take(self, size: int) -> bytes:
        """So many bytes of what the broker says."""
        taken = b""
        while len(taken) < size:
            part = self.socket.recv(size - len(taken))
            if not part:
                raise ConnectionError("the broker hung up")
            taken += part
        return taken

    def connect_again(self) -> None:
        """Have a new connection in the place of the old one."""
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
