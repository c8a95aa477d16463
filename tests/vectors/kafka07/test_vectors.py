"""The examples of bytes in the specification: decoded, executed, and encoded again.

spec: kafka-0.7#messages, kafka-0.7#produce
"""

from __future__ import annotations

import pytest

from polywire.protocols.kafka07 import messages
from polywire.protocols.kafka07.compression import Expander
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    Fetch,
    FetchEntry,
    Offsets,
    Produce,
    RequestType,
    encode_fetch,
    encode_message,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_offsets_answer,
    encode_produce,
    encode_set,
    parse,
    parse_offsets_answer,
    split_multifetch_answer,
)
from polywire.types import Buffer
from tests.unit.protocols.kafka07.dialogue import World

PRODUCE = bytes.fromhex("0000001f 0000 0004 74657374 00000000 0000000f 0000000b 0100 3610a686 68656c6c6f")
TWO_OF_MAGIC_0 = bytes.fromhex("000000270000000474657374ffffffff000000170000000a003610a68668656c6c6f000000050000000000")
MULTIPRODUCE = bytes.fromhex(
    "0000003c 0003 0002 0004 74657374 00000000 0000000f 0000000b 0100 3610a686 68656c6c6f"
    "0004 6c6f6773 00000002 0000000d 00000009 0100 352441c2 616263"
)
FETCH = bytes.fromhex("00000018 0001 0004 74657374 00000000 0000000000000000 00100000")
FETCHED = bytes.fromhex("0000001e 0000 0000000b01003610a68668656c6c6f 000000090100352441c2616263")
FETCHED_20 = bytes.fromhex("00000016 0000 0000000b01003610a68668656c6c6f 0000000901")
EMPTY = bytes.fromhex("00000002 0000")
OUT_OF_RANGE = bytes.fromhex("00000002 0001")
MULTIFETCH = bytes.fromhex(
    "00000046 0002 0003 0004 74657374 00000000 0000000000000000 00100000"
    "0004 6c6f6773 00000002 000000000000000d 00100000 0004 74657374 00000009 0000000000000000 00000064"
)
MULTIFETCHED = bytes.fromhex("00000023 0000 00000011 0000 0000000b01003610a68668656c6c6f 00000002 0000 00000002 0003")
OFFSETS = bytes.fromhex("00000018 0004 0004 74657374 00000000 ffffffffffffffff 00000002")
LISTED = bytes.fromhex("00000016 0000 00000002 000000000000001c 0000000000000000")
INNER = bytes.fromhex("000000070100e8b7be4361 000000080100b5ae1bae6262")
GZIP = bytes.fromhex(
    "00000031 0101 0862eba8 1f8b0800000000000203 63606060676478b17d9f73220303030723c3d675d2eb92920069b166e817000000"
)
SNAPPY = bytes.fromhex(
    "00000033 0102 165e6c6b 82534e4150505900 00000001 00000001 00000019 17 58"
    "000000070100e8b7be4361 000000080100b5ae1bae6262"
)
SET = encode_set([b"hello"])


def opened(message_set: bytes) -> list[bytes]:
    """Return the bytes of the plain sets in a set."""
    parts = Expander().open_set(message_set, 0, len(message_set))
    return [bytes(memoryview(part.data)[part.start : part.stop]) for part in parts]


def test_produce() -> None:
    request = parse(PRODUCE, 4, len(PRODUCE))
    assert isinstance(request, Produce)
    [entry] = request.entries
    assert (entry.topic, entry.partition, PRODUCE[entry.start : entry.stop]) == (b"test", 0, SET)
    assert encode_produce(b"test", 0, SET) == PRODUCE


def test_two_messages_of_magic_0() -> None:
    assert encode_produce(b"test", -1, encode_set([b"hello", b""], magic=0)) == TWO_OF_MAGIC_0
    world = World()
    peer = world.connect()
    assert peer.ask(TWO_OF_MAGIC_0) == b""
    found = [peer.ask(encode_fetch(b"test", number, 0, 1000))[6:] for number in range(3)]
    assert sorted(found) == [b"", b"", TWO_OF_MAGIC_0[-23:]]


def test_multiproduce() -> None:
    entries = [(b"test", 0, SET), (b"logs", 2, encode_set([b"abc"]))]
    assert encode_multiproduce(entries) == MULTIPRODUCE
    request = parse(MULTIPRODUCE, 4, len(MULTIPRODUCE))
    assert isinstance(request, Produce)
    assert [(e.topic, e.partition, MULTIPRODUCE[e.start : e.stop]) for e in request.entries] == entries


