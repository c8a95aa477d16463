"""A small client of the Cursus wire, written from its API reference of November 2025 alone; nothing of Polywire is imported.

The page does not say how topic and payload stand in one message, so a message is the command as text; nor what ends the messages of a
CONSUME, so a command that has one answer is sent behind it. A request whose connection breaks is sent again on a new one: a message
that was stored before the answer got lost is there twice.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator

PATIENCE_S = 60.0  # a broker that does not answer for so long is given up


class Refused(Exception):
    """What the broker says behind ``ERROR:``."""


class Client:
    """One connection, made anew when it broke."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._topics: set[str] = set()  # that the connection is subscribed to

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._topics.clear()

    def create(self, topic: str, partitions: int) -> int:
        """Make a topic, or add partitions; returns how many it has."""
        answer = self._ask(f"CREATE {topic} {partitions}")
        return int(answer.removeprefix(f"\u2705 Topic '{topic}' now has ").removesuffix(" partitions"))

    def delete(self, topic: str) -> None:
        assert self._ask(f"DELETE {topic}") == f"\U0001f5d1\ufe0f Topic '{topic}' deleted"

    def topics(self) -> list[str]:
        answer = self._ask("LIST")
        return [] if answer == "(no topics)" else answer.split(", ")

    def publish(self, topic: str, message: str) -> None:
        """Returns once the broker has it."""
        assert self._ask(f"PUBLISH {topic} {message}") == f"\U0001f4e4 Published to '{topic}'"

    def consume(self, topic: str, partition: int, offset: int) -> tuple[list[str], int]:
        """The messages from a byte offset on, as many as one CONSUME tells, and the offset behind them."""
        nobody = f"none{random.getrandbits(60)}"
        end = f"ERROR: topic '{nobody}' not found"
        while True:
            try:
                self._subscribe(topic)
                self._send(f"CONSUME {topic} {partition} {offset}", f"DELETE {nobody}")
                messages = [message.decode() for message in iter(self._take, end.encode())]
                break
            except OSError:
                self.close()
        if messages and messages[0].startswith("ERROR: "):
            raise Refused(messages[0])
        return messages, offset + sum(4 + len(message.encode()) for message in messages)

    def read_all(self, topic: str, partition: int, offset: int) -> Iterator[tuple[str, int]]:
        """Every message from a byte offset on, and where the next one begins."""
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
        """A command with one answer. Raises Refused."""
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
