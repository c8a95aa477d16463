"""Idempotent and transactional Kafka clients over this project's codec, which need no other client library.

As in ``clients``; every transaction is in the history, however it ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import decode_batches, encode_batch
from polywire.protocols.kafka.client_codec import decode_response, encode_request
from polywire.protocols.kafka.messages import Api, WireError
from polywire.records.columns import Record
from tests.histories.clients import ANSWER_S, CONNECT_S, PAUSE_S, Url, now
from tests.histories.history import History, Outcome, Place, Position, Produce, Shared, Transaction, Write

VERSIONS: Final = {
    Api.INIT_PRODUCER_ID: 4,
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.OFFSET_FETCH: 7,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.ADD_OFFSETS_TO_TXN: 3,
    Api.TXN_OFFSET_COMMIT: 3,
    Api.END_TXN: 3,
}
TRANSACTIONAL: Final = 16  # attribute of a batch
READ_COMMITTED: Final = 1
TIMEOUT_MS: Final = 60_000
ALL: Final = -1  # acks
TAKEN_MAX: Final = 40  # records of one transaction
ABORTED_EACH: Final = 5
LOST: Final = (OSError, asyncio.IncompleteReadError)


class Refusal(Exception):
    """The broker responded with an error."""


class Connection:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader: Final = reader
        self._writer: Final = writer
        self._numbers: Final = count()

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect. Raises OSError."""
        host, _, port = url.partition("://")[2].partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, api: Api, /, **fields: Any) -> Any:
        """Send one request; return the body of its response.

        Raises OSError or IncompleteReadError on a lost connection.
        """
        async with asyncio.timeout(ANSWER_S):
            version = VERSIONS[api]
            body = schema.request(api)(**fields)
            self._writer.write(encode_request(api, version, next(self._numbers), body, client_id="histories"))
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return decode_response(api, version, await self._reader.readexactly(size))[1]

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


class KafkaClient:
    """A client with one connection, which reconnects after a loss or refusal. ``answers`` counts responses."""

    def __init__(self, name: str, url: Url, history: History) -> None:
        self.name: Final = name
        self.running = True
        self.answers = 0
        self.pause_s = PAUSE_S
        self.history: Final = history
        self._url: Final = url

    async def run(self) -> None:
        """Work until ``running`` is cleared."""
        while self.running:
            try:
                connection = await Connection.open(self._url("kafka"))
            except OSError:
                await asyncio.sleep(CONNECT_S)
                continue
            try:
                with suppress(Refusal, *LOST):
                    await self.use(connection)
            finally:
                connection.close()
            await asyncio.sleep(self.pause_s)

    async def use(self, connection: Connection) -> None:
        """Work over one connection."""
        raise AssertionError("each client has its own work")


class IdempotentKafkaProducer(KafkaClient):
    """Repeats each batch unchanged until it is acknowledged: the producer id lives as long as the client."""

    def __init__(self, name: str, url: Url, history: History, *, topic: str, partition: int, size: int) -> None:
        super().__init__(name, url, history)
        self._topic: Final = topic
        self._partition: Final = partition
        self._size: Final = size
        self._who: tuple[int, int] | None = None
        self._next = 0
        self._begun = 0

    async def use(self, connection: Connection) -> None:
        """Send one batch after the other."""
        if self._who is None:
            reported = await connection.ask(Api.INIT_PRODUCER_ID, transaction_timeout_ms=TIMEOUT_MS)
            _check(reported.error)
            self._who = reported.producer_id, reported.producer_epoch
        while self.running:
            self._begun = self._begun or now()
            batch = encode_batch(
                [Record(value) for value in self._values],
                producer_id=self._who[0],
                producer_epoch=self._who[1],
                base_sequence=self._next,
            )
            error, offset = await _produce(connection, self._topic, self._partition, batch)
            _check(error, WireError.DUPLICATE_SEQUENCE_NUMBER)
            self._note(Outcome.DONE, offset)
            self.answers += 1
            await asyncio.sleep(self.pause_s)

    @property
    def _values(self) -> tuple[bytes, ...]:
        return tuple(f"{self.name}:{number:06}".encode() for number in range(self._next, self._next + self._size))

    def _note(self, outcome: Outcome, offset: int = -1) -> None:
        places = tuple(Place(self._topic, self._partition, offset + row) for row in range(self._size))
        reported = places if offset >= 0 else ()
        event = Produce(self.name, self._begun, now(), self._topic, self._values, outcome, reported)
        self.history.events.append(event)
        self._begun, self._next = 0, self._next + self._size

    def in_doubt(self) -> None:
        """Record the last unacknowledged batch at the end."""
        if self._begun:
            self._note(Outcome.UNKNOWN)


