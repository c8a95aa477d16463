"""An OFFSETS request in progress: find addresses at which a client may start to read (spec: kafka-0.7#times).

Addresses are in descending order, and each is the beginning of a record. Looking them up does not delay other clients.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from polywire.broker.api import Pending
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing, PeerError
from polywire.log.base import Completion, Handle
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.messages import EARLIEST, LATEST, Offsets
from polywire.protocols.kafka07.produce import Authorize, topic_name

TIME_MS_MAX: Final = (
    2**62 // 1000
)  # later times are treated as LATEST; the npm package ``kafka`` sends such values by mistake and expects the end


class OffsetsReply:
    """Builds the response to an OFFSETS request. In Kafka 0.7 an offset is a byte position.

    It has at most two offsets, in descending order. The higher one is the log's end, or the offset after the records up
    to a time. The lower one is the log's first offset.
    """

    __slots__ = ("_addresses", "_authorize", "_broker", "_done", "_request", "_waits_for")

    def __init__(
        self, broker: Kafka07Broker, request: Offsets, done: Completion[list[int]], *, authorize: Authorize
    ) -> None:
        """``done`` is called with the offsets or the error. ``authorize`` raises Denied."""
        self._authorize = authorize
        self._broker = broker
        self._request = request
        self._done = done
        self._addresses: list[int] = []
        self._waits_for: Handle | None = None

    def cancel(self) -> None:
        if self._waits_for is not None:
            self._waits_for.cancel()

    def run(self) -> None:
        """Start the look-up. ``done`` may be called inside this call.

        Raises PeerError if the connection must be closed.
        """
        try:
            self._find()
        except BrokerError as error:
            raise PeerError(f"cannot list offsets: {error.message}", fatal=True) from None

    def _find(self) -> None:
        """Find the partition, then its offsets.

        Raises BrokerError if it does not exist or the client may not describe it.
        """
        request = self._request
        try:
            partition = self._partition(topic_name(request.topic), request.partition)
        except Pending as pending:
            self._waits_for = pending.then(self._find_again)
            return
        if request.count_max < 0:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"number of offsets is negative count={request.count_max}")
        if partition is None:
            self._done([0] if request.time_ms in (LATEST, EARLIEST) else [])
            return
        self._waits_for = self._broker.when_current(partition, partial(self._refreshed, partition))
        if self._waits_for is None:
            self._begin(partition)

    def _find_again(self) -> None:
        try:
            self._find()
        except BrokerError as error:
            self._done(error)

    def _partition(self, name: str, number: int) -> Partition | None:
        """Return the partition; None if the topic does not exist. Raises Missing(PARTITION_MISSING) or Denied."""
        self._authorize(Action.TOPIC_DESCRIBE, name)
        if not 0 <= number < self._broker.partition_count(name):
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={name!r} partition={number}")
        topic = self._broker.find_topic(name)
        return None if topic is None else topic.partitions[number]

    def _refreshed(self, partition: Partition, result: BrokerError | None) -> None:
        if result is None:
            self._begin(partition)
        else:
            self._done(result)

    def _begin(self, partition: Partition) -> None:
        log, time_ms = partition.log, self._request.time_ms
        if log.next_offset == 0:
            self._done([0] if time_ms in (LATEST, EARLIEST) else [])
        elif time_ms == EARLIEST:
            self._add_address(partition, log.first_offset, log.first_offset)
        elif time_ms == LATEST or time_ms >= TIME_MS_MAX:
            self._add_address(partition, log.first_offset, log.readable_offset)
        elif time_ms < 0:
            self._done([])
        else:
            self._find_time(partition, time_ms)

    def _find_time(self, partition: Partition, time_ms: int) -> None:
        """Find the offset after the records up to a time.

        If all records are newer, ``done`` is called with an empty list.
        """
        then = partial(self._time_found, partition)
        found = partition.log.offset_at(time_ms * 1000 + 1, then)
        if isinstance(found, int):
            then(found)
        else:
            self._waits_for = found

    def _time_found(self, partition: Partition, found: int | BrokerError) -> None:
        if isinstance(found, BrokerError):
            self._done(found)
        elif found <= partition.log.first_offset:
            self._done([])
        else:
            self._add_address(partition, partition.log.first_offset, min(found, partition.log.readable_offset))

    def _add_address(self, partition: Partition, first: int, offset: int) -> None:
        then = partial(self._address_found, partition, first, offset)
        try:
            found = partition.log.address_of_offset(offset, then)
        except BrokerError as error:
            then(error)
            return
        if isinstance(found, int):
            then(found)
        else:
            self._waits_for = found

    def _address_found(self, partition: Partition, first: int, offset: int, found: int | BrokerError) -> None:
        if isinstance(found, BrokerError):
            self._done(found)
            return
        self._addresses.append(found)
        if offset > first and len(self._addresses) < self._request.count_max:
            self._add_address(partition, first, first)
        else:
            self._done(self._addresses[: self._request.count_max])
