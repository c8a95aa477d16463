"""Append one record: PUBLISH, and messages (envelopes) without a command (spec: cursus#publish, cursus#envelope).

Offsets follow the order of requests, whatever their acks. With acks 0, the response is OK even if the append fails.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Final

from polywire.broker.api import Pending
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion
from polywire.protocols.cursus.batches import LEVELS, Status, acknowledged
from polywire.protocols.cursus.idempotence import (
    BUSY_RETRY_S,
    BUSY_WAIT_S,
    Checked,
    Rejected,
    already_stored,
    append_failure,
)
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
from polywire.protocols.cursus.produce import (
    ProducerSpan,
    append_checked,
    close_if_lost,
    find_partition,
    writable_topic,
)
from polywire.protocols.cursus.reply_slots import Answer
from polywire.protocols.cursus.session import BARE, Command, CursusSession, Reply
from polywire.records.batch import from_spans
from polywire.records.columns import Column
from polywire.records.memory import Lendable
from polywire.types import Buffer, KeyHash, Level

SENT: Final = "\U0001f4e4"


def publish(session: CursusSession, request: Request, /) -> Reply | None:
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
    chosen = _number(request, "partition", "Atoi", low=-(2**63), high=2**63 - 1, default=-1)
    topic = writable_topic(session, name)
    key = encoded(request.options.get("key", ""))
    partition = (
        find_partition(topic, chosen) if "partition" in request.options else choose_partition(session, topic, key)
    )
    if {"transactional_id", "txn", "transaction"} & request.options.keys():
        raise Refused("transaction_metadata_forbidden", "command=PUBLISH")
    checked = (idempotent or topic.settings.idempotent) and sequence > 0
    run = ProducerSpan(0, 1, producer, epoch, sequence, checked=checked)
    PublishAppend(session, request, run, acks, partition).begin(key, request.message)
    return None


def choose_partition(session: CursusSession, topic: Topic, key: Buffer) -> Partition:
    """Choose a partition by the key or round-robin, depending on the topic's partitioner (spec: cursus#partitioning)."""
    if key and policy_of(topic).partitioner == "hash_key":
        return session.state.broker.partition_of_key(topic, key, KeyHash.FNV64)
    number = session.state.round_robin.get(topic.id, 0)
    session.state.round_robin[topic.id] = number + 1
    partitions = topic.written_to()
    return partitions[number % len(partitions)]


def _truth(request: Request) -> bool:
    given = request.options.get("isIdempotent", "false")
    if given.lower() not in ("true", "false", "1", "0", "t", "f"):
        raise Refused("invalid_is_idempotent", f"value={given}")
    return given.lower() in ("true", "1", "t")


def _number(request: Request, key: str, function: str, *, low: int, high: int, default: int = 0) -> int:
    """Return a number of the request. Raises Refused with the error text of the original broker's parser."""
    given = request.options.get(key)
    if given is None:
        return default
    code = {"seqNum": "invalid_seq_num", "epoch": "invalid_epoch", "partition": "invalid_partition"}[key]
    digits = given[1:] if given[:1] in ("+", "-") and function != "ParseUint" else given
    if not (digits.isascii() and digits.isdigit()):
        raise Refused(code, f"reason={quote(f'strconv.{function}: parsing {quote(given)}: invalid syntax')}")
    if len(digits) > 20 or not low <= int(given) <= high:
        raise Refused(code, f"reason={quote(f'strconv.{function}: parsing {quote(given)}: value out of range')}")
    return int(given)