class Transformer(KafkaClient):
    """Copies a topic into another, record by record, in transactions that commit its group's offsets; aborts some.

    After a lost connection it starts at the group's offsets, which fences its former self and ends the open
    transaction.
    """

    def __init__(self, name: str, url: Url, history: History, *, source: str, target: str, partitions: int) -> None:
        super().__init__(name, url, history)
        self._source: Final = source
        self._target: Final = target
        self._partitions: Final = partitions
        self._numbers: Final = count(1)

    async def use(self, connection: Connection) -> None:
        """Initialize the producer, and run one transaction after the other."""
        reported = await connection.ask(
            Api.INIT_PRODUCER_ID, transactional_id=self.name, transaction_timeout_ms=TIMEOUT_MS
        )
        _check(reported.error)
        who = {
            "transactional_id": self.name,
            "producer_id": reported.producer_id,
            "producer_epoch": reported.producer_epoch,
        }
        sequences: Counter[int] = Counter()
        while self.running:
            positions = await self._positions(connection)
            taken = {number: await self._take(connection, number, at) for number, at in positions.items()}
            if any(taken.values()):
                await self._transact(connection, who, sequences, positions, taken)
            self.answers += 1
            await asyncio.sleep(self.pause_s)

    async def _positions(self, connection: Connection) -> dict[int, int]:
        begun = now()
        topic = schema.request(Api.OFFSET_FETCH).Topics(name=self._source, indexes=list(range(self._partitions)))
        reported = await connection.ask(Api.OFFSET_FETCH, group_id=self.name, topics=[topic])
        _check(reported.error)
        found = {entry.index: max(entry.offset, 0) for entry in reported.topics[0].partitions}
        for number, offset in found.items():
            shared = Shared(self.name, self._source, number)
            self.history.events.append(Position(self.name, begun, now(), shared, offset))
        return found

    async def _take(self, connection: Connection, partition: int, offset: int) -> list[Record]:
        """Return the next records."""
        topics = schema.request(Api.FETCH).Topics
        entries = [topics.Partitions(partition=partition, fetch_offset=offset, partition_max_bytes=1 << 16)]
        asked = [topics(topic=self._source, partitions=entries)]
        reported = await connection.ask(Api.FETCH, max_bytes=1 << 16, isolation_level=READ_COMMITTED, topics=asked)
        entry = reported.responses[0].partitions[0]
        _check(entry.error)
        return decode_batches(entry.records or b"", offset=offset)[:TAKEN_MAX]

    async def _transact(
        self,
        connection: Connection,
        who: dict[str, Any],
        sequences: Counter[int],
        positions: dict[int, int],
        taken: dict[int, list[Record]],
    ) -> None:
        attempt = next(self._numbers)
        after = {number: records[-1].offset + 1 for number, records in taken.items() if records}
        writes = tuple(
            Write(
                self._target,
                f"{self.name}:{attempt}:{number}:{record.offset}".encode(),
                Place(self._source, number, record.offset),
                record.value or b"",
            )
            for number, records in taken.items()
            for record in records
        )
        moved = tuple((Shared(self.name, self._source, number), offset) for number, offset in after.items())
        begun, outcome = now(), Outcome.REFUSED  # until the commit is requested
        commits = attempt % ABORTED_EACH != 0
        try:
            await self._write(connection, who, sequences, writes)
            await self._move(connection, who, after)
            outcome = Outcome.UNKNOWN if commits else outcome
            _check((await connection.ask(Api.END_TXN, **who, committed=commits)).error)
            outcome = Outcome.DONE if commits else outcome
        finally:
            self.history.events.append(Transaction(self.name, begun, now(), writes, moved, outcome))

    async def _write(
        self, connection: Connection, who: dict[str, Any], sequences: Counter[int], writes: Sequence[Write]
    ) -> None:
        """Write each record to the partition after its source's."""
        parts: dict[int, list[Record]] = {}
        for write in writes:
            parts.setdefault((write.source.partition + 1) % self._partitions, []).append(Record(write.value))
        topics = schema.request(Api.ADD_PARTITIONS_TO_TXN).Topics
        asked = [topics(name=self._target, partitions=list(parts))]
        reported = await connection.ask(Api.ADD_PARTITIONS_TO_TXN, **who, topics=asked)
        for entry in reported.topics[0].partitions:
            _check(entry.error)
        for number, records in parts.items():
            batch = encode_batch(
                records,
                producer_id=who["producer_id"],
                producer_epoch=who["producer_epoch"],
                base_sequence=sequences[number],
                attributes=TRANSACTIONAL,
            )
            error, _ = await _produce(connection, self._target, number, batch, transactional_id=self.name)
            _check(error)
            sequences[number] += len(records)

    async def _move(self, connection: Connection, who: dict[str, Any], after: dict[int, int]) -> None:
        _check((await connection.ask(Api.ADD_OFFSETS_TO_TXN, **who, group_id=self.name)).error)
        topics = schema.request(Api.TXN_OFFSET_COMMIT).Topics
        entries = [topics.Partitions(index=number, offset=offset) for number, offset in after.items()]
        asked = [topics(name=self._source, partitions=entries)]
        reported = await connection.ask(Api.TXN_OFFSET_COMMIT, **who, group_id=self.name, topics=asked)
        for entry in reported.topics[0].partitions:
            _check(entry.error)


async def _produce(connection: Connection, topic: str, partition: int, batch: bytes, **fields: Any) -> tuple[int, int]:
    """Return the error and offset of one batch."""
    topics = schema.request(Api.PRODUCE).Topics
    asked = [topics(name=topic, partitions=[topics.Partitions(index=partition, records=batch)])]
    reported = await connection.ask(Api.PRODUCE, acks=ALL, timeout_ms=TIMEOUT_MS, topics=asked, **fields)
    entry = reported.responses[0].partitions[0]
    return entry.error, entry.base_offset


def _check(error: int, *but: int) -> None:
    if error and error not in but:
        raise Refusal(WireError(error).name)
