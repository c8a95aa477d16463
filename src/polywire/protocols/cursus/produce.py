"""Append batches to the log (spec: cursus#batches, cursus#writing).

Offsets follow the order of requests, whatever their acks. A batch is stored in the partition that it names. It is
acknowledged even with acks 0, and the acknowledgement reports a failed append.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import partial
from itertools import chain
from math import inf
from typing import Final

import msgspec

from polywire.broker.owners import Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, ErrorCode, PeerError, Unavailable
from polywire.log.base import Completion
from polywire.protocols.cursus import decoder, repeated
from polywire.protocols.cursus.batches import LEVELS, Batch, Status, acknowledged, read_batch
from polywire.protocols.cursus.context import WIRE
from polywire.protocols.cursus.idempotence import (
    BUSY_RETRY_S,
    BUSY_WAIT_S,
    Checked,
    CheckedAppends,
    Rejected,
    already_stored,
    append_failure,
    stored_id,
)
from polywire.protocols.cursus.long_frame import PendingBatch
from polywire.protocols.cursus.messages import Dialect, Refused, decoded, topic_word
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.cursus.session import CursusSession
from polywire.records.batch import from_spans
from polywire.records.columns import Column, RecordFlags
from polywire.records.memory import Lendable
from polywire.types import Level

# size of the pieces in which a large batch is stored; other connections wait for one piece at a time
LONG_PIECE_BYTES: Final = 4 * 1024 * 1024
PIECES_MAX: Final = 256  # stored batches that one request may need: one per producer, or parts of a very large batch


class ProducerSpan(msgspec.Struct, frozen=True):
    """Consecutive messages of one producer, which are stored as one batch.

    Attributes:
        checked: whether duplicates of them are detected by their sequence numbers.
    """

    start: int
    stop: int
    producer: bytes
    epoch: int
    sequence: int
    checked: bool
    gaps: bool = False

    @property
    def stored_as(self) -> bytes:
        return stored_id(self.producer)


def writable_topic(session: CursusSession, name: str) -> Topic:
    """Return the topic of a write. If it does not exist, wait a while, because it may be about to be created.

    Raises Refused, or Pending if the request must be repeated later (spec: cursus#publish).
    """
    if name.startswith("__"):
        raise Refused(
            "internal_topic_write_forbidden",
            f"topic={topic_word(name)}",
            legacy=f"topic '{topic_word(name)}' does not exist",
        )
    found = session.state.broker.resource(name)
    session.state.guard.admit_topic(
        session, found, Action.PRODUCE
    )  # checked first, so that a client that may not write cannot find out whether the topic exists
    if isinstance(found, Topic):
        return found
    session.wait_for_topic(name)
    raise Refused("topic_not_found", f"topic={topic_word(name)}", legacy=f"topic '{topic_word(name)}' does not exist")


def find_partition(topic: Topic, number: int) -> Partition:
    if not 0 <= number < len(topic.partitions):
        raise Refused("partition_not_found", f"partition={number}")
    return topic.partitions[number]


# Batches


def take_batch(session: CursusSession, body: memoryview, scratch: ScratchArrays, /) -> PendingBatch | None:
    """Parse a batch frame and return the batch to store.

    If the batch is invalid, respond with the error and return None. Raises Pending if the request must be repeated
    later.
    """
    try:
        session.state.guard.admit_batch(session)
        batch = read_batch(body, scratch)
        topic = _checked_topic(session, batch)
        partition = find_partition(topic, batch.partition)
        piece_bytes_max = session.state.piece_bytes_max
        if len(body) > piece_bytes_max:
            piece_bytes_max = min(piece_bytes_max, LONG_PIECE_BYTES)
        idempotent = batch.idempotent or topic.settings.idempotent
        runs = _runs(body, scratch, batch, idempotent=idempotent, piece_bytes_max=piece_bytes_max)
    except Refused as error:
        session.later(Dialect.MODERN).refuse(error)
        return None
    if len(runs) > 1 and not session.broker.owns(partition):
        return ForwardedBatch(session, body, partition)
    repeated.learn(session, body, batch, partition)
    return BatchAppend(session, body, scratch, batch, partition, runs)


def _checked_topic(session: CursusSession, batch: Batch) -> Topic:
    if batch.topic.startswith("__"):
        raise Refused("internal_topic_write_forbidden", f"topic={topic_word(batch.topic)}")
    if batch.acks.lower() not in LEVELS:
        raise Refused("invalid_acks", f"value={batch.acks}")
    topic = writable_topic(session, batch.topic)
    if batch.count == 0:
        find_partition(topic, batch.partition)
        raise Refused("broker_error", 'reason="empty batch messages"')
    return topic


def _runs(
    body: memoryview, scratch: ScratchArrays, batch: Batch, *, idempotent: bool, piece_bytes_max: int
) -> list[ProducerSpan]:
    """Split the messages into batches to store, nearly always a single one. Raises Refused for an invalid batch."""
    details = scratch.details
    if (
        not batch.traits & decoder.MIXED
        and not (idempotent and batch.traits & decoder.GAPS)
        and len(body) <= piece_bytes_max
    ):
        gaps = bool(batch.traits & decoder.GAPS)
        return [_run(body, details, 0, batch.count, idempotent=idempotent, gaps=gaps)]
    spans = scratch.spans
    runs: list[ProducerSpan] = []
    start = 0
    while start < batch.count and len(runs) < PIECES_MAX:
        stop = decoder.reach(body, spans, details, start, batch.count, decoder.MIXED | decoder.GAPS, piece_bytes_max)
        runs.append(_run(body, details, start, stop, idempotent=idempotent))
        start = stop
    if start == batch.count:
        return runs
    if idempotent:
        raise Refused("batch_decode_failed", f'reason="more than {PIECES_MAX} runs of producers in one batch"')
    return _without_producers(body, scratch, batch.count, piece_bytes_max)


def _without_producers(
    body: memoryview, scratch: ScratchArrays, count: int, piece_bytes_max: int
) -> list[ProducerSpan]:
    """Split the messages into batches without producer ids, because they have too many different producers."""
    runs: list[ProducerSpan] = []
    start = 0
    while start < count:
        stop = decoder.reach(body, scratch.spans, scratch.details, start, count, 0, piece_bytes_max)
        runs.append(ProducerSpan(start, stop, b"", 0, 0, checked=False))
        start = stop
    return runs


def _run(
    body: memoryview, details: memoryview, start: int, stop: int, *, idempotent: bool, gaps: bool = False
) -> ProducerSpan:
    at = decoder.DETAIL_WORDS * start
    place = details[at + decoder.MESSAGE_PRODUCER_AT]
    producer = bytes(body[place : place + details[at + decoder.MESSAGE_PRODUCER_SIZE]])
    epoch = details[at + decoder.MESSAGE_EPOCH]
    sequence = details[at + decoder.SEQUENCE] & ((1 << 64) - 1)
    if epoch < 0:
        raise Refused("batch_decode_failed", f'reason="message[{start}] epoch must not be negative"')
    checked = idempotent and bool(producer) and sequence > 0
    return ProducerSpan(start, stop, producer, epoch, sequence, checked=checked, gaps=gaps)


def append_checked(
    session: CursusSession,
    partition: Partition,
    batch: bytearray,
    by: Caller,
    level: Level,
    then: Completion[Checked],
) -> None:
    """Append a batch of an idempotent producer to a partition of another process, which checks the sequences."""
    parts = session.state.parts
    assert parts is not None, "this broker has other processes"
    shard = parts.shard_of_topic(partition.topic)
    parts.call_part(shard, WIRE, CheckedAppends.append, partition, bytes(batch), level=level, by=by, then=then)


def close_if_lost(session: CursusSession, partition: Partition, error: BrokerError) -> None:
    """Close the connection if the process that owns a partition has ended: it is unknown whether a write was stored.

    A producer then sends its unanswered batches again, in order. After an error response, it would continue with the
    next batch.
    """
    if isinstance(error, Unavailable) and not session.broker.owns(partition) and not session.closed:
        session.output.fail(PeerError("the process that owns a topic has exited", fatal=True))


class ForwardedBatch:
    """A batch of several producers for a partition of another process. Implements ``PendingBatch``.

    The other process stores it as if the client had sent it there. It is forwarded when earlier batches were answered,
    because those are forwarded in another way and could arrive later.
    """

    __slots__ = ("_body", "_client", "_forward", "_partition", "_session")

    def __init__(self, session: CursusSession, body: memoryview, partition: Partition) -> None:
        forward = session.state.forward
        assert forward is not None, "this broker has other processes"
        self._forward = forward
        self._client = forward.client(session)
        self._session = session
        self._body = body
        self._partition = partition

    def store_at_once(self) -> bool:
        return False

    def store(self, end: float | None = None) -> float | None:
        session = self._session
        answer = session.later(Dialect.MODERN, blocking=True)
        try:
            self._forward.store(session, self._client, answer, self._partition, bytes(self._body))
        except Busy:  # too many bytes are on the way to the other process
            session.withdraw(answer)
            return BUSY_RETRY_S
        return None


class BatchAppend:
    """A batch that is being stored, and its acknowledgement. Implements ``PendingBatch``.

    It is acknowledged when all parts that were passed to the broker have completed. The first error is reported.
    """

    __slots__ = (
        "_answer",
        "_batch",
        "_body",
        "_busy_until",
        "_by",
        "_epoch",
        "_error",
        "_last_offset",
        "_level",
        "_partition",
        "_refused_at",
        "_runs",
        "_scratch",
        "_session",
        "_stored_to",
        "_waiting",
    )

    def __init__(
        self,
        session: CursusSession,
        body: memoryview,
        scratch: ScratchArrays,
        batch: Batch,
        partition: Partition,
        runs: Iterable[ProducerSpan],
    ) -> None:
        self._session = session
        self._by = session.caller
        self._body = body
        self._scratch = scratch
        self._runs = iter(runs)
        self._batch = batch
        self._partition = partition
        self._level = LEVELS[batch.acks.lower()]
        self._answer: Answer = session.later(Dialect.MODERN)
        self._last_offset = -1
        self._error = ""
        self._epoch = batch.last_epoch
        self._refused_at = batch.count  # index of the first message that was not stored
        self._stored_to = batch.last_sequence  # sequence of the message before it
        self._busy_until: float | None = None
        self._waiting = 1  # results to wait for; one of them is the end of the loop over the runs

    def store(self, end: float | None = None) -> float | None:
        """Append the batch's parts in order, until time ``end`` if given.

        Returns None when all were passed to the broker, otherwise the seconds until the next attempt. After a rejected
        part, nothing is stored. If ``end`` is given, a part is tried again while the log's write buffer is full.
        """
        now = self._session.state.broker.clock.monotonic
        for run in self._runs:
            if self._error:
                break
            self._waiting += 1
            before = self._sequence_before(run)
            try:
                self._store(run, before)
            except Rejected as error:
                self._failed(run, before, str(error))
                break
            except BrokerError as error:
                if end is not None and isinstance(error, Busy) and self._may_wait(error, now()):
                    self._waiting -= 1
                    self._runs = chain((run,), self._runs)
                    return BUSY_RETRY_S
                self._failed(run, before, append_failure(error))
                break
            self._busy_until = None
            if end is not None and now() >= end:
                return 0.0
        self._body = memoryview(b"")
        self._finish()
        return None

    def store_at_once(self) -> bool:
        """Append all parts now. Return False, without an effect, if the log's write buffer is full."""
        if self.store(inf) is None:
            return True
        if self._waiting == 1 and self._last_offset < 0:
            self._session.withdraw(self._answer)
            return False
        self.store()
        return True

    def _may_wait(self, error: Busy, now: float) -> bool:
        """Return whether to try again: parts of a large batch may have to wait until the log has written earlier ones."""
        if self._busy_until is None:
            self._busy_until = now + BUSY_WAIT_S
        return error.code is ErrorCode.BUSY and now < self._busy_until

    def _sequence_before(self, run: ProducerSpan) -> int:
        at = decoder.DETAIL_WORDS * (run.start - 1) + decoder.SEQUENCE
        return self._scratch.details[at] & ((1 << 64) - 1) if run.start else 0

    def _store(self, run: ProducerSpan, before: int) -> None:
        broker, scratch = self._session.state.broker, self._scratch
        start, sequence, stored = run.start, run.sequence, 0
        is_own = broker.owns(self._partition)
        if run.checked and is_own:
            stored = already_stored(
                broker.producer_last(self._partition, run.stored_as),
                producer=decoded(run.stored_as),
                epoch=run.epoch,
                first=sequence,
                last=sequence + run.stop - start - 1,
            )
        if stored == run.stop - start:
            broker.settle(self._level, partial(self._repeated, run, before))
            return
        start += stored
        columns = _columns(self._body, scratch.details, run, start, events=bool(self._batch.traits & decoder.EVENTS))
        has_epoch = run.checked or Column.SEQUENCES in columns
        batch = from_spans(
            self._body,
            scratch.spans[4 * start : 4 * run.stop],
            None,
            columns.pop(Column.RECORD_FLAGS, None),
            columns=columns,
            producer_epoch=run.epoch if has_epoch else -1,
            base_sequence=sequence + stored if run.producer else 0,
        )
        if run.checked and not is_own:
            append_checked(self._session, self._partition, batch, self._by, self._level, partial(self._checked, run))
            return
        done = partial(self._stored, run, before, run.stop - start)
        broker.produce(self._partition, batch, by=self._by, level=self._level, done=done)

    def _stored(self, run: ProducerSpan, before: int, count: int, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            close_if_lost(self._session, self._partition, offset)
            self._failed(run, before, append_failure(offset))
            return
        self._last_offset = max(self._last_offset, offset + count - 1)
        self._finish()

    def _checked(self, run: ProducerSpan, result: Checked | BrokerError) -> None:
        """Completion for a batch of one producer that another process has checked for duplicates."""
        if isinstance(result, BrokerError):
            self._stored(run, 0, 0, result)
        elif result.error:
            self._epoch = result.epoch if result.epoch >= 0 else self._epoch
            self._failed(run, 0, result.error)
        else:
            self._last_offset = result.offset if result.offset >= 0 else result.latest
            self._finish()

    def _repeated(self, run: ProducerSpan, before: int, result: int | BrokerError) -> None:
        """Report success for a duplicate (spec: cursus#idempotent-producers).

        The original offset is reported if it is known.
        """
        if isinstance(result, BrokerError):
            self._failed(run, before, append_failure(result))
            return
        broker, last = self._session.state.broker, run.sequence + run.stop - run.start - 1
        offset = broker.producer_offset(self._partition, run.stored_as, epoch=run.epoch, sequence=last)
        self._last_offset = max(self._last_offset, offset)
        self._finish()

    def _failed(self, run: ProducerSpan, before: int, error: str) -> None:
        if run.start < self._refused_at:
            self._refused_at, self._stored_to, self._error = run.start, before, error
        self._finish()

    def _finish(self) -> None:
        self._waiting -= 1
        if self._waiting:
            return
        batch = self._batch
        status, last_sequence, epoch = Status.OK, batch.last_sequence, self._epoch
        if self._error:
            status, last_sequence = Status.ERROR, batch.last_sequence
            broker, known = self._session.state.broker, None
            if broker.owns(self._partition):
                known = broker.producer_last(self._partition, stored_id(batch.last_producer))
            epoch = known[0] if known is not None else epoch  # a producer with an old epoch needs the current one
            if self._refused_at:
                status, last_sequence = Status.PARTIAL, self._stored_to
        last_offset = self._last_offset
        if last_offset < 0:  # nothing new was stored; a number is sent anyway, because clients accept only digits
            last_offset = 0 if status is Status.ERROR else self._partition.log.next_offset - 1
        self._answer.ok(
            acknowledged(
                status,
                last_offset=last_offset,
                epoch=epoch,
                producer=batch.last_producer,
                first_sequence=batch.first_sequence,
                last_sequence=last_sequence,
                leader=self._session.leader,
                error=self._error,
            )
        )


def _columns(
    body: memoryview, details: memoryview, run: ProducerSpan, start: int, *, events: bool
) -> dict[int, Lendable]:
    """Return the columns of messages that are stored as one batch, except keys and values.

    Sequence numbers are stored if they have gaps. They are also stored for a producer that is not checked, to retain
    its epoch. Without them, a batch with an epoch and consecutive sequence numbers would be checked for duplicates
    (decision 0101, ``broker.producers``).
    """
    columns: dict[int, Lendable] = {}
    count = run.stop - start
    if run.producer:
        columns[Column.PRODUCER_ID] = run.stored_as
        if run.gaps or (run.epoch > 0 and not run.checked):
            sequences = array("q", bytes(8 * count))
            decoder.pick(details, decoder.SEQUENCE, start, run.stop, sequences)
            columns[Column.SEQUENCES] = sequences
    if events:
        columns.update(_event_columns(body, details, start, run.stop))
    return columns


def _event_columns(body: memoryview, details: memoryview, start: int, stop: int) -> dict[int, Lendable]:
    """Return the columns of event fields; none if no message has any.

    Raises Rejected for an event type that is not UTF-8.
    """
    count = stop - start
    flags = bytearray(count)
    decoder.mark(details, start, stop, flags, RecordFlags.EVENT_SOURCED)
    if not any(flags):
        return {}
    type_offsets, types = decoder.texts(body, details, decoder.TYPE_AT, start, stop)
    metadata_offsets, metadata = decoder.texts(body, details, decoder.METADATA_AT, start, stop)
    versions, schemas = array("q", bytes(8 * count)), array("i", bytes(4 * count))
    decoder.pick(details, decoder.AGGREGATE_VERSION, start, stop, versions)
    decoder.pick(details, decoder.SCHEMA_VERSION, start, stop, schemas)
    if not decoder.is_text(type_offsets, types):
        raise Rejected("an event type is not valid UTF-8")
    columns: dict[int, Lendable] = {
        Column.EVENT_TYPE_OFFSETS: type_offsets,
        Column.EVENT_TYPE_BYTES: types,
        Column.EVENT_SCHEMA_VERSIONS: schemas,
        Column.AGGREGATE_VERSIONS: versions,
        Column.RECORD_FLAGS: flags,
    }
    if metadata:
        columns[Column.EVENT_METADATA_OFFSETS] = metadata_offsets
        columns[Column.EVENT_METADATA_BYTES] = metadata
    return columns
