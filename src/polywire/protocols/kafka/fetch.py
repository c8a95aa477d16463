"""The Fetch request, with and without a fetch session (spec: kafka#fetch, kafka#fetch-sessions).

In a fetch session, the cost of a request depends on the number of partitions with changes or data, not on the number of
all partitions. Permissions are checked for every read. This module is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.fetch_responses import IDS_SINCE
from polywire.protocols.kafka.fetch_sessions import FetchSession, SessionTopic
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.runtime.slices import AT_ONCE_MAX

if cython.compiled:
    from cython.cimports.polywire.protocols.kafka.fetch_responses import Entry
    from cython.cimports.polywire.protocols.kafka.fetching import Fetching
else:
    from polywire.protocols.kafka.fetch_responses import Entry
    from polywire.protocols.kafka.fetching import Fetching

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import FetchRequest, FetchResponse

BEGINNING: Final = 0  # epoch of a request that opens a session
SESSIONLESS: Final = -1  # epoch of a request without a session, or that closes its session
_FETCH: Final = Api.FETCH  # read for every request; a module constant is ten times as fast as an attribute
_NONE: Final = WireError.NONE


def fetch(session: KafkaSession, answer: Answer, request: FetchRequest, /) -> FetchResponse | None:
    fetch_session = session.fetch_session
    if fetch_session is not None and (fetch_session.is_over or fetch_session.number != request.session_id):
        fetch_session = None
    names_ids = answer.request.version >= IDS_SINCE
    if request.session_epoch not in (BEGINNING, SESSIONLESS):
        error = _session_error(fetch_session, request, names_ids=names_ids)
        if error is not _NONE:
            return schema.response(_FETCH)(error=error, responses=[])
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
    return _NONE if fetch_session.names_ids == names_ids else WireError.FETCH_SESSION_TOPIC_ID_ERROR


def _open(session: KafkaSession, *, names_ids: bool) -> FetchSession | None:
    """End the connection's fetch session, and open a new one. Return None if the listener has too many."""
    if session.fetch_session is not None:
        session.fetch_session.end()
    session.fetch_session = session.shared.fetch_sessions.open(names_ids=names_ids)
    return session.fetch_session


@cython.cclass
class IncrementalFetching(Fetching):
    """A request in a fetch session.

    It names only changed partitions; the response has only partitions with new data or state.
    """

    _fetch_session: Any
    _found: dict[SessionTopic, Any]
    _refused: list[Any]
    _topic_entries: dict[SessionTopic, Any]

    def __init__(
        self, session: KafkaSession, answer: Answer, request: FetchRequest, fetch_session: FetchSession
    ) -> None:
        super().__init__(session, answer, request, None)
        self._fetch_session = fetch_session
        self._found = {}  # topics that were checked, or why they cannot be read
        self._refused = []  # entries of partitions that cannot be read
        self._topic_entries = {}  # entries of the response

    def begin(self, request: FetchRequest) -> None:
        """Apply the request's changes to the session, then read its partitions that are ready."""
        self._with_pauses(self._change(request), self._read_ready, AT_ONCE_MAX)

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
            self._answer.ok(schema.response(_FETCH)(error=WireError.FETCH_SESSION_ID_NOT_FOUND, responses=[]))
            return
        if fetch_session.is_empty:
            fetch_session.end()  # the response reports the error
        fetch_session.has_new_ready = False
        self._entries, self._refused, self._found = [], [], {}
        self._with_pauses(self._check_ready(), self.run, AT_ONCE_MAX)

    def _check_ready(self) -> Iterator[None]:
        for wanted in list(self._fetch_session.ready):
            topic: SessionTopic = wanted.topic
            if topic not in self._found:
                self._found[topic] = self._find(topic.name, topic.topic_id)
            entry: Entry = Entry(wanted.partition, wanted.fetch_offset, wanted.partition_max_bytes, wanted)
            self._check(self._found[topic], topic.topic_id, wanted.current_leader_epoch, entry)
            if entry.error:
                self._refused.append(entry)
            yield None

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _read(self, entry: Entry) -> cython.bint:
        if not Fetching._read(self, entry):
            return False
        if not entry.error and entry.offset == entry.high_watermark:
            self._register(entry)
            self._fetch_session.mark_read(entry.in_session)
        return True

    @cython.cfunc
    def _register(self, entry: Entry) -> Any:
        """Have the session notified of the partition's next record.

        Raises BrokerError if the partition cannot be read.
        """
        wanted = entry.in_session
        if wanted.wait is None:
            wanted.wait = self._broker.wait(entry.partition, entry.high_watermark, wanted.woken)

    # Waiting

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _has_ended(self, wake: Callable[[], None]) -> cython.bint:
        self._fetch_session.ready_callback = wake
        return bool(self._fetch_session.has_new_ready)

    @cython.cfunc
    def _wait_for(self, entry: Entry, wake: Callable[[], None]) -> Any:
        self._register(entry)

    def _woken(self, ticket: int) -> None:
        if ticket != self._ticket:
            return
        self._ticket += 1
        self._stop_waiting()
        self._number = self._bytes = 0
        self._read_ready()

    @cython.cfunc
    def _stop_waiting(self) -> Any:
        self._fetch_session.ready_callback = None
        Fetching._stop_waiting(self)

    # The response

    @cython.cfunc
    def _finish(self) -> Any:
        self._ticket += 1
        fetch_session = self._fetch_session
        session_id = 0 if fetch_session.is_over else fetch_session.number
        self._with_pauses(self._add_changed(), partial(self._send, session_id), AT_ONCE_MAX)

    def _add_changed(self) -> Iterator[None]:
        """Add partitions to the response that have new data or a new state."""
        entry: Entry
        for entry in self._entries:
            wanted = entry.in_session
            if len(entry.records):
                self._fetch_session.move_back(wanted)
            if len(entry.records) or entry.error or (wanted.end, wanted.start) != (entry.high_watermark, entry.start):
                self._add_entry(entry)
            yield None
        for entry in self._refused:
            self._add_entry(entry)
            yield None

    @cython.cfunc
    def _add_entry(self, entry: Entry) -> Any:
        wanted = entry.in_session
        topic: SessionTopic = wanted.topic
        entries = self._topic_entries.get(topic)
        if entries is None:
            entries = self._topic_entries[topic] = []
            self._topics.append((topic.name, topic.topic_id, entries))
        entries.append(entry)
        wanted.end, wanted.start = entry.high_watermark, entry.start
