"""The asynchronous client of the Kafka 0.7 protocol.

* Requests are pipelined over one connection.
* When ``produce`` returns, the records are stored.
* The protocol has byte addresses instead of offsets. An offset in this client is the number of earlier records in the
  partition.
"""

from __future__ import annotations

import itertools
import ssl
from array import array
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polywire.client.base import Ability, Membership, PartitionBounds, Produced, TopicInfo
from polywire.client.connection import FramedConnection, Scope, open_connection, understood
from polywire.client.failures import bare_value, beyond, cannot, cannot_name
from polywire.errors import BrokerError, ErrorCode, Invalid, Missing, PeerError, Unavailable
from polywire.protocols.kafka07 import decoder
from polywire.protocols.kafka07.compression import Expander, PlainSet, wrap
from polywire.protocols.kafka07.messages import (
    EARLIEST,
    ENTRY_BYTES_MIN,
    LATEST,
    NAME_BYTES_MAX,
    CompressionCodec,
    FetchEntry,
    WireError,
    encode_fetch,
    encode_multifetch,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_error,
    parse_offsets_answer,
    split_multifetch_answer,
    topic_bytes,
)
from polywire.records.columns import Record
from polywire.records.partitioner import partitions_of
from polywire.types import PARTITION_COUNT_MAX, Assignor, Buffer, KeyHash, Level

WIRE: Final = "Kafka 0.7"  # the protocol's name in error messages
OPEN_TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024
FETCH_BYTES: Final = 1024 * 1024
# records per response; in practice bytes limit a response, so all decoded records are returned
FETCH_RECORDS: Final = 1_000_000
FETCH_BYTES_MAX: Final = (
    64 * 1024 * 1024
)  # limit when a message does not fit and is requested again with twice the size
SET_BYTES_MAX: Final = 4 * 1024 * 1024  # bytes of messages per PRODUCE
# maximum number of bytes to read when counting records up to an unknown offset
SCAN_BYTES_MAX: Final = 256 * 1024 * 1024
MARKS_MAX: Final = 1_000  # known pairs of offset and address that are cached per partition
PARTITIONS_PROBED: Final = 64  # partitions requested at a time when counting partitions

ABILITIES: Final = frozenset(
    {
        Ability.EMPTY_VALUES,
        Ability.SAME_HASH,
        Ability.BINARY_VALUES,
        Ability.WHITE_SPACE_VALUES,
        Ability.CHOOSE_PARTITION,
    }
)


class _Connection(FramedConnection):
    """A connection. A response is a body that begins with an error code."""

    CLOSE_REASON = "the broker rejected a request"
    BODY_BYTES_MIN = 2
    BODY_BYTES_MAX = ANSWER_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Fetched:
    """Messages of a partition from an offset on. In Kafka 0.7 an offset is a byte position, here called address.

    Attributes:
        values: values of the messages.
        positions: for each value, the address to continue at after it. Messages inside a compressed message share its
            address.
        next_address: address after the last message.
        is_cut: whether the first message is longer than the requested size, so that ``values`` is empty.
    """

    values: list[bytes]
    positions: list[int]
    next_address: int
    is_cut: bool = False


