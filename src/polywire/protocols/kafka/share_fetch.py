"""ShareFetch and ShareAcknowledge: acquire the records of a share group and acknowledge them (spec: kafka#share-fetch).

* A response has records only after the broker has stored that they were delivered.
* Acknowledgements of a partition are processed all or none.
* Available records are returned immediately. If there are none, the request waits until there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.groups.share import Outcome
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Handle, Read
from polywire.protocols.kafka import encoder, schema
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.fetching import GROWTH_BYTES, READ_BYTES_MIN, WAIT_MS_MAX, put_chunk
from polywire.protocols.kafka.groups import group_error
from polywire.protocols.kafka.lookup import led_topic, missing_error, partition_of
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.kafka.share_sessions import (
    CLOSING,
    OPENING,
    PARTITIONS_MAX,
    Place,
    ShareSession,
    session_error,
)
from polywire.protocols.runtime.session import QUANTUM_S

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        ShareAcknowledgeRequest,
        ShareAcknowledgeResponse,
        ShareFetchRequest,
        ShareFetchResponse,
    )

    _Fetched = ShareFetchResponse.Responses.Partitions
    _Batches = Iterable[ShareFetchRequest.Topics.Partitions.Batches | ShareAcknowledgeRequest.Topics.Partitions.Batches]

RECORDS_MAX: Final = 10_000  # records of one response
PARTITION_BYTES_MAX: Final = 1024 * 1024  # records of one partition in a response; a single record may be larger
_LAST_OFFSET: Final = 2**63 - 1


def share_fetch(session: KafkaSession, answer: Answer, request: ShareFetchRequest, /) -> ShareFetchResponse | None:
    response = schema.response(Api.SHARE_FETCH)
    try:
        error = _authorize(session, request)
        if error is WireError.NONE:
            error = _enter(session, request)
    except BrokerError as refused:
        return response(error=group_error(refused), message=refused.message)
    if error is not WireError.NONE:
        return response(error=error)
    assert session.share_session is not None, "_enter has checked or opened it"
    Fetching(session, answer, request, session.share_session).begin(request)
    return None


def _authorize(session: KafkaSession, request: ShareFetchRequest | ShareAcknowledgeRequest) -> WireError:
    if not request.group_id or not request.member_id:
        return WireError.INVALID_REQUEST
    session.broker.access.authorize_somewhere(session.principal, Action.GROUP_JOIN)
    return WireError.NONE


def _enter(session: KafkaSession, request: ShareFetchRequest) -> WireError:
    """Open the session of a request or find it, and apply the request's changes to it."""
    assert request.group_id, "_authorize checked this"
    assert request.member_id, "_authorize checked this"
    if request.session_epoch == OPENING:
        if any(partition.batches for topic in request.topics for partition in topic.partitions):
            return WireError.INVALID_REQUEST  # a new session has not acquired records
        session.end_share_session()
        session.share_session = session.shared.share_sessions.open(request.group_id, request.member_id)
        if session.share_session is None:
            return WireError.SHARE_SESSION_LIMIT_REACHED
    else:
        error = session_error(session.share_session, request.group_id, request.member_id, request.session_epoch)
        if error is not WireError.NONE:
            return error
        assert session.share_session is not None, "session_error checked this"
        session.share_session.advance()
    partitions = session.share_session.partitions
    for topic in request.topics:
        for partition in topic.partitions:
            partitions.setdefault((topic.topic_id, partition.index))
    for gone in request.forgotten:
        for index in gone.partitions:
            partitions.pop((gone.topic_id, index), None)
    if len(partitions) > PARTITIONS_MAX:
        session.end_share_session()
        return WireError.INVALID_REQUEST
    return WireError.NONE


def _batches(requested: _Batches) -> list[tuple[int, int, Sequence[int]]]:
    """Return acknowledgements as the broker takes them. Raises Invalid(INVALID_REQUEST)."""
    found: list[tuple[int, int, Sequence[int]]] = []
    end = 0
    for batch in requested:
        first, last, types = batch.first_offset, batch.last_offset, batch.types
        count = last - first + 1
        if not end <= first <= last < _LAST_OFFSET or len(types) not in (1, count):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"acknowledged offsets are not in order first={first} last={last}")
        if not all(Outcome.GAP <= outcome <= Outcome.RENEW for outcome in types):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown acknowledge type first={first} last={last}")
        found.append((first, last, types))
        end = last + 1
    return found


