"""The Produce request (spec: kafka#produce, kafka#refused-batches, kafka#idempotent-producers).

* The batch of a partition is stored completely or not at all. An error in one partition does not affect others.
* The response is sent when all batches have reached the durability level.
* Large batches are decompressed in a thread. A request for thousands of partitions is processed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, PeerError
from polywire.log.base import Read
from polywire.protocols.kafka import schema, transactions
from polywire.protocols.kafka.checks import REPEATED, check_records, produce_error, stamp_head
from polywire.protocols.kafka.compression import decode_batch, expand
from polywire.protocols.kafka.configs import produce_limits
from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES, BatchHead, Built, build, check_batch
from polywire.protocols.kafka.lookup import led_topic, missing_error, partition_of
from polywire.protocols.kafka.messages import Api, Codec, Refused, WireError
from polywire.protocols.kafka.replies import encode_in_slices
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession
from polywire.protocols.runtime.off_loop import LARGE_BYTES
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices
from polywire.records.batch import read_header
from polywire.types import Buffer, Level

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import ProduceRequest, ProduceResponse

    _Entry = ProduceResponse.Responses.Partitions
    _Batch = tuple[_Entry, Topic, Buffer | None, int]
    """The response's entry, the topic, the batch, and its size limit."""

ALL: Final = -1  # the value of acks for acks=all
LEVELS: Final = {0: Level.MEMORY, 1: Level.WRITTEN}

STEPS_AT_ONCE: Final = 16  # partitions that are stored between two checks of the time

Opened = tuple[BatchHead, Built] | Refused


def produce(session: KafkaSession, answer: Answer, request: ProduceRequest, /) -> None:
    Producing(session, answer, request).begin(request.topics)


class _Slices:
    """A request whose partitions are stored in slices. Implements ``Work``."""

    __slots__ = ("_release", "_slices")

    def __init__(self, slices: Slices[None], release: Callable[[], None]) -> None:
        self._slices = slices
        self._release = release

    def leave(self) -> None:
        self._slices.cancel()
        self._release()


