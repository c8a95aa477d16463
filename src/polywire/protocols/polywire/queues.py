"""Requests about share groups in the `polywire` protocol: work queues (spec: polywire#queues).

* A member is known by its id. Its records are released when the connection closes that acquired them.
* The response to a change is sent when the change is in the journal.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING, Any, Final

from polywire.broker.groups.dead_letters import REASON_BYTES_MAX
from polywire.broker.groups.share import Batch
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
from polywire.protocols.runtime.acquiring import Acquiring
from polywire.records.columns import BatchHeader
from polywire.records.compression import expand_body
from polywire.records.header import read_header, walk
from polywire.records.reshape import keep
from polywire.records.rows import Rows
from polywire.types import Outcome

if TYPE_CHECKING:
    from polywire.broker.topics import Partition, Topic
    from polywire.protocols.polywire.context import PolywireBroker

RECORDS_MAX: Final = 10_000  # records of one response
RUNS_MAX: Final = 10_000  # entries of one ACKNOWLEDGE
DELAY_MS_MAX: Final = 30 * 86_400_000  # longest delay of a released record
QUEUES_MAX: Final = 1_000  # entries of one response
_Batches = list[tuple[BatchHeader, memoryview]]


def acquire(session: ReplyOwner, correlation: int, request: messages.Acquire, _: memoryview) -> None:
    check_name("group", request.group)
    check_name("member", request.member)
    topic = session.broker.topic(request.name)
    reading = QueueReading(session, correlation, request, topic)
    session.share(request.group, request.member, reading)
    session.owe()
    session.broker.commit()  # earlier records of this connection must be readable
    numbers = list(range(len(topic.partitions)))
    turn = next(session.round_robin) % max(len(numbers), 1)
    reading.read(numbers[turn:] + numbers[:turn])


class QueueReading(Acquiring[int]):
    """An ACQUIRE request in progress. A partition is identified by its number."""

    __slots__ = ("_correlation", "_error", "_partitions", "_payload", "_session", "_topic")

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
        self._session: Final = session
        self._correlation: Final = correlation
        self._topic: Final = topic
        self._partitions: dict[int, messages.AcquiredPartition] = {}
        self._payload: dict[int, bytes] = {}
        self._error: BrokerError | None = None

    def find(self, place: int) -> Partition:
        return partition_of(self._topic, place)

    def encode(self, read: Read, partition: Partition, offset: int, *, bytes_max: int) -> tuple[object, int]:
        batches: _Batches = []
        end, left = offset, bytes_max
        for chunk, at in ((part, position) for part in read.chunks for position in walk(part)):
            header = read_header(chunk, at)
            if header.next_offset <= offset:
                continue
            if batches and header.length > left:
                break
            batches.append((header, chunk[at : at + header.length]))
            left -= header.length
            end = header.next_offset
        return batches, end

    def add(self, place: int, records: Any, runs: Sequence[tuple[int, int, int]]) -> int:
        payload = b"".join(part for header, batch in records for part in _chosen(header, batch, runs))
        self._partitions[place] = messages.AcquiredPartition(place, list(runs), len(payload))
        self._payload[place] = payload
        return len(payload)

    def refuse(self, place: int, error: BrokerError) -> None:
        self._error = error.with_traceback(None)
        self._partitions.pop(place, None)
        self._payload.pop(place, None)

    def respond(self) -> None:
        if self._error is not None and not self._partitions:
            self._session.respond_error(Verb.ACQUIRE, self._correlation, self._error)
            return
        lock_ms = self._broker.shares.directory.settings(self.group).lock_ms
        head = messages.Acquired(lock_ms, list(self._partitions.values()))
        payload = b"".join(self._payload[partition.partition] for partition in head.partitions)
        self._session.respond(Verb.ACQUIRE, self._correlation, head, payload)


def _chosen(header: BatchHeader, batch: memoryview, runs: Sequence[tuple[int, int, int]]) -> Iterator[bytes]:
    """Yield a batch with those records of a stored batch that were acquired, if there are any."""
    base, end = header.base_offset, header.next_offset
    spans = [range(max(first, base), min(last + 1, end)) for first, last, _ in runs]
    spans = [span for span in spans if span]
    if not spans:
        return
    if len(spans) == 1 and len(spans[0]) == end - base:
        yield bytes(batch)
        return
    plain = expand_body(batch)
    if header.record_count == end - base:
        rows = array("i", [offset - base for span in spans for offset in span])
    else:
        found = Rows(plain)
        rows = array("i", [i for i in range(found.count) if any(found.offset(i) in span for span in spans)])
    if rows:
        yield bytes(keep(plain, rows, base_offset=base, base_address=header.base_address))


def acknowledge(session: ReplyOwner, correlation: int, request: messages.Acknowledge, _: memoryview) -> None:
    """ACKNOWLEDGE: accept, release, reject or renew records. Raises Invalid for malformed entries."""
    if len(request.runs) > RUNS_MAX:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"too many acknowledgements limit={RUNS_MAX}")
    topic = session.broker.topic(request.name)
    refused: list[tuple[int, messages.Failure]] = []
    left = 1

    def count(index: int, result: int | BrokerError) -> None:
        nonlocal left
        if isinstance(result, BrokerError):
            refused.append((index, failure_of(result)))
        left -= 1
        if not left:
            session.respond(
                Verb.ACKNOWLEDGE, correlation, messages.Acknowledged(sorted(refused, key=lambda one: one[0]))
            )

    for run in request.runs:
        _check_run(run)
    session.owe()
    for index, run in enumerate(request.runs):
        left += 1
        done = partial(count, index)
        try:
            session.broker.shares.acknowledge(
                request.group,
                partition_of(topic, run.partition),
                request.member,
                [Batch(run.first, run.last, (run.outcome,), run.delay_ms / 1000, run.reason[:REASON_BYTES_MAX])],
                by=session.admission.caller,
                done=done,
            )
        except BrokerError as error:
            done(error)
    count(-1, 0)


def _check_run(run: messages.AcknowledgedRun) -> None:
    if not 0 <= run.first <= run.last or not 0 <= run.delay_ms <= DELAY_MS_MAX:
        raise Invalid(
            ErrorCode.INVALID_REQUEST,
            f"acknowledgement is out of range first={run.first} last={run.last} delay_ms={run.delay_ms}",
        )
    if not Outcome.GAP <= run.outcome <= Outcome.RENEW:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"unknown outcome outcome={run.outcome}")


# Administration


def configure(session: ReplyOwner, correlation: int, request: messages.ConfigureQueue, _: memoryview) -> None:
    """CONFIGURE_QUEUE: change the named settings of a share group, which begins to read the topic if it does not yet."""
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
                offsets.delayed,
                held,
            )
        )
    view = broker.shares.members.view(group)
    for joined in () if view is None else view.members:
        if topic_name in joined.topics:
            acquired.setdefault(joined.id, 0)
    owner = broker.access.name_of(broker.shares.directory.owner(group))
    settings = dict(broker.shares.directory.stored_settings(group))
    return messages.QueueEntry(topic_name, group, acquired, partitions, settings, owner)