class Kafka07Client(Scope):
    """A client that implements ``WireClient`` as far as the protocol supports it. Create one with ``open``.

    A record's key chooses its partition and is not sent.

    In this protocol, the offset of a message is its byte position, here called address. ``read``, ``addresses`` and
    ``write`` use addresses. Other methods use record numbers as offsets, which they find by counting records from
    address 0 or from the nearest known address. Once retention has removed the beginning of a partition, these are
    unknown (-1 in ``Produced``).

    A broker sends no acknowledgements. The client detects message sets that the broker dropped, and closed connections.
    """

    __slots__ = ("_connection", "_marks", "_round_robin", "_run")

    def __init__(self, connection: _Connection) -> None:
        self._connection: _Connection = connection
        self._marks: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._run = decoder.RecordSpans()
        self._round_robin = itertools.count()

    @classmethod
    async def open(
        cls, host: str, port: int, *, timeout_s: float = OPEN_TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> Kafka07Client:
        """Connect.

        Args:
            host: name or address of the broker.
            port: port of its Kafka 0.7 listener.
            timeout_s: time limit, in seconds.
            tls: how to verify the broker (``client.address.client_context``); None connects without TLS.

        Raises:
            Unavailable: the broker is not reachable.
        """
        return cls(await open_connection(_Connection, host, port, timeout_s=timeout_s, tls=tls))

    @property
    def abilities(self) -> frozenset[Ability]:
        """The features of the Kafka 0.7 protocol."""
        return ABILITIES

    async def close(self) -> None:
        """Close the connection. Pending calls fail with Unavailable."""
        self._connection.fail(Unavailable(ErrorCode.STOPPING, "client was closed"))

    # The protocol's own operations

    async def addresses(self, topic: str, partition: int, time_ms: int = LATEST, count: int = 1) -> list[int]:
        """Return addresses (byte positions) at which a read can begin, newest first.

        Args:
            topic: name of the topic.
            partition: number of the partition, from 0.
            time_ms: latest time of the addresses, in milliseconds since 1970, or ``LATEST``, ``EARLIEST``.
            count: maximum number of addresses.

        Raises:
            Unavailable: the broker rejected the request, or the connection was lost.
        """
        [answer] = await self._connection.exchange(encode_offsets(_topic(topic), partition, time_ms, count), 1)
        return understood(parse_offsets_answer, answer)

    async def read(self, topic: str, partition: int, address: int, *, bytes_max: int = FETCH_BYTES) -> Fetched:
        """Return messages from an address (byte position) on. Return no messages at the end of the partition.

        Args:
            topic: name of the topic.
            partition: number of the partition, from 0.
            address: the start of a message: 0, a result of ``addresses``, or the end of an earlier read.
            bytes_max: size to request. If the first message is longer, the request is repeated with a larger size.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE, PARTITION_MISSING.
            Invalid: the topic name is invalid, or RECORD_TOO_LARGE for a message above ``FETCH_BYTES_MAX``.
        """
        while True:
            frame = encode_fetch(_topic(topic), partition, address, bytes_max)
            [answer] = await self._connection.exchange(frame, 1)
            _raise_code(understood(parse_error, answer, 0), topic, partition, address)
            found = self.decode(memoryview(answer)[2:], address)
            if not found.is_cut:
                return found
            if bytes_max >= FETCH_BYTES_MAX:
                raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"message is too long to read limit={FETCH_BYTES_MAX}")
            bytes_max *= 2

    async def read_many(
        self, topic: str, places: Sequence[tuple[int, int]], *, bytes_max: int = FETCH_BYTES
    ) -> list[Fetched | BrokerError]:
        """Read from several (partition, address) pairs at once. Return a result or an error for each, in order.

        An address is a byte position. If a first message is longer than ``bytes_max``, ``Fetched.is_cut`` is set.
        """
        entries = [FetchEntry(_topic(topic), partition, address, bytes_max) for partition, address in places]
        [answer] = await self._connection.exchange(encode_multifetch(entries), 1)
        results: list[Fetched | BrokerError] = []
        for (code, part), entry in zip(understood(split_multifetch_answer, answer), entries, strict=True):
            try:
                _raise_code(code, topic, entry.partition, entry.address)
                results.append(self.decode(part, entry.address))
            except BrokerError as error:
                results.append(error)
        return results

    async def write(self, topic: str, partition: int, message_set: bytes) -> tuple[int, int]:
        """Send a message set, and return the byte position of the partition's end before and after it.

        Between the two, there may also be messages of other clients. Raises Unavailable if the set was rejected.
        """
        name = _topic(topic)
        end = encode_offsets(name, partition, LATEST, 1)
        before, after = await self._connection.exchange(end + encode_produce(name, partition, message_set) + end, 2)
        return understood(parse_offsets_answer, before)[0], understood(parse_offsets_answer, after)[0]

    async def send(self, frames: bytes, topic: str, partition: int = 0) -> None:
        """Send encoded produce requests, and wait until the broker has processed them.

        Raises Unavailable if it rejected one.
        """
        await self._connection.exchange(frames + encode_offsets(_topic(topic), partition, LATEST, 1), 1)

    async def partition_count(self, topic: str) -> int:
        """Return the number of partitions of a topic, even if it does not exist yet. Raises Invalid(INVALID_TOPIC)."""
        for first in range(0, PARTITION_COUNT_MAX, PARTITIONS_PROBED):
            entries = [FetchEntry(_topic(topic), first + step, 0, 0) for step in range(PARTITIONS_PROBED)]
            [answer] = await self._connection.exchange(encode_multifetch(entries), 1)
            codes = [code for code, _ in understood(split_multifetch_answer, answer)]
            if WireError.UNKNOWN in codes:
                raise Invalid(ErrorCode.INVALID_TOPIC, f"the broker rejects the topic name name={topic!r}")
            if WireError.WRONG_PARTITION in codes:
                return first + codes.index(WireError.WRONG_PARTITION)
        return PARTITION_COUNT_MAX

    def decode(self, data: memoryview, address: int) -> Fetched:
        """Return the values of the complete messages of a set, including those inside compressed messages.

        ``address`` is the byte position of ``data`` in the partition. Raises Unavailable for an invalid set.
        """
        end = understood(_whole_end, data)
        found = Fetched([], [], address + end, is_cut=end == 0 and len(data) > 0)
        expander = Expander(FETCH_BYTES_MAX)
        at = 0
        while at < end:
            position, stop, packed = decoder.next_wrapper(data, at, end)
            for part in understood(expander.open_set, data, at, position):
                self._take(part, found, address)
            inner = understood(expander.open_set, data, position, stop) if packed else []
            known = len(found.values)
            for part in inner:
                self._take(part, found, address)
            if len(found.values) > known:  # messages in a wrapper share its address (spec: kafka-0.7#iterating)
                found.positions[known:] = [address + position] * (len(found.values) - known - 1) + [address + stop]
            at = stop
        return found

    def _take(self, part: PlainSet, found: Fetched, address: int) -> None:
        """Add the values of an uncompressed set to ``found``.

        The positions are wrong if the set is inside a compressed message.
        """
        at, left, source = part.start, part.records, memoryview(part.data)
        while left > 0:
            at, count = decoder.take(part.data, at, part.stop, self._run, FETCH_BYTES_MAX)
            spans = self._run.spans[: 4 * count].tolist()
            for start, size in zip(spans[2::4], spans[3::4], strict=True):
                found.values.append(bytes(source[start : start + size]))
                found.positions.append(address + start + size)
            left -= count

    # Client

    async def create_topic(self, topic: str, partition_count: int) -> None:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot create topics.

        A topic is created when a record is produced to it.
        """
        raise cannot(WIRE, "create topics")

    async def delete_topic(self, topic: str) -> None:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot delete topics."""
        raise cannot(WIRE, "delete topics")

    async def topics(self) -> list[TopicInfo]:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot list topics."""
        raise cannot(WIRE, "list topics")

    async def bounds(self, topic: str) -> list[PartitionBounds]:
        """Raise Invalid(INVALID_REQUEST): the protocol reports byte positions instead of offsets. Use ``addresses``."""
        raise cannot(WIRE, "report offsets of bounds")

    async def offset_at(self, topic: str, partition: int, time_us: int) -> int:
        """Raise Invalid(INVALID_REQUEST): the protocol looks up byte positions by time, not offsets.

        Use ``addresses``.
        """
        raise cannot(WIRE, "look offsets up by time")

    async def produce(
        self, topic: str, records: Sequence[Record], *, partition: int | None = None, level: Level = Level.WRITTEN
    ) -> list[Produced]:
        """Append records, and return their offsets, or -1 for an unknown offset. See ``WireClient``.

        A key chooses the partition and is not sent. A missing topic is created. Raises Invalid for a level other than
        WRITTEN, and for null values, headers, ids and times, which the protocol does not support. Raises
        Invalid(RECORD_TOO_LARGE).
        """
        if level is not Level.WRITTEN:
            raise cannot(WIRE, "choose what an acknowledgement means")
        values = [bare_value(WIRE, record) for record in records]
        chosen = await self._choose_partitions(topic, records) if partition is None else [partition] * len(records)
        produced: list[Produced] = [Produced(number, -1) for number in chosen]
        for number in sorted(set(chosen)):
            rows = [row for row, other in enumerate(chosen) if other == number]
            for part in _portions(rows, values):
                first = await self._produce_part(topic, number, [values[row] for row in part])
                for step, row in enumerate(part):
                    produced[row] = Produced(number, -1 if first < 0 else first + step)
        return produced

    async def _choose_partitions(self, topic: str, records: Sequence[Record]) -> list[int]:
        """Return the partition of each record: by its key or, without a key, round-robin."""
        count = await self.partition_count(topic)
        keys = [record.key or b"" for record in records]
        ends = list(itertools.accumulate(map(len, keys), initial=0))
        spans = memoryview(
            array("q", [number for at, key in zip(ends, keys, strict=False) for number in (at, len(key), 0, 0)])
        )
        hashed = partitions_of(b"".join(keys), spans, count, KeyHash.FNV32) if records else []
        next_partition = next(self._round_robin) % count
        return [
            next_partition if record.key is None else number for record, number in zip(records, hashed, strict=True)
        ]

    async def _produce_part(self, topic: str, partition: int, values: list[bytes]) -> int:
        """Store values in one set. Return the offset of the first value, or -1 if it is unknown."""
        plain = encode_set(values)
        sent = plain
        if max(map(len, values)) > decoder.PAYLOAD_BYTES_MAX:
            sent = wrap(plain, CompressionCodec.GZIP)
        if len(sent) > decoder.PAYLOAD_BYTES_MAX and sent is not plain:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE,
                f"value does not fit a Kafka 0.7 message, compressed or not limit={decoder.PAYLOAD_BYTES_MAX}",
            )
        before, after = await self.write(topic, partition, sent)
        if after - before < len(plain):
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"the broker dropped a message set bytes={len(plain)}")
        try:
            first = await self._offset_of(topic, partition, before)
            if first >= 0 and after - before > len(plain):
                first = await self._search(topic, partition, first, before, after, values)
        except Missing:
            return -1
        if first >= 0 and after - before == len(plain):
            self._note(topic, partition, first + len(values), after)
        return first

    async def _search(
        self, topic: str, partition: int, offset: int, address: int, stop: int, values: list[bytes]
    ) -> int:
        """Return the offset of ``values`` between two byte positions. Other clients may have written there, too."""
        found: list[bytes] = []
        while address < stop:
            read = await self.read(topic, partition, address)
            found += read.values
            address = beyond(address, read.next_address, "address")
        for step in range(len(found) - len(values) + 1):
            if found[step] == values[0] and found[step : step + len(values)] == values:
                return offset + step
        return -1

    async def fetch(
        self, topic: str, partition: int, offset: int, *, records_max: int = FETCH_RECORDS, wait_ms: int = 0
    ) -> list[Record]:
        """Return records from an offset on, without keys. See ``WireClient``.

        The protocol cannot wait, so ``wait_ms`` is ignored. The offset is found by counting records from the nearest
        known address. Raises Invalid(INVALID_REQUEST) if that address is too far away.
        """
        if offset < 0:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"offset must not be negative offset={offset}")
        at, address = self._nearest(topic, partition, offset)
        begun = address
        while True:
            try:
                read = await self.read(topic, partition, address)
            except Missing as error:
                if error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
                    # the records were removed by retention, or the topic was created again
                    self._marks.pop((topic, partition), None)
                raise
            if not read.values:
                return []
            following = at + len(read.values)
            self._note(topic, partition, following, read.next_address)
            if following > offset:
                values = read.values[offset - at :][:records_max]
                return [Record(value, offset=offset + step) for step, value in enumerate(values)]
            at, address = following, read.next_address
            if address - begun > SCAN_BYTES_MAX:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"too many bytes to read to find this offset (read by address instead) limit={SCAN_BYTES_MAX}",
                )

    async def _offset_of(self, topic: str, partition: int, address: int) -> int:
        """Return the offset of the record at a byte position, by counting the records before it.

        Returns -1 if there are too many to count. Raises Missing.
        """
        marks = self._marks.get((topic, partition), [])
        known = [mark for mark in marks if mark[1] <= address]
        at, position = known[-1] if known else (0, 0)
        if address - position > SCAN_BYTES_MAX:
            return -1
        while position < address:
            read = await self.read(topic, partition, position, bytes_max=min(FETCH_BYTES, address - position))
            if not read.values:
                return -1
            at, position = at + len(read.values), read.next_address
        self._note(topic, partition, at, position)
        return at if position == address else -1

    def _nearest(self, topic: str, partition: int, offset: int) -> tuple[int, int]:
        marks = self._marks.get((topic, partition), [])
        number = bisect_right(marks, (offset, 2**63))
        return marks[number - 1] if number else (0, 0)

    def _note(self, topic: str, partition: int, offset: int, address: int) -> None:
        marks = self._marks.setdefault((topic, partition), [])
        if (offset, address) not in marks[-8:]:
            insort(marks, (offset, address))
        if len(marks) > MARKS_MAX:
            del marks[::2]

    async def join(self, group: str, topic: str, member: str, *, assignor: Assignor | None = None) -> Membership:
        """Raise Invalid(INVALID_REQUEST): the protocol has no groups."""
        raise cannot(WIRE, "form groups")

    async def heartbeat(self, group: str, topic: str, member: str, generation: int) -> Membership:
        """Raise Invalid(INVALID_REQUEST): the protocol has no groups."""
        raise cannot(WIRE, "form groups")

    async def leave(self, group: str, topic: str, member: str, generation: int) -> None:
        """Raise Invalid(INVALID_REQUEST): the protocol has no groups."""
        raise cannot(WIRE, "form groups")

    async def commit(
        self, group: str, topic: str, partition: int, offset: int, *, member: str = "", generation: int = -1
    ) -> None:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot store committed offsets.

        ``kafka07_streams.Consumer`` stores them in a file.
        """
        raise cannot(WIRE, "store positions")

    async def position(self, group: str, topic: str, partition: int) -> int | None:
        """Raise Invalid(INVALID_REQUEST): the protocol cannot store committed offsets."""
        raise cannot(WIRE, "store positions")


