"""Kafka 0.7 producers that send in batches, and consumers that store their positions, asynchronous or blocking.

* After ``flush``, the broker has stored all messages, in order.
* A position is the address after the last returned message. After a crash, messages may be returned again. None is
  skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from polywire.client.base import WireClient
from polywire.client.kafka07 import FETCH_BYTES, Fetched, Kafka07Client
from polywire.client.sync import SyncClient
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.protocols.kafka07.compression import wrap
from polywire.protocols.kafka07.decoder import PAYLOAD_BYTES_MAX
from polywire.protocols.kafka07.messages import (
    ANY_PARTITION,
    EARLIEST,
    LATEST,
    CompressionCodec,
    encode_multiproduce,
    encode_set,
    topic_bytes,
)
from polywire.records.partitioner import partitions_of
from polywire.types import KeyHash

BATCH_RECORDS: Final = 200  # the default of Kafka 0.7's producer
LINGER_S: Final = 0.1
WAITING_BYTES_MAX: Final = (
    4 * 1024 * 1024
)  # limit for the size of a batch, whatever its number of messages, because a frame has a size limit
# a set of this size is below the broker's limit even if compression does not shrink it
SET_VALUES_BYTES_MAX: Final = 512 * 1024
POLL_INTERVAL_S: Final = 0.05  # seconds between polls without messages; the protocol cannot wait


class Producer:
    """Sends messages in batches, with one MULTIPRODUCE request for all topics and partitions.

    Call ``flush`` at the end.

    Messages of the same topic and partition stay in order.
    """

    def __init__(
        self,
        client: Kafka07Client,
        *,
        compression: CompressionCodec = CompressionCodec.NONE,
        batch_records: int = BATCH_RECORDS,
        linger_s: float = LINGER_S,
    ) -> None:
        """Create a producer.

        Args:
            client: the connection.
            compression: compression of each message set.
            batch_records: number of waiting messages at which they are sent.
            linger_s: seconds after which the oldest waiting message is sent. This is checked only in ``send``.
        """
        self._client: Final = client
        self._compression: Final = compression
        self._batch_records: Final = batch_records
        self._linger_s: Final = linger_s
        self._waiting: dict[tuple[str, int], list[bytes]] = {}
        self._count = self._bytes = 0
        self._since = 0.0
        self._partition_counts: dict[str, int] = {}
        self._lock = asyncio.Lock()

    async def send(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = ANY_PARTITION) -> None:
        """Add a message.

        A key chooses the partition and is not sent. With neither key nor partition, the broker chooses one.

        Raises Invalid(RECORD_TOO_LARGE), and the errors of ``flush``.
        """
        if len(value) > PAYLOAD_BYTES_MAX:
            raise Invalid(
                ErrorCode.RECORD_TOO_LARGE, f"value is too large bytes={len(value)} limit={PAYLOAD_BYTES_MAX}"
            )
        if key is not None and partition == ANY_PARTITION:
            partition = await self._partition_of(topic, key)
        if not self._count:
            self._since = time.monotonic()
        self._waiting.setdefault((topic, partition), []).append(value)
        self._count += 1
        self._bytes += len(value)
        full = self._count >= self._batch_records or self._bytes >= WAITING_BYTES_MAX
        if full or time.monotonic() - self._since >= self._linger_s:
            await self.flush()

    async def _partition_of(self, topic: str, key: bytes) -> int:
        count = self._partition_counts.get(topic)
        if count is None:
            count = self._partition_counts[topic] = await self._client.partition_count(topic)
        return partitions_of(key, memoryview(array("q", (0, len(key), 0, 0))), count, KeyHash.FNV32)[0]

    async def flush(self) -> None:
        """Send all waiting messages, and wait until the broker has stored them.

        Raises Unavailable if the connection was lost. The outcome is then unknown.
        """
        async with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._count = self._bytes = 0
            entries = [
                (topic_bytes(topic), partition, wrap(encode_set(part), self._compression))
                for (topic, partition), values in waiting.items()
                for part in _parts(values)
            ]
            if entries:
                topic, partition = next(iter(waiting))
                await self._client.send(encode_multiproduce(entries), topic, max(partition, 0))


@dataclass(frozen=True, slots=True)
class Message:
    """A message, and the byte position of the next one."""

    partition: int
    value: bytes
    next_address: int


class Consumer:
    """Reads the partitions of a topic concurrently and stores its positions.

    A position is the byte position of the next message, which Kafka 0.7 calls offset.

    Attributes:
        positions: byte position after the last returned message, by partition. ``commit`` writes them to a JSON file
            ``{topic: {partition: position}}``, which is replaced atomically.
    """

    def __init__(
        self,
        client: Kafka07Client,
        topic: str,
        *,
        partitions: list[int] | None = None,
        positions: Mapping[int, int] | None = None,
        start: int = EARLIEST,
        path: Path | None = None,
    ) -> None:
        """Create a consumer that begins at ``positions``, or at the positions in the file ``path``.

        Args:
            client: the connection.
            topic: name of the topic.
            partitions: partitions to read; None reads all.
            positions: byte position to begin at, by partition.
            start: ``EARLIEST`` or ``LATEST``: where to begin if there is no position, or if it is outside the retained
                messages.
            path: file of the positions.

        Raises:
            Invalid: INVALID_REQUEST: ``start`` has another value.
        """
        if start not in (EARLIEST, LATEST):
            raise Invalid(ErrorCode.INVALID_REQUEST, f"start must be EARLIEST or LATEST start={start}")
        self._client: Final = client
        self._topic: Final = topic
        self._partitions = partitions
        self._start: Final = start
        self._path: Final = path
        self.positions: dict[int, int] = dict(positions or (_stored(path).get(topic, {}) if path else {}))

    async def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages forever."""
        while True:
            found = await self.poll()
            for message in found:
                self.positions[message.partition] = message.next_address
                yield message
            if not found:
                await asyncio.sleep(POLL_INTERVAL_S)

    async def poll(self) -> list[Message]:
        """Return available messages. Positions do not change. Raises Unavailable, Missing(PARTITION_MISSING)."""
        if self._partitions is None:
            self._partitions = list(range(await self._client.partition_count(self._topic)))
        for partition in self._partitions:
            if partition not in self.positions:
                await self._reset(partition)
        positions = [(partition, self.positions[partition]) for partition in self._partitions]
        found: list[Message] = []
        for (partition, address), result in zip(
            positions, await self._client.read_many(self._topic, positions, bytes_max=FETCH_BYTES), strict=True
        ):
            read = await self._complete_read(partition, address, result)
            if read is not None:
                found += [Message(partition, *pair) for pair in zip(read.values, read.positions, strict=True)]
                if not read.values:
                    self.positions[partition] = read.next_address
        return found

    async def _complete_read(self, partition: int, address: int, result: Fetched | BrokerError) -> Fetched | None:
        if isinstance(result, BrokerError):
            if result.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise result
            await self._reset(partition)
            return None
        return await self._client.read(self._topic, partition, address) if result.is_cut else result

    async def _reset(self, partition: int) -> None:
        self.positions[partition] = (await self._client.addresses(self._topic, partition, self._start))[0]

    def commit(self) -> None:
        """Write the positions to the file. Raises OSError."""
        if self._path is None:
            return
        stored = _stored(self._path) | {self._topic: self.positions}
        text = json.dumps(
            {topic: {str(p): at for p, at in kafka.items()} for topic, kafka in stored.items()}, sort_keys=True
        )
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self._path)


