"""CONSUME: return one batch of records (spec: cursus#consume).

If there are no records yet, wait as long as the request allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import msgspec

from polywire.broker.access import Principal
from polywire.broker.api import Pending
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Corrupt
from polywire.log.base import Handle, Read
from polywire.matching import matches
from polywire.protocols.cursus.batches import opening
from polywire.protocols.cursus.legacy_fetch import consume_values
from polywire.protocols.cursus.messages import TOPIC_BYTES_MAX, Dialect, Refused, Request, integer, topic_word
from polywire.protocols.cursus.read_arguments import (
    batch_size,
    check_isolation,
    failed,
    given_offset,
    out_of_range,
    partition_number,
    readable_partition,
    readable_topic,
    start_offset,
)
from polywire.protocols.cursus.reply_batch import ReplyBatch
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices

WAIT_MS_MAX: Final = 30_000  # half of the time after which a silent connection is closed
TOPICS_MAX: Final = 1_000  # largest number of topics that one pattern may match
READ_BYTES_MAX: Final = 256 * 1024  # bytes that are read and encoded before other connections are served


class ReadCursor(msgspec.Struct):
    """A partition to read, and the next offset."""

    partition: Partition
    offset: int

    @property
    def is_done(self) -> bool:
        return self.offset >= self.partition.log.readable_offset


def consume(session: CursusSession, request: Request, /) -> Reply | None:
    if request.dialect is Dialect.LEGACY:
        return consume_values(session, request)
    options = request.options
    needed = ("topic", "partition", "member") if request.dialect is Dialect.MODERN else ("topic", "partition", "offset")
    if not all(options.get(key) for key in needed):
        raise Refused("invalid_consume_syntax")
    offset = given_offset(request)
    if offset is None and not (options.get("group") or options.get("autoOffsetReset")):
        raise Refused("invalid_consume_syntax")
    check_isolation(request)
    name = options["topic"]
    topic = None if request.pattern else readable_topic(session, name)
    number = partition_number(options["partition"])
    cursor = None if topic is None else _cursor(session, request, readable_partition(topic, number), offset)
    wait_ms = integer(options.get("wait_ms", "0"))
    if wait_ms is None:
        raise failed(f"invalid wait_ms value: {options['wait_ms']}")
    if topic is None and len(name) > TOPIC_BYTES_MAX:
        raise failed(f"a pattern has at most {TOPIC_BYTES_MAX} characters")
    if topic is None:
        session.state.require_latest()
    reply = ConsumeReply(session, request, number, min(max(wait_ms, 0), WAIT_MS_MAX))
    if cursor is None:
        acting = session.state.guard.acting
        reply.choose(_matching(session, request, acting, name=name, number=number, offset=offset), offset)
    else:
        reply.begin([cursor])
    return None


def _cursor(session: CursusSession, request: Request, partition: Partition, offset: int | None) -> ReadCursor:
    """Return the partition of a request, and the offset at which reading begins.

    Raises Refused if the offset is before the first retained record.
    """
    session.broker.require_current([partition])
    cursor = ReadCursor(partition, start_offset(session, request, partition, offset))
    if cursor.offset < partition.log.first_offset:
        raise Refused("OFFSET_OUT_OF_RANGE", out_of_range(partition, cursor.offset))
    return cursor


def _matching(
    session: CursusSession,
    request: Request,
    acting: Principal | None,
    *,
    name: str,
    number: int,
    offset: int | None,
) -> Iterator[ReadCursor | Partition | Refused | None]:
    """Yield the partition to read of each topic that matches a pattern. Also yields None now and then, to pause.

    Partitions of other processes are yielded without an offset. Refused is yielded last, if it occurs. ``acting`` is
    the user of the request: the connection may have begun other requests meanwhile.
    """
    access = session.broker.access
    found = 0
    for topic in session.state.broker.topics():
        yield None
        if not matches(name, topic_word(topic.name.full)) or not access.permits(acting, Action.FETCH, topic):
            continue
        found += 1
        if found > TOPICS_MAX:
            yield failed(f"more than {TOPICS_MAX} topics match pattern '{name}'")
            return
        try:
            partition = readable_partition(topic, number)
            yield _cursor(session, request, partition, offset) if session.broker.owns(partition) else partition
        except Refused as error:
            yield error
            return
    if not found:
        yield failed(f"no topics match pattern '{name}'")


class ConsumeReply:
    """Builds the response to one CONSUME request."""

    __slots__ = (
        "_answer",
        "_cursors",
        "_number",
        "_open",
        "_records_max",
        "_reply_batch",
        "_request",
        "_session",
        "_timer",
        "_wait_ms",
        "_waits",
    )

    def __init__(self, session: CursusSession, request: Request, number: int, wait_ms: int) -> None:
        """``wait_ms`` is the longest wait for records.

        If there are still none afterwards, the response is an empty batch.
        """
        self._session = session
        self._request = request
        self._number = number
        self._cursors: Sequence[ReadCursor] = ()
        self._records_max = batch_size(request)
        self._wait_ms = wait_ms
        self._answer: Answer = session.later(request.dialect, blocking=not wait_ms)
        self._open: deque[ReadCursor] = deque()
        self._reply_batch: ReplyBatch | None = None
        self._waits: list[Handle] = []
        self._timer: Handle | None = None

    def choose(self, cursors: Iterator[ReadCursor | Partition | Refused | None], offset: int | None) -> None:
        chosen = partial(self._chosen, offset)
        choosing: Slices[ReadCursor | Partition | Refused] = Slices(self._session.broker, cursors, chosen)
        self._answer.cancel = choosing.cancel

    def _chosen(self, offset: int | None, found: list[ReadCursor | Partition | Refused] | BrokerError) -> None:
        if isinstance(found, BrokerError):
            self._fail(found)
            return
        refusals = [item for item in found if isinstance(item, Refused)]
        if refusals:
            self._answer.refuse(refusals[0])
            return
        self._answer.cancel = self._stop
        located = {at: item for at, item in enumerate(found) if isinstance(item, ReadCursor)}
        if len(located) == len(found):
            self.begin(list(located.values()))
        for at, item in enumerate(found):
            if isinstance(item, Partition):
                self._locate(item, offset, partial(self._located, located, len(found), at))

    def _locate(
        self,
        partition: Partition,
        offset: int | None,
        then: Callable[[ReadCursor], None],
        pending: Pending | None = None,
    ) -> None:
        """Find the offset at which reading begins, if necessary by a request to the process that owns the partition."""
        if self._answer.parts is not None:  # another partition was refused
            return
        try:
            with pending or nullcontext():
                cursor = _cursor(self._session, self._request, partition, offset)
        except Pending as again:
            self._waits.append(again.then(partial(self._locate, partition, offset, then, again)))
        except Refused as error:
            self._stop()
            self._answer.refuse(error)
        except BrokerError as error:
            self._fail(error)
        else:
            then(cursor)

    def _located(self, located: dict[int, ReadCursor], count: int, at: int, cursor: ReadCursor) -> None:
        located[at] = cursor
        if len(located) == count:
            self.begin([cursor for _, cursor in sorted(located.items())])

    def begin(self, cursors: Sequence[ReadCursor]) -> None:
        self._cursors = cursors
        self._answer.cancel = self._stop
        if self._wait_ms and all(cursor.is_done for cursor in cursors):
            self._timer = self._session.state.broker.loop.call_later(self._wait_ms / 1000, self._time_out)
            self._wait()
        else:
            self._read()

    def _wait(self) -> None:
        broker = self._session.state.broker
        try:
            self._waits = [broker.wait(cursor.partition, cursor.offset, self._woken) for cursor in self._cursors]
        except BrokerError as error:
            self._fail(error)

    def _woken(self) -> None:
        self._stop()
        self._session.state.broker.loop.call_soon(self._refresh)

    def _refresh(self, pending: Pending | None = None) -> None:
        """Read when the partitions' end offsets are known."""
        if self._session.closed:
            return
        try:
            with pending or nullcontext():
                self._session.broker.require_current([cursor.partition for cursor in self._cursors])
        except Pending as again:
            self._waits = [again.then(partial(self._refresh, again))]
        except BrokerError as error:
            self._fail(error)
        else:
            self._read()

    def _time_out(self) -> None:
        self._timer = None
        self._stop()
        self._read()

    def _stop(self) -> None:
        for wait in self._waits:
            wait.cancel()
        self._waits = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self) -> None:
        if self._session.closed:
            return
        request = self._request
        positional = request.dialect is Dialect.POSITIONAL
        begin = opening(request.options["topic"], self._number, positional=positional)
        self._reply_batch = ReplyBatch(self._session.state.reply_buffers, begin, self._records_max)
        self._open = deque(cursor for cursor in self._cursors if not cursor.is_done)
        self._continue()

    def _continue(self) -> None:
        """Continue to read, if necessary in several passes of the loop."""
        if self._take_cursors(self._session.broker.clock.monotonic() + QUANTUM_S):
            self._session.broker.sliced.put(self._take_cursors)

    def _take_cursors(self, end: float) -> bool:
        """Read partitions until the batch is full, or data must be read from disk.

        Return True if reading stopped only because the connection has used up its time slice.
        """
        broker = self._session.broker
        while self._open:
            if self._session.closed:
                self._drop()
                return False
            cursor = self._open[0]
            stop = cursor.partition.log.readable_offset
            try:
                read = broker.fetch(
                    cursor.partition, cursor.offset, bytes_max=READ_BYTES_MAX, then=self._read_later, offset_end=stop
                )
                if not isinstance(read, Read):
                    return False
                self._take(read, cursor, stop)
            except BrokerError as error:
                self._fail(error)
                return False
            if self._open and broker.clock.monotonic() >= end:
                return True
        reply_batch, self._reply_batch = self._reply_batch, None
        assert reply_batch is not None, "a batch is filled once"
        reply_batch.answer(self._answer)
        return False

    def _read_later(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            self._fail(read)
            return
        if self._session.closed or self._reply_batch is None:
            read.pin.release()
            self._drop()
            return
        cursor = self._open[0]
        try:
            self._take(read, cursor, read.readable_offset)
        except BrokerError as error:
            self._fail(error)
            return
        self._continue()

    def _take(self, read: Read, cursor: ReadCursor, end: int) -> None:
        reply_batch = self._reply_batch
        assert reply_batch is not None, "a batch is being filled"
        try:
            wanted = reply_batch.take(read, cursor.offset, end)
        finally:
            read.pin.release()
        cursor.offset = read.next_offset
        if not wanted:
            self._open.clear()
        elif cursor.offset >= end:
            self._open.popleft()

    def _drop(self) -> None:
        if self._reply_batch is not None:
            self._reply_batch.drop()
            self._reply_batch = None

    def _fail(self, error: BrokerError) -> None:
        self._stop()
        reply_batch = self._reply_batch
        if (
            isinstance(error, Corrupt) and reply_batch is not None and reply_batch.written
        ):  # the records before the damaged batch are intact
            self._reply_batch = None
            reply_batch.answer(self._answer)
            return
        self._drop()
        self._answer.fail(error)


COMMANDS: Final = (Command("CONSUME", consume, (Action.FETCH, Action.OFFSET_FETCH)),)
