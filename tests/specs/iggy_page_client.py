"""A small client of Iggy's binary protocol, written from its page of 2023 alone.

The page is silent on replies' frames (a status, a length, as many bytes) and on the length that stands before a message's headers; the rest
is as it says. Connections that break are made again, groups joined again, and the command repeated: what was acknowledged is never lost,
what was not may come twice.
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
    """A command was answered with a status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status={status}")
        self.status = status


class Message(NamedTuple):
    """A message that was polled."""

    offset: int
    state: int
    timestamp: int
    id: int
    checksum: int
    headers: bytes
    payload: bytes


class Polled(NamedTuple):
    """What a poll brought."""

    partition: int
    current_offset: int
    messages: list[Message]


def u32(value: int) -> bytes:
    """A number of four bytes."""
    return struct.pack("<I", value)


def name(text: str) -> bytes:
    """A name behind its length."""
    return bytes((len(text.encode()),)) + text.encode()


def identifier(who: int | str) -> bytes:
    """Kind, length, value: a number has kind 1 and four bytes, a name kind 2."""
    return b"\1\4" + u32(who) if isinstance(who, int) else b"\2" + name(who)


def consumer(kind: int, number: int) -> bytes:
    """A consumer of five bytes."""
    return struct.pack("<BI", kind, number)


def strategy(kind: int, value: int = 0) -> bytes:
    """A polling strategy of nine bytes."""
    return struct.pack("<BQ", kind, value)


def message(payload: bytes, number: int = 0, headers: bytes = b"") -> bytes:
    """A message to send."""
    return number.to_bytes(16, "little") + u32(len(headers)) + headers + u32(len(payload)) + payload


def frame(code: int, payload: bytes = b"") -> bytes:
    """A whole command."""
    return u32(4 + len(payload)) + u32(code) + payload


def polled(body: bytes) -> Polled:
    """Partition, newest offset, a count, and as many messages, with nothing left."""
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
    """One connection after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._joined: list[bytes] = []
        self.socket = socket.create_connection(address, 60)

    def command(self, code: int, payload: bytes = b"") -> bytes:
        """Carry out a command, again if the connection breaks."""
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
        """Reply to one command. Raises Refused."""
        self.socket.sendall(frame(code, payload))
        return self.reply()

    def reply(self) -> bytes:
        """Payload of the next reply. Raises Refused."""
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
                raise ConnectionError("the broker hung up")
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
    """What a command is answered with."""
    try:
        client.ask(code, b"".join(fields))
    except Refused as refused:
        return refused.status
    return 0
