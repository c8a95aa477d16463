"""Append the message sets of Kafka 0.7 producers (spec: kafka-0.7#reactions).

* The message sets of a connection are appended in order.
* A message set is stored completely or not at all.
* After a rejected message set, later ones are not stored.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from polywire.broker.owners import Caller
from polywire.broker.permissions import Action
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

# limit for the values of one batch; a longer message set becomes several consecutive batches
BATCH_VALUES_BYTES_MAX: Final = 8 * 1024 * 1024
# size of the header and alignment of a stored batch; a stored record is not longer than in the protocol
BATCH_OVERHEAD_BYTES: Final = 1024
RECORD_OVERHEAD_BYTES: Final = 9  # size of a stored record without its value: delta, CRC and flags

Append = Callable[[Partition, bytearray], None]
Authorize = Callable[[Action, str], None]
"""Raises Denied if the client may not perform the action on the topic with this name."""


class Peer(NamedTuple):
    """The client that produces.

    Attributes:
        caller: returns the client's user, against whose quota the topics that it creates count.
    """

    authorize: Authorize
    caller: Callable[[], Caller]


def topic_name(topic: bytes) -> str:
    """Decode a topic name.

    Raises Invalid(INVALID_TOPIC) if Kafka 0.7 or Polywire does not allow it, or if it is reserved.
    """
    name = messages.topic_name(topic)
    if name.startswith("__"):
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic names that begin with __ are reserved name={name!r}")
    check_topic_name(TopicName.parse(name))
    return name


def _check_length(name: str) -> None:
    """Raise Invalid if the name is too long for a new topic of Kafka 0.7. Other protocols allow longer names."""
    if len(name.encode("utf-16-le")) > 2 * messages.NAME_UNITS_MAX:
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name is too long limit={messages.NAME_UNITS_MAX} name={name!r}")


class Producer:
    """Builds the batches of all connections of a listener, which share its buffers."""

    __slots__ = ("_broker", "_run", "_run_bytes_max", "_values_bytes_max")

    def __init__(self, broker: Kafka07Broker) -> None:
        self._broker = broker
        self._run = decoder.RecordSpans()
        self._run_bytes_max = broker.settings.batch_bytes_max - BATCH_OVERHEAD_BYTES
        self._values_bytes_max = min(
            BATCH_VALUES_BYTES_MAX, self._run_bytes_max - RECORD_OVERHEAD_BYTES * decoder.RUN_RECORDS_MAX
        )

    def take_run(self, data: memoryview, start: int, append: Append, peer: Peer) -> tuple[int, int, int]:
        """Append the records of consecutive valid, uncompressed PRODUCE requests at ``start``.

        Returns the reason for the end, the position after these requests and the end of the next request (see
        ``decoder.scan``). If a topic or partition is rejected, raises PeerError after appending the earlier message
        sets.
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
                targets.append((self._topic_of(bytes(data[place : place + size]), partition, peer), partition))
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
        """Append the records with the numbers ``rows``, or the first ``count`` records if None, to a partition.

        With partition -1, each message set is appended to a random partition.
        """
        run, partitions = self._run, topic.partitions
        spans, flags = run.spans[: 4 * count], memoryview(run.flags)[:count]
        if not (count if rows is None else rows):
            return
        if partition == ANY_PARTITION and len(partitions) > 1:
            chosen = array("i", range(count)) if rows is None else rows
            numbers = decoder.spread(run, chosen, random.getrandbits(32), len(partitions))
            order, starts = rows_by_partition(numbers, len(partitions))
            for number in range(len(partitions)):
                rows_of_partition = array("i", [chosen[index] for index in order[starts[number] : starts[number + 1]]])
                if rows_of_partition:
                    append(partitions[number], self._batch(data, spans, rows_of_partition, flags))
        elif rows is None:
            columns: dict[int, Lendable] = {Column.VALUE_CRC32: run.crcs[:count]}
            append(partitions[max(partition, 0)], from_spans(data, spans, None, flags, columns=columns))
        else:
            append(partitions[max(partition, 0)], self._batch(data, spans, rows, flags))

    def _batch(self, data: Buffer, spans: memoryview, rows: array[int], flags: memoryview) -> bytearray:
        return from_spans(data, spans, rows, flags, columns={Column.VALUE_CRC32: decoder.crcs_of(self._run, rows)})

    def find_topics(self, sets: Sequence[OpenedSet], peer: Peer) -> None:
        """Find or create the topics of these message sets.

        Raises Pending until other processes have found or created them. Call it before ``take_sets``, which cannot be
        repeated after Pending. Stops silently at a topic that must be rejected.
        """
        with suppress(PeerError):
            for entry, _ in sets:
                self._topic_of(entry.topic, entry.partition, peer)

    def take_sets(self, sets: Iterable[OpenedSet], append: Append, peer: Peer) -> Iterator[bool]:
        """Append the message sets of a request batch by batch.

        Yields after each batch: True if a message set is complete, otherwise False. Raises PeerError at the first
        rejected set.
        """
        for entry, plain in sets:
            topic = self._topic_of(entry.topic, entry.partition, peer)
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

    def _topic_of(self, name: bytes, partition: int, peer: Peer) -> Topic:
        """Return the topic of a message set. A missing topic is created.

        Raises PeerError if the topic or partition is rejected (spec: kafka-0.7#topics-and-partitions).
        """
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
