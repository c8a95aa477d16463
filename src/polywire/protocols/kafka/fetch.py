"""The Fetch request, with and without a fetch session (spec: kafka#fetch, kafka#fetch-sessions).

In a fetch session, the cost of a request depends on the number of partitions with changes or data, not on the number of
all partitions. Permissions are checked for every read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema
from polywire.protocols.kafka.fetch_sessions import FetchSession, SessionPartition, SessionTopic
from polywire.protocols.kafka.fetching import Fetching
from polywire.protocols.kafka.lookup import led_topic
from polywire.protocols.kafka.messages import NO_OFFSET, Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import FetchRequest, FetchResponse

    _Entry = FetchResponse.Responses.Partitions

BEGINNING: Final = 0  # epoch of a request that opens a session
SESSIONLESS: Final = -1  # epoch of a request without a session, or that closes its session
IDS_SINCE: Final = 13  # first version that names topics by id


def fetch(session: KafkaSession, answer: Answer, request: FetchRequest, /) -> FetchResponse | None:
    fetch_session = session.fetch_session
    if fetch_session is not None and (fetch_session.is_over or fetch_session.number != request.session_id):
        fetch_session = None
    names_ids = answer.request.version >= IDS_SINCE
    if request.session_epoch not in (BEGINNING, SESSIONLESS):
        error = _session_error(fetch_session, request, names_ids=names_ids)
        if error is not WireError.NONE:
            return schema.response(Api.FETCH)(error=error, responses=[])
        assert fetch_session is not None, "_session_error checked this"
        session.shared.fetch_sessions.use(fetch_session)
        fetch_session.advance()
        IncrementalFetching(session, answer, request, fetch_session).begin(request)
        return None
    if fetch_session is not None:
        fetch_session.end()
    if request.session_epoch == BEGINNING:
        fetch_session = _open(session, names_ids=names_ids) if request.topics else None
    else:
        fetch_session = None
    Fetching(session, answer, request, fetch_session).begin(request)
    return None


def _session_error(fetch_session: FetchSession | None, request: FetchRequest, *, names_ids: bool) -> WireError:
    if fetch_session is None:
        return WireError.FETCH_SESSION_ID_NOT_FOUND
    if fetch_session.epoch != request.session_epoch:
        return WireError.INVALID_FETCH_SESSION_EPOCH
    return WireError.NONE if fetch_session.names_ids == names_ids else WireError.FETCH_SESSION_TOPIC_ID_ERROR


def _open(session: KafkaSession, *, names_ids: bool) -> FetchSession | None:
    """End the connection's fetch session, and open a new one. Return None if the listener has too many."""
    if session.fetch_session is not None:
        session.fetch_session.end()
    session.fetch_session = session.shared.fetch_sessions.open(names_ids=names_ids)
    return session.fetch_session


