"""Batches on their way into the broker, sent ahead of their answers: staged under tokens, or appended at once.

Promises: ``StageWriter`` names a token only when all that was staged under it was acknowledged, each batch once, however often the
connection is lost; ``ProduceWriter`` stores each batch at least once, and once where its batches name their producer. What is held to be
sent again has a limit. Must not know: Arrow, Spark.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from time import sleep
from typing import Final, NamedTuple, Protocol

from polywire.client.blocking import FramedSocket
from polywire.client.bulk import BulkConnection
from polywire.errors import Busy, Unavailable
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.messages import Head, Verb
from polywire.types import Buffer, Level

WINDOW: Final = 8  # requests of one writer that wait for their answers
TOKEN_BYTES: Final = 32 << 20  # staged under one token: what has to be kept to be sent again
TOKEN_BATCHES: Final = 4_096
TOKEN_RANDOM_BYTES: Final = 16
BUSY_WAIT_S: Final = 30.0  # how long one step waits in all for a broker that is over a limit
BUSY_PAUSE_S: Final = 0.5  # before it is asked again, where it does not say after how long
BUSY_PAUSE_MIN_S: Final = 0.01  # whatever it says
BUSY_PAUSE_MAX_S: Final = 5.0


class Writer(Protocol):
    """Takes stored batches of any topic and partition."""

    def put(self, topic: str, partition: int, batch: Buffer) -> None:
        """Hand over a batch; it may be on its way when this returns."""

    def finish(self) -> list[bytes]:
        """Wait until everything was acknowledged; the tokens to publish, in order (none where nothing was staged)."""

    def abandon(self) -> None:
        """Drop what can be dropped; errors of the connection are of no interest any more."""


class _Item(NamedTuple):
    topic: str
    partition: int
    batch: Buffer


class _Pipeline:
    """Requests over one socket. Guards: the socket goes back to the others only when it owes nothing."""

    __slots__ = ("_connection", "_pending", "_wire", "answered")

    def __init__(self, connection: BulkConnection, answered: Callable[[], None]) -> None:
        self._connection: Final = connection
        self._pending: Final[deque[int]] = deque()
        self._wire: FramedSocket | None = None
        self.answered: Final = answered

    def send(self, verb: Verb, head: Head, batch: Buffer) -> None:
        if self._wire is None:
            self._wire = self._connection.take()
        while len(self._pending) >= WINDOW:
            self._settle(self._wire)
        self._pending.append(self._wire.send(verb, head, [batch]))

    def drain(self) -> None:
        while self._pending and self._wire is not None:
            self._settle(self._wire)

    def drop(self) -> None:
        """Let the socket go, with whatever it still owes."""
        self._pending.clear()
        if self._wire is not None:
            self._connection.give(self._wire)
            self._wire = None

    def _settle(self, wire: FramedSocket) -> None:
        prefix, _ = wire.receive(self._pending.popleft())
        wire.receive_payload(prefix)
        self.answered()


class _RetryPolicy:
    """How often, and how long, something is tried again. Raises the last error when it has been enough."""

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
    """Do ``step``; when the broker is gone or busy, do ``again`` instead until it works.

    Raises Unavailable, Busy, and what cannot be mended by trying again.
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
    """Stages batches under random tokens, sent ahead of their answers.

    Guards: a token under which a batch may have arrived twice, or in doubt, is never handed out.
    """

    __slots__ = ("_ahead", "_connection", "_doubtful", "_held", "_level", "_size", "_token", "_tokens", "_write")

    def __init__(
        self, connection: BulkConnection, write: tuple[str, int] = ("", 0), level: Level = Level.WRITTEN
    ) -> None:
        """``write``: writer and number of the publish that it is for, so that leftovers can be told."""
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
        """See ``Writer``. Raises Busy(STAGE_FULL), Unavailable, Missing."""
        item = _Item(topic, partition, batch)
        self._held.append(item)
        self._size += memoryview(batch).nbytes
        _retry(self._connection, lambda: self._send(item), self._send_again)
        if self._size >= TOKEN_BYTES or len(self._held) >= TOKEN_BATCHES:
            self._close_token()

    def finish(self) -> list[bytes]:
        """Wait until everything was acknowledged, and return the tokens to publish, in order. Raises as ``put``."""
        self._close_token()
        self._ahead.drop()
        self._abandon(self._doubtful)
        return self._tokens

    def abandon(self) -> None:
        """Drop everything that was staged. Raises Unavailable; then it expires."""
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
        """Nobody knows what arrived under the token: begin another with the same batches."""
        self._ahead.drop()
        self._doubtful.append(self._token)
        self._token = os.urandom(TOKEN_RANDOM_BYTES)
        for item in self._held:
            self._send(item)

    def _abandon(self, tokens: list[bytes]) -> None:
        if tokens:
            self._connection.abandon(tokens)


class ProduceWriter:
    """Appends batches at once, sent ahead of their answers.

    Guards: a batch is held until it was acknowledged.
    """

    __slots__ = ("_ahead", "_connection", "_held", "_level")

    def __init__(self, connection: BulkConnection, level: Level) -> None:
        self._connection: Final = connection
        self._level: Final = int(level)
        self._held: Final[deque[_Item]] = deque()
        self._ahead: Final = _Pipeline(connection, self._answered)

    def put(self, topic: str, partition: int, batch: Buffer) -> None:
        """See ``Writer``. Raises Unavailable, Missing."""
        item = _Item(topic, partition, batch)
        self._held.append(item)
        _retry(self._connection, lambda: self._send(item), self._send_again)

    def finish(self) -> list[bytes]:
        """Wait until everything was acknowledged; there are no tokens to return. Raises as ``put``."""

        def again() -> None:
            self._send_again()
            self._ahead.drain()

        _retry(self._connection, self._ahead.drain, again)
        self._ahead.drop()
        return []

    def abandon(self) -> None:
        """Stop waiting for answers; what was sent may be stored."""
        self._ahead.drop()

    def _answered(self) -> None:
        self._held.popleft()

    def _send(self, item: _Item) -> None:
        self._ahead.send(Verb.PRODUCE, messages.Produce(item.topic, item.partition, self._level), item.batch)

    def _send_again(self) -> None:
        self._ahead.drop()
        for item in list(self._held):
            self._send(item)


def _nothing() -> None:
    """What a staged batch's answer means is told by its token."""
