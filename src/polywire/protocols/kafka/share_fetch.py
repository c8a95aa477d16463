"""ShareFetch and ShareAcknowledge: acquire the records of a share group and acknowledge them (spec: kafka#share-fetch).

The acknowledgements of a partition are processed all or none. This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.groups.share import batches_of
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Read
from polywire.protocols.kafka import encoder, schema
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.fetching import ENCODED_AT_ONCE_MAX, GROWTH_BYTES, WAIT_MS_MAX, put_chunk
from polywire.protocols.kafka.groups import group_error
from polywire.protocols.kafka.lookup import led_topic, missing_error, partition_of
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.replies import PendingResponse, encode_in_slices, refuse
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
from polywire.protocols.runtime.acquiring import chosen
from polywire.records.header import read_header, walk
from polywire.types import Outcome

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.acquiring import Acquiring
else:
    from polywire.protocols.runtime.acquiring import Acquiring

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
GROWTH_BYTES_MIN: Final = 1024  # for the headers of a few batches
RECORD_GROWTH_BYTES: Final = 64  # how much larger a record can be in a response than in the log
DELIVERY_COUNT_MAX: Final = 2**15 - 1
_NONE: Final = WireError.NONE  # read for every request; a module constant is ten times as fast as an attribute
_SHARE_FETCH: Final = Api.SHARE_FETCH
_SHARE_ACKNOWLEDGE: Final = Api.SHARE_ACKNOWLEDGE
_LAST_OFFSET: Final = 2**63 - 1
_OUTCOME_MIN: Final = int(Outcome.GAP)  # plain integers, because they are compared with every entry
_OUTCOME_MAX: Final = int(Outcome.RENEW)


def share_fetch(session: KafkaSession, answer: Answer, request: ShareFetchRequest, /) -> ShareFetchResponse | None:
    response = schema.response(_SHARE_FETCH)
    try:
        error = _authorize(session, request)
        if error is _NONE:
            error = _enter(session, request)
    except BrokerError as refused:
        return response(error=group_error(refused), message=refused.message)
    if error is not _NONE:
        return response(error=error)
    assert session.share_session is not None, "_enter has checked or opened it"
    session.share_reading = fetching = Fetching(session, answer, request, session.share_session)
    fetching.begin(request)
    return None


def _authorize(session: KafkaSession, request: ShareFetchRequest | ShareAcknowledgeRequest) -> WireError:
    if not request.group_id or not request.member_id:
        return WireError.INVALID_REQUEST
    session.broker.access.authorize_somewhere(session.principal, Action.GROUP_JOIN)
    return _NONE


def _enter(session: KafkaSession, request: ShareFetchRequest) -> WireError:
    """Open the session of a request, or find it."""
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
        if error is not _NONE:
            return error
        assert session.share_session is not None, "session_error checked this"
        session.share_session.advance()
    return _NONE


def _entries(requested: _Batches) -> Iterator[tuple[int, int, Sequence[int], float, str]]:
    """Yield acknowledgements as the fields of the broker's batches. Raises Invalid(INVALID_REQUEST)."""
    end = 0
    for batch in requested:
        first, last, types = batch.first_offset, batch.last_offset, batch.types
        if not end <= first <= last < _LAST_OFFSET or len(types) not in (1, last - first + 1):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"acknowledged offsets are not in order first={first} last={last}")
        for outcome in types:
            if not _OUTCOME_MIN <= outcome <= _OUTCOME_MAX:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown acknowledge type first={first} last={last}")
        yield first, last, types, 0.0, ""
        end = last + 1


def _find(session: KafkaSession, place: Place) -> Partition:
    """Return a partition that the client may read in a group. Raises BrokerError."""
    topic = led_topic(session, Action.FETCH, "", place[0])
    session.authorize(Action.GROUP_JOIN, topic)
    return partition_of(topic, place[1])


def _acknowledge(
    session: KafkaSession, place: Place, group: str, member: str, requested: _Batches, done: Callable[[Any], None]
) -> bool:
    """Acknowledge records of one partition. Raises BrokerError, or calls ``done`` later.

    Return whether this waits for dead letters.
    """
    batches = batches_of(_entries(requested))
    shares = session.broker.shares
    return shares.acknowledge(group, _find(session, place), member, batches, by=session.caller, done=done)


