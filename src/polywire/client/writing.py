"""Send batches to the broker with pipelined requests: staged under a token to be published later, or appended.

* ``StageWriter`` returns a token only after every batch staged under it was acknowledged. Each batch is staged once,
  even if connections are lost.
* ``ProduceWriter`` stores each batch at least once. A batch with a producer id is stored exactly once.
* The memory for batches that may have to be sent again is limited.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from time import sleep
from typing import Final, NamedTuple, Protocol

from polywire.client.bulk import BulkConnection
from polywire.client.sockets import FramedSocket
from polywire.errors import Busy, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.types import Buffer, Level

WINDOW: Final = 8  # requests of one writer in flight
# limit for the data under one token, which stays in memory because it may have to be sent again
TOKEN_BYTES: Final = 32 << 20
TOKEN_BATCHES: Final = 4_096
TOKEN_RANDOM_BYTES: Final = 16
BUSY_WAIT_S: Final = 30.0  # how long one step waits in total while the broker is over a limit
BUSY_PAUSE_S: Final = 0.5  # pause before a retry, if the broker's response does not have one
BUSY_PAUSE_MIN_S: Final = 0.01  # minimum pause, even if the broker asks for a shorter one
BUSY_PAUSE_MAX_S: Final = 5.0


class Writer(Protocol):
    """Accepts stored batches of any topic and partition."""

    def put(self, topic: str, partition: int, batch: Buffer) -> None:
        """Add a batch. It may still be in flight when this method returns."""

    def finish(self) -> list[bytes]:
        """Wait until all batches are acknowledged.

        Return the tokens to publish, in order; empty if the batches are visible already.
        """

    def abandon(self) -> None:
        """Delete batches that are not published. Errors of the connection are ignored."""


class _Item(NamedTuple):
    topic: str
    partition: int
    batch: Buffer


class _Pipeline:
    """Sends requests over a socket of the pool without waiting for each response."""

    __slots__ = ("_connection", "_pending", "_wire", "on_response")

    def __init__(self, connection: BulkConnection, on_response: Callable[[], None]) -> None:
        self._connection: Final = connection
        self._pending: Final[deque[int]] = deque()
        self._wire: FramedSocket | None = None
        self.on_response: Final = on_response

    def send(self, verb: Verb, head: Head, batch: Buffer) -> None:
        if self._wire is None:
            self._wire = self._connection.take()
        while len(self._pending) >= WINDOW:
            self._receive(self._wire)
        self._pending.append(self._wire.send(verb, head, [batch]))

    def drain(self) -> None:
        while self._pending and self._wire is not None:
            self._receive(self._wire)

    def drop(self) -> None:
        """Return the socket to the pool without waiting for responses, so that the pool closes it."""
        self._pending.clear()
        if self._wire is not None:
            self._connection.give(self._wire)
            self._wire = None

    def _receive(self, wire: FramedSocket) -> None:
        prefix, _ = wire.receive(self._pending.popleft())
        wire.receive_payload(prefix)
        self.on_response()


class _RetryPolicy:
    """Limits the number and duration of retries."""

    __slots__ = ("_busy_left_s", "_connection", "_lost")

    def __init__(self, connection: BulkConnection) -> None:
        self._connection: Final = connection
        self._lost: Iterator[None] | None = None
        self._busy_left_s = BUSY_WAIT_S

    def wait_or_raise(self, error: Unavailable | Busy) -> None:
        if isinstance(error, Busy):
            pause_s = BUSY_PAUSE_S
            if error.retry_after_ms is not None:
                pause_s = min(max(error.retry_after_ms / 1000, BUSY_PAUSE_MIN_S), BUSY_PAUSE_MAX_S)
            if self._busy_left_s < pause_s:
                raise error
            self._busy_left_s -= pause_s
            sleep(pause_s)
            return
        if self._lost is None:
            self._lost = self._connection.retries()
        for _ in self._lost:
            return
        raise error


def _retry(connection: BulkConnection, step: Callable[[], None], again: Callable[[], None]) -> None:
    """Run ``step``. If the broker is busy or not reachable, pause and run ``again`` until it succeeds.

    Raises Unavailable or Busy after too many retries, and errors that a retry cannot fix.
    """
    policy = _RetryPolicy(connection)
    while True:
        try:
            step()
        except (Unavailable, Busy) as error:
            policy.wait_or_raise(error)
            step = again
        else:
            return


class StageWriter:
    """Stores batches under random tokens, invisibly until they are published. Does not wait for each response.

    If the outcome of a batch is unknown, all batches under its token are sent again under a new one. A returned token
    therefore has each of its batches exactly once.
    """

    __slots__ = ("_ahead", "_connection", "_doubtful", "_held", "_level", "_size", "_token", "_tokens", "_write")

    def __init__(
        self, connection: BulkConnection, write: tuple[str, int] = ("", 0), level: Level = Level.WRITTEN
    ) -> None:
        """Create a writer.

        ``write`` is the writer name and sequence number with which the tokens will be published. With it, the broker
        can delete batches that a crashed writer has left.
        """
        self._connection: Final = connection
        self._write: Final = write
        self._level: Final = int(level)
        self._ahead: Final = _Pipeline(connection, _nothing)
        self._held: list[_Item] = []
        self._size = 0
        self._token = os.urandom(TOKEN_RANDOM_BYTES)
        self._tokens: list[bytes] = []
        self._doubtful: list[bytes] = []

    def put(self, topic: str, partition: int, batch: Buffer) -> None:
        """Add a batch. See ``Writer``. Raises Busy(STAGE_FULL), Unavailable, Missing."""
        item = _Item(topic, partition, batch)
        self._held.append(item)
        self._size += memoryview(batch).nbytes
        _retry(self._connection, lambda: self._send(item), self._send_again)
        if self._size >= TOKEN_BYTES or len(self._held) >= TOKEN_BATCHES:
            self._close_token()

    def finish(self) -> list[bytes]:
        """Wait until everything is acknowledged, and return the tokens to publish, in order.

        Raises the errors of ``put``.
        """
        self._close_token()
        self._ahead.drop()
        self._abandon(self._doubtful)
        return self._tokens

    def abandon(self) -> None:
        """Delete all batches that were sent. Raises Unavailable; the broker then deletes them after a while."""
        self._ahead.drop()
        self._abandon([*self._tokens, *self._doubtful, self._token])

    def _close_token(self) -> None:
        if not self._held:
            return

        def again() -> None:
            self._send_again()
            self._ahead.drain()

        _retry(self._connection, self._ahead.drain, again)
        self._tokens.append(self._token)
        self._begin_token()

    def _begin_token(self) -> None:
        self._token = os.urandom(TOKEN_RANDOM_BYTES)
        self._held = []
        self._size = 0

    def _send(self, item: _Item) -> None:
        self._ahead.send(
            Verb.STAGE, messages.Stage(self._token, item.topic, item.partition, self._level, *self._write), item.batch
        )

    def _send_again(self) -> None:
        """Send all batches under a new token, because it is unknown which of them are stored under the current one."""
        self._ahead.drop()
        self._doubtful.append(self._token)
        self._token = os.urandom(TOKEN_RANDOM_BYTES)
        for item in self._held:
            self._send(item)

    def _abandon(self, tokens: list[bytes]) -> None:
        if tokens:
            self._connection.abandon(tokens)


class ProduceWriter:
    """Appends batches without waiting for each response. A batch stays in memory until it is acknowledged."""

    __slots__ = ("_ahead", "_connection", "_held", "_level")

    def __init__(self, connection: BulkConnection, level: Level) -> None:
        self._connection: Final = connection
        self._level: Final = int(level)
        self._held: Final[deque[_Item]] = deque()
        self._ahead: Final = _Pipeline(connection, self._on_response)

    def put(self, topic: str, partition: int, batch: Buffer) -> None:
        """Add a batch. See ``Writer``. Raises Unavailable, Missing."""
        item = _Item(topic, partition, batch)
        self._held.append(item)
        _retry(self._connection, lambda: self._send(item), self._send_again)

    def finish(self) -> list[bytes]:
        """Wait until all batches are acknowledged. Raises the errors of ``put``.

        The list is empty: only writers that stage records return tokens.
        """

        def again() -> None:
            self._send_again()
            self._ahead.drain()

        _retry(self._connection, self._ahead.drain, again)
        self._ahead.drop()
        return []

    def abandon(self) -> None:
        """Stop waiting for responses. The broker may nevertheless have stored batches that are in flight."""
        self._ahead.drop()

    def _on_response(self) -> None:
        self._held.popleft()

    def _send(self, item: _Item) -> None:
        self._ahead.send(Verb.PRODUCE, messages.Produce(item.topic, item.partition, self._level), item.batch)

    def _send_again(self) -> None:
        self._ahead.drop()
        for item in list(self._held):
            self._send(item)


def _nothing() -> None: ...
