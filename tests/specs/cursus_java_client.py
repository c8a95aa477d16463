"""A small Cursus client written from docs/protocol.md of the Java client, without Polywire's code.

The page leaves the responses to JOIN_GROUP and SYNC_GROUP open: the client reads what follows ``member=``, ``generation=`` and
``assignments=``. A request whose connection breaks is repeated on a new one, so a producer marks its batches as idempotent.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"\xba\x7c"
PATIENCE_S = 60.0  # how long to wait for a response of the broker


@dataclass(frozen=True)
class Message:
    """One message of a batch, with all of its fields in order."""

    offset: int = 0
    sequence: int = 0
    producer: str = ""
    key: str = ""
    epoch: int = 0
    payload: str = ""
    event_type: str = ""
    schema_version: int = 0
    aggregate_version: int = 0
    metadata: str = ""

    def encode(self) -> bytes:
        payload = self.payload.encode()
        head = struct.pack(">qq", self.offset, self.sequence) + _text(self.producer) + _text(self.key)
        body = struct.pack(">qi", self.epoch, len(payload)) + payload + _text(self.event_type)
        return head + body + struct.pack(">iq", self.schema_version, self.aggregate_version) + _text(self.metadata)


@dataclass(frozen=True)
class Batch:
    """A batch body."""

    topic: str
    partition: int
    messages: Sequence[Message]
    acks: str = "1"
    idempotent: bool = False

    def encode(self) -> bytes:
        head = MAGIC + _text(self.topic) + _text(str(self.partition)) + _text(self.acks) + bytes((self.idempotent,))
        first, last = (self.messages[0].sequence, self.messages[-1].sequence) if self.messages else (0, 0)
        return b"".join(
            (head, struct.pack(">qqi", first, last, len(self.messages)), *map(Message.encode, self.messages))
        )

    @staticmethod
    def decode(body: bytes) -> Batch:
        at = 0

        def number(form: str) -> int:
            nonlocal at
            (value,) = struct.unpack_from(">" + form, body, at)
            at += struct.calcsize(form)
            return int(value)

        def text(form: str = "H") -> str:
            nonlocal at
            size = number(form)
            at += size
            assert 0 <= size <= len(body) - at + size, "a text exceeds the batch"
            return body[at - size : at].decode()

        def message() -> Message:
            ids = number("q"), number("q"), text(), text(), number("q")
            return Message(*ids, text("i"), text(), number("i"), number("q"), text())

        assert body[:2] == MAGIC, body[:80]
        at = 2
        topic, partition, acks, idempotent = text(), int(text()), text(), bool(number("b"))
        first, last, count = number("q"), number("q"), number("i")
        found = Batch(topic, partition, [message() for _ in range(count)], acks, idempotent)
        assert at == len(body), "bytes are left after the messages"
        assert not count or (first, last) == (found.messages[0].sequence, found.messages[-1].sequence)
        return found


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack(">H", len(data)) + data


@dataclass
class Client:
    """A connection that is restored when the broker is."""

    address: tuple[str, int]
    tls: ssl.SSLContext | None = None
    _socket: socket.socket | None = field(default=None, init=False)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def send(self, body: bytes) -> None:
        """Send one frame, and connect first if necessary."""
        self.begin(len(body), body)

    def begin(self, size: int, body: bytes) -> None:
        """Send the beginning of a frame of this size."""
        if self._socket is None:
            plain = socket.create_connection(self.address, timeout=PATIENCE_S)
            self._socket = plain if self.tls is None else self.tls.wrap_socket(plain, server_hostname=self.address[0])
        self._socket.sendall(struct.pack(">I", size) + body)

    def receive(self, patience_s: float = PATIENCE_S) -> bytes:
        """Return the body of the next frame."""
        assert self._socket is not None, "nothing was sent yet"
        self._socket.settimeout(patience_s)
        return self._take(*struct.unpack(">I", self._take(4)))

    def _take(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            part = self._socket.recv(min(size - len(found), 1 << 20)) if self._socket is not None else b""
            if not part:
                raise ConnectionError("the broker closed the connection")
            found += part
        return bytes(found)

    def exchange(self, body: bytes) -> bytes:
        """Send one frame and return the reply, on a new connection if the old one broke."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.send(body)
                return self.receive()
            except OSError:
                self.close()
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def ask(self, command: str) -> str:
        return self.exchange(command.encode()).decode()

    def produce(self, batch: Batch) -> dict[str, Any]:
        reported: dict[str, Any] = json.loads(self.exchange(batch.encode()))
        return reported

    def consume(self, topic: str, partition: int, offset: int) -> Batch:
        return Batch.decode(self.exchange(f"CONSUME {topic} {partition} {offset}".encode()))
