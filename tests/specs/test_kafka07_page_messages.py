"""Messages and message sets in the pages on Kafka 0.7, on both ports.

The tests use the client written from the pages alone. Requests are in ``test_kafka07_page_requests.py``, limits in ``test_kafka07_page.py``.
"""

from __future__ import annotations

import gzip
import itertools
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Final

import cramjam
import pytest

from tests.broker_process import BrokerProcess
from tests.specs.kafka07_page_client import (
    FETCH,
    LATEST,
    OFFSETS,
    PRODUCE,
    Client,
    asked,
    fetched,
    frame,
    message,
    opened,
    produced,
)
from tests.specs.pages import KAFKA07, Differs, Row

HELLO: Final = message(b"hello")
GZIP, SNAPPY = 1, 2
CLOSED: Final = None
TOPICS: Final = itertools.count(random.getrandbits(40))


@pytest.fixture(params=["kafka07", "any"])
def client(request: pytest.FixtureRequest, broker: BrokerProcess) -> Iterator[Client]:
    """Return a client of the protocol's own port, and of the one that detects it."""
    found = Client(broker.addresses[request.param])
    yield found
    found.socket.close()


def stored(client: Client, messages: bytes) -> bytes | None:
    """Return the content of a new topic after these were produced; None if the broker closed the connection."""
    topic = b"t%014d" % next(TOPICS)
    try:
        client.ask(frame(PRODUCE, produced(topic, 0, messages)) + frame(OFFSETS, asked(topic, 0, LATEST, 1)))
        return client.ask(frame(FETCH, fetched(topic, 0, 0, 2**24)))
    except ConnectionError:
        return CLOSED


def blocks(messages: bytes, size: int) -> bytes:
    """Return snappy blocks after the header of their stream."""
    packed = bytes.fromhex("82534e4150505900 00000001 00000001")
    for begin in range(0, len(messages), size):
        block = bytes(cramjam.snappy.compress_raw(messages[begin : begin + size]))
        packed += struct.pack(">i", len(block)) + block
    return packed


def gzipped(messages: bytes) -> bytes:
    """Return a message that contains a compressed set."""
    return message(gzip.compress(messages, mtime=0), 1, GZIP)


INNER: Final = bytes.fromhex("000000070100e8b7be4361 000000080100b5ae1bae6262")
OPENED: Final = Differs("the compressed message as it was sent", "its messages, opened", "clients need no compression")


@KAFKA07.rows(
    "written",
    Row(
        20,
        "a message: length, magic 0, CRC-32 of the payload, payload",
        (bytes.fromhex("0000000a003610a68668656c6c6f"),),
    ),
    Row(
        20,
        "a message: length, magic 1, attributes, CRC-32 of the payload, payload",
        (bytes.fromhex("0000000b01003610a68668656c6c6f"),),
    ),
    Row(20, "the length does not count itself", (message(b"x" * 300),)),
    Row(20, "a payload may have no bytes, with magic 0", (bytes.fromhex("000000050000000000"),)),
    Row(20, "a payload may have no bytes, with magic 1", (bytes.fromhex("00000006010000000000"),)),
    Row(20, "a payload may be any bytes", (message(bytes(range(256)) * 9),)),
    Row(20, "a set is its messages, one behind the other", (HELLO * 50,)),
    Row(20, "both magics may be mixed, and each is kept", (message(b"a", 0) + message(b"b", 1) + message(b"c", 0),)),
    Row(
        20,
        "a message has no key, time or offset: what was produced is what is fetched",
        (message(b"a") + message(b"b"),),
    ),
)
def test_messages_round_trip(client: Client, written: bytes) -> None:
    assert stored(client, written) == written


@KAFKA07.rows(
    "written",
    Row(20, "the CRC does not count the magic and the attributes", (message(b"x" * 9)[:6] + b"\1\2\3\4" + b"x" * 9,)),
    Row(20, "the CRC of no payload is 0", (bytes.fromhex("000000060100 00000001"),)),
    Row(20, "a magic of 2 is an error", (message(b"x", 2),)),
    Row(20, "a magic of 255 is an error", (message(b"x", 255),)),
    Row(20, "codec 3 is an error", (message(gzip.compress(HELLO), 1, 3),)),
    Row(
        21,
        "the CRC of a compressed message is that of its compressed bytes",
        (gzipped(HELLO)[:6] + bytes(4) + gzipped(HELLO)[10:],),
    ),
    Row(21, "messages within a compressed one have CRCs of their own", (gzipped(HELLO[:-1] + b"O"),)),
    Row(21, "magics within it are 0 or 1", (gzipped(message(b"x", 2)),)),
)
def test_invalid_messages_close_the_connection(client: Client, written: bytes) -> None:
    assert stored(client, written) is CLOSED


