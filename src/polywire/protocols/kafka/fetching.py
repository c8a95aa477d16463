"""A Fetch request in progress (spec: kafka#fetch).

* Available records are returned immediately. If there are none, the request waits until a record is appended.
* Only the first batch may exceed the size limits.
* A request reads one partition at a time, and keeps no data in memory while it waits.
* A request for thousands of partitions is processed in slices.

This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.topics import Topic
from polywire.errors import BrokerError
from polywire.log.base import Handle, Read
from polywire.protocols.kafka import encoder
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.fetch_sessions import FetchSession
from polywire.protocols.kafka.lookup import led_topic, missing_error, partition_of
from polywire.protocols.kafka.messages import NO_OFFSET, WireError
from polywire.protocols.kafka.offsets import leader_error
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.shapes import FETCH
from polywire.protocols.runtime.slices import AT_ONCE_MAX, rest_in_slices
from polywire.records.compression import expand_body

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.fetch_responses import Entry, ResponseWriter
else:
    from polywire.protocols.kafka.fetch_responses import Entry, ResponseWriter

if TYPE_CHECKING:
    from array import array

    from polywire.protocols.kafka.message_types import FetchRequest

WAIT_MS_MAX: Final = 5 * 60_000
READ_BYTES_MIN: Final = 4096  # smallest useful read, because a batch has a header in addition to its records
GROWTH_BYTES: Final = 64 * 1024  # how much larger records can be in a response than in the log
ENCODED_AT_ONCE_MAX: Final = 1_000  # entries of a response that are encoded in one step, about 1 ms
_LENGTH: Final = Struct("<4xI")
_READ_MIN = cython.declare(cython.longlong, READ_BYTES_MIN)
_GROWTH = cython.declare(cython.longlong, GROWTH_BYTES)
_DONE = cython.declare(cython.int, encoder.DONE)
_CAP = cython.declare(cython.int, encoder.CAP)
_AT = cython.declare(cython.int, encoder.AT)
_POSITION = cython.declare(cython.int, encoder.POSITION)
_NEEDED = cython.declare(cython.int, encoder.NEEDED)


@cython.cclass
class Fetching:
    """A request that names all of its partitions.

    The partitions are checked and read. If they have too few records, the request waits.
    """

    if not cython.compiled:  # when compiled, fetching.pxd declares the fields
        __slots__ = (
            "_answer",
            "_broker",
            "_bytes",
            "_bytes_max",
            "_deadline",
            "_entries",
            "_has_failed",
            "_min_bytes",
            "_number",
            "_opened_session",
            "_session",
            "_slices",
            "_stops",
            "_ticket",
            "_topics",
        )

    def __init__(
        self, session: KafkaSession, answer: Answer, request: FetchRequest, opened_session: FetchSession | None
    ) -> None:
        broker = session.broker
        self._session: Any = session
        self._broker: Any = broker
        self._answer: Any = answer
        self._opened_session: Any = opened_session  # gets the partitions; None outside of fetch sessions
        self._min_bytes = request.min_bytes
        self._bytes_max = min(request.max_bytes, session.shared.settings.answer_bytes_max)
        self._deadline = broker.clock.monotonic() + min(max(request.max_wait_ms, 0), WAIT_MS_MAX) / 1000
        self._stops: list[Handle] = []
        self._slices: Any = None
        self._topics: list[Any] = []  # (name, id, entries) of each topic in the response
        self._entries: list[Any] = []  # the partitions to read
        self._number = 0  # partitions before this one were read
        self._bytes = 0  # records in the response
        self._ticket = 0  # incremented to make pending operations stale: callbacks with an earlier ticket are ignored
        self._has_failed = False
        answer.cancel = self._cancel

    @cython.cfunc
    def _with_pauses(self, steps: Iterator[None], then: Callable[[], None], at_once: cython.long) -> Any:
        """Run the steps, then call ``then``. The first steps run immediately, the others in slices."""
        slices = rest_in_slices(self._broker, steps, then, at_once=at_once)
        if slices is None:
            then()
        else:
            self._slices = slices

    def begin(self, request: FetchRequest) -> None:
        self._with_pauses(self._check_each(request.topics), self.run, AT_ONCE_MAX)

    def _check_each(self, topics: list[FetchRequest.Topics]) -> Iterator[None]:
        """Add an entry without records to the response for each partition.

        Partitions that cannot be read get an error.
        """
        for topic_request in topics:
            topic_id: bytes = topic_request.topic_id
            entries: list[Any] = []
            self._topics.append((topic_request.topic, topic_id, entries))
            topic = self._find(topic_request.topic, topic_id)
            for partition_request in topic_request.partitions:
                in_session = None
                if self._opened_session is not None:
                    in_session = self._opened_session.add(topic_request, partition_request)
                entry: Entry = Entry(
                    partition_request.partition,
                    partition_request.fetch_offset,
                    partition_request.partition_max_bytes,
                    in_session,
                )
                entries.append(entry)
                self._check(topic, topic_id, partition_request.current_leader_epoch, entry)
                yield None
            yield None

    @cython.cfunc
    def _find(self, name: str, topic_id: bytes) -> Any:
        """Return a topic, or the error if it cannot be read."""
        try:
            return led_topic(self._session, FETCH, name, topic_id)
        except BrokerError as error:
            # the error's traceback refers to this connection, which would in turn refer to the error
            return error.with_traceback(None)

    @cython.cfunc
    def _check(self, topic: Topic | BrokerError, topic_id: bytes, epoch: cython.longlong, entry: Entry) -> Any:
        """Check whether a partition can be read. If so, add it to the partitions to read; otherwise, set its error.

        ``topic`` is the result of ``_find``, and ``epoch`` the client's leader epoch.
        """
        if isinstance(topic, BrokerError):
            self._refuse(entry, missing_error(topic, topic_id))
            return
        try:
            partition = partition_of(topic, entry.index)
        except BrokerError as error:
            self._refuse(entry, missing_error(error, topic_id))
            return
        stale = leader_error(partition, epoch)
        if stale is not None:
            self._refuse(entry, stale)
        else:
            entry.partition = partition
            self._entries.append(entry)

    @cython.cfunc
    def _refuse(self, entry: Entry, error: WireError) -> Any:
        entry.error = error
        entry.records = b""
        entry.high_watermark = entry.start = NO_OFFSET
        self._has_failed = True

    def run(self) -> None:
        self._ticket += 1
        if self._read_until(self._broker.clock.monotonic() + QUANTUM_S):
            self._broker.sliced.put(partial(self._read_on, self._ticket))

    def _read_on(self, ticket: int, end: float) -> bool:
        return ticket == self._ticket and self._read_until(end)

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _read_until(self, end: cython.double) -> cython.bint:
        """Read partitions until time ``end``. Return True if only the time is over and more partitions remain.

        False means that the response was sent, that the request waits for records, or that data is read from disk
        first.
        """
        now = self._broker.clock.monotonic
        while self._number < len(self._entries):
            if not self._read(self._entries[self._number]):
                return False
            self._number += 1
            if self._number < len(self._entries) and now() >= end:
                return True
        if self._has_failed or self._bytes >= self._min_bytes or now() >= self._deadline:
            self._finish()
        else:
            self._wait()
        return False

    # One partition

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _read(self, entry: Entry) -> cython.bint:
        """Add a partition's records to the response. Return False if they must be read from disk first."""
        partition: Any = entry.partition
        log: Any = partition.log
        readable: cython.longlong = log.readable_offset
        space: cython.longlong = min(entry.bytes_max, self._bytes_max - self._bytes)
        entry.high_watermark = readable
        entry.start = log.first_offset
        if partition.ended:
            self._refuse(entry, WireError.UNKNOWN_TOPIC_OR_PARTITION)
            return True
        if not entry.start <= entry.offset <= readable:
            self._refuse(entry, WireError.OFFSET_OUT_OF_RANGE)
            return True
        if entry.offset == readable or (space <= 0 and self._bytes):
            return True
        then = partial(self._arrived, self._ticket, entry)
        try:
            read = self._broker.fetch(partition, entry.offset, bytes_max=max(space, _READ_MIN), then=then)
        except BrokerError as error:
            self._refuse(entry, wire_error(error))
            return True
        if not isinstance(read, Read):
            return False
        self._take(read, space, entry)
        return True

    def _arrived(self, ticket: int, entry: Entry, read: Read | BrokerError) -> None:
        if ticket != self._ticket:
            if isinstance(read, Read):
                read.pin.release()
            return
        if isinstance(read, BrokerError):
            self._refuse(entry, wire_error(read))
        else:
            self._take(read, min(entry.bytes_max, self._bytes_max - self._bytes), entry)
        self._number += 1
        self.run()

    @cython.cfunc
    def _take(self, read: Read, space: cython.longlong, entry: Entry) -> Any:
        partition: Any = entry.partition
        appended: cython.bint = produce_limits(partition.topic.settings).has_times_of_append
        size: cython.longlong = 0
        for chunk in read.chunks:
            size += len(chunk)
        limit: cython.longlong = min(max(space, 0), size + size // 4 + _GROWTH)
        # records rarely grow to twice their size, and clearing a large buffer takes longer than encoding a small read
        expected: cython.longlong = min(limit, 2 * size)
        try:
            entry.records = _encode(read.chunks, entry.offset, expected, limit, self._bytes == 0, appended)
        except BrokerError as error:
            self._refuse(entry, wire_error(error))
            return
        finally:
            read.pin.release()
        self._bytes += len(entry.records)

    # Waiting

    @cython.cfunc
    def _wait(self) -> Any:
        broker = self._broker
        wake = partial(self._woken, self._ticket)
        delay = max(self._deadline - broker.clock.monotonic(), 0.0)
        self._stops.append(broker.loop.call_later(delay, wake))
        self._with_pauses(self._wait_for_each(self._ticket, wake), _nothing, AT_ONCE_MAX)

    def _wait_for_each(self, ticket: int, wake: Callable[[], None]) -> Iterator[None]:
        """Have ``wake`` called when a partition has records that were not read."""
        entry: Entry
        if self._has_ended(wake):
            wake()
            return
        for entry in self._entries:
            if ticket != self._ticket:
                return
            try:
                self._wait_for(entry, wake)
            except BrokerError:  # the topic was deleted in the meantime
                wake()
                return
            yield None

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _has_ended(self, wake: Callable[[], None]) -> cython.bint:
        """Return whether the request need not wait for records. If it must wait, ``wake`` is called when that changes.

        Overridden for requests in a session, which wait for other events.
        """
        return False

    @cython.cfunc
    def _wait_for(self, entry: Entry, wake: Callable[[], None]) -> Any:
        """Have ``wake`` called for records that were not read. Raises BrokerError if the partition cannot be read."""
        self._stops.append(self._broker.wait(entry.partition, entry.high_watermark, wake))

    def _woken(self, ticket: int) -> None:
        entry: Entry
        if ticket != self._ticket:
            return
        self._stop_waiting()
        self._number = self._bytes = 0
        for entry in self._entries:
            entry.records = b""
        self.run()

    @cython.cfunc
    def _stop_waiting(self) -> Any:
        stops, self._stops = self._stops, []
        for stop in stops:
            stop.cancel()

    def _cancel(self) -> None:
        self._ticket += 1
        self._stop_waiting()
        if self._slices is not None:
            self._slices.cancel()

    # The response

    @cython.cfunc
    def _finish(self) -> Any:
        """Send the response: enough was read, or the time limit has passed."""
        self._ticket += 1
        opened_session = self._opened_session
        if opened_session is None or opened_session.is_over:
            self._send(0)
        else:
            self._with_pauses(self._remember_each(), partial(self._send, opened_session.number), AT_ONCE_MAX)

    def _remember_each(self) -> Iterator[None]:
        """Store in the new session the offsets that the response sends to the client."""
        entry: Entry
        for entry in self._entries:
            in_session = entry.in_session
            assert in_session is not None, "the session has all partitions"
            in_session.end, in_session.start = entry.high_watermark, entry.start
            yield None

    def _send(self, session_id: int) -> None:
        writer: ResponseWriter = ResponseWriter(self._answer.request, session_id, len(self._topics))
        self._with_pauses(self._encode_each(writer), partial(self._respond, writer), ENCODED_AT_ONCE_MAX)

    def _encode_each(self, writer: ResponseWriter) -> Iterator[None]:
        for name, topic_id, entries in self._topics:
            writer.begin_topic(name, topic_id, len(entries))
            for entry in entries:
                writer.add(entry)
                yield None
            writer.end_topic()

    def _respond(self, writer: ResponseWriter) -> None:
        """Send the encoded response, with the time for which quotas delay the client."""
        output = self._session.output
        if output.meter is not None and not self._session.closed:
            writer.delay(output.delay_ms(writer.size()))
        parts = writer.finish()
        self._answer.fill(parts, _nothing if len(parts) > 1 else None)  # more than one part is not copied


def _nothing() -> None:
    pass


@cython.cfunc
def _encode(
    chunks: Any,
    offset: cython.longlong,
    size: cython.longlong,
    limit: cython.longlong,
    is_first: cython.bint,
    append_times: cython.bint,
) -> memoryview:
    """Encode stored batches as Kafka batches of at most ``limit`` bytes. The first record of a response may be larger.

    ``size`` is the expected number of bytes. Raises BrokerError.
    """
    out = bytearray(size)
    state: Any = encoder.begin(offset, at=0, limit=size)
    for chunk in chunks:
        state[_POSITION] = 0
        if put_chunk(chunk, state, out, append_times=append_times) == _DONE:
            continue
        if size < limit:
            return _encode(chunks, offset, limit, limit, is_first, append_times)
        if state[_AT] or not is_first:
            break
        out = bytearray(state[_NEEDED])
        state[_CAP] = len(out)
        put_chunk(chunk, state, out, append_times=append_times)
        break
    return memoryview(out)[: state[_AT]]


def put_chunk(chunk: memoryview, state: array[int], out: bytearray, *, append_times: bool) -> int:
    """Encode the batches of a chunk. Compressed batches are decompressed first."""
    ended = encoder.put_batches(chunk, state, out, append_times=append_times)
    while ended == encoder.COMPRESSED:
        at = state[encoder.POSITION]
        size = _LENGTH.unpack_from(chunk, at)[0]
        state[encoder.POSITION] = 0
        ended = encoder.put_batches(expand_body(chunk[at : at + size]), state, out, append_times=append_times)
        state[encoder.POSITION] = at
        if ended == encoder.DONE:
            state[encoder.POSITION] = at + size
            ended = encoder.put_batches(chunk, state, out, append_times=append_times)
    return ended
