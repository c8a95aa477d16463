"""Fetch (spec: kafka#fetch, kafka#fetch-sessions).

In a fetch session, the cost of a request depends on the number of partitions that changed or have data. It does not
depend on the number of all partitions. Permissions are checked for every read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.fetch_sessions import FetchSession, Wanted, WantedTopic
from polywire.protocols.kafka.fetching import Fetching
from polywire.protocols.kafka.lookup import led_topic
from polywire.protocols.kafka.messages import NO_OFFSET, Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

BEGINNING: Final = 0  # epoch of a request that opens a session
SESSIONLESS: Final = -1  # epoch of a request without a session, or that closes its session
IDS_SINCE: Final = 13  # first version that names topics by id


def fetch(session: KafkaSession, answer: Answer, request: Any, /) -> Any:
    kept = session.fetch_session
    if kept is not None and (kept.is_over or kept.number != request.session_id):
        kept = None
    names_ids = answer.request.version >= IDS_SINCE
    if request.session_epoch not in (BEGINNING, SESSIONLESS):
        error = _session_error(kept, request, names_ids=names_ids)
        if error is not WireError.NONE:
            return schema.response(Api.FETCH)(error=error, responses=[])
        assert kept is not None, "_session_error checked this"
        session.shared.fetch_sessions.use(kept)
        kept.advance()
        IncrementalFetching(session, answer, request, kept).begin(request)
        return None
    if kept is not None:
        kept.end()
    if request.session_epoch == BEGINNING:
        kept = _open(session, names_ids=names_ids) if request.topics else None
    else:
        kept = None
    Fetching(session, answer, request, kept).begin(request)
    return None


def _session_error(kept: FetchSession | None, request: Any, *, names_ids: bool) -> WireError:
    if kept is None:
        return WireError.FETCH_SESSION_ID_NOT_FOUND
    if kept.epoch != request.session_epoch:
        return WireError.INVALID_FETCH_SESSION_EPOCH
    return WireError.NONE if kept.names_ids == names_ids else WireError.FETCH_SESSION_TOPIC_ID_ERROR


def _open(session: KafkaSession, *, names_ids: bool) -> FetchSession | None:
    """Close the connection's session, and open a new one. Return None if there are too many sessions."""
    if session.fetch_session is not None:
        session.fetch_session.end()
    session.fetch_session = session.shared.fetch_sessions.open(names_ids=names_ids)
    return session.fetch_session


class IncrementalFetching(Fetching):
    """A request in a session. It names only changes, and the response has only partitions with new data or a new state.

    In addition to the base class: ``_refused`` has the partitions that cannot be read. ``_topics`` caches the topics of
    the partitions that were checked.
    """

    __slots__ = ("_in_session", "_refused", "_topic_entries", "_topics")

    def __init__(self, session: KafkaSession, answer: Answer, request: Any, kept: FetchSession) -> None:
        super().__init__(session, answer, request, kept)
        self._in_session: Final = kept
        self._refused: list[tuple[Wanted, Any]] = []
        self._topics: dict[WantedTopic, Topic | BrokerError] = {}
        self._topic_entries: dict[WantedTopic, Any] = {}

    def begin(self, request: Any) -> None:
        """Apply the changes to the session, and read what is available."""
        self._with_pauses(self._change(request), self._look)

    def _change(self, request: Any) -> Iterator[None]:
        for named in request.topics:
            for one in named.partitions:
                self._in_session.want(named, one)
                yield None
        for named in request.forgotten:
            for partition in named.partitions:
                self._in_session.forget(named, partition)
                yield None

    def _look(self) -> None:
        kept = self._in_session
        if kept.is_over:
            self._answer.ok(schema.response(Api.FETCH)(error=WireError.FETCH_SESSION_ID_NOT_FOUND, responses=[]))
            return
        if kept.is_empty:
            kept.end()  # the response reports the error
        kept.has_news = False
        self._asked, self._refused, self._topics = [], [], {}
        self._with_pauses(self._look_at_each(), self.run)

    def _look_at_each(self) -> Iterator[None]:
        made = schema.response(Api.FETCH).Responses.Partitions
        for wanted in list(self._in_session.ready):
            entry = made(index=wanted.partition, high_watermark=NO_OFFSET, records=b"")
            self._ask(self._topic(wanted.topic), wanted.topic.topic_id, wanted, entry)
            if entry.error:
                self._refused.append((wanted, entry))
            yield None

    def _topic(self, named: WantedTopic) -> Topic | BrokerError:
        """Return the topic, or the error if it cannot be read. It is looked up once for all its partitions."""
        found = self._topics.get(named)
        if found is None:
            try:
                found = led_topic(self._session, Action.FETCH, named.name, named.topic_id)
            except BrokerError as error:
                # the error's traceback refers to this connection, which would in turn refer to the error
                found = error.with_traceback(None)
            self._topics[named] = found
        return found

    def _read(self, partition: Partition, asked: Wanted, entry: Any) -> bool:
        if not super()._read(partition, asked, entry):
            return False
        if not entry.error and asked.fetch_offset == entry.high_watermark:
            self._hear_of(partition, asked, entry.high_watermark)
            self._in_session.rest(asked)
        return True

    def _hear_of(self, partition: Partition, wanted: Wanted, offset: int) -> None:
        """Register the session for the partition's next record.

        Raises BrokerError if the partition cannot be read.
        """
        if wanted.wait is None:
            wanted.wait = self._session.broker.wait(partition, offset, wanted.woken)

    # Waiting

    def _has_come(self, wake: Callable[[], None]) -> bool:
        """Return whether a partition of the session has become ready.

        If none has, ``wake`` is called when one does.
        """
        self._in_session.news = wake
        return self._in_session.has_news

    def _wait_for(self, partition: Partition, asked: Wanted, offset: int, wake: Callable[[], None]) -> None:
        """The session wakes this request when the partition has a new record."""
        self._hear_of(partition, asked, offset)

    def _woken(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._ticket += 1
        self._stop_waiting()
        self._number = self._bytes = 0
        self._look()

    def _stop_waiting(self) -> None:
        self._in_session.news = None
        super()._stop_waiting()

    # The response

    def _finish(self) -> None:
        self._ticket += 1
        kept = self._in_session
        self._body.session_id = 0 if kept.is_over else kept.number
        self._with_pauses(self._tell_each(), self._tell)

    def _tell_each(self) -> Iterator[None]:
        """Add partitions to the response that have new data or a new state."""
        for _, wanted, entry in self._asked:
            if entry.records:
                self._in_session.served(wanted)
            if (
                entry.records
                or entry.error
                or (wanted.end, wanted.start) != (entry.high_watermark, entry.log_start_offset)
            ):
                self._tell_of(wanted, entry)
            yield None
        for wanted, entry in self._refused:
            self._tell_of(wanted, entry)
            yield None

    def _tell_of(self, wanted: Wanted, entry: Any) -> None:
        topic = wanted.topic
        topic_entry = self._topic_entries.get(topic)
        if topic_entry is None:
            made = schema.response(Api.FETCH).Responses
            topic_entry = self._topic_entries[topic] = made(topic=topic.name, topic_id=topic.topic_id, partitions=[])
            self._body.responses.append(topic_entry)
        topic_entry.partitions.append(entry)
        wanted.end, wanted.start = entry.high_watermark, entry.log_start_offset
        self._count += 1