@KAFKA07.says(
    20,
    "attributes but the two lowest bits mean nothing, and come back",
    Differs("stored and sent as they came", "0 in what is fetched", "they mean nothing on any wire"),
)
def test_attributes(client: Client) -> None:
    assert stored(client, message(b"hello", 1, 0xFC)) == HELLO


@KAFKA07.rows(
    "written",
    Row(21, "a message of codec 1 holds a set in gzip", (gzipped(INNER),)),
    Row(
        36,
        "a set in gzip, byte by byte",
        (
            bytes.fromhex(
                "0000003101010862eba81f8b080000000000020363606060676478b17d9f73220303030723c3d675d2eb92920069b166e817000000"
            ),
        ),
    ),
    Row(
        21,
        "a message of codec 2 holds a set in snappy's stream of blocks",
        (message(blocks(INNER, 32_768), 1, SNAPPY),),
    ),
    Row(
        36,
        "a set in snappy, byte by byte",
        (
            bytes.fromhex(
                "000000330102165e6c6b82534e415050590000000001000000010000001917 58000000070100e8b7be4361000000080100b5ae1bae6262".replace(
                    " ", ""
                )
            ),
        ),
    ),
    Row(21, "a block may end within a message", (message(blocks(INNER, 5), 1, SNAPPY),)),
    Row(
        21,
        "a message of codec 2 may hold a set in one raw block",
        (message(bytes(cramjam.snappy.compress_raw(INNER)), 1, SNAPPY),),
    ),
    Row(21, "a compressed message may hold another", (gzipped(gzipped(message(blocks(INNER, 9), 1, SNAPPY))),)),
    Row(21, "an incomplete message at the end of a compressed set is dropped", (gzipped(INNER + HELLO[:-1]),)),
)
def test_compressed_messages_are_read(client: Client, written: bytes) -> None:
    found = stored(client, written)
    assert found is not None
    assert opened(found)[0] == [b"a", b"bb"]


@KAFKA07.says(21, "a compressed message is stored and fetched as it was sent", OPENED)
@KAFKA07.says(
    22,
    "a compressed message has one offset, and a consumer that stops within it begins it again",
    Differs(
        "reads the first of its messages again", "each of its messages has an offset", "they are stored as messages"
    ),
)
def test_compressed_messages_are_decompressed(client: Client) -> None:
    assert stored(client, HELLO + gzipped(INNER) + HELLO) == HELLO + INNER + HELLO


@KAFKA07.says(21, "a compressed message may hold messages of magic 0")
def test_magic_0_inside(client: Client) -> None:
    inner = message(b"a", 0) + message(b"bb", 1)
    assert stored(client, gzipped(inner)) == inner


@KAFKA07.says(21, "a compressed message may hold none")
def test_an_empty_compressed_set(client: Client) -> None:
    assert stored(client, HELLO + gzipped(b"") + HELLO) == HELLO * 2


@KAFKA07.says(22, "a set is read message by message; what is not whole at its end is left for the next fetch")
@KAFKA07.says(22, "if not even the first is whole, the size was too small")
def test_reading_a_set(client: Client) -> None:
    topic = b"t%014d" % next(TOPICS)
    client.produce(topic, 0, b"x" * 1000, b"y" * 3000)
    small = client.ask(frame(FETCH, fetched(topic, 0, 0, 500)))
    assert opened(small) == ([], 0)
    assert small == message(b"x" * 1000)[:500]
    assert [client.consume(topic, 0, 500), client.consume(topic, 0, 500)] == [[b"x" * 1000], [b"y" * 3000]]
    assert client.consume(topic, 0, 500) == []


@KAFKA07.says(20, "the CRC-32 is the common one")
def test_a_checksum(client: Client) -> None:
    found = stored(client, message(b"123456789"))
    assert found is not None
    assert int.from_bytes(found[6:10], "big") == zlib.crc32(b"123456789") == 0xCBF43926
