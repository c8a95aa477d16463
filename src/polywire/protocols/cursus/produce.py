"""Writing batches into the log (spec: cursus#batches, cursus#writing).

Promises: offsets follow the order of the requests whatever their acks; a batch is stored in the partition it names. A failed append is told.
Must not know: sockets, the layouts of batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.batches import LEVELS, Batch, Status, acknowledged, read_batch
from polywire.protocols.cursus.idempotence import Rejected, already_stored, stored_id
from polywire.protocols.cursus.messages import (
    Dialect,
    Refused,
    decoded,
    topic_word,
)
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.scratch import ScratchArrays
from polywire.protocols.cursus.session import CursusSession
from polywire.records.batch import from_spans
from polywire.records.columns import Column, RecordFlags
from polywire.records.memory import Lendable

LONG_PIECE_BYTES: Final = 4 * 1024 * 1024  # of a batch that cannot be stored as one: others wait for a piece at a time
BUSY_LOOK_S: Final = 0.05  # between two tries while the log takes nothing: a journal slot is sealed in about that time
BUSY_WAIT_S: Final = 10.0  # how long a long batch waits for a log that takes nothing at all
PIECES_MAX: Final = 256  # stored batches of one request: runs of one producer, or parts of a very large one


@dataclass(frozen=True, slots=True)
class ProducerSpan:
    """Consecutive messages of one producer. producer: its id; ``stored_as`` is what the log knows it by. checked: whether its sequences are
    to be checked and remembered."""

    start: int
    stop: int
    producer: bytes
    epoch: int
    sequence: int
    checked: bool
    gaps: bool = False

    @property
    def stored_as(self) -> bytes:
        """The producer's id as the log keeps it."""
        return stored_id(self.producer)


def writable_topic(session: CursusSession, name: str) -> Topic:
    """The topic a record is written to; one that is about to be made is waited for (spec: cursus#publish).

    Raises Refused, or NotYet when the request is to be offered again.
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
    )  # first: who may not write there is not told whether it is there
    if isinstance(found, Topic):
        return found
    session.wait_for_topic(name)
    raise Refused("topic_not_found", f"topic={topic_word(name)}", legacy=f"topic '{topic_word(name)}' does not exist")


def find_partition(topic: Topic, number: int) -> Partition:
    """A partition that exists. Raises Refused ``partition_not_found``."""
    if not 0 <= number < len(topic.partitions):
        raise Refused("partition_not_found", f"partition={number}")
    return topic.partitions[number]


# Batches


def take_batch(session: CursusSession, body: memoryview, scratch: ScratchArrays, /) -> BatchAppend | None:
    """A batch frame, to be stored; None when something is wrong with it, which is answered in its place. Raises NotYet."""
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
    """The stored batches that a received one becomes; nearly always one. Raises Refused."""
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
    return _nameless(body, scratch, batch.count, piece_bytes_max)


def _nameless(body: memoryview, scratch: ScratchArrays, count: int, piece_bytes_max: int) -> list[ProducerSpan]:
    """Too many producers to keep apart: their names are not stored."""
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


class BatchAppend:
    """A batch on its way into the log, and its acknowledgement.

    Invariant: answered once, when all of its runs were handed over and none is waited for any more; the first error is told, and all that
    lies before ``_refused_at``, the first message that was not stored, is stored. ``_stored_to``: sequence of the message before it.
    """

    __slots__ = (
        "_answer",
        "_batch",
        "_body",
        "_busy_until",
        "_by",
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
        self._refused_at = batch.count
        self._stored_to = batch.last_sequence
        self._busy_until: float | None = None
        self._waiting = 1

    def store(self, end: float | None = None) -> float | None:
        """Hand runs to the broker in order, until ``end`` if that is told; None once it has all of them, else in how many seconds to go on.

        What comes behind one that is refused is not stored; where ``end`` is told, a broker that is busy is waited for."""
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
                    return BUSY_LOOK_S
                self._failed(run, before, append_failure(error))
                break
            self._busy_until = None
            if end is not None and now() >= end:
                return 0.0
        self._body = memoryview(b"")
        self._finish()
        return None

    def store_at_once(self) -> bool:
        """Hand everything to the broker now; False where the log takes nothing just now: then nothing is stored, and nobody answered."""
        if self.store(inf) is None:
            return True
        if self._waiting == 1 and self._last_offset < 0:
            self._session.withdraw(self._answer)
            return False
        self.store()
        return True

    def _may_wait(self, error: Busy, now: float) -> bool:
        """Whether to try again: a part of a large batch may have to wait until parts before it are sealed."""
        if self._busy_until is None:
            self._busy_until = now + BUSY_WAIT_S
        return error.code is ErrorCode.BUSY and now < self._busy_until

    def _sequence_before(self, run: ProducerSpan) -> int:
        """Sequence of the message in front of a run, 0 for the first."""
        at = decoder.DETAIL_WORDS * (run.start - 1) + decoder.SEQUENCE
        return self._scratch.details[at] & ((1 << 64) - 1) if run.start else 0

    def _store(self, run: ProducerSpan, before: int) -> None:
        broker, scratch = self._session.state.broker, self._scratch
        start, sequence, stored = run.start, run.sequence, 0
        if run.checked:
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
        kept = run.checked or Column.SEQUENCES in columns
        batch = from_spans(
            self._body,
            scratch.spans[4 * start : 4 * run.stop],
            None,
            columns.pop(Column.RECORD_FLAGS, None),
            columns=columns,
            producer_epoch=run.epoch if kept else -1,
            base_sequence=sequence + stored if run.producer else 0,
        )
        done = partial(self._stored, run, before, run.stop - start)
        broker.produce(self._partition, batch, by=self._by, level=self._level, done=done)

    def _stored(self, run: ProducerSpan, before: int, count: int, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            self._failed(run, before, append_failure(offset))
            return
        self._last_offset = max(self._last_offset, offset + count - 1)
        self._finish()

    def _repeated(self, run: ProducerSpan, before: int, result: int | BrokerError) -> None:
        """All of a run was stored before: that is success (spec: cursus#idempotent-producers), and it lies where it lay then, if that is
        still known."""
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
        status, last_sequence, epoch = Status.OK, batch.last_sequence, batch.last_epoch
        if self._error:
            status, last_sequence = Status.ERROR, batch.last_sequence
            known = self._session.state.broker.producer_last(self._partition, stored_id(batch.last_producer))
            epoch = known[0] if known is not None else epoch  # what a producer that is behind has to know
            if self._refused_at:
                status, last_sequence = Status.PARTIAL, self._stored_to
        last_offset = self._last_offset
        if last_offset < 0:  # nothing new was stored; clients read digits only
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
    """What a run has beside keys and values.

    Sequences are written out when they have gaps, and to keep the epoch of a producer that is not checked: a stored batch with an epoch
    and consecutive sequences takes part in idempotence (decision 0001, ``broker.producers``).
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
    """The event fields of messages, in columns of their own; none when no message has any. Raises Rejected for a type that is no UTF-8."""
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


def append_failure(error: BrokerError) -> str:
    """The text of a failed append: the words by which clients know errors that end a producer."""
    if error.code is ErrorCode.PRODUCER_FENCED:
        return f"stale_producer_epoch {error.message}"
    if error.code is ErrorCode.SEQUENCE_GAP:
        return f"idempotency gap {error.message}"
    return error.message
