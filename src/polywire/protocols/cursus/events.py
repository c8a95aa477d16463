"""Event sourcing: APPEND_STREAM, READ_STREAM, SAVE_SNAPSHOT and others (spec: cursus#event-sourcing).

In these commands, a stream consists of the events with one key, which are in one partition. It is returned completely
or not at all.
"""

from __future__ import annotations

import json
from array import array
from functools import partial
from typing import Final

from polywire.broker.changes import SnapshotSaved
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, Conflict, Invalid
from polywire.log.base import Read
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.batches import empty_batch, opening
from polywire.protocols.cursus.messages import (
    REPLY_BYTES_MAX,
    Refused,
    Request,
    decoded,
    encoded,
    frame,
    integer,
    quote,
    topic_word,
)
from polywire.protocols.cursus.reply_batch import ReplyBatch
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.records.columns import Event, Record
from polywire.records.rows import from_records
from polywire.types import KeyHash, Level

READ_BYTES_MAX: Final = 64 * 1024  # bytes read from the log at a time; most may belong to other aggregates
TEXT_BYTES_MAX: Final = 65_535  # largest type or metadata of an event, as in batches
_SCHEMA_MAX: Final = 2**32 - 1


def _topic(session: CursusSession, request: Request, action: Action) -> Topic:
    """Return the event-sourced topic in the request. Raises Refused if it does not exist or is not event-sourced."""
    name = request.need("topic")
    topic = session.state.local.find_topic(name)
    if topic is None:
        raise Refused("topic_not_found", f"topic={topic_word(name)}")
    session.state.guard.admit_topic(session, topic, action)
    if not topic.settings.event_sourcing:
        raise Refused("event_sourcing_not_enabled", f"topic={topic_word(name)}")
    return topic


def _partition_of(session: CursusSession, topic: Topic, key: bytes) -> Partition:
    return session.state.local.partition_of_key(topic, key, KeyHash.FNV64)


def _number(request: Request, key: str, *, low: int, high: int = 2**63 - 1, default: str = "") -> int:
    """Return a number of the request. Raises Refused ``missing_<key>`` or ``invalid_<key>``."""
    text = request.options.get(key) or default or request.need(key)
    value = integer(text)
    if value is None or not low <= value <= high:
        raise Refused(f"invalid_{key}", f"value={text}")
    return value


def _message(request: Request) -> bytes:
    if request.message is None:
        raise Refused("missing_message", f"command={request.name}")
    return request.message


def _text(request: Request, key: str) -> bytes:
    text = encoded(request.options.get(key, ""))
    if len(text) > TEXT_BYTES_MAX:
        raise Refused("append_stream_failed", f"reason={quote(f'{key} is longer than {TEXT_BYTES_MAX} bytes')}")
    return text


# Write


def append(session: CursusSession, request: Request, /) -> Reply | None:
    """APPEND_STREAM: append one event of a key. Its version must be the latest version plus one."""
    for name in ("topic", "key", "version"):
        request.need(name)
    value = _message(request)
    version = _number(request, "version", low=0)
    schema = _number(request, "schema_version", low=0, high=_SCHEMA_MAX, default="1")
    kind, metadata = _text(request, "event_type"), _text(request, "metadata")
    topic = _topic(session, request, Action.PRODUCE)
    key = encoded(request.need("key"))
    partition = _partition_of(session, topic, key)
    event = Event(decoded(kind), schema, version, metadata or None)
    answer = session.later(request.dialect, blocking=True)
    try:
        batch = from_records([Record(value=value, key=key, event=event)])
        offset = session.state.local.events.append(
            partition, key, version, batch, by=session.caller, level=Level.WRITTEN, done=answer.done
        )
    except Conflict:
        current = session.state.local.events.version(partition, key)
        raise Refused("version_conflict", f"current={current} expected={version}") from None
    except (Invalid, Busy) as error:
        raise Refused("append_stream_failed", f"reason={quote(error.message)}") from None
    answer.body = encoded(f"OK version={version} offset={offset} partition={partition.number}")
    return None


