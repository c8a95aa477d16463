"""Read partitions from beginning to end over any protocol.

A *location* is where reading can continue: an offset, or a byte address over Kafka 0.7. Protocols differ in the
requests that find locations.

Reading from the first location returns every record once and in order. The field ``offset`` of a returned record is its
location.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from polywire.client.base import Ability, PartitionBounds, WireClient
from polywire.client.flux import FluxClient
from polywire.client.iggy import IggyClient
from polywire.client.kafka import KafkaClient
from polywire.client.kafka07 import EARLIEST, LATEST, Kafka07Client
from polywire.client.polywire import PolywireClient, split_records
from polywire.errors import ErrorCode, Missing
from polywire.records.batch import walk
from polywire.records.columns import Record
from polywire.records.pieces import Piece, piece_of_records, piece_of_stored

READ_RECORDS_MAX: Final = 10_000
READ_BYTES: Final = 4 << 20  # of stored batches
EXPANDED_BYTES: Final = 16 << 20  # of stored batches, decompressed; the last one may exceed it
OFFSET_LIMIT: Final = 2**62


class PartitionReader(Protocol):
    """Reads the partitions of one topic, over one connection.

    A location is an offset or, over Kafka 0.7, a byte position.
    """

    reports_empty_ends: ClassVar[bool] = False
    """Whether ``end`` is right for an empty partition that had records. Otherwise it may be 0."""

    async def partition_count(self) -> int:
        """Return how many partitions there are. Raises Missing(TOPIC_MISSING)."""

    async def first(self, partition: int) -> int:
        """Return the location of the first record, or of the next record if the partition is empty."""

    async def end(self, partition: int) -> int:
        """Return the location after the last record."""

    async def extents(self, count: int) -> list[tuple[int, int]]:
        """Return the first location and the location after the last record, of each of the first ``count`` partitions."""
        return [(await self.first(number), await self.end(number)) for number in range(count)]

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        """Return records from a location on, and the location to continue at.

        At the end, return no records and the same location.
        """

    async def read_pieces(self, partition: int, location: int) -> tuple[list[Piece], int]:
        """Return what ``read`` returns as batches. Raises Invalid if the offsets of the source do not ascend."""
        records, following = await self.read(partition, location)
        return [piece_of_records(group) for group in split_records(records)], following

    async def topic_id(self) -> bytes:
        """Return the id of the topic, which changes if it is created again; empty if the protocol has none."""
        return b""


def reader_of(client: WireClient, topic: str) -> PartitionReader:
    """Return the reader of a topic's partitions over this client's protocol."""
    match client:
        case Kafka07Client():
            return _AddressReader(client, topic)
        case IggyClient():
            return _PollReader(client, topic)
        case FluxClient():
            return _SearchReader(client, topic)
        case KafkaClient():
            return _KafkaReader(client, topic)
        case PolywireClient():
            return _PolywireReader(client, topic)
        case _:
            return _BoundsReader(client, topic)


class _BoundsReader(PartitionReader):
    """Reads over protocols that report the first and the end offset of partitions."""

    reports_empty_ends = True

    def __init__(self, client: WireClient, topic: str) -> None:
        self._client: Final = client
        self._topic: Final = topic

    async def partition_count(self) -> int:
        return len(await self._client.bounds(self._topic))

    async def _bounds(self, partition: int) -> PartitionBounds:
        for part in await self._client.bounds(self._topic):
            if part.partition == partition:
                return part
        raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={self._topic!r} partition={partition}")

    async def first(self, partition: int) -> int:
        return (await self._bounds(partition)).first_offset

    async def end(self, partition: int) -> int:
        return (await self._bounds(partition)).next_offset

    async def extents(self, count: int) -> list[tuple[int, int]]:
        return [(part.first_offset, part.next_offset) for part in (await self._client.bounds(self._topic))[:count]]

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        records = await self._client.fetch(self._topic, partition, location, records_max=READ_RECORDS_MAX)
        if records:
            return records, records[-1].offset + 1
        return [], max(location, await self.end(partition))  # compaction removed the records up to the end


class _PolywireReader(_BoundsReader):
    """Reads stored batches."""

    def __init__(self, client: PolywireClient, topic: str) -> None:
        super().__init__(client, topic)
        self._polywire: Final = client

    async def read_pieces(self, partition: int, location: int) -> tuple[list[Piece], int]:
        payloads, following = await self._polywire.fetch_batches(self._topic, partition, location, bytes_max=READ_BYTES)
        pieces: list[Piece] = []
        size = 0
        for batch in (memoryview(payload)[at:] for payload in payloads for at in walk(payload)):
            if size > EXPANDED_BYTES:  # a hostile source may send batches that are small only while compressed
                return pieces, pieces[-1].next_offset
            piece = piece_of_stored(batch, location)
            if piece is not None:
                pieces.append(piece)
                size += len(piece.batch)
        return pieces, following

    async def topic_id(self) -> bytes:
        return (await self._polywire.describe(self._topic)).id


class _KafkaReader(_BoundsReader):
    """Reads the records of committed transactions."""

    def __init__(self, client: KafkaClient, topic: str) -> None:
        super().__init__(client, topic)
        self._kafka: Final = client

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        pieces, following = await self.read_pieces(partition, location)
        return [record for piece in pieces for record in piece.records()], following

    async def read_pieces(self, partition: int, location: int) -> tuple[list[Piece], int]:
        return await self._kafka.fetch_pieces(self._topic, partition, location)

    async def topic_id(self) -> bytes:
        return await self._kafka.topic_id(self._topic)


class _PollReader(PartitionReader):
    """Reads over Iggy, which returns the first or the last record on request."""

    def __init__(self, client: IggyClient, topic: str) -> None:
        self._client: Final = client
        self._topic: Final = topic

    async def partition_count(self) -> int:
        return await _count_listed(self._client, self._topic)

    async def first(self, partition: int) -> int:
        return (await self._client.extent(self._topic, partition))[0]

    async def end(self, partition: int) -> int:
        return (await self._client.extent(self._topic, partition))[1]

    async def extents(self, count: int) -> list[tuple[int, int]]:
        return [await self._client.extent(self._topic, number) for number in range(count)]

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        return await _fetch(self._client, self._topic, partition, location)


class _SearchReader(PartitionReader):
    """Reads over FLUX, on which a location can only be found by trying to read."""

    def __init__(self, client: FluxClient, topic: str) -> None:
        self._client: Final = client
        self._topic: Final = topic

    async def partition_count(self) -> int:
        return await _count_listed(self._client, self._topic)

    async def first(self, partition: int) -> int:
        return 0

    async def end(self, partition: int) -> int:
        """Return the lowest offset without a record, found by binary search."""
        low, high = 0, 1
        while await self._has(partition, high - 1):
            low, high = high, 2 * high
            if high > OFFSET_LIMIT:
                raise Missing(
                    ErrorCode.OFFSET_OUT_OF_RANGE, f"the end of the partition cannot be found topic={self._topic!r}"
                )
        while low < high:
            middle = (low + high) // 2
            if await self._has(partition, middle):
                low = middle + 1
            else:
                high = middle
        return low

    async def _has(self, partition: int, offset: int) -> bool:
        return bool(await self._client.fetch(self._topic, partition, offset, records_max=1))

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        return await _fetch(self._client, self._topic, partition, location)


class _AddressReader(PartitionReader):
    def __init__(self, client: Kafka07Client, topic: str) -> None:
        self._client: Final = client
        self._topic: Final = topic

    async def partition_count(self) -> int:
        return await self._client.partition_count(self._topic)

    async def first(self, partition: int) -> int:
        return await self._address(partition, EARLIEST)

    async def end(self, partition: int) -> int:
        return await self._address(partition, LATEST)

    async def _address(self, partition: int, time_ms: int) -> int:
        found = await self._client.addresses(self._topic, partition, time_ms)
        return found[0] if found else 0

    async def read(self, partition: int, location: int) -> tuple[list[Record], int]:
        read = await self._client.read(self._topic, partition, location)
        begins = [location, *read.positions]
        return [Record(value, offset=at) for value, at in zip(read.values, begins, strict=False)], read.next_address


async def _fetch(client: WireClient, topic: str, partition: int, location: int) -> tuple[list[Record], int]:
    records = await client.fetch(topic, partition, location, records_max=READ_RECORDS_MAX)
    return records, records[-1].offset + 1 if records else location


async def _count_listed(client: WireClient, topic: str) -> int:
    for known in await client.topics():
        if known.name == topic:
            return known.partition_count
    raise Missing(ErrorCode.TOPIC_MISSING, f"no such topic topic={topic!r}")


def uses_offsets(client: WireClient) -> bool:
    """Return whether locations over this protocol are offsets that a group can commit."""
    return not isinstance(client, Kafka07Client) and Ability.POSITIONS in client.abilities
