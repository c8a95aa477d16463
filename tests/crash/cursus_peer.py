"""A client of the Cursus wire that goes on whenever its broker is killed.

Promises: one request at a time; whoever was not answered knows that it was not. Must not know: what is asked.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from typing import Self

from polywire.protocols.cursus.messages import frame
from tests.broker_process import BrokerProcess


class Gone(Exception):
    """The broker died under the request."""


class Peer:
    """One connection that asks one thing at a time."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._socket = socket.create_connection(broker.addresses["cursus"], timeout=60.0)
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def read(self) -> bytes:
        """The body of the next frame."""
        while len(self._data) < 4 or len(self._data) < 4 + int.from_bytes(self._data[:4], "big"):
            part = self._socket.recv(1 << 16)
            if not part:
                raise Gone
            self._data += part
        end = 4 + int.from_bytes(self._data[:4], "big")
        body, self._data = self._data[4:end], self._data[end:]
        return body

    def ask(self, text: str) -> str:
        """One command and its answer."""
        self._socket.sendall(frame(text.encode()))
        return self.read().decode()

    def sure(self, text: str) -> str:
        """One command and its answer, which is no error."""
        answer = self.ask(text)
        assert answer.startswith("OK"), (text, answer)
        return answer


class Worker(ABC):
    """Does something over one connection after the other, for a thread.

    Invariant: ``done`` is the number of the latest that was acknowledged.
    """

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self.done = 0
        self.stopped = False
        self.fault: BaseException | None = None

    def run(self) -> None:
        """Until ``stopped``, or until something is wrong."""
        try:
            while not self.stopped:
                self._live()
        except BaseException as error:
            self.fault = error

    def until(self, beyond: int) -> None:
        """Wait until more than this is acknowledged, or something is wrong."""
        while self.done <= beyond and self.fault is None:
            time.sleep(0.02)

    def _live(self) -> None:
        """One connection's life."""
        try:
            with Peer(self._broker) as peer:
                self.work(peer)
        except (OSError, Gone):
            time.sleep(0.02)

    @abstractmethod
    def work(self, peer: Peer) -> None:
        """Go on from what the broker tells until ``stopped``."""