def save_snapshot(session: CursusSession, request: Request, /) -> Reply | None:
    """SAVE_SNAPSHOT: replace a key's snapshot, even one of a later version."""
    for name in ("topic", "key", "version"):
        request.need(name)
    payload = _message(request)
    version = _number(request, "version", low=1)
    topic = _topic(session, request, Action.PRODUCE)
    key = encoded(request.need("key"))
    partition = _partition_of(session, topic, key)
    answer = session.later(request.dialect, blocking=True)
    answer.body = encoded(f"OK version={version} partition={partition.number}")
    events = session.state.local.events
    try:
        events.save_snapshot(partition, key, version, payload, by=session.caller, level=Level.WRITTEN, done=answer.done)
    except Conflict:
        current = events.version(partition, key)
        raise Refused("snapshot_version_exceeds_stream", f"version={version} current={current}") from None
    except (Invalid, Busy) as error:
        raise Refused("save_snapshot_failed", f"reason={quote(error.message)}") from None
    return None


# Read


def version_of(session: CursusSession, request: Request, /) -> Reply | None:
    """STREAM_VERSION: return the version of a key's latest event; 0 if the key has none."""
    topic = _topic(session, request, Action.FETCH)
    key = encoded(request.need("key"))
    version = session.state.local.events.version(_partition_of(session, topic, key), key)
    _reply_once_stored(session, request, encoded(f"OK version={version}"))
    return None


def read_snapshot(session: CursusSession, request: Request, /) -> Reply | None:
    """READ_SNAPSHOT: return the version and payload of a key's snapshot as JSON, or null."""
    topic = _topic(session, request, Action.FETCH)
    key = encoded(request.need("key"))
    found = session.state.local.events.snapshot(_partition_of(session, topic, key), key)
    body = encoded("OK snapshot=") + _json(None if found is None else _json_fields(found))
    _reply_once_stored(session, request, body)
    return None


def _reply_once_stored(session: CursusSession, request: Request, body: bytes) -> None:
    """Respond once the state that the response contains is as durable as an acknowledged request."""
    answer = session.later(request.dialect, blocking=True)
    answer.body = body
    session.state.local.settle(Level.WRITTEN, answer.done)


def _json_fields(snapshot: SnapshotSaved) -> dict[str, object]:
    return {"version": snapshot.version, "payload": decoded(snapshot.payload)}