class Producing:
    """A Produce request in progress. It is answered when all of its batches are stored or rejected."""

    __slots__ = (
        "_acks",
        "_answer",
        "_body",
        "_expanded_max",
        "_has_failed",
        "_is_wide",
        "_large",
        "_outstanding",
        "_refused",
        "_session",
        "_transactional_id",
    )

    def __init__(
        self, session: KafkaSession, answer: Answer, request: ProduceRequest, *, refused: Refused | None = None
    ) -> None:
        """``refused`` is the error for transactional batches; None if the request's transaction can be used."""
        self._refused: Final = refused
        self._session: Final = session
        self._answer: Final = answer
        self._acks: Final = request.acks
        self._transactional_id: Final = request.transactional_id
        self._large: Final[list[_Batch]] = []  # batches to decompress in a thread
        self._body: Final = schema.response(Api.PRODUCE)(responses=[])
        self._expanded_max = LARGE_BYTES  # bytes that may still be decompressed on the event loop
        self._has_failed = self._is_wide = False  # wide: the partitions are stored in slices
        self._outstanding = 1  # results to wait for; one of them is the end of the loop over the partitions

    # Partition by partition

    def begin(self, topics: Sequence[ProduceRequest.Topics]) -> None:
        self._with_pauses(self._store_each(topics), self._begin_large)

    def _with_pauses(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Run the steps, then call ``then``.

        After ``QUANTUM_S``, the remaining steps run in slices. Between these, other connections are served, but not
        this one.
        """
        session = self._session
        now = session.broker.clock.monotonic
        end = now() + QUANTUM_S
        for number, _ in enumerate(steps, 1):
            if number % STEPS_AT_ONCE == 0 and now() >= end:
                break
        else:
            then()
            return

        def done(made: list[None] | BrokerError) -> None:
            assert not isinstance(made, BrokerError), "errors are set in the partitions"
            then()

        self._is_wide = True
        release = session.output.pin() if session.work is None else session.work.leave
        session.work = _Slices(Slices(session.broker, steps, done), release)

    def _store_each(self, topics: Sequence[ProduceRequest.Topics]) -> Iterator[None]:
        """Check, decompress and store the batch of one partition in each step."""
        response = schema.response(Api.PRODUCE)
        for topic_request in topics:
            topic_entry = response.Responses(name=topic_request.name, topic_id=topic_request.topic_id, partitions=[])
            self._body.responses.append(topic_entry)
            for partition_request in topic_request.partitions:
                entry = response.Responses.Partitions(index=partition_request.index)
                topic_entry.partitions.append(entry)
                topic = self._topic_of(topic_request, partition_request, entry)
                if topic is not None:
                    self._store_batch(
                        (entry, topic, partition_request.records, produce_limits(topic.settings).bytes_max)
                    )
                yield None
            yield None

    def _topic_of(
        self, topic_request: ProduceRequest.Topics, partition_request: ProduceRequest.Topics.Partitions, entry: _Entry
    ) -> Topic | None:
        """Return the topic if the client may write to the partition.

        Otherwise, set the entry's error and return None.
        """
        if self._acks not in LEVELS and self._acks != ALL:
            self._refuse(entry, WireError.INVALID_REQUIRED_ACKS)
            return None
        try:
            topic = led_topic(self._session, Action.PRODUCE, topic_request.name, topic_request.topic_id)
            partition_of(topic, partition_request.index)
        except BrokerError as error:
            self._refuse(entry, missing_error(error, topic_request.topic_id), error.message)
            return None
        return topic

    def _store_batch(self, batch: _Batch) -> None:
        """Decompress and store a batch. A batch that takes long to decompress is added to ``_large`` instead."""
        entry, topic, records, bytes_max = batch
        try:
            head = check_batch(records, bytes_max=bytes_max)
            assert records is not None, "check_batch rejects a missing batch"
            source, start, stop = memoryview(records), BATCH_HEAD_BYTES, head.end
            if head.codec:
                expanded = self._expanded(source[start:stop], Codec(head.codec))
                if expanded is None:
                    self._large.append(batch)
                    return
                source, start, stop = memoryview(expanded), 0, len(expanded)
            self._store_or_refuse(entry, topic, (head, build(source, start, stop, head)))
        except Refused as refused:
            self._store_or_refuse(entry, topic, refused)

    def _expanded(self, source: memoryview, codec: Codec) -> Buffer | None:
        """Decompress a batch.

        Return None if it is too large to decompress on the event loop. Raises Refused for damaged bytes.
        """
        try:
            expanded = expand(source, codec, self._expanded_max)
        except Refused as refused:
            if refused.error is WireError.MESSAGE_TOO_LARGE:
                return None
            raise
        self._expanded_max -= len(expanded)
        return expanded

    def _begin_large(self) -> None:
        session = self._session
        if not self._large:
            self._resume_session()
            return
        release = session.output.pin() if session.work is None else session.work.leave
        session.work = session.shared.off_loop.put(self._decompress_large, self._opened, release)

    def _decompress_large(self) -> Sequence[Opened]:
        """Decompress the large batches. Called in the thread."""
        return [_open(records, bytes_max) for _, _, records, bytes_max in self._large]

    def _opened(self, opened: Sequence[Opened] | PeerError) -> None:
        if isinstance(opened, PeerError):
            self._session.fail(opened)
            return
        large = [(entry, topic) for entry, topic, _, _ in self._large]
        self._large.clear()  # this releases the views of the request's bytes
        self._with_pauses(self._store_opened(large, opened), self._resume_session)

    def _store_opened(self, large: Sequence[tuple[_Entry, Topic]], opened: Sequence[Opened]) -> Iterator[None]:
        for (entry, topic), found in zip(large, opened, strict=True):
            self._store_or_refuse(entry, topic, found)
            yield None

    def _resume_session(self) -> None:
        """Let the session handle its next request: all batches were passed to the broker."""
        self._count_result()
        if self._session.work is not None:
            self._session.end_work()

    def _store_or_refuse(self, entry: _Entry, topic: Topic, found: Opened) -> None:
        if isinstance(found, Refused):
            self._refuse(entry, found.error, found.message)
            return
        try:
            # the partition may have been deleted in the meantime
            self._store(entry, partition_of(topic, entry.index), topic, *found)
        except Refused as refused:
            self._refuse(entry, refused.error, refused.message)
        except BrokerError as error:
            self._refuse(entry, produce_error(error), error.message)

    def _store(self, entry: _Entry, partition: Partition, topic: Topic, head: BatchHead, built: Built) -> None:
        """Store the records of one partition. Raises Refused or BrokerError if they are not accepted."""
        broker = self._session.broker
        if head.is_transactional and self._transactional_id is None:
            raise Refused(
                WireError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
                "batch is transactional, but the request has no transactional id",
            )
        limits = produce_limits(topic.settings)
        check_records(topic, built, limits, broker.clock)
        if head.is_transactional and self._transactional_id is not None:
            self._stage(entry, partition, head, built.batch)
            return
        stamp_head(broker, partition, built.batch, head)
        level = self._session.shared.settings.acks_all if self._acks == ALL else LEVELS[self._acks]
        self._outstanding += 1
        stored = partial(self._stored, entry, partition)
        self._session.append_queue.produce(partition, built.batch, level, stored, by=self._session.caller)

    def _stage(self, entry: _Entry, partition: Partition, head: BatchHead, batch: bytearray) -> None:
        """Stage the records of one partition in the transaction.

        Raises Refused or BrokerError if they are not accepted.
        """
        id_, version = self._transactional_id, self._answer.request.version
        assert id_ is not None, "a transactional batch has a transactional id"
        if self._refused is not None:
            raise _without_traceback(self._refused)
        transactions.stage(self._session, id_, version, partition, head, batch, partial(self._staged, entry, partition))
        self._outstanding += 1

    def _staged(self, entry: _Entry, partition: Partition, result: int | BrokerError) -> None:
        """Set the result of staged records.

        The records get no offset before the commit (spec: kafka#base-offsets-in-transactions).
        """
        if isinstance(result, BrokerError):
            self._refuse(entry, produce_error(result), result.message)
        else:
            entry.log_start_offset = partition.log.first_offset
        self._count_result()

    def _stored(self, entry: _Entry, partition: Partition, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self._refuse(entry, produce_error(result), result.message)
        elif result < 0:
            self._refuse(entry, WireError.DUPLICATE_SEQUENCE_NUMBER, REPEATED)
        else:
            entry.base_offset = result
            entry.log_start_offset = partition.log.first_offset
            if self._acks and produce_limits(partition.topic.settings).has_times_of_append:
                self._read_append_time(entry, partition, result)
                return
        self._count_result()

    def _read_append_time(self, entry: _Entry, partition: Partition, offset: int) -> None:
        """Read the batch that was stored at ``offset``, because the response must have its append time."""
        timed = partial(self._set_append_time, entry)
        try:
            read = self._session.broker.fetch(partition, offset, bytes_max=1, then=timed)
        except BrokerError as error:
            timed(error)
        else:
            if isinstance(read, Read):
                timed(read)

    def _set_append_time(self, entry: _Entry, read: Read | BrokerError) -> None:
        if isinstance(read, Read):
            if read.chunks:
                entry.log_append_time_ms = read_header(read.chunks[0]).append_time_us // 1000
            read.pin.release()
        self._count_result()

    def _refuse(self, entry: _Entry, error: WireError, message: str | None = None) -> None:
        entry.error, entry.message = error, message
        self._has_failed = True

    def _count_result(self) -> None:
        self._outstanding -= 1
        if self._outstanding:
            return
        if self._acks and self._is_wide:
            encode_in_slices(self._session.broker, self._answer, self._body)
        elif self._acks:
            self._answer.ok(self._body)
        elif self._has_failed:
            self._session.refuse_silently()
        else:
            self._answer.nothing()


def _open(records: Buffer | None, bytes_max: int) -> Opened:
    try:
        return decode_batch(records, bytes_max=bytes_max)
    except Refused as refused:
        return _without_traceback(refused)


def _without_traceback(refused: Refused) -> Refused:
    """Remove the error's traceback. Its frames refer to the error, which would be a reference cycle."""
    return refused.with_traceback(None)
