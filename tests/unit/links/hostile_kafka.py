"""A server that speaks Kafka's protocol and lies: tests set what it responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from polywire.protocols.kafka import schema
from polywire.protocols.kafka.client_batches import encode_batch
from polywire.protocols.kafka.codec import decode_request, encode_response
from polywire.protocols.kafka.crc32c import crc32c
from polywire.protocols.kafka.messages import Api, Codec, Request
from polywire.records.columns import Record

TOPIC: Final = "lies"
HEAD_BYTES: Final = 61


def batch_at(base: int, values: Sequence[bytes] = (b"v",), *, codec: Codec = Codec.NONE, **fields: int) -> bytes:
    """Return a batch with consecutive offsets. ``fields`` are written into its header, which gets a right CRC."""
    batch = bytearray(encode_batch([Record(value) for value in values], codec=codec))
    batch[0:8] = (base & 2**64 - 1).to_bytes(8, "big")
    return sealed(batch, **fields)


def sealed(batch: bytearray, **fields: int) -> bytes:
    """Write fields into the header of a batch, and its CRC."""
    places = {"attributes": (21, 2), "last_delta": (23, 4), "first_time": (27, 8), "count": (57, 4), "magic": (16, 1)}
    for name, number in fields.items():
        at, size = places[name]
        batch[at : at + size] = (number & 256**size - 1).to_bytes(size, "big")
    batch[17:21] = crc32c(memoryview(batch)[21:]).to_bytes(4, "big")
    return bytes(batch)


def with_body(base: int, body: bytes, *, codec: Codec, count: int = 1) -> bytes:
    """Return a batch with this compressed body."""
    batch = bytearray(batch_at(base)[:HEAD_BYTES]) + body
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    return sealed(batch, attributes=codec, count=count, last_delta=count - 1)


class HostileKafka:
    """The server. It has one topic with one partition.

    Attributes:
        records: returns the content of a response for an offset.
        aborted: aborted transactions of each response.
        frame: if set, the bytes of each response to a Fetch.
        silent: requests of this kind get no response.
        asked: number of Fetch requests.
    """

    def __init__(self) -> None:
        self.first = 0
        self.end = 1000
        self.records: Callable[[int], bytes] = lambda offset: batch_at(offset)
        self.aborted: list[tuple[int, int]] = []
        self.topic_id = b"i" * 16
        self.frame: bytes | None = None
        self.silent: Api | None = None
        self.asked = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """Listen, and return the URL."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"kafka://{host}:{port}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                request = decode_request(await reader.readexactly(size))
                if request.api is self.silent:
                    continue
                if request.api is Api.FETCH and self.frame is not None:
                    writer.write(self.frame)
                else:
                    writer.writelines(map(bytes, encode_response(request, self._answer(request))))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, request: Request) -> Any:
        made = schema.response(request.api)
        match request.api:
            case Api.METADATA:
                partitions = [made.Topics.Partitions(index=0, leader_id=1)]
                return made(topics=[made.Topics(name=TOPIC, topic_id=self.topic_id, partitions=partitions)])
            case Api.LIST_OFFSETS:
                [entry] = request.body.topics[0].partitions
                offset = self.end if entry.timestamp == -1 else self.first
                return made(
                    topics=[made.Topics(name=TOPIC, partitions=[made.Topics.Partitions(index=0, offset=offset)])]
                )
            case api if api is not Api.FETCH:  # settings, users and groups, of which it has none
                return made()
        self.asked += 1
        [entry] = request.body.topics[0].partitions
        partition = made.Responses.Partitions(
            index=0,
            high_watermark=self.end,
            last_stable_offset=self.end,
            aborted_transactions=[
                made.Responses.Partitions.AbortedTransactions(producer_id=producer, first_offset=first)
                for producer, first in self.aborted
            ],
            records=self.records(entry.fetch_offset),
        )
        return made(responses=[made.Responses(topic=TOPIC, partitions=[partition])])