def test_fetch() -> None:
    assert encode_fetch(b"test", 0, 0, 1 << 20) == FETCH
    assert parse(FETCH, 4, len(FETCH)) == Fetch([FetchEntry(b"test", 0, 0, 1 << 20)], is_multiple=False)
    peer = World().connect()
    peer.feed(encode_produce(b"test", 0, encode_set([b"hello", b"abc"])))
    assert peer.ask(FETCH) == FETCHED
    assert peer.ask(encode_fetch(b"test", 0, 28, 1 << 20)) == EMPTY
    assert peer.ask(encode_fetch(b"test", 0, 29, 1 << 20)) == OUT_OF_RANGE


def test_a_fetch_that_ends_inside_a_message_stops_before_it() -> None:
    """We stop at 15 bytes where 0.7.2 truncates at 20 (spec: kafka-0.7#what-breaks)."""
    peer = World().connect()
    peer.feed(encode_produce(b"test", 0, encode_set([b"hello", b"abc"])))
    answer = peer.ask(encode_fetch(b"test", 0, 0, 20))
    assert answer[4:] == FETCHED_20[4:21]
    assert answer[:4] == (17).to_bytes(4, "big")
    assert peer.ask(encode_fetch(b"test", 0, 15, 5)) == bytes.fromhex("00000007 0000 0000000901")


def test_multifetch() -> None:
    entries = [
        FetchEntry(b"test", 0, 0, 1 << 20),
        FetchEntry(b"logs", 2, 13, 1 << 20),
        FetchEntry(b"test", 9, 0, 100),
    ]
    assert encode_multifetch(entries) == MULTIFETCH
    assert parse(MULTIFETCH, 4, len(MULTIFETCH)) == Fetch(entries, is_multiple=True)
    peer = World().connect()
    peer.feed(MULTIPRODUCE)
    assert peer.ask(MULTIFETCH) == MULTIFETCHED
    assert [(code, bytes(part)) for code, part in split_multifetch_answer(MULTIFETCHED[4:])] == [
        (0, SET),
        (0, b""),
        (3, b""),
    ]


def test_offsets() -> None:
    assert encode_offsets(b"test", 0, -1, 2) == OFFSETS
    assert parse(OFFSETS, 4, len(OFFSETS)) == Offsets(b"test", 0, -1, 2)
    peer = World().connect()
    peer.feed(encode_produce(b"test", 0, encode_set([b"hello", b"abc"])))
    assert peer.ask(OFFSETS) == LISTED
    assert encode_offsets_answer([28, 0]) == LISTED
    assert parse_offsets_answer(LISTED[4:]) == [28, 0]


@pytest.mark.parametrize("wrapper", [GZIP, SNAPPY], ids=["gzip", "snappy"])
def test_wrappers(wrapper: bytes) -> None:
    assert encode_set([b"a", b"bb"]) == INNER
    assert opened(wrapper) == [INNER]
    assert encode_message(wrapper[10:], 1, CompressionCodec(wrapper[5])) == wrapper
    peer = World().connect()
    assert peer.ask(encode_produce(b"test", 0, wrapper) + encode_fetch(b"test", 0, 0, 1000))[6:] == INNER


def test_the_crc_of_nothing_is_zero() -> None:
    assert encode_message(b"")[6:] == bytes(4)


STREAM = PRODUCE + TWO_OF_MAGIC_0.replace(b"\xff\xff\xff\xff", bytes(4), 1) + MULTIPRODUCE
STREAM += encode_produce(b"test", 0, GZIP + SNAPPY) + FETCH + MULTIFETCH + OFFSETS + FETCH


def test_the_stream_split_at_every_byte_means_the_same() -> None:
    def answers(pieces: list[bytes]) -> bytes:
        peer = World().connect()
        for piece in pieces:
            peer.feed(piece)
        peer.world.memory.run()
        return peer.take()

    whole = answers([STREAM])
    assert whole
    assert answers([STREAM[at : at + 1] for at in range(len(STREAM))]) == whole
    for at in range(1, len(STREAM)):
        assert answers([STREAM[:at], STREAM[at:]]) == whole, at


def test_types_are_numbered_as_in_the_protocol() -> None:
    assert [RequestType(number).name for number in range(5)] == [
        "PRODUCE",
        "FETCH",
        "MULTIFETCH",
        "MULTIPRODUCE",
        "OFFSETS",
    ]


def test_surplus_bytes_of_a_frame_are_ignored() -> None:
    padded: Buffer = bytes.fromhex("0000001c") + FETCH[4:] + b"\1\2\3\4"
    assert messages.parse(padded, 4, len(padded)) == parse(FETCH, 4, len(FETCH))
