"""Kafka's idempotent producers: InitProducerId, sequence numbers, DescribeProducers (spec: kafka#idempotent-producers).

* A producer id is never assigned twice.
* Kafka's sequence numbers wrap around at 2**31. The stored numbers continue to grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from polywire.broker.changes import ProducerState
from polywire.broker.owners import ITSELF
from polywire.broker.permissions import Action
from polywire.broker.producers import WRAP
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import Transaction
from polywire.errors import BrokerError
from polywire.protocols.kafka import schema, transactions
from polywire.protocols.kafka.checks import IDENTITY
from polywire.protocols.kafka.errors import wire_error
from polywire.protocols.kafka.lookup import led_topic
from polywire.protocols.kafka.messages import Api, WireError
from polywire.protocols.kafka.replies import answer_in_slices
from polywire.protocols.kafka.reply_slots import Answer
from polywire.protocols.kafka.session import KafkaSession

if TYPE_CHECKING:
    from polywire.protocols.kafka.message_types import (
        DescribeProducersRequest,
        DescribeProducersResponse,
        InitProducerIdRequest,
        InitProducerIdResponse,
    )

NO_SEQUENCE: Final = -1
EPOCH_MAX: Final = 32_767


def init_producer_id(
    session: KafkaSession, answer: Answer, request: InitProducerIdRequest, /
) -> InitProducerIdResponse | None:
    """InitProducerId: assign a new id to a producer without a transactional id."""
    response = schema.response(Api.INIT_PRODUCER_ID)
    if request.transactional_id is not None:
        return transactions.hold(session, answer, request)
    try:
        session.broker.access.authorize_somewhere(session.principal, Action.PRODUCE)
    except BrokerError as error:
        denied = wire_error(error, denied=WireError.CLUSTER_AUTHORIZATION_FAILED)
        return response(error=denied, producer_id=-1, producer_epoch=-1)
    return response(producer_id=session.broker.new_producer_id(), producer_epoch=0)


# Producers of a partition


def describe_producers(
    session: KafkaSession, answer: Answer, request: DescribeProducersRequest, /
) -> DescribeProducersResponse | None:
    """DescribeProducers: list the active producers of partitions, with or without a transactional id.

    Each partition is listed once, even if the request repeats it.
    """
    response = schema.response(Api.DESCRIBE_PRODUCERS)
    entries = _Active(session, response.Topics).fill(request.topics)
    return answer_in_slices(session.broker, answer, entries, lambda topics: response(topics=topics), at_once=8)


class _Active:
    """The active producers of the requested partitions."""

    __slots__ = ("_by_partition", "_made", "_session")

    def __init__(self, session: KafkaSession, made: type[DescribeProducersResponse.Topics]) -> None:
        self._session: Final = session
        self._made: Final = made
        # entries, by the partition's incarnation
        self._by_partition: dict[
            int, tuple[Partition, list[DescribeProducersResponse.Topics.Partitions.ActiveProducers]]
        ] = {}

    def fill(self, topics: list[DescribeProducersRequest.Topics]) -> Iterator[DescribeProducersResponse.Topics | None]:
        """Yield the requested topics with the producers of their partitions.

        After each None, other requests may run.
        """
        found: list[DescribeProducersResponse.Topics] = []
        for topic_request in topics:
            entry = self._made(name=topic_request.name, partitions=[])
            found.append(entry)
            try:
                topic: Topic | BrokerError = led_topic(self._session, Action.FETCH, topic_request.name)
            except BrokerError as error:
                # the error's traceback refers to this connection, which would in turn refer to the error
                topic = error.with_traceback(None)
            for number in topic_request.indexes:
                self._add_partition(topic, number, entry.partitions)
                yield None
        yield from self._add_remembered()
        yield from self._add_transactional()
        yield from found

    def _add_partition(
        self, topic: Topic | BrokerError, number: int, entries: list[DescribeProducersResponse.Topics.Partitions]
    ) -> None:
        made = self._made.Partitions(index=number, active_producers=[])
        if isinstance(topic, BrokerError):
            made.error, made.message = wire_error(topic), topic.message
        elif not 0 <= number < len(topic.partitions):
            made.error = WireError.UNKNOWN_TOPIC_OR_PARTITION
        else:
            partition = topic.partitions[number]
            if partition.incarnation in self._by_partition:
                return
            self._by_partition[partition.incarnation] = (partition, made.active_producers)
        entries.append(made)

    def _add_remembered(self) -> Iterator[None]:
        for state in self._session.broker.producers_of(self._by_partition):
            if state is not None and len(state.id) == IDENTITY.size and state.id[:1] == b"k":
                self._by_partition[state.incarnation][1].append(self._remembered(state))
            yield None

    def _remembered(self, state: ProducerState) -> DescribeProducersResponse.Topics.Partitions.ActiveProducers:
        return self._made.Partitions.ActiveProducers(
            producer_id=IDENTITY.unpack(state.id)[1],
            producer_epoch=state.epoch,
            last_sequence=state.last % WRAP,
            last_timestamp=self._time_ms(state.seen_at_us),
            coordinator_epoch=-1,
            current_txn_start_offset=-1,
        )

    def _add_transactional(self) -> Iterator[None]:
        """Add the producers that hold a transactional id.

        They are listed apart, because records of an open transaction are not in the log yet.
        """
        for known in self._session.broker.transactions.visible(by=ITSELF, participants=True):
            if known.producer is not None:
                self._add_holder(known)
            yield None

    def _add_holder(self, known: Transaction) -> None:
        for incarnation in {**known.sequences, **known.partitions}:
            if incarnation in self._by_partition:
                partition, entries = self._by_partition[incarnation]
                entries.append(self._holder(known, partition))

    def _holder(
        self, known: Transaction, partition: Partition
    ) -> DescribeProducersResponse.Topics.Partitions.ActiveProducers:
        assert known.producer is not None, "a transaction of this protocol has a producer id"
        is_open = known.is_open and partition.incarnation in known.partitions
        return self._made.Partitions.ActiveProducers(
            producer_id=known.producer.id,
            producer_epoch=min(known.producer_epoch, EPOCH_MAX),
            last_sequence=known.sequences.get(partition.incarnation, NO_SEQUENCE),
            last_timestamp=self._time_ms(known.at_us),
            coordinator_epoch=0,
            current_txn_start_offset=partition.log.next_offset if is_open else -1,
        )

    def _time_ms(self, elapsed_us: int) -> int:
        """Convert a time of the broker's monotonic clock to wall-clock time in milliseconds."""
        broker = self._session.broker
        return (broker.clock.now_us() - (broker.elapsed.now_us() - elapsed_us)) // 1000
