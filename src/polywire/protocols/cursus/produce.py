"""Writing: batches, PUBLISH, and the bare envelope (spec: cursus#publish, cursus#batches, cursus#writing).

Promises: offsets follow the order of the requests whatever their acks; a batch is stored in the partition it names. A failed append is told.
Must not know: sockets, the layouts of batches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.batches import LEVELS, Batch, Status, acknowledged, read_batch
from polywire.protocols.cursus.idempotence import Rejected, already_stored, stored_id
from polywire.protocols.cursus.messages import (
    PADDING,
    Dialect,
    Refused,
    Request,
    decoded,
    encoded,
    no_command,
    quote,
    topic_word,
)
from polywire.protocols.cursus.policies import policy_of
from polywire.protocols.cursus.reply_buffers import Scratch
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import BARE, Command, CursusSession, Reply
from polywire.records.batch import from_spans
from polywire.records.columns import Column, RecordFlags
from polywire.records.memory import Lendable
from polywire.types import Buffer, KeyHash, Level

LONG_PIECE_BYTES: Final = 4 * 1024 * 1024  # of a batch that cannot be stored as one: others wait for a piece at a time
BUSY_LOOK_S: Final = 0.05  # between two tries while the log takes nothing: a journal slot is sealed in about that time
BUSY_WAIT_S: Final = 10.0  # how long a long batch waits for a log that takes nothing at all
PIECES_MAX: Final = 256  # stored batches of one request: runs of one producer, or parts of a very large one
SENT: Final = "\U0001f4e4"


@dataclass(frozen=True, slots=True)
class Run:
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


def take_batch(session: CursusSession, body: memoryview, scratch: Scratch, /) -> Storing | None:
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
    return Storing(session, body, scratch, batch, partition, runs)


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


def _runs(body: memoryview, scratch: Scratch, batch: Batch, *, idempotent: bool, piece_bytes_max: int) -> list[Run]:
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
    runs: list[Run] = []
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


def _nameless(body: memoryview, scratch: Scratch, count: int, piece_bytes_max: int) -> list[Run]:
    """Too many producers to keep apart: their names are not stored."""
    runs: list[Run] = []
    start = 0
    while start < count:
        stop = decoder.reach(body, scratch.spans, scratch.details, start, count, 0, piece_bytes_max)
        runs.append(Run(start, stop, b"", 0, 0, checked=False))
        start = stop
    return runs


def _run(body: memoryview, details: memoryview, start: int, stop: int, *, idempotent: bool, gaps: bool = False) -> Run:
    at = decoder.DETAIL_WORDS * start
    place = details[at + decoder.MESSAGE_PRODUCER_AT]
    producer = bytes(body[place : place + details[at + decoder.MESSAGE_PRODUCER_SIZE]])
    epoch = details[at + decoder.MESSAGE_EPOCH]
    sequence = details[at + decoder.SEQUENCE] & ((1 << 64) - 1)
    if epoch < 0:
        raise Refused("batch_decode_failed", f'reason="message[{start}] epoch must not be negative"')
    checked = idempotent and bool(producer) and sequence > 0
    return Run(start, stop, producer, epoch, sequence, checked=checked, gaps=gaps)


class Storing:
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
        scratch: Scratch,
        batch: Batch,
        partition: Partition,
        runs: Iterable[Run],
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
                self._failed(run, before, _append_failure(error))
                break
            self._busy_until = None
            if end is not None and now() >= end:
                return 0.0
        self._body = memoryview(b"")
        self._finish()
        return None

    def _may_wait(self, error: Busy, now: float) -> bool:
        """Whether to try again: a part of a large batch may have to wait until parts before it are sealed."""
        if self._busy_until is None:
            self._busy_until = now + BUSY_WAIT_S
        return error.code is ErrorCode.BUSY and now < self._busy_until

    def _sequence_before(self, run: Run) -> int:
        """Sequence of the message in front of a run, 0 for the first."""
        at = decoder.DETAIL_WORDS * (run.start - 1) + decoder.SEQUENCE
        return self._scratch.details[at] & ((1 << 64) - 1) if run.start else 0

    def _store(self, run: Run, before: int) -> None:
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

    def _stored(self, run: Run, before: int, count: int, offset: int, error: BrokerError | None) -> None:
        if error is not None:
            self._failed(run, before, _append_failure(error))
            return
        self._last_offset = max(self._last_offset, offset + count - 1)
        self._finish()

    def _repeated(self, run: Run, before: int, offset: int, error: BrokerError | None) -> None:
        """All of a run was stored before: that is success (spec: cursus#idempotent-producers), and it lies where it lay then, if that is
        still known."""
        del offset
        if error is not None:
            self._failed(run, before, _append_failure(error))
            return
        broker, last = self._session.state.broker, run.sequence + run.stop - run.start - 1
        offset = broker.producer_offset(self._partition, run.stored_as, epoch=run.epoch, sequence=last)
        self._last_offset = max(self._last_offset, offset)
        self._finish()

    def _failed(self, run: Run, before: int, error: str) -> None:
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


def _columns(body: memoryview, details: memoryview, run: Run, start: int, *, events: bool) -> dict[int, Lendable]:
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


def _append_failure(error: BrokerError) -> str:
    """The text of a failed append: the words by which clients know errors that end a producer."""
    if error.code is ErrorCode.PRODUCER_FENCED:
        return f"stale_producer_epoch {error.message}"
    if error.code is ErrorCode.SEQUENCE_GAP:
        return f"idempotency gap {error.message}"
    return error.message


# PUBLISH


def publish(session: CursusSession, request: Request, /) -> Reply | None:
    """PUBLISH of one record, in either of its dialects."""
    if request.dialect is not Dialect.MODERN:
        return _publish_legacy(session, request)
    name = request.need("topic")
    if request.message is None:
        raise Refused("missing_message", "command=PUBLISH")
    producer = encoded(request.need("producerId"))
    if name.startswith("__"):
        raise Refused("internal_topic_write_forbidden", f"topic={topic_word(name)}")
    idempotent = _truth(request)
    acks = request.options.get("acks", "1")
    if acks.lower() not in LEVELS:
        raise Refused("invalid_acks", f"value={acks}")
    sequence = _number(request, "seqNum", "ParseUint", low=0, high=2**64 - 1)
    epoch = _number(request, "epoch", "ParseInt", low=0, high=2**63 - 1)
    chosen = _number(request, "partition", "Atoi", low=-(2**63), high=2**63 - 1, usual=-1)
    topic = writable_topic(session, name)
    key = encoded(request.options.get("key", ""))
    partition = (
        find_partition(topic, chosen) if "partition" in request.options else choose_partition(session, topic, key)
    )
    if {"transactional_id", "txn", "transaction"} & request.options.keys():
        raise Refused("transaction_metadata_forbidden", "command=PUBLISH")
    checked = (idempotent or topic.settings.idempotent) and sequence > 0
    run = Run(0, 1, producer, epoch, sequence, checked=checked)
    Publishing(session, request, run, acks, partition).begin(key, request.message)
    return None


def choose_partition(session: CursusSession, topic: Topic, key: Buffer) -> Partition:
    """The partition of a record whose sender leaves the choice to the topic's partitioner (spec: cursus#partitioning)."""
    if key and policy_of(topic).partitioner == "hash_key":
        return session.state.broker.partition_of_key(topic, key, KeyHash.FNV64)
    turn = session.state.turns.get(topic.id, 0)
    session.state.turns[topic.id] = turn + 1
    partitions = topic.written_to()
    return partitions[turn % len(partitions)]


def _truth(request: Request) -> bool:
    given = request.options.get("isIdempotent", "false")
    if given.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise Refused("invalid_is_idempotent", f"value={given}")
    return given.lower() in ("true", "1", "t")


def _number(request: Request, key: str, function: str, *, low: int, high: int, usual: int = 0) -> int:
    """A number, or the error of the function that the reference reads it with."""
    given = request.options.get(key)
    if given is None:
        return usual
    code = {"seqNum": "invalid_seq_num", "epoch": "invalid_epoch", "partition": "invalid_partition"}[key]
    digits = given[1:] if given[:1] in ("+", "-") and function != "ParseUint" else given
    if not (digits.isascii() and digits.isdigit()):
        raise Refused(code, f"reason={quote(f'strconv.{function}: parsing {quote(given)}: invalid syntax')}")
    if len(digits) > 20 or not low <= int(given) <= high:
        raise Refused(code, f"reason={quote(f'strconv.{function}: parsing {quote(given)}: value out of range')}")
    return int(given)


class Publishing:
    """One record of PUBLISH on its way into the log. Invariant: answered once."""

    __slots__ = ("_acks", "_answer", "_partition", "_run", "_session")

    def __init__(self, session: CursusSession, request: Request, run: Run, acks: str, partition: Partition) -> None:
        self._session = session
        self._run = run
        self._acks = acks.lower()
        self._partition = partition
        self._answer: Answer = session.later(request.dialect)

    def begin(self, key: bytes, value: bytes) -> None:
        """Hand the record to the broker, unless it is stored already."""
        run, level = self._run, LEVELS[self._acks]
        try:
            stored = 0
            if run.checked:
                stored = already_stored(
                    self._session.state.broker.producer_last(self._partition, run.stored_as),
                    producer=decoded(run.stored_as),
                    epoch=run.epoch,
                    first=run.sequence,
                    last=run.sequence,
                )
            if stored:
                self._session.state.broker.settle(level, self._repeated)
                return
            batch = one_record(key, value, run)
            by = self._session.caller
            self._session.state.broker.produce(self._partition, batch, by=by, level=level, done=self._stored)
        except Rejected as error:
            self._failed(str(error))
        except BrokerError as error:
            self._failed(_append_failure(error))

    def _stored(self, offset: int, error: BrokerError | None) -> None:
        if error is not None:
            self._failed(_append_failure(error))
        else:
            self._tell(offset)

    def _repeated(self, offset: int, error: BrokerError | None) -> None:
        self._stored(self._partition.log.next_offset - 1 if error is None else offset, error)

    def _tell(self, offset: int) -> None:
        run = self._run
        if self._acks == "0":
            self._answer.ok(b"OK")
            return
        self._answer.ok(
            acknowledged(
                Status.OK,
                last_offset=offset,
                epoch=run.epoch,
                producer=run.producer,
                first_sequence=run.sequence,
                last_sequence=run.sequence,
                leader=self._session.leader,
            )
        )

    def _failed(self, text: str) -> None:
        if self._acks == "0":
            self._answer.ok(b"OK")  # the reference says so even then (spec: cursus#publish)
            return
        reason = f"acks={self._acks} publish failed: sync publish failed: {text}"
        self._answer.refuse(Refused("broker_error", f"reason={quote(reason)}"))


def one_record(key: bytes, value: bytes, run: Run | None = None) -> bytearray:
    """A batch of one record; an empty key is none."""
    spans = array("q", (0, len(key) or -1, len(key), len(value)))
    columns: dict[int, Lendable] = {}
    epoch, sequence = -1, 0
    if run is not None and run.producer:
        columns[Column.PRODUCER_ID] = run.stored_as
        sequence = run.sequence
        if run.checked or run.epoch > 0:
            epoch = run.epoch
        if epoch > 0 and not run.checked:
            columns[Column.SEQUENCES] = array("Q", (sequence,))
    return from_spans(key + value, spans, columns=columns, producer_epoch=epoch, base_sequence=sequence)


def _publish_legacy(session: CursusSession, request: Request) -> Reply | None:
    name = request.options.get("topic", "")
    if not name or request.message is None:
        raise Refused("missing_message", "command=PUBLISH", legacy="invalid PUBLISH syntax")
    return _publish_plain(session, name, request.message, encoded(f"{SENT} Published to '{topic_word(name)}'"))


def publish_bare(session: CursusSession, request: Request, /) -> Reply | None:
    """An envelope whose payload is no command (spec: cursus#envelope); the topic must exist, so that a typing error is no message."""
    name = request.options["topic"]
    assert request.message is not None, "a bare envelope has a payload"
    is_known = session.state.settings.bare_publish and session.state.broker.find_topic(name) is not None
    if not is_known or not request.message.strip(PADDING):
        told = no_command(request.message)
        raise Refused("malformed_input", "reason=missing_topic_or_payload", legacy=told)
    return _publish_plain(session, name, request.message, b"OK")


def _publish_plain(session: CursusSession, name: str, value: bytes, reply: bytes) -> Reply | None:
    """One record without a key; a repeat, where those are dropped, is answered as what it repeats."""
    topic = writable_topic(session, name)
    broker, repeats = session.state.broker, session.state.repeats
    answer = session.later(Dialect.LEGACY)
    answer.body = reply
    if repeats is None:
        partition = choose_partition(session, topic, b"")
        broker.produce(partition, one_record(b"", value), level=Level.WRITTEN, done=answer.done)
        return None
    digest = repeats.digest(topic.id, value)
    if repeats.has(digest):
        broker.settle(Level.WRITTEN, answer.done)
        return None
    partition = choose_partition(session, topic, b"")
    done = partial(repeats.stored, digest, answer.done)
    broker.produce(partition, one_record(b"", value), level=Level.WRITTEN, done=done)
    repeats.add(digest)
    return None


COMMANDS: Final[Mapping[str, Command]] = {
    "PUBLISH": Command(publish, (Action.PRODUCE,), pipelined=True),
    BARE: Command(publish_bare, (Action.PRODUCE,), alone=True, pipelined=True),
}
