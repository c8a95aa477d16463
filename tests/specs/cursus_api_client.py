"""A small Cursus client written from the API reference of November 2025, without Polywire's code.

The page does not say how topic and payload form one message, so a message is the command as text. It also does not say what ends the
messages of a CONSUME, so a command with one response follows it. A request whose connection breaks is repeated on a new one: a message
stored before the response was lost is duplicated.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator

PATIENCE_S = 60.0  # how long to wait for a response of the broker


class Refused(Exception):
    """The text after ``ERROR:``."""


class Client:
    """One connection, re-created when it broke."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._topics: set[str] = set()  # to which the connection is subscribed

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._topics.clear()

    def create(self, topic: str, partitions: int) -> int:
        """Create a topic or add partitions; return its number of partitions."""
        answer = self._ask(f"CREATE {topic} {partitions}")
        return int(answer.removeprefix(f"\u2705 Topic '{topic}' now has ").removesuffix(" partitions"))

    def delete(self, topic: str) -> None:
        assert self._ask(f"DELETE {topic}") == f"\U0001f5d1\ufe0f Topic '{topic}' deleted"

    def topics(self) -> list[str]:
        answer = self._ask("LIST")
        return [] if answer == "(no topics)" else answer.split(", ")

    def publish(self, topic: str, message: str) -> None:
        """Return once the broker has stored the message."""
        assert self._ask(f"PUBLISH {topic} {message}") == f"\U0001f4e4 Published to '{topic}'"

    def consume(self, topic: str, partition: int, offset: int) -> tuple[list[str], int]:
        """Return the messages of one CONSUME from a byte offset on, and the offset after them."""
        missing = f"none{random.getrandbits(60)}"
        end = f"ERROR: topic '{missing}' not found"
        while True:
            try:
                self._subscribe(topic)
                self._send(f"CONSUME {topic} {partition} {offset}", f"DELETE {missing}")
                messages = [message.decode() for message in iter(self._take, end.encode())]
                break
            except OSError:
                self.close()
        if messages and messages[0].startswith("ERROR: "):
            raise Refused(messages[0])
        return messages, offset + sum(4 + len(message.encode()) for message in messages)

    def read_all(self, topic: str, partition: int, offset: int) -> Iterator[tuple[str, int]]:
        """Return every message from a byte offset on, and the byte offset of the next one."""
        while True:
            messages, following = self.consume(topic, partition, offset)
            for message in messages:
                offset += 4 + len(message.encode())
                yield message, offset
            if not messages:
                return
            assert offset == following

    def _subscribe(self, topic: str) -> None:
        self._connect()
        if topic not in self._topics:
            self._send(f"SUBSCRIBE {topic}")
            answer = self._take().decode()
            if answer != f"\u2705 Subscribed to '{topic}'":
                raise Refused(answer)
            self._topics.add(topic)

    def _ask(self, text: str) -> str:
        """Send a command with one response. Raises Refused."""
        while True:
            try:
                self._connect()
                self._send(text)
                answer = self._take().decode()
                break
            except OSError:
                self.close()
        if answer.startswith("ERROR: "):
            raise Refused(answer)
        return answer

    def _connect(self) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while self._socket is None:
            try:
                self._socket = socket.create_connection(self._address, PATIENCE_S)
            except ConnectionRefusedError as error:
                if time.monotonic() > give_up:
                    raise AssertionError("the broker does not come back") from error
                time.sleep(0.05)

    def _send(self, *texts: str) -> None:
        assert self._socket is not None
        bodies = [text.encode() for text in texts]
        self._socket.sendall(b"".join(len(body).to_bytes(4, "big") + body for body in bodies))

    def _take(self) -> bytes:
        return self._read(int.from_bytes(self._read(4), "big"))

    def _read(self, size: int) -> bytes:
        assert self._socket is not None
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise ConnectionResetError
            found += part
        return found
