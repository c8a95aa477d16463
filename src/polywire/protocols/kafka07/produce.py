"""What a Kafka 0.7 connection produces: sets into batches, one per partition and run.

Promises: sets of a connection are appended in the order sent; a set is stored whole or not at all; a refused set stops everything behind it
(spec: kafka-0.7#reactions). Must not know: sockets, answers.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from polywire.broker.actions import Action
from polywire.broker.owners import Caller
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, Invalid, PeerError
from polywire.protocols.kafka07 import decoder, messages
from polywire.protocols.kafka07.compression import OpenedSet, PlainSet
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.messages import ANY_PARTITION
from polywire.records.batch import from_spans
from polywire.records.columns import Column
from polywire.records.memory import Lendable
from polywire.records.partitioner import rows_by_partition
from polywire.types import Buffer, TopicName, check_topic_name

BATCH_VALUES_BYTES_MAX: Final = 8 * 1024 * 1024  # of one batch: a long set becomes several, one after the other
BATCH_ROOM_BYTES: Final = 1024  # header and alignment of a stored batch; a stored record takes no more than on the wire
RECORD_ROOM_BYTES: Final = 9  # of a stored record beside its value: its place, CRC and flags

Append = Callable[[Partition, bytearray], None]
Authorize = Callable[[Action, str], None]
"""Refuses what a peer may not do with the topic of this name. Raises Denied."""


class Peer(NamedTuple):
    """Who produces; ``caller`` tells whose the topics are that it makes, once it was authorized."""

    authorize: Authorize
    caller: Callable[[], Caller]


def topic_name(topic: bytes) -> str:
    """A topic this wire may name. Raises Invalid(INVALID_TOPIC): a name 0.7 forbids, one our topics cannot have, or a reserved one."""
    name = messages.topic_name(topic)
    if name.startswith("__"):
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic names that begin with __ are reserved name={name!r}")
    check_topic_name(TopicName.parse(name))
    return name


def _check_length(name: str) -> None:
    """Refuse to make a topic with a name that 0.7 has no room for; there may be such all the same, from other wires."""
    if len(name.encode("utf-16-le")) > 2 * messages.NAME_UNITS_MAX:
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name is too long limit={messages.NAME_UNITS_MAX} name={name!r}")


class Producer:
    """Makes batches of what one listener's connections send; they share its buffers.

    Invariant: nothing in ``_run`` outlives the call that filled it.
    """

    __slots__ = ("_broker", "_run", "_run_bytes_max", "_values_bytes_max")

    def __init__(self, broker: Kafka07Broker) -> None:
        self._broker = broker
        self._run = decoder.RecordSpans()
        self._run_bytes_max = broker.settings.batch_bytes_max - BATCH_ROOM_BYTES
        self._values_bytes_max = min(
            BATCH_VALUES_BYTES_MAX, self._run_bytes_max - RECORD_ROOM_BYTES * decoder.RUN_RECORDS_MAX
        )

    def take_run(self, data: memoryview, start: int, append: Append, peer: Peer) -> tuple[int, int, int]:
        """Append every produce frame from ``start`` on that is plain and sound: (reason, position, end) of ``decoder.scan``.

        Raises PeerError when a topic or partition is refused; then what came before it was appended.
        """
        run = self._run
        reason, at, end = decoder.scan(data, start, len(data), run, self._run_bytes_max)
        record_count, group_count, set_count = run.counts
        if set_count:
            self._append_groups(data, record_count, group_count, append, peer)
        return reason, at, end

    def _append_groups(self, data: memoryview, count: int, group_count: int, append: Append, peer: Peer) -> None:
        run = self._run
        targets: list[tuple[Topic, int]] = []
        refused: PeerError | None = None
        for number in range(group_count):
            place, size, partition, first = run.groups[4 * number : 4 * number + 4]
            try:
                targets.append((self._target(bytes(data[place : place + size]), partition, peer), partition))
            except PeerError as error:
                refused, count = error, first
                break
        for number, (topic, partition) in enumerate(targets):
            rows = None if len(targets) == 1 else decoder.rows_of_group(run, count, number)
            self._append_rows(data, count, rows, topic, partition, append)
        if refused is not None:
            raise refused

    def _append_rows(
        self,
        data: memoryview,
        count: int,
        rows: array[int] | None,
        topic: Topic,
        partition: int,
        append: Append,
    ) -> None:
        """Append these records, or the first ``count``, to their partition, or set by set to partitions at random."""
        run, partitions = self._run, topic.partitions
        spans, flags = run.spans[: 4 * count], memoryview(run.flags)[:count]
        if not (count if rows is None else rows):
            return
        if partition == ANY_PARTITION and len(partitions) > 1:
            chosen = array("i", range(count)) if rows is None else rows
            numbers = decoder.spread(run, chosen, random.getrandbits(32), len(partitions))
            order, starts = rows_by_partition(numbers, len(partitions))
            for number in range(len(partitions)):
                own = array("i", [chosen[index] for index in order[starts[number] : starts[number + 1]]])
                if own:
                    append(partitions[number], self._batch(data, spans, own, flags))
        elif rows is None:
            columns: dict[int, Lendable] = {Column.VALUE_CRC32: run.crcs[:count]}
            append(partitions[max(partition, 0)], from_spans(data, spans, None, flags, columns=columns))
        else:
            append(partitions[max(partition, 0)], self._batch(data, spans, rows, flags))

    def _batch(self, data: Buffer, spans: memoryview, rows: array[int], flags: memoryview) -> bytearray:
        return from_spans(data, spans, rows, flags, columns={Column.VALUE_CRC32: decoder.crcs_of(self._run, rows)})

    def take_sets(self, sets: Iterable[OpenedSet], append: Append, peer: Peer) -> Iterator[bool]:
        """Append the sets of one decoded request batch by batch, telling whether a set has ended. Raises PeerError at the first that is
        refused."""
        for entry, plain in sets:
            topic = self._target(entry.topic, entry.partition, peer)
            if isinstance(plain, PeerError):
                raise plain
            longest, limit = max((part.longest for part in plain), default=0), self._broker.settings.record_bytes_max
            if longest > limit:
                raise PeerError(f"message is too large bytes={longest} limit={limit}", fatal=True)
            number = random.randrange(len(topic.partitions)) if entry.partition == ANY_PARTITION else entry.partition
            for part in plain:
                yield from self._take_set(part, topic.partitions[number], append)
            yield True

    def _take_set(self, part: PlainSet, partition: Partition, append: Append) -> Iterator[bool]:
        run, at, left = self._run, part.start, part.records
        while left > 0:
            at, count = decoder.take(part.data, at, part.stop, run, self._values_bytes_max)
            assert count > 0, "a surveyed set has the records it was said to have"
            columns: dict[int, Lendable] = {Column.VALUE_CRC32: run.crcs[:count]}
            flags = memoryview(run.flags)[:count]
            append(partition, from_spans(part.data, run.spans[: 4 * count], None, flags, columns=columns))
            left -= count
            yield False

    def _target(self, name: bytes, partition: int, peer: Peer) -> Topic:
        """The topic of a set, made when it is missing; that comes before the set is looked at
        (spec: kafka-0.7#topics-and-partitions). Raises PeerError."""
        try:
            text = topic_name(name)
            peer.authorize(Action.PRODUCE, text)
            if self._broker.find_topic(text) is None:
                _check_length(text)
                peer.authorize(Action.TOPIC_CREATE, text)
            count = self._broker.partition_count(text)
            if not ANY_PARTITION <= partition < count:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST, f"no such partition topic={text!r} partition={partition} count={count}"
                )
            return self._broker.ensure_topic(text, by=peer.caller())
        except BrokerError as error:
            raise PeerError(f"message set cannot be produced: {error.message}", fatal=True) from None