def _json(value: object) -> bytes:
    return encoded(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def read_stream(session: CursusSession, request: Request, /) -> Reply | None:
    """READ_STREAM: return a summary as JSON, then the events as a batch. An error is one frame of JSON."""
    try:
        for name in ("topic", "key"):
            request.need(name)
        first_version = _number(request, "from_version", low=1, default="1")
        topic = _topic(session, request, Action.FETCH)
        key = encoded(request.need("key"))
    except Refused as error:
        return _failed(error)
    partition = _partition_of(session, topic, key)
    answer = session.later(request.dialect, blocking=True)
    reading = StreamRead(session, answer, partition, key, first_version)
    session.state.local.settle(Level.WRITTEN, reading.begin)
    return None


def _failed(error: Refused) -> bytes:
    return _json({"error": f"{error.code} {error.facts}".rstrip(), "status": "ERROR"})


class StreamRead:
    """A READ_STREAM request in progress, which reads the events of a key."""

    __slots__ = (
        "_answer",
        "_first_version",
        "_key",
        "_next",
        "_offsets",
        "_partition",
        "_reply_batch",
        "_session",
        "_snapshot",
    )

    def __init__(
        self, session: CursusSession, answer: Answer, partition: Partition, key: bytes, first_version: int
    ) -> None:
        self._session = session
        self._answer = answer
        self._partition = partition
        self._key = key
        self._first_version = first_version
        self._snapshot: SnapshotSaved | None = None
        self._offsets = array("q")
        self._next = 0  # index of the next event to read
        self._reply_batch: ReplyBatch | None = None

    def begin(self, result: int | BrokerError) -> None:
        """Begin to read when all earlier appends are readable."""
        if self._session.closed:
            return
        if isinstance(result, BrokerError):
            self._fail(result.message)
            return
        events = self._session.state.local.events
        snapshot = events.snapshot(self._partition, self._key)
        if snapshot is not None and snapshot.version >= self._first_version:
            self._snapshot = snapshot
            self._first_version = snapshot.version + 1
        _, self._offsets = events.offsets(self._partition, self._key, self._first_version)
        self._reply_batch = ReplyBatch(self._session.state.reply_buffers, self._opening, decoder.RECORDS_MAX)
        # in slices, because many reads may wait for the same write batch
        self._session.broker.sliced.put(self._take_events)

    @property
    def _opening(self) -> bytes:
        return opening(topic_word(self._partition.topic.name.full), self._partition.number, positional=False)

    def _take_events(self, end: float) -> bool:
        """Read until all events are found, or data must be read from disk.

        Return True if reading stopped only because the connection has used up its time slice.
        """
        if self._session.closed:
            self._drop()
            return False
        now = self._session.broker.clock.monotonic
        while self._next < len(self._offsets):
            if now() >= end:
                return True
            try:
                read = self._session.state.local.fetch(
                    self._partition, self._offsets[self._next], bytes_max=READ_BYTES_MAX, then=self._read_later
                )
            except BrokerError as error:
                self._fail(error.message)
                return False
            if not isinstance(read, Read) or not self._take(read):
                return False
        self._finish()
        return False

    def _read_later(self, read: Read | BrokerError) -> None:
        """Continue in a later pass of the loop, because many requests may have waited for the same data."""
        if isinstance(read, BrokerError):
            self._fail(read.message)
        else:
            self._session.broker.sliced.put(partial(self._take_fetched, read))

    def _take_fetched(self, read: Read, end: float) -> bool:
        if self._session.closed:
            read.pin.release()
            self._drop()
        elif self._take(read) and self._take_events(end):
            self._session.broker.sliced.put(self._take_events)
        return False

    def _take(self, read: Read) -> bool:
        reply_batch, offsets = self._reply_batch, self._offsets
        assert reply_batch is not None, "a batch is being filled"
        try:
            if read.next_offset <= offsets[self._next]:
                self._fail("an event cannot be read yet")
                return False
            while self._next < len(offsets) and offsets[self._next] < read.next_offset:
                start = stop = self._next
                while stop < len(offsets) and offsets[stop] - offsets[start] == stop - start:
                    stop += 1
                end = min(offsets[stop - 1] + 1, read.next_offset)
                before = reply_batch.written
                reply_batch.take(read, offsets[start], end)
                if reply_batch.written - before != end - offsets[start]:
                    self._fail("the stream is too large for one answer: save a snapshot, or read from a later version")
                    return False
                self._next += end - offsets[start]
        except BrokerError as error:
            self._fail(error.message)
            return False
        finally:
            read.pin.release()
        return True

    def _finish(self) -> None:
        reply_batch, self._reply_batch = self._reply_batch, None
        assert reply_batch is not None, "a batch was filled"
        topic, number = topic_word(self._partition.topic.name.full), self._partition.number
        parts, released = reply_batch.finish()
        if sum(map(len, parts)) > REPLY_BYTES_MAX:
            if released is not None:
                released()
            self._fail("the stream is too large for one answer: save a snapshot, or read from a later version")
            return
        head: dict[str, object] = {"status": "OK", "topic": topic, "key": decoded(self._key), "partition": number}
        head["count"] = len(self._offsets)
        if self._snapshot is not None:
            head["snapshot"] = _json_fields(self._snapshot)
        self._answer.fill([frame(_json(head)), *(parts or [frame(empty_batch(self._opening))])], released)

    def _drop(self) -> None:
        if self._reply_batch is not None:
            self._reply_batch.drop()
            self._reply_batch = None

    def _fail(self, reason: str) -> None:
        self._drop()
        self._answer.ok(_failed(Refused("read_stream_failed", f"reason={quote(reason)}")))


COMMANDS: Final = (
    Command("APPEND_STREAM", append, (Action.PRODUCE,)),
    Command("SAVE_SNAPSHOT", save_snapshot, (Action.PRODUCE,)),
    Command("STREAM_VERSION", version_of, (Action.FETCH,)),
    Command("READ_SNAPSHOT", read_snapshot, (Action.FETCH,)),
    Command("READ_STREAM", read_stream, (Action.FETCH,)),
)
