"""A small client of Iggy's binary protocol, written from its page of 2023 alone.

The page does not describe the frames of replies (a status, a length, that many bytes) and the length before a message's
headers. Broken connections are re-created, groups rejoined, and the command repeated: acknowledged commands are never
lost, others may be duplicated.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final, NamedTuple

SINGLE, GROUP = 1, 2  # kinds of consumers
OFFSET, TIMESTAMP, FIRST, LAST, NEXT = 1, 2, 3, 4, 5  # kinds of polls
BALANCED: Final = b"\1\0"
POLL, SEND, GET_OFFSET, STORE_OFFSET = 100, 101, 120, 121
CREATE_STREAM, CREATE_TOPIC, CREATE_GROUP, JOIN_GROUP = 202, 302, 602, 604
TRIES, PAUSE_S = 600, 0.1


class Refused(Exception):
    """A response with a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status={status}")
        self.status = status


class Message(NamedTuple):
    """A polled message."""

    offset: int
    state: int
    timestamp: int
    id: int
    checksum: int
    headers: bytes
    payload: bytes


class Polled(NamedTuple):
    """The result of a poll."""

    partition: int
    current_offset: int
    messages: list[Message]


def u32(value: int) -> bytes:
    """Encode a number of four bytes."""
    return struct.pack("<I", value)


def name(text: str) -> bytes:
    """Encode a name after its length."""
    return bytes((len(text.encode()),)) + text.encode()


def identifier(who: int | str) -> bytes:
    """Encode kind, length and value: a number has kind 1 and four bytes, a name kind 2."""
    return b"\1\4" + u32(who) if isinstance(who, int) else b"\2" + name(who)


def consumer(kind: int, number: int) -> bytes:
    """Encode a consumer in five bytes."""
    return struct.pack("<BI", kind, number)


def strategy(kind: int, value: int = 0) -> bytes:
    """Encode a polling strategy in nine bytes."""
    return struct.pack("<BQ", kind, value)


def message(payload: bytes, number: int = 0, headers: bytes = b"") -> bytes:
    """Encode a message to send."""
    return number.to_bytes(16, "little") + u32(len(headers)) + headers + u32(len(payload)) + payload


def frame(code: int, payload: bytes = b"") -> bytes:
    """Encode a whole command."""
    return u32(4 + len(payload)) + u32(code) + payload


def polled(body: bytes) -> Polled:
    """Decode partition, newest offset, a count, and that many messages, with nothing left."""
    partition, current, count = struct.unpack_from("<IQI", body)
    at, messages = 16, []
    for _ in range(count):
        offset, state, timestamp, number, checksum, size = struct.unpack_from("<QBQ16sII", body, at)
        headers, at = body[at + 41 : at + 41 + size], at + 41 + size
        end = at + 4 + struct.unpack_from("<I", body, at)[0]
        key = int.from_bytes(number, "little")
        messages.append(Message(offset, state, timestamp, key, checksum, headers, body[at + 4 : end]))
        at = end
    assert at == len(body)
    return Polled(partition, current, messages)


class Client:
    """Consecutive connections."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._joined: list[bytes] = []
        self.socket = socket.create_connection(address, 60)

    def command(self, code: int, payload: bytes = b"") -> bytes:
        """Execute a command, repeated if the connection breaks."""
        for _ in range(TRIES):
            try:
                found = self.ask(code, payload)
            except OSError:
                self._connect_again()
                continue
            if code == JOIN_GROUP:
                self._joined.append(payload)
            return found
        raise TimeoutError("the broker does not come back")

    def ask(self, code: int, payload: bytes = b"") -> bytes:
        """Return the reply to one command. Raises Refused."""
        self.socket.sendall(frame(code, payload))
        return self.reply()

    def reply(self) -> bytes:
        """Return the payload of the next reply. Raises Refused."""
        status, length = struct.unpack("<II", self._take(8))
        body = self._take(length)
        if status:
            raise Refused(status)
        return body

    def _take(self, size: int) -> bytes:
        taken = b""
        while len(taken) < size:
            part = self.socket.recv(size - len(taken))
            if not part:
                raise ConnectionError("the broker closed the connection")
            taken += part
        return taken

    def _connect_again(self) -> None:
        self.socket.close()
        try:
            self.socket = socket.create_connection(self._address, 60)
            for joined in self._joined:
                self.ask(JOIN_GROUP, joined)
        except OSError:
            time.sleep(PAUSE_S)


def status(client: Client, code: int, *fields: bytes) -> int:
    """Return the status of a command's response."""
    try:
        client.ask(code, b"".join(fields))
    except Refused as refused:
        return refused.status
    return 0