class PublishAppend:
    """A record that is being appended, and the response."""

    __slots__ = ("_acks", "_answer", "_partition", "_run", "_session")

    def __init__(
        self, session: CursusSession, request: Request, run: ProducerSpan, acks: str, partition: Partition
    ) -> None:
        self._session = session
        self._run = run
        self._acks = acks.lower()
        self._partition = partition
        self._answer: Answer = session.later(request.dialect)

    def begin(self, key: bytes, value: bytes) -> None:
        """Append the record, unless it is a duplicate."""
        run, level, by = self._run, LEVELS[self._acks], self._session.caller
        try:
            stored = 0
            if run.checked and not self._session.broker.owns(self._partition):
                batch = one_record(key, value, run)
                append_checked(self._session, self._partition, batch, by, level, self._checked)
                return
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
            append(self._session, self._partition, batch, by=by, level=level, done=self._stored)
        except Rejected as error:
            self._failed(str(error))
        except BrokerError as error:
            self._failed(append_failure(error))

    def _checked(self, result: Checked | BrokerError) -> None:
        """Completion of a record that another process has checked for duplicates."""
        if isinstance(result, BrokerError):
            self._stored(result)
        elif result.error:
            self._failed(result.error)
        else:
            self._stored(result.offset if result.latest < 0 else result.latest)

    def _stored(self, offset: int | BrokerError) -> None:
        if isinstance(offset, BrokerError):
            close_if_lost(self._session, self._partition, offset)
            self._failed(append_failure(offset))
        else:
            self._respond(offset)

    def _repeated(self, result: int | BrokerError) -> None:
        self._stored(result if isinstance(result, BrokerError) else self._partition.log.next_offset - 1)

    def _respond(self, offset: int) -> None:
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
            self._answer.ok(b"OK")  # the original broker replies OK even after a failure (spec: cursus#publish)
            return
        reason = f"acks={self._acks} publish failed: sync publish failed: {text}"
        self._answer.refuse(Refused("broker_error", f"reason={quote(reason)}"))


def append(
    session: CursusSession,
    partition: Partition,
    batch: bytearray,
    *,
    by: Caller = NO_CALLER,
    level: Level,
    done: Completion[int],
) -> None:
    """Append a batch.

    Raises Pending while the log's write buffer is full, for at most ``BUSY_WAIT_S``. Also raises the broker's errors.
    """
    broker = session.state.broker
    try:
        broker.produce(partition, batch, by=by, level=level, done=done)
    except Busy as error:
        if error.code is not ErrorCode.BUSY:
            raise
        now, until = broker.clock.monotonic(), session.busy_until
        session.busy_until = until = now + BUSY_WAIT_S if until is None else until
        if now >= until:
            session.busy_until = None
            raise
        raise Pending("space in the log", partial(broker.loop.call_later, BUSY_RETRY_S)) from None
    session.busy_until = None


def one_record(key: bytes, value: bytes, run: ProducerSpan | None = None) -> bytearray:
    """Return a batch of one record. An empty key means no key."""
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
    """Append the payload of an envelope without a command (spec: cursus#envelope).

    The topic must exist, because a mistyped command must not be published.
    """
    name = request.options["topic"]
    assert request.message is not None, "a bare envelope has a payload"
    is_known = session.state.settings.bare_publish and session.state.broker.find_topic(name) is not None
    if not is_known or not request.message.strip(PADDING):
        legacy = no_command(request.message)
        raise Refused("malformed_input", "reason=missing_topic_or_payload", legacy=legacy)
    return _publish_plain(session, name, request.message, b"OK")


def _publish_plain(session: CursusSession, name: str, value: bytes, reply: bytes) -> Reply | None:
    """Append one record without a key.

    If duplicate payloads are dropped, a duplicate gets the response of the original.
    """
    topic = writable_topic(session, name)
    broker, repeats = session.state.broker, session.state.repeats
    answer = session.later(Dialect.LEGACY)
    answer.body = reply
    if repeats is None:
        partition = choose_partition(session, topic, b"")

        def done(result: int | BrokerError) -> None:
            if isinstance(result, BrokerError):
                close_if_lost(session, partition, result)
            answer.done(result)

        append(session, partition, one_record(b"", value), level=Level.WRITTEN, done=done)
        return None
    digest = repeats.digest(topic.id, value)
    if repeats.has(digest):
        broker.settle(Level.WRITTEN, answer.done)
        return None
    partition = choose_partition(session, topic, b"")
    stored = partial(repeats.stored, digest, answer.done)
    append(session, partition, one_record(b"", value), level=Level.WRITTEN, done=stored)
    repeats.add(digest)
    return None


COMMANDS: Final = (
    Command("PUBLISH", publish, (Action.PRODUCE,), pipelined=True),
    Command(BARE, publish_bare, (Action.PRODUCE,), alone=True, pipelined=True),
)
