"""Requests about share groups in the `polywire` protocol: work queues (spec: polywire#queues).

* A member is known by its id. Its records are released when the last connection closes that acquired some for it.
* The response to a change is sent when the change is in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

import cython

from polywire.broker.groups.dead_letters import REASON_BYTES_MAX
from polywire.broker.groups.share import batches_of
from polywire.broker.permissions import Action
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.log.base import Read
from polywire.protocols.polywire import messages
from polywire.protocols.polywire.arguments import check_name, partition_of
from polywire.protocols.polywire.codec import ANSWER_BYTES_MAX
from polywire.protocols.polywire.errors import failure_of
from polywire.protocols.polywire.fetch import WAIT_MS_MAX
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.polywire.replies import LongAnswer, ReplyOwner
from polywire.protocols.runtime.acquiring import chosen
from polywire.records.columns import BatchHeader
from polywire.records.header import read_header, walk
from polywire.types import Outcome

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.acquiring import Acquiring
else:
    from polywire.protocols.runtime.acquiring import Acquiring

if TYPE_CHECKING:
    from polywire.broker.topics import Partition, Topic
    from polywire.protocols.polywire.context import PolywireBroker

RECORDS_MAX: Final = 10_000  # records of one response
RUNS_MAX: Final = 10_000  # acknowledgements of one request
DELAY_MS_MAX: Final = 30 * 86_400_000  # longest delay of a released record
QUEUES_MAX: Final = 1_000  # entries of one response
OFFSETS_MAX: Final = 2**63 - 1  # offsets are below it, so the one after the last is a signed 64-bit number, too
_OUTCOME_MIN: Final = int(Outcome.GAP)  # plain integers, because they are compared with every entry
_OUTCOME_MAX: Final = int(Outcome.RENEW)
_ACQUIRE: Final = Verb.ACQUIRE  # read for every request; a module constant is ten times as fast as an attribute
_ACKNOWLEDGE: Final = Verb.ACKNOWLEDGE
_Batches = list[tuple[BatchHeader, memoryview]]
_Refused = tuple[int, messages.Failure]
"""Index and error of a refused entry."""


def acquire(session: ReplyOwner, correlation: int, request: messages.Acquire, _: memoryview) -> None:
    """ACQUIRE: acknowledge records, then acquire others. Raises Invalid for malformed entries."""
    check_name("group", request.group)
    check_name("member", request.member)
    topic = session.broker.topic(request.name)
    parts = _parts(request.runs) if request.runs else None
    reading: QueueReading = QueueReading(session, correlation, request, topic)
    session.share(request.group, request.member, reading)
    session.owe()
    if parts:
        reading.acknowledge(parts)
    numbers = list(range(len(topic.partitions)))
    turn = next(session.round_robin) % max(len(numbers), 1)
    reading.read(numbers[turn:] + numbers[:turn])


@cython.cclass
class QueueReading(Acquiring):
    """An ACQUIRE request in progress. A partition is identified by its number."""

    _correlation: cython.longlong
    _error: Any
    _partitions: dict[int, messages.AcquiredPartition]
    _payload: dict[int, bytes]
    _refused: list[_Refused]
    _request: Any
    _session: Any
    _topic: Any

    def __init__(self, session: ReplyOwner, correlation: int, request: messages.Acquire, topic: Topic) -> None:
        bytes_max = ANSWER_BYTES_MAX if request.bytes_max < 0 else min(request.bytes_max, ANSWER_BYTES_MAX)
        super().__init__(
            session.broker,
            group=request.group,
            member=request.member,
            by=session.admission.caller,
            records_max=min(max(request.records_max, 1), RECORDS_MAX),
            bytes_max=bytes_max,
            wait_s=min(max(request.wait_ms, 0), WAIT_MS_MAX) / 1000,
        )
        self._session = session
        self._correlation = correlation
        self._request = request
        self._topic = topic
        self._partitions = {}
        self._payload = {}
        self._error = None
        self._refused = []

    @cython.ccall
    def acknowledge(self, parts: Any) -> Any:
        """Execute the acknowledgements of the request, which then responds without waiting for records."""
        self.must_respond = True
        self.expect()
        acknowledging = _Acknowledging(self._session, self._request, self._topic, self._acknowledged)
        self.acquires = not acknowledging.execute(parts)

    def _acknowledged(self, refused: list[_Refused]) -> None:
        self._refused = refused
        self.count()

    @cython.ccall
    def find(self, place: Any) -> Any:
        return partition_of(self._topic, place)

    def encode(
        self, read: Read, partition: Partition, offset: int, offset_end: int, *, bytes_max: int
    ) -> tuple[object, int]:
        batches: _Batches = []
        first: cython.longlong = offset
        limit: cython.longlong = offset_end
        end: cython.longlong = offset
        left: cython.longlong = bytes_max
        next_offset: cython.longlong
        for chunk in read.chunks:
            for at in walk(chunk):
                header = read_header(chunk, at)
                next_offset = header.next_offset
                if next_offset <= first:
                    continue
                if batches and (header.length > left or header.base_offset >= limit):
                    return batches, min(end, limit)
                batches.append((header, chunk[at : at + header.length]))
                left -= header.length
                end = next_offset
        return batches, min(end, limit)

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def add(self, place: Any, records: Any, runs: Any) -> cython.longlong:
        parts = [chosen(header, batch, runs) for header, batch in records]
        payload = b"".join([part for part in parts if part is not None])
        self._partitions[place] = messages.AcquiredPartition(place, list(runs), len(payload))
        self._payload[place] = payload
        return len(payload)

    @cython.ccall
    def refuse(self, place: Any, error: Any) -> Any:
        self._error = error.with_traceback(None)
        self._partitions.pop(place, None)
        self._payload.pop(place, None)

    @cython.ccall
    def respond(self) -> Any:
        if self._error is not None and not self._partitions and not self._request.runs:
            self._session.respond_error(_ACQUIRE, self._correlation, self._error)
            return
        lock_ms = self._broker.shares.directory.settings(self.group).lock_ms
        head = messages.Acquired(lock_ms, list(self._partitions.values()), self._refused)
        payload = b"".join([self._payload[partition.partition] for partition in head.partitions])
        self._session.respond(_ACQUIRE, self._correlation, head, payload)


def acknowledge(session: ReplyOwner, correlation: int, request: messages.Acknowledge, _: memoryview) -> None:
    """ACKNOWLEDGE: accept, release, reject or renew records. Raises Invalid for malformed entries."""
    topic = session.broker.topic(request.name)
    parts = _parts(request.runs)
    session.owe()

    def respond(refused: list[_Refused]) -> None:
        session.respond(_ACKNOWLEDGE, correlation, messages.Acknowledged(refused))

    _Acknowledging(session, request, topic, respond).execute(parts)


def _parts(runs: Sequence[messages.AcknowledgedRun]) -> Sequence[range]:
    """Check entries, and divide their indexes: each part has one partition, ascending offsets and no overlap.

    Raises Invalid(INVALID_REQUEST).
    """
    if len(runs) > RUNS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many acknowledgements limit={RUNS_MAX}")
    found: list[Any] = []
    index: cython.Py_ssize_t
    start: cython.Py_ssize_t = 0
    partition: cython.longlong = 0
    end: cython.longlong = -1
    first: cython.longlong
    last: cython.longlong
    for index, run in enumerate(runs):
        first, last = run.first, run.last
        if not (
            0 <= first <= last < OFFSETS_MAX
            and 0 <= run.delay_ms <= DELAY_MS_MAX
            and _OUTCOME_MIN <= run.outcome <= _OUTCOME_MAX
        ):
            raise _invalid(run)
        if index and (first <= end or run.partition != partition):
            found.append(range(start, index))
            start = index
        end, partition = last, run.partition
    if runs:
        found.append(range(start, len(runs)))
    return found


@cython.cclass
class _Acknowledging:
    """The acknowledgements of a request in progress."""

    _is_long: cython.bint
    _left: cython.long
    _refused: list[_Refused]
    _request: Any
    _session: Any
    _then: Any
    _topic: Any

    def __init__(
        self,
        session: ReplyOwner,
        request: messages.Acquire | messages.Acknowledge,
        topic: Topic,
        then: Callable[[list[_Refused]], None],
    ) -> None:
        """``then`` is called with the refused entries, once the effect of the others is stored."""
        self._session = session
        self._request = request
        self._topic = topic
        self._then = then
        self._left = 1
        self._is_long = False
        self._refused = []

    @cython.ccall
    def execute(self, parts: Any) -> cython.bint:
        """Acknowledge the entries of each part together. Return whether this waits for dead letters."""
        for entries in parts:
            self._acknowledge(entries)
        self._count((), 0)
        return self._is_long

    @cython.cfunc
    def _acknowledge(self, entries: Any) -> Any:
        """Acknowledge these entries together. If that is refused, acknowledge each of them separately."""
        runs = self._request.runs
        batches = batches_of(
            [
                (run.first, run.last, (run.outcome,), run.delay_ms / 1000, run.reason[:REASON_BYTES_MAX])
                for run in map(runs.__getitem__, entries)
            ]
        )
        self._left += 1
        done = partial(self._count, entries)
        try:
            self._is_long |= self._session.broker.shares.acknowledge(
                self._request.group,
                partition_of(self._topic, runs[entries[0]].partition),
                self._request.member,
                batches,
                by=self._session.admission.caller,
                done=done,
            )
        except BrokerError as error:
            if len(entries) == 1:
                done(error)
                return
            for index in entries:
                self._acknowledge((index,))
            self._left -= 1

    def _count(self, entries: Sequence[int], result: int | BrokerError) -> None:
        """Note the result of some entries, and report the refused ones after the last."""
        if isinstance(result, BrokerError):
            failure = failure_of(result)
            self._refused += [(index, failure) for index in entries]
        self._left -= 1
        if not self._left:
            self._then(sorted(self._refused, key=_index))


def _index(refused: _Refused) -> int:
    return refused[0]


def _invalid(run: messages.AcknowledgedRun) -> Invalid:
    if _OUTCOME_MIN <= run.outcome <= _OUTCOME_MAX:
        message = f"acknowledgement is out of range first={run.first} last={run.last} delay_ms={run.delay_ms}"
    else:
        message = f"unknown outcome outcome={run.outcome}"
    return Invalid(ErrorCode.INVALID_REQUEST, message)


# Administration


def configure(session: ReplyOwner, correlation: int, request: messages.ConfigureQueue, _: memoryview) -> None:
    """CONFIGURE_QUEUE: change the named settings of a share group, and let it read the topic."""
    check_name("group", request.group)
    topic = session.broker.topic(request.name)
    done = _done(session, Verb.CONFIGURE_QUEUE, correlation)
    session.broker.shares.configure(request.group, topic, request.settings, by=session.admission.caller, done=done)
    session.owe()


def reset(session: ReplyOwner, correlation: int, request: messages.ResetQueue, _: memoryview) -> None:
    """RESET_QUEUE: continue at other offsets, for example to skip all records. The group must have no members."""
    topic = session.broker.topic(request.name)
    if request.offsets:
        offsets = {partition_of(topic, number): offset for number, offset in request.offsets.items()}
    else:
        offsets = {partition: partition.log.next_offset for partition in topic.partitions}
    done = _done(session, Verb.RESET_QUEUE, correlation)
    session.broker.shares.alter_offsets(request.group, offsets, by=session.admission.caller, done=done)
    session.owe()


def delete(session: ReplyOwner, correlation: int, request: messages.DeleteQueue, _: memoryview) -> None:
    topic = session.broker.topic(request.name)
    done = _done(session, Verb.DELETE_QUEUE, correlation)
    session.broker.shares.delete_topic(request.group, topic, by=session.admission.caller, done=done)
    session.owe()


def _done(session: ReplyOwner, verb: Verb, correlation: int) -> Callable[[int | BrokerError], None]:
    def done(result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            session.respond_error(verb, correlation, result)
        else:
            session.respond(verb, correlation, Head())

    return done


def list_queues(session: ReplyOwner, correlation: int, request: messages.AskQueues, _: memoryview) -> None:
    """QUEUES: list share groups by topic, sorted by topic and name. Raises Invalid for a malformed ``after``."""
    if request.after and len(request.after) != 2:
        raise Invalid(ErrorCode.INVALID_REQUEST, "after must contain a topic and a group")
    broker, by = session.broker, session.admission.caller
    after = tuple(request.after)
    names = [request.group] if request.group is not None else broker.shares.directory.names(by=by)
    keys = (
        (topic, name)
        for name in names
        if broker.shares.directory.exists(name, by=by)
        for topic in broker.shares.topics(name)
        if (topic, name) > after and session.admission.sees(broker.resource(topic), Action.GROUP_DESCRIBE)
    )
    found = nsmallest(QUEUES_MAX + 1, keys)
    entries = (_entry(broker, *key) for key in found[:QUEUES_MAX])
    LongAnswer(session, Verb.QUEUES, correlation).make(
        entries, lambda made: messages.QueueList(made, len(found) > QUEUES_MAX)
    )


def _entry(broker: PolywireBroker, topic_name: str, group: str) -> messages.QueueEntry | None:
    topic = broker.find_topic(topic_name)
    acquired: dict[str, int] = {}
    partitions: list[messages.QueuePartition] = []
    for partition in () if topic is None else topic.partitions:
        offsets = broker.shares.offsets(group, partition)
        if offsets is None:
            continue
        for member, count in offsets.acquired.items():
            acquired[member] = acquired.get(member, 0) + count
        held = sum(offsets.acquired.values())
        partitions.append(
            messages.QueuePartition(
                partition.number,
                offsets.start,
                offsets.end,
                max(partition.log.next_offset, offsets.end),
                offsets.unfinished - held - offsets.delayed,
                offsets.delayed + offsets.scheduled,
                held,
                offsets.next_due_ms or 0,
            )
        )
    view = broker.shares.members.view(group)
    for joined in () if view is None else view.members:
        if topic_name in joined.topics:
            acquired.setdefault(joined.id, 0)
    owner = broker.access.name_of(broker.shares.directory.owner(group))
    settings = dict(broker.shares.directory.stored_settings(group))
    return messages.QueueEntry(topic_name, group, acquired, partitions, settings, owner)