def _find(session: KafkaSession, place: Place) -> Partition:
    """Return a partition that the client may read in a group. Raises BrokerError."""
    topic = led_topic(session, Action.FETCH, "", place[0])
    session.authorize(Action.GROUP_JOIN, topic)
    return partition_of(topic, place[1])


def _acknowledge(
    session: KafkaSession, place: Place, group: str, member: str, requested: _Batches, done: Callable[[Any], None]
) -> None:
    """Acknowledge records of one partition. Raises BrokerError, or calls ``done`` later."""
    batches = _batches(requested)
    broker = session.broker
    broker.shares.acknowledge(group, _find(session, place), member, batches, by=session.caller, done=done)


def share_acknowledge(
    session: KafkaSession, answer: Answer, request: ShareAcknowledgeRequest, /
) -> ShareAcknowledgeResponse | None:
    response = schema.response(Api.SHARE_ACKNOWLEDGE)
    try:
        error = _authorize(session, request)
    except BrokerError as refused:
        return response(error=group_error(refused), message=refused.message)
    group, member = request.group_id or "", request.member_id or ""
    if error is WireError.NONE:
        error = session_error(session.share_session, group, member, request.session_epoch)
    if error is not WireError.NONE:
        return response(error=error)
    assert session.share_session is not None, "session_error checked this"
    session.share_session.advance()
    body = response(responses=[], lock_timeout_ms=int(session.broker.shares.settings(group).lock_s * 1000))
    left = 1

    def count(entry: ShareAcknowledgeResponse.Responses.Partitions | None, result: int | BrokerError = 0) -> None:
        nonlocal left
        if entry is not None and isinstance(result, BrokerError):
            entry.error, entry.message = wire_error(result), result.message
        left -= 1
        if not left:
            answer.ok(body)

    for topic in request.topics:
        topic_entry = response.Responses(topic_id=topic.topic_id, partitions=[])
        body.responses.append(topic_entry)
        for partition in topic.partitions:
            entry = topic_entry_of = response.Responses.Partitions(
                index=partition.index, current_leader=response.Responses.Partitions.CurrentLeader()
            )
            topic_entry.partitions.append(topic_entry_of)
            left += 1
            place = topic.topic_id, partition.index
            try:
                _acknowledge(session, place, group, member, partition.batches, partial(count, entry))
            except BrokerError as refused:
                entry.error, entry.message = missing_error(refused, topic.topic_id), refused.message
                left -= 1
    if request.session_epoch == CLOSING:
        session.end_share_session()
    count(None)
    return None


