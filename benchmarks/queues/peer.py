"""The interface to a broker with work queues: how it is started, and its protocol for the load generator.

A worker takes records of a queue and acknowledges each of them with its own entry, under its own outcome.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from benchmarks.peers.peer import Address, Server

LOCKS_MAX: Final = 2_000  # unacknowledged records of a queue, Kafka's default
WAIT_MS: Final = 30_000  # duration of a request that waits for records


def group_of(topic: str) -> str:
    """Return the share group of a topic, which has its own: a worker that leaves releases its records of all topics."""
    return f"workers-{topic}"


class Step(NamedTuple):
    """The result of received bytes: how many acknowledgements are done, and the next requests."""

    acknowledged: int
    answer: bytes = b""


class Worker(Protocol):
    """A consumer's side of a conversation."""

    def begin(self) -> bytes:
        """Return the first request."""

    def take(self, received: memoryview) -> Step:
        """Handle received bytes in order; a frame may be split anywhere."""


class QueuePeer(Protocol):
    """One broker over one of its protocols."""

    @property
    def name(self) -> str:
        """Return its name in the table."""

    @property
    def confirms(self) -> bool:
        """Return whether the server can confirm single acknowledgements."""

    def running(self, place: Path) -> AbstractContextManager[Server]:
        """Start it over an empty directory, as durable as it is by default. Raises Absent."""

    def create(self, address: Address, topic: str) -> None:
        """Create a queue that workers read from its start."""

    def producer(self, address: Address, topic: str) -> socket.socket:
        """Return a connection that can send requests."""

    def request(self, topic: str, values: Sequence[bytes]) -> bytes:
        """Return a request that stores these values, to be confirmed."""

    def confirmations(self) -> Callable[[memoryview], int]:
        """Return a function that counts confirmed records in received bytes. It raises AssertionError for a refusal."""

    def worker(
        self, address: Address, topic: str, number: int, *, prefetch: int, single: bool
    ) -> tuple[socket.socket, Worker]:
        """Return a worker and its connection.

        Args:
            prefetch: how many records it holds at most.
            single: send each acknowledgement when the one before is confirmed; otherwise those of all received records
                at once.
        """