class SyncProducer:
    """The blocking version of ``Producer``. It has its own connection."""

    def __init__(
        self,
        url: str,
        *,
        compression: CompressionCodec = CompressionCodec.NONE,
        batch_records: int = BATCH_RECORDS,
        linger_s: float = LINGER_S,
    ) -> None:
        """Connect to ``url`` (``kafka07://host:port``). Other arguments are the same as in ``Producer``.

        Raises Unavailable, and Invalid for another protocol.
        """
        self._client: Final = SyncClient(url)

        async def make(client: WireClient) -> Producer:
            kafka = _kafka07(client)
            return Producer(kafka, compression=compression, batch_records=batch_records, linger_s=linger_s)

        self._producer: Final = self._client.run(make)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = ANY_PARTITION) -> None:
        """Add a message. See ``Producer.send``."""
        self._client.run(lambda _: self._producer.send(topic, value, key=key, partition=partition))

    def flush(self) -> None:
        """Send all waiting messages. See ``Producer.flush``."""
        self._client.run(lambda _: self._producer.flush())

    def close(self) -> None:
        """Flush, and close the connection."""
        try:
            self.flush()
        finally:
            self._client.close()


class SyncConsumer:
    """The blocking version of ``Consumer``. It has its own connection."""

    def __init__(self, url: str, topic: str, *, start: int = EARLIEST, path: Path | None = None) -> None:
        """Connect to ``url`` (``kafka07://host:port``). Other arguments are the same as in ``Consumer``.

        Raises Unavailable, and Invalid for another protocol.
        """
        self._client: Final = SyncClient(url)

        async def make(client: WireClient) -> Consumer:
            return Consumer(_kafka07(client), topic, start=start, path=path)

        self._consumer: Final = self._client.run(make)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages forever."""
        while True:
            found = self._client.run(lambda _: self._consumer.poll())
            for message in found:
                self._consumer.positions[message.partition] = message.next_address
                yield message
            if not found:
                time.sleep(POLL_INTERVAL_S)

    @property
    def positions(self) -> dict[int, int]:
        """The byte position to continue at, by partition."""
        return self._consumer.positions

    def commit(self) -> None:
        """Write the positions to the file. See ``Consumer.commit``. Raises OSError."""
        self._consumer.commit()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _kafka07(client: WireClient) -> Kafka07Client:
    if not isinstance(client, Kafka07Client):
        raise Invalid(ErrorCode.INVALID_REQUEST, "url must begin with kafka07://")
    return client


def _parts(values: list[bytes]) -> Iterator[list[bytes]]:
    """Split values into message sets.

    A compressed set must fit the broker's limit for a message, even if compression does not make it smaller.
    """
    part: list[bytes] = []
    size = 0
    for value in values:
        if part and size + len(value) > SET_VALUES_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(value)
        size += len(value)
    if part:
        yield part


def _stored(path: Path) -> dict[str, dict[int, int]]:
    """Return the positions in a file. If the file does not exist, there are none."""
    if not path.exists():
        return {}
    content: dict[str, dict[str, int]] = json.loads(path.read_text(encoding="utf-8"))
    return {topic: {int(partition): at for partition, at in kafka.items()} for topic, kafka in content.items()}