class Fetching:
    """A ShareFetch request in progress."""

    __slots__ = (
        "_answer",
        "_body",
        "_bytes",
        "_bytes_max",
        "_deadline",
        "_entries",
        "_finds",
        "_group",
        "_has_result",
        "_is_finished",
        "_number",
        "_partitions",
        "_pending",
        "_read_handle",
        "_records",
        "_records_max",
        "_session",
        "_share_session",
        "_stops",
        "_ticket",
        "_topic_entries",
    )

    def __init__(
        self, session: KafkaSession, answer: Answer, request: ShareFetchRequest, share_session: ShareSession
    ) -> None:
        self._session: Final = session
        self._share_session: Final = share_session
        self._answer: Final = answer
        self._group: Final = share_session.group
        self._bytes_max: Final = min(max(request.max_bytes, 0), session.shared.settings.answer_bytes_max)
        self._records_max: Final = min(max(request.max_records, 1), RECORDS_MAX)
        now = session.broker.clock.monotonic()
        self._deadline: Final = now + min(max(request.max_wait_ms, 0), WAIT_MS_MAX) / 1000
        self._stops: list[Handle] = []
        self._read_handle: Handle | None = None
        self._partitions: list[Place] = []
        self._number = 0  # partitions before this one were read
        self._finds: dict[Place, Partition] = {}
        self._bytes = self._records = 0  # in the response
        self._pending = 0  # writes to the journal that the response waits for
        self._has_result = False  # whether the response must not wait for records
        self._is_finished = False
        self._ticket = 0  # incremented when an operation must be ignored that was begun with an earlier ticket
        response = schema.response(Api.SHARE_FETCH)
        lock_ms = int(session.broker.shares.settings(self._group).lock_s * 1000)
        self._body: Final = response(responses=[], lock_timeout_ms=lock_ms)
        self._topic_entries: dict[bytes, ShareFetchResponse.Responses] = {}
        self._entries: dict[Place, _Fetched] = {}
        answer.cancel = self._cancel

    def begin(self, request: ShareFetchRequest) -> None:
        group, member = self._group, self._share_session.member
        for topic in request.topics:
            for requested in topic.partitions:
                if not requested.batches:
                    continue
                place = topic.topic_id, requested.index
                entry = self._entry(place)
                try:
                    done = partial(self._acknowledged, entry)
                    _acknowledge(self._session, place, group, member, requested.batches, done)
                    self._pending += 1
                except BrokerError as error:
                    entry.acknowledge_error = missing_error(error, topic.topic_id)
                    entry.acknowledge_message = error.message
                    self._has_result = True
        if request.session_epoch == CLOSING:
            self._session.end_share_session()
            self._finish()
        elif request.is_renew:
            self._finish()
        else:
            self._partitions = list(self._share_session.partitions)
            self._run()

    def _entry(self, place: Place) -> _Fetched:
        entry = self._entries.get(place)
        if entry is None:
            made = schema.response(Api.SHARE_FETCH).Responses
            topic_entry = self._topic_entries.get(place[0])
            if topic_entry is None:
                topic_entry = self._topic_entries[place[0]] = made(topic_id=place[0], partitions=[])
                self._body.responses.append(topic_entry)
            entry = made.Partitions(
                index=place[1], current_leader=made.Partitions.CurrentLeader(), records=b"", acquired_records=[]
            )
            topic_entry.partitions.append(entry)
            self._entries[place] = entry
        return entry

    def _acknowledged(self, entry: _Fetched, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            entry.acknowledge_error, entry.acknowledge_message = wire_error(result), result.message
        self._count()

    def _count(self) -> None:
        self._pending -= 1
        if self._is_finished and not self._pending:
            self._answer.large(self._body)

    def _refuse(self, place: Place, error: BrokerError) -> None:
        entry = self._entry(place)
        entry.error, entry.message = missing_error(error, place[0]), error.message
        self._has_result = True

    # Reading

    def _run(self) -> None:
        self._ticket += 1
        broker = self._session.broker
        if self._read_until(broker.clock.monotonic() + QUANTUM_S):
            broker.sliced.put(partial(self._read_on, self._ticket))

    def _read_on(self, ticket: int, end: float) -> bool:
        return ticket == self._ticket and self._read_until(end)

    def _read_until(self, end: float) -> bool:
        """Acquire and read records until time ``end``.

        Return True if only the time is over, and False if the request waits or has ended.
        """
        now = self._session.broker.clock.monotonic
        while self._number < len(self._partitions) and not self._is_full:
            if not self._read(self._partitions[self._number]):
                return False
            self._number += 1
            if now() >= end and self._number < len(self._partitions):
                return True
        if self._records or self._has_result or now() >= self._deadline:
            self._finish()
        else:
            self._wait()
        return False

    @property
    def _is_full(self) -> bool:
        return self._records >= self._records_max or (self._records > 0 and self._bytes >= self._bytes_max)

    def _read(self, place: Place) -> bool:
        """Acquire records of a partition and add them to the response. Return False if this must wait for the disk."""
        broker, shares = self._session.broker, self._session.broker.shares
        try:
            partition = self._finds[place] = _find(self._session, place)
            handle = shares.begin(
                self._group, partition, partial(self._arrived, self._ticket, place, partition), by=self._session.caller
            )
            if handle is not None:
                self._read_handle = handle
                return False
            offset = shares.next_offset(self._group, partition)
            if offset is None:
                return True
            space = min(self._bytes_max - self._bytes, PARTITION_BYTES_MAX)
            read = broker.fetch(
                partition,
                offset,
                bytes_max=max(space, READ_BYTES_MIN),
                then=partial(self._arrived, self._ticket, place, partition),
            )
        except BrokerError as error:
            self._refuse(place, error)
            return True
        if not isinstance(read, Read):
            self._read_handle = read
            return False
        self._take(place, partition, read, offset)
        return True

    def _arrived(self, ticket: int, place: Place, partition: Partition, read: Read | int | BrokerError) -> None:
        """Continue after a read from disk, or after a search for the offset at which a new group begins."""
        if ticket != self._ticket:
            if isinstance(read, Read):
                read.pin.release()
            return
        self._read_handle = None
        if isinstance(read, BrokerError):
            self._refuse(place, read)
        elif isinstance(read, Read):
            offset = self._session.broker.shares.next_offset(self._group, partition)
            if offset is None or offset >= read.next_offset:
                read.pin.release()
            else:
                self._take(place, partition, read, offset)
            self._number += 1
        self._run()

    def _take(self, place: Place, partition: Partition, read: Read, offset: int) -> None:
        """Encode the records of a read, and acquire those of them that are available."""
        space = min(self._bytes_max - self._bytes, PARTITION_BYTES_MAX)
        appended = produce_limits(partition.topic.settings).has_times_of_append
        try:
            records, end = _encode(read, offset, space, append_times=appended)
            runs = self._session.broker.shares.acquire(
                self._group,
                partition,
                self._share_session.member,
                offset,
                end,
                count_max=self._records_max - self._records,
                done=partial(self._acquired, place),
            )
        except BrokerError as error:
            self._refuse(place, error)
            return
        finally:
            read.pin.release()
        if not runs:
            return
        entry = self._entry(place)
        made = schema.response(Api.SHARE_FETCH).Responses.Partitions.AcquiredRecords
        entry.records = records
        entry.acquired_records = [
            made(first_offset=first, last_offset=last, delivery_count=min(count, 2**15 - 1))
            for first, last, count in runs
        ]
        self._pending += 1
        self._bytes += len(records)
        self._records += sum(last - first + 1 for first, last, _ in runs)
        self._share_session.move_back(place)

    def _acquired(self, place: Place, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            entry = self._entry(place)
            entry.records, entry.acquired_records = b"", []
            entry.error, entry.message = wire_error(result), result.message
        self._count()

    # Waiting

    def _wait(self) -> None:
        broker = self._session.broker
        wake = partial(self._woken, self._ticket)
        self._stops.append(broker.loop.call_later(max(self._deadline - broker.clock.monotonic(), 0.0), wake))
        for place in self._partitions:
            partition = self._finds.get(place)
            if partition is None:
                continue
            try:
                self._stops.append(broker.shares.wait(self._group, partition, wake))
            except BrokerError:  # the topic was deleted in the meantime
                broker.loop.call_soon(wake)
                return

    def _woken(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._stop_waiting()
        self._number = 0
        self._run()

    def _stop_waiting(self) -> None:
        stops, self._stops = self._stops, []
        for stop in stops:
            stop.cancel()

    def _cancel(self) -> None:
        self._ticket += 1
        self._stop_waiting()
        if self._read_handle is not None:
            self._read_handle.cancel()

    def _finish(self) -> None:
        self._ticket += 1
        self._is_finished = True
        if not self._pending:
            self._answer.large(self._body)


def _encode(read: Read, offset: int, space: int, *, append_times: bool) -> tuple[memoryview, int]:
    """Encode records from ``offset`` on as Kafka batches, and return them with the offset after the last one.

    They have at most ``space`` bytes, unless the first record is larger. Raises BrokerError.
    """
    size = sum([len(chunk) for chunk in read.chunks])
    out = bytearray(min(max(space, 0), size + size // 4 + GROWTH_BYTES))
    state = encoder.begin(offset, at=0, limit=len(out))
    for chunk in read.chunks:
        state[encoder.POSITION] = 0
        if put_chunk(chunk, state, out, append_times=append_times) == encoder.DONE:
            continue
        if state[encoder.AT]:
            break
        out = bytearray(state[encoder.NEEDED])
        state[encoder.CAP] = len(out)
        put_chunk(chunk, state, out, append_times=append_times)
        break
    return memoryview(out)[: state[encoder.AT]], state[encoder.NEXT]
