"""A Fetch request in progress (spec: kafka#fetch).

* Available records are returned immediately. If there are none, the request waits until a record is appended.
* Only the first batch may exceed the size limits.
* A request reads one partition at a time, and keeps no data in memory while it waits.
* A request for thousands of partitions is processed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.log.base import Handle, Read
from polywire.protocols.kafka import encoder, schema
from polywire.protocols.kafka.codec import encode_response_entry
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.fetch_sessions import FetchSession, SessionPartition
from polywire.protocols.kafka.lookup import led_topic, missing_error, partition_of
from polywire.protocols.kafka.messages import NO_OFFSET, Api, WireError
from polywire.protocols.kafka.offsets import leader_error
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.structure_encoder import PART_BYTES_MIN
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices, rest_in_slices
from polywire.records.compression import expand_body

if TYPE_CHECKING:
    from array import array

    from polywire.protocols.kafka.message_types import FetchRequest, FetchResponse

    _Entry = FetchResponse.Responses.Partitions

# A partition to read: an entry of the request, or a partition of the session, which has the same fields.
_Wanted = TypeVar("_Wanted", bound="FetchRequest.Topics.Partitions | SessionPartition")

WAIT_MS_MAX: Final = 5 * 60_000
READ_BYTES_MIN: Final = 4096  # smallest useful read, because a batch has a header in addition to its records
GROWTH_BYTES: Final = 64 * 1024  # how much larger records can be in a response than in the log
ENCODED_AT_ONCE_MAX: Final = 1_000  # entries of a response that are encoded in one step, about 1 ms
_LENGTH: Final = Struct("<4xI")


class Fetching(Generic[_Wanted]):
    """A request that names all of its partitions.

    The partitions are checked and read. If they have too few records, the request waits.
    """

    __slots__ = (
        "_answer",
        "_body",
        "_bytes",
        "_bytes_max",
        "_count",
        "_deadline",
        "_has_failed",
        "_min_bytes",
        "_number",
        "_opened_session",
        "_partitions",
        "_session",
        "_slices",
        "_stops",
        "_ticket",
    )

    def __init__(
        self, session: KafkaSession, answer: Answer, request: FetchRequest, opened_session: FetchSession | None
    ) -> None:
        self._session: Final = session
        self._answer: Final = answer
        self._opened_session: Final = opened_session  # gets the partitions; None outside of fetch sessions
        self._min_bytes: Final = request.min_bytes
        self._bytes_max: Final = min(request.max_bytes, session.shared.settings.answer_bytes_max)
        now = session.broker.clock.monotonic()
        self._deadline: Final = now + min(max(request.max_wait_ms, 0), WAIT_MS_MAX) / 1000
        self._stops: list[Handle] = []
        self._slices: Slices[None] | None = None
        self._partitions: list[tuple[Partition, _Wanted, _Entry]] = []
        self._number = 0  # partitions before this one were read
        self._bytes = 0  # records in the response
        self._count = 0  # entries in the response
        self._ticket = 0  # incremented to make pending operations stale: callbacks with an earlier ticket are ignored
        self._has_failed = False
        self._body: Final = schema.response(Api.FETCH)(responses=[])
        answer.cancel = self._cancel

    def _with_pauses(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Run the steps, then call ``then``. A few steps run immediately, many in slices."""
        slices = rest_in_slices(self._session.broker, steps, then)
        if slices is None:
            then()
        else:
            self._slices = slices

    def begin(self, request: FetchRequest) -> None:
        self._with_pauses(self._check_each(request.topics), self.run)

    def _check_each(self, topics: list[FetchRequest.Topics]) -> Iterator[None]:
        """Add an entry without records to the response for each partition.

        Partitions that cannot be read get an error.
        """
        response = schema.response(Api.FETCH)
        for topic_request in topics:
            topic_entry = response.Responses(topic=topic_request.topic, topic_id=topic_request.topic_id, partitions=[])
            self._body.responses.append(topic_entry)
            topic: Topic | BrokerError
            try:
                topic = led_topic(self._session, Action.FETCH, topic_request.topic, topic_request.topic_id)
            except BrokerError as error:
                # the error's traceback refers to this connection, which would in turn refer to the error
                topic = error.with_traceback(None)
            self._count += len(topic_request.partitions)
            for partition_request in topic_request.partitions:
                entry = response.Responses.Partitions(
                    index=partition_request.partition, high_watermark=NO_OFFSET, records=b""
                )
                topic_entry.partitions.append(entry)
                wanted: Any = partition_request  # of either type: a subclass with one type does not use this method
                if self._opened_session is not None:
                    wanted = self._opened_session.add(topic_request, partition_request) or partition_request
                self._check(topic, topic_request.topic_id, wanted, entry)
                yield None
            yield None

    def _check(self, topic: Topic | BrokerError, topic_id: bytes, wanted: _Wanted, entry: _Entry) -> None:
        """Check whether a partition can be read. If so, add it to the partitions to read; otherwise, set its error.

        ``topic`` is the topic, or the error if it cannot be read.
        """
        if isinstance(topic, BrokerError):
            self._refuse(entry, missing_error(topic, topic_id))
            return
        try:
            partition = partition_of(topic, wanted.partition)
        except BrokerError as error:
            self._refuse(entry, missing_error(error, topic_id))
            return
        stale = leader_error(partition, wanted.current_leader_epoch)
        if stale is not None:
            self._refuse(entry, stale)
        else:
            self._partitions.append((partition, wanted, entry))

    def _refuse(self, entry: _Entry, error: WireError) -> None:
        entry.error, entry.records = error, b""
        entry.high_watermark = entry.last_stable_offset = entry.log_start_offset = NO_OFFSET
        self._has_failed = True

    def run(self) -> None:
        self._ticket += 1
        broker = self._session.broker
        if self._read_until(broker.clock.monotonic() + QUANTUM_S):
            broker.sliced.put(partial(self._read_on, self._ticket))

    def _read_on(self, ticket: int, end: float) -> bool:
        return ticket == self._ticket and self._read_until(end)

    def _read_until(self, end: float) -> bool:
        """Read partitions until time ``end``. Return True if only the time is over and more partitions remain.

        False means that the response was sent, that the request waits for records, or that data is read from disk
        first.
        """
        now = self._session.broker.clock.monotonic
        while self._number < len(self._partitions):
            if not self._read(*self._partitions[self._number]):
                return False
            self._number += 1
            if now() >= end and self._number < len(self._partitions):
                return True
        if self._has_failed or self._bytes >= self._min_bytes or now() >= self._deadline:
            self._finish()
        else:
            self._wait()
        return False

    # One partition

    def _read(self, partition: Partition, wanted: _Wanted, entry: _Entry) -> bool:
        """Add a partition's records to the response. Return False if they must be read from disk first."""
        log, offset = partition.log, wanted.fetch_offset
        entry.high_watermark = entry.last_stable_offset = log.readable_offset
        entry.log_start_offset = log.first_offset
        space = min(wanted.partition_max_bytes, self._bytes_max - self._bytes)
        if partition.ended:
            self._refuse(entry, WireError.UNKNOWN_TOPIC_OR_PARTITION)
            return True
        if not log.first_offset <= offset <= log.readable_offset:
            self._refuse(entry, WireError.OFFSET_OUT_OF_RANGE)
            return True
        if offset == log.readable_offset or (space <= 0 and self._bytes):
            return True
        then = partial(self._arrived, self._ticket, partition, wanted, entry)
        try:
            bytes_max = max(space, READ_BYTES_MIN)
            read = self._session.broker.fetch(partition, offset, bytes_max=bytes_max, then=then)
        except BrokerError as error:
            self._refuse(entry, wire_error(error))
            return True
        if not isinstance(read, Read):
            return False
        self._take(read, partition, offset, space, entry)
        return True

    def _arrived(
        self, ticket: int, partition: Partition, wanted: _Wanted, entry: _Entry, read: Read | BrokerError
    ) -> None:
        if ticket != self._ticket:
            if isinstance(read, Read):
                read.pin.release()
            return
        if isinstance(read, BrokerError):
            self._refuse(entry, wire_error(read))
        else:
            space = min(wanted.partition_max_bytes, self._bytes_max - self._bytes)
            self._take(read, partition, wanted.fetch_offset, space, entry)
        self._number += 1
        self.run()

    def _take(self, read: Read, partition: Partition, offset: int, space: int, entry: _Entry) -> None:
        appended = produce_limits(partition.topic.settings).has_times_of_append
        size = sum([len(chunk) for chunk in read.chunks])
        limit = min(max(space, 0), size + size // 4 + GROWTH_BYTES)
        # records rarely grow to twice their size, and clearing a large buffer takes longer than encoding a small read
        expected = min(limit, 2 * size)
        try:
            records = self._encode(read.chunks, offset, expected, limit, append_times=appended)
        except BrokerError as error:
            self._refuse(entry, wire_error(error))
            return
        finally:
            read.pin.release()
        entry.records = records
        self._bytes += len(records)

    def _encode(
        self, chunks: Sequence[memoryview], offset: int, size: int, limit: int, *, append_times: bool
    ) -> memoryview:
        """Encode a read as Kafka batches of at most ``limit`` bytes. The first record of the response may be larger.

        ``size`` is the expected number of bytes. Raises BrokerError.
        """
        out = bytearray(size)
        state = encoder.begin(offset, at=0, limit=size)
        for chunk in chunks:
            state[encoder.POSITION] = 0
            if put_chunk(chunk, state, out, append_times=append_times) == encoder.DONE:
                continue
            if size < limit:
                return self._encode(chunks, offset, limit, limit, append_times=append_times)
            if state[encoder.AT] or self._bytes:
                break
            out = bytearray(state[encoder.NEEDED])
            state[encoder.CAP] = len(out)
            put_chunk(chunk, state, out, append_times=append_times)
            break
        return memoryview(out)[: state[encoder.AT]]

    # Waiting

    def _wait(self) -> None:
        broker = self._session.broker
        wake = partial(self._woken, self._ticket)
        delay = max(self._deadline - broker.clock.monotonic(), 0.0)
        self._stops.append(broker.loop.call_later(delay, wake))
        self._with_pauses(self._wait_for_each(self._ticket, wake), _nothing)

    def _wait_for_each(self, ticket: int, wake: Callable[[], None]) -> Iterator[None]:
        """Have ``wake`` called when a partition has records that were not read."""
        if self._has_ended(wake):
            wake()
            return
        for partition, wanted, entry in self._partitions:
            if ticket != self._ticket:
                return
            try:
                self._wait_for(partition, wanted, entry.high_watermark, wake)
            except BrokerError:  # the topic was deleted in the meantime
                wake()
                return
            yield None

    def _has_ended(self, wake: Callable[[], None]) -> bool:
        """Return whether the request need not wait for records. If it must wait, ``wake`` is called when that changes.

        Overridden for requests in a session, which wait for other events.
        """
        return False

    def _wait_for(self, partition: Partition, wanted: _Wanted, offset: int, wake: Callable[[], None]) -> None:
        """Have ``wake`` called for records from ``offset`` on. Raises BrokerError if the partition cannot be read."""
        self._stops.append(self._session.broker.wait(partition, offset, wake))

    def _woken(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._stop_waiting()
        self._number = self._bytes = 0
        for _, _, entry in self._partitions:
            entry.records = b""
        self.run()

    def _stop_waiting(self) -> None:
        stops, self._stops = self._stops, []
        for stop in stops:
            stop.cancel()

    def _cancel(self) -> None:
        self._ticket += 1
        self._stop_waiting()
        if self._slices is not None:
            self._slices.cancel()

    def _finish(self) -> None:
        """Send the response: enough was read, or the time limit has passed."""
        self._ticket += 1
        opened_session = self._opened_session
        if opened_session is None or opened_session.is_over:
            self._send()
        else:
            self._body.session_id = opened_session.number
            self._with_pauses(self._remember_each(), self._send)

    def _remember_each(self) -> Iterator[None]:
        """Store in the new session the offsets that the response sends to the client."""
        for _, wanted, entry in self._partitions:
            assert isinstance(wanted, SessionPartition), "the session has all partitions"
            wanted.end, wanted.start = entry.high_watermark, entry.log_start_offset
            yield None

    def _send(self) -> None:
        if self._count <= ENCODED_AT_ONCE_MAX:
            self._answer.large(self._body)
        else:
            self._with_pauses(self._encode_each(), partial(self._answer.large, self._body))

    def _encode_each(self) -> Iterator[None]:
        """Encode the entries in steps, except large ones, whose records are sent without a copy."""
        topics = self._body.responses
        for number, topic_entry in enumerate(topics):
            if max((len(entry.records or b"") for entry in topic_entry.partitions), default=0) < PART_BYTES_MIN:
                yield from self._encode_entry(topics, number)
                continue
            for index, entry in enumerate(topic_entry.partitions):
                if len(entry.records or b"") < PART_BYTES_MIN:
                    yield from self._encode_entry(topic_entry.partitions, index)

    def _encode_entry(self, entries: list[Any], index: int) -> Iterator[None]:
        """Replace an entry by its bytes."""
        entry = entries[index]
        for entries[index] in encode_response_entry(self._answer.request, entry):
            yield None


def _nothing() -> None:
    pass


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