class IncrementalFetching(Fetching[SessionPartition]):
    """A request in a fetch session.

    It names only changed partitions; the response has only partitions with new data or state.
    """

    __slots__ = ("_fetch_session", "_refused", "_topic_entries", "_topics")

    def __init__(
        self, session: KafkaSession, answer: Answer, request: FetchRequest, fetch_session: FetchSession
    ) -> None:
        super().__init__(session, answer, request, fetch_session)
        self._fetch_session: Final = fetch_session
        self._refused: list[tuple[SessionPartition, _Entry]] = []  # partitions that cannot be read, and their entries
        self._topics: dict[SessionTopic, Topic | BrokerError] = {}  # cache of topics that were checked
        self._topic_entries: dict[SessionTopic, FetchResponse.Responses] = {}

    def begin(self, request: FetchRequest) -> None:
        """Apply the request's changes to the session, then read its partitions that are ready."""
        self._with_pauses(self._change(request), self._read_ready)

    def _change(self, request: FetchRequest) -> Iterator[None]:
        for topic_request in request.topics:
            for partition_request in topic_request.partitions:
                self._fetch_session.add(topic_request, partition_request)
                yield None
        for forgotten in request.forgotten:
            for partition in forgotten.partitions:
                self._fetch_session.forget(forgotten, partition)
                yield None

    def _read_ready(self) -> None:
        fetch_session = self._fetch_session
        if fetch_session.is_over:
            self._answer.ok(schema.response(Api.FETCH)(error=WireError.FETCH_SESSION_ID_NOT_FOUND, responses=[]))
            return
        if fetch_session.is_empty:
            fetch_session.end()  # the response reports the error
        fetch_session.has_new_ready = False
        self._partitions, self._refused, self._topics = [], [], {}
        self._with_pauses(self._check_ready(), self.run)

    def _check_ready(self) -> Iterator[None]:
        made = schema.response(Api.FETCH).Responses.Partitions
        for wanted in list(self._fetch_session.ready):
            entry = made(index=wanted.partition, high_watermark=NO_OFFSET, records=b"")
            self._check(self._topic(wanted.topic), wanted.topic.topic_id, wanted, entry)
            if entry.error:
                self._refused.append((wanted, entry))
            yield None

    def _topic(self, topic: SessionTopic) -> Topic | BrokerError:
        """Return the topic, or the error if it cannot be read.

        The result is cached for the topic's other partitions.
        """
        found = self._topics.get(topic)
        if found is None:
            try:
                found = led_topic(self._session, Action.FETCH, topic.name, topic.topic_id)
            except BrokerError as error:
                # the error's traceback refers to this connection, which would in turn refer to the error
                found = error.with_traceback(None)
            self._topics[topic] = found
        return found

    def _read(self, partition: Partition, wanted: SessionPartition, entry: _Entry) -> bool:
        if not super()._read(partition, wanted, entry):
            return False
        if not entry.error and wanted.fetch_offset == entry.high_watermark:
            self._register(partition, wanted, entry.high_watermark)
            self._fetch_session.mark_read(wanted)
        return True

    def _register(self, partition: Partition, wanted: SessionPartition, offset: int) -> None:
        """Have the session notified of the partition's next record.

        Raises BrokerError if the partition cannot be read.
        """
        if wanted.wait is None:
            wanted.wait = self._session.broker.wait(partition, offset, wanted.woken)

    # Waiting

    def _has_ended(self, wake: Callable[[], None]) -> bool:
        self._fetch_session.ready_callback = wake
        return self._fetch_session.has_new_ready

    def _wait_for(self, partition: Partition, wanted: SessionPartition, offset: int, wake: Callable[[], None]) -> None:
        self._register(partition, wanted, offset)

    def _woken(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._ticket += 1
        self._stop_waiting()
        self._number = self._bytes = 0
        self._read_ready()

    def _stop_waiting(self) -> None:
        self._fetch_session.ready_callback = None
        super()._stop_waiting()

    # The response

    def _finish(self) -> None:
        self._ticket += 1
        fetch_session = self._fetch_session
        self._body.session_id = 0 if fetch_session.is_over else fetch_session.number
        self._with_pauses(self._add_changed(), self._send)

    def _add_changed(self) -> Iterator[None]:
        """Add partitions to the response that have new data or a new state."""
        for _, wanted, entry in self._partitions:
            if entry.records:
                self._fetch_session.move_back(wanted)
            if (
                entry.records
                or entry.error
                or (wanted.end, wanted.start) != (entry.high_watermark, entry.log_start_offset)
            ):
                self._add_entry(wanted, entry)
            yield None
        for wanted, entry in self._refused:
            self._add_entry(wanted, entry)
            yield None

    def _add_entry(self, wanted: SessionPartition, entry: _Entry) -> None:
        topic = wanted.topic
        topic_entry = self._topic_entries.get(topic)
        if topic_entry is None:
            made = schema.response(Api.FETCH).Responses
            topic_entry = self._topic_entries[topic] = made(topic=topic.name, topic_id=topic.topic_id, partitions=[])
            self._body.responses.append(topic_entry)
        topic_entry.partitions.append(entry)
        wanted.end, wanted.start = entry.high_watermark, entry.log_start_offset
        self._count += 1