def share_acknowledge(
    session: KafkaSession, answer: Answer, request: ShareAcknowledgeRequest, /
) -> ShareAcknowledgeResponse | None:
    response = schema.response(_SHARE_ACKNOWLEDGE)
    try:
        error = _authorize(session, request)
    except BrokerError as refused:
        return response(error=group_error(refused), message=refused.message)
    group, member = request.group_id or "", request.member_id or ""
    if error is _NONE:
        error = session_error(session.share_session, group, member, request.session_epoch)
    if error is not _NONE:
        return response(error=error)
    share_session = session.share_session
    assert share_session is not None, "session_error checked this"
    share_session.advance()
    body = response(responses=[], lock_timeout_ms=session.broker.shares.directory.settings(group).lock_ms)
    pending = PendingResponse(answer, body)

    def acknowledged(entry: ShareAcknowledgeResponse.Responses.Partitions, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            refuse(entry, result)
        pending.count_result()

    def entries() -> Iterator[None]:
        for topic in request.topics:
            topic_entry = response.Responses(topic_id=topic.topic_id, partitions=[])
            body.responses.append(topic_entry)
            for partition in topic.partitions:
                leader = response.Responses.Partitions.CurrentLeader()
                entry = response.Responses.Partitions(index=partition.index, current_leader=leader)
                topic_entry.partitions.append(entry)
                pending.expect()
                place = topic.topic_id, partition.index
                try:
                    _acknowledge(session, place, group, member, partition.batches, partial(acknowledged, entry))
                except BrokerError as refused:
                    refuse(entry, refused, missing_error(refused, topic.topic_id))
                    pending.count_result()
                yield None
        if request.session_epoch == CLOSING and session.share_session is share_session:
            session.end_share_session()

    pending.run(session.broker, entries())
    return None


@cython.cclass
class Fetching(Acquiring):
    """A ShareFetch request in progress. A partition is identified by its topic's id and its number."""

    _answer: Any
    _body: Any
    _entries: dict[Place, Any]
    _session: Any
    _share_session: Any
    _topic_entries: dict[bytes, Any]

    def __init__(
        self, session: KafkaSession, answer: Answer, request: ShareFetchRequest, share_session: ShareSession
    ) -> None:
        super().__init__(
            session.broker,
            group=share_session.group,
            member=share_session.member,
            by=session.caller,
            records_max=min(max(request.max_records, 1), RECORDS_MAX),
            bytes_max=min(max(request.max_bytes, 0), session.shared.settings.answer_bytes_max),
            wait_s=min(max(request.max_wait_ms, 0), WAIT_MS_MAX) / 1000,
        )
        self._session = session
        self._share_session = share_session
        self._answer = answer
        lock_ms = session.broker.shares.directory.settings(self.group).lock_ms
        self._body = schema.response(_SHARE_FETCH)(responses=[], lock_timeout_ms=lock_ms)
        self._topic_entries = {}
        self._entries = {}
        answer.cancel = self.cancel

    def begin(self, request: ShareFetchRequest) -> None:
        self.with_pauses(self._enter(request), partial(self._begin_reading, request))

    def _enter(self, request: ShareFetchRequest) -> Iterator[None]:
        """Change the partitions of the session, then process the acknowledgements."""
        partitions = self._share_session.partitions
        for topic in request.topics:
            for requested in topic.partitions:
                partitions.setdefault((topic.topic_id, requested.index))
                yield None
        for gone in request.forgotten:
            for index in gone.partitions:
                partitions.pop((gone.topic_id, index), None)
                yield None
        if len(partitions) > PARTITIONS_MAX:
            return
        for topic in request.topics:
            for requested in topic.partitions:
                if requested.batches:
                    self._process((topic.topic_id, requested.index), requested.batches)
                    yield None

    @cython.cfunc
    def _process(self, place: Any, batches: Any) -> Any:
        """Process the acknowledgements of a partition."""
        entry = self._entry(place)
        self.expect()
        try:
            done = partial(self._acknowledged, entry)
            if _acknowledge(self._session, place, self.group, self.member, batches, done):
                self.acquires = False
        except BrokerError as error:
            entry.acknowledge_error = missing_error(error, place[0])
            entry.acknowledge_message = error.message
            self.must_respond = True
            self.count()

    def _begin_reading(self, request: ShareFetchRequest) -> None:
        if len(self._share_session.partitions) > PARTITIONS_MAX:
            self._end_session()
            self._body.error = WireError.INVALID_REQUEST
            self.finish()
        elif request.session_epoch == CLOSING:
            self._end_session()
            self.finish()
        elif request.is_renew:
            self.finish()
        else:
            self.read(list(self._share_session.partitions))

    def _end_session(self) -> None:
        if self._session.share_session is self._share_session:  # a later request may have opened another one
            self._session.end_share_session()

    @cython.cfunc
    def _entry(self, place: Any) -> Any:
        entry = self._entries.get(place)
        if entry is None:
            made = schema.response(_SHARE_FETCH).Responses
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
        self.count()

    # Acquiring

    @cython.ccall
    def find(self, place: Any) -> Any:
        return _find(self._session, place)

    def encode(
        self, read: Read, partition: Partition, offset: int, offset_end: int, *, bytes_max: int
    ) -> tuple[memoryview, int]:
        appended = produce_limits(partition.topic.settings).has_times_of_append
        return _encode(read, offset, offset_end, bytes_max, append_times=appended)

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def add(self, place: Any, records: Any, runs: Any) -> cython.longlong:
        entry = self._entry(place)
        made = schema.response(_SHARE_FETCH).Responses.Partitions.AcquiredRecords
        entry.records = records
        entry.acquired_records = [
            made(first_offset=first, last_offset=last, delivery_count=min(count, DELIVERY_COUNT_MAX))
            for first, last, count in runs
        ]
        self._share_session.move_back(place)
        return len(records)

    @cython.ccall
    def refuse(self, place: Any, error: Any) -> Any:
        entry = self._entry(place)
        entry.records, entry.acquired_records = b"", []
        entry.error, entry.message = missing_error(error, place[0]), error.message

    @cython.ccall
    def respond(self) -> Any:
        if len(self._entries) > ENCODED_AT_ONCE_MAX:
            encode_in_slices(self._session.broker, self._answer, self._body)
        else:
            self._answer.large(self._body)


def _encode(read: Read, offset: int, offset_end: int, space: int, *, append_times: bool) -> tuple[memoryview, int]:
    """Encode the records of [offset, offset_end) as Kafka batches. Return them with the offset after the last one.

    They have at most ``space`` bytes, unless the first record is larger. Raises BrokerError.
    """
    chunks: list[memoryview] = []
    for chunk in read.chunks:
        _add_trimmed(chunks, chunk, offset, offset_end)
    size = sum([len(chunk) for chunk in chunks])
    growth = min(GROWTH_BYTES, GROWTH_BYTES_MIN + RECORD_GROWTH_BYTES * (offset_end - offset))
    out = bytearray(min(max(space, 0), size + size // 4 + growth))
    state = encoder.begin(offset, at=0, limit=len(out))
    end = min(read.next_offset, offset_end)
    for chunk in chunks:
        state[encoder.POSITION] = 0
        if put_chunk(chunk, state, out, append_times=append_times) == encoder.DONE:
            continue
        end = state[encoder.NEXT]
        if state[encoder.AT]:
            break
        out = bytearray(state[encoder.NEEDED])
        state[encoder.CAP] = len(out)
        put_chunk(chunk, state, out, append_times=append_times)
        end = state[encoder.NEXT]
        break
    return memoryview(out)[: state[encoder.AT]], end


def _add_trimmed(found: list[memoryview], chunk: memoryview, offset: int, offset_end: int) -> None:
    """Add the stored batches of a chunk to a list, without the records outside of [offset, offset_end)."""
    positions = walk(chunk)
    headers = [read_header(chunk, at) for at in positions]
    if headers[0].base_offset >= offset and headers[-1].next_offset <= offset_end:
        found.append(chunk)
        return
    for at, header in zip(positions, headers, strict=True):
        batch = chosen(header, chunk[at : at + header.length], [(offset, offset_end - 1, 0)])
        if batch is not None:
            found.append(memoryview(batch))