def _topic(topic: str) -> bytes:
    name = topic_bytes(topic)
    if not 0 < len(name) <= NAME_BYTES_MAX:
        raise cannot_name(WIRE, topic)
    return name


def _portions(rows: list[int], values: list[bytes]) -> list[list[int]]:
    """Split the records with the indexes ``rows`` into lists whose values fit one message set.

    A value above the protocol's size limit is alone in its list. It is sent compressed.
    """
    portions: list[list[int]] = []
    size = SET_BYTES_MAX
    for row in rows:
        added = (
            SET_BYTES_MAX if len(values[row]) > decoder.PAYLOAD_BYTES_MAX else len(values[row]) + ENTRY_BYTES_MIN + 1
        )
        if size + added > SET_BYTES_MAX:
            portions.append([])
            size = 0
        portions[-1].append(row)
        size += added
    return portions


def _whole_end(data: Buffer) -> int:
    """Return the end of the last complete entry of a set (spec: kafka-0.7#writing-a-client).

    Raises PeerError for an impossible size.
    """
    at = 0
    while len(data) - at >= 4:
        size = int.from_bytes(memoryview(data)[at : at + 4], "big", signed=True)
        if size < ENTRY_BYTES_MIN - 4:
            raise PeerError(f"message has an impossible size bytes={size}", fatal=True)
        if size > len(data) - at - 4:
            break
        at += 4 + size
    return at


def _raise_code(code: int, topic: str, partition: int, address: int) -> None:
    facts = f"topic={topic!r} partition={partition} address={address}"
    match code:
        case WireError.NONE:
            return
        case WireError.OFFSET_OUT_OF_RANGE:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"no message at this address {facts}")
        case WireError.WRONG_PARTITION:
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition {facts}")
        case _:
            raise Invalid(ErrorCode.INVALID_REQUEST, f"the broker rejected the request code={code} {facts}")


__all__ = ["ABILITIES", "EARLIEST", "LATEST", "Fetched", "Kafka07Client"]
