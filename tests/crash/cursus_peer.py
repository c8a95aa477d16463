"""A client of the Cursus protocol that continues whenever its broker is killed.

It sends one request at a time, and knows which requests got no response.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from typing import Self

from polywire.protocols.cursus.messages import frame
from tests.broker_process import BrokerProcess


class Gone(Exception):
    """The broker died during the request."""


class Peer:
    """One connection with one request at a time."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._socket = socket.create_connection(broker.addresses["cursus"], timeout=60.0)
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self) -> bytes:
        """Return the body of the next frame."""
        while len(self._data) < 4 or len(self._data) < 4 + int.from_bytes(self._data[:4], "big"):
            part = self._socket.recv(1 << 16)
            if not part:
                raise Gone
            self._data += part
        end = 4 + int.from_bytes(self._data[:4], "big")
        body, self._data = self._data[4:end], self._data[end:]
        return body

    def ask(self, text: str) -> str:
        """Send one command and return its response."""
        self.send(text)
        return self.read().decode()

    def send(self, text: str) -> None:
        """Send one command."""
        self._socket.sendall(frame(text.encode()))

    def sure(self, text: str) -> str:
        """Send one command and return its response, which must be no error."""
        answer = self.ask(text)
        assert answer.startswith("OK"), (text, answer)
        return answer


class Worker(ABC):
    """Work in a thread over consecutive connections. Invariant: ``done`` is the latest acknowledged number."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self.done = 0
        self.stopped = False
        self.fault: BaseException | None = None

    def run(self) -> None:
        """Work until ``stopped`` is set or something fails."""
        try:
            while not self.stopped:
                self._live()
        except BaseException as error:
            self.fault = error

    def until(self, beyond: int) -> None:
        """Wait until more than this is acknowledged, or something fails."""
        while self.done <= beyond and self.fault is None:
            time.sleep(0.02)

    def _live(self) -> None:
        """Use one connection until it is lost."""
        try:
            with Peer(self._broker) as peer:
                self.work(peer)
        except (OSError, Gone):
            time.sleep(0.02)

    @abstractmethod
    def work(self, peer: Peer) -> None:
        """Resume from what the broker reports, until ``stopped`` is set."""
