"""Every row of the reactions of a 0.7.2 broker: response bytes, stored records, and open or closed connection.

The rows: spec: kafka-0.7#connections, kafka-0.7#reactions.
"""

from __future__ import annotations

import gc
import gzip
import itertools
import struct
import zlib

import pytest

from polywire.broker.settings import BrokerSettings
from polywire.errors import ErrorCode
from polywire.protocols.kafka07 import decoder, fetch
from polywire.protocols.kafka07.compression import EXPANDED_BYTES_MAX, wrap
from polywire.protocols.kafka07.errors import WIRE_ERRORS
from polywire.protocols.kafka07.messages import (
    CompressionCodec,
    FetchEntry,
    encode_fetch,
    encode_message,
    encode_multifetch,
    encode_multiproduce,
    encode_offsets,
    encode_produce,
    encode_set,
    parse_offsets_answer,
    split_multifetch_answer,
)
from polywire.protocols.kafka07.session import ENTRIES_AT_ONCE_MAX
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.testing.loop import SimulatedClock
from polywire.types import Level, TopicName
from tests.processor import processor_used
from tests.unit.protocols.kafka07.dialogue import Dialogue, World

EMPTY = bytes.fromhex("00000002 0000")
OUT_OF_RANGE = bytes.fromhex("00000002 0001")
WRONG_PARTITION = bytes.fromhex("00000002 0003")
UNKNOWN = bytes.fromhex("00000002 ffff")
GZIP, SNAPPY = CompressionCodec.GZIP, CompressionCodec.SNAPPY
A, B = encode_message(b"aaaa"), encode_message(b"bb", 0)
BAD = encode_message(b"x")[:6] + b"\0\0\0\0x"
LONGEST = BrokerSettings().record_bytes_max
TOO_LONG = encode_message(b"x" * (LONGEST + 1))


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def peer(world: World) -> Dialogue:
    return world.connect()


def fetched(peer: Dialogue, topic: bytes = b"t", partition: int = 0, at: int = 0, size: int = 1 << 20) -> bytes:
    """Return the set bytes of one FETCH that must succeed."""
    answer = peer.ask(encode_fetch(topic, partition, at, size))
    assert answer[:6] == struct.pack(">ih", len(answer) - 4, 0), answer[:20]
    return answer[6:]


def stored(world: World, topic: bytes = b"t", partition: int = 0) -> bytes:
    """Return what a new connection reads."""
    return fetched(world.connect(), topic, partition)


def framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">i", 0),
        struct.pack(">i", -5),
        struct.pack(">i", decoder.FRAME_BYTES_MAX + 1),
        framed(b"\0"),
        framed(b"\0\5"),
        framed(b"\xff\xff"),
        framed(b"\0\1\0\4te"),
        framed(b"\0\1\xff\xff" + bytes(16)),
        framed(b"\0\2\xff\xff"),
        framed(b"\0\3\xff\xff"),
        framed(b"\0\2\0\1"),
        encode_produce(b"a/b", 0, A),
        encode_produce(b"..", 0, A),
        encode_produce(b"", 0, A),
        encode_produce(b"\xff", 0, A),
        encode_produce(b"__own", 0, A),
        encode_produce(b"t", 3, A),
        encode_produce(b"t", -2, A),
        framed(b"\0\0\0\1t" + struct.pack(">ii", 0, -1)),
        framed(b"\0\0\0\1t" + struct.pack(">ii", 0, len(A) + 1) + A),
        encode_offsets(b"t", 3, -1, 1),
        encode_offsets(b"t", -1, -1, 1),
        encode_offsets(b"a/b", 0, -1, 1),
        encode_offsets(b"t", 0, -1, -1),
        encode_fetch(b"t", 0, 0, -1),
    ],
)
def test_requests_that_close_the_connection(peer: Dialogue, frame: bytes) -> None:
    assert peer.ask(frame) == b""
    assert peer.closed


@pytest.mark.parametrize(
    "message_set",
    [
        A[:-1],
        b"\xff\xff\xff\xff" + A,
        A + b"\xff\xff\xff\xff",
        struct.pack(">i", 4) + bytes(4),
        A + struct.pack(">iB", 5, 1) + bytes(4),
        BAD,
        A + BAD,
        A + encode_message(b"x", 1)[:4] + b"\2" + encode_message(b"x", 1)[5:],
        encode_message(b"x", 1, CompressionCodec(0))[:5] + b"\3" + encode_message(b"x")[6:],
        encode_message(b"no gzip", 1, GZIP),
        encode_message(b"no snappy", 1, SNAPPY),
        encode_message(b"", 1, SNAPPY),
        encode_message(b"", 1, GZIP),
        encode_message(gzip.compress(A, mtime=0)[:-3], 1, GZIP),
        wrap(A + BAD, GZIP),
        wrap(BAD, SNAPPY),
        wrap(A[:-1], GZIP),
        *[wrap(bytes(size), codec) for size in (1, 2, 3, 4) for codec in (GZIP, SNAPPY)],
        A + wrap(wrap(b"x", GZIP), GZIP),
        TOO_LONG,
        A + TOO_LONG,
        A + wrap(TOO_LONG, GZIP),
    ],
)
def test_sets_that_close_the_connection_and_store_nothing(world: World, peer: Dialogue, message_set: bytes) -> None:
    peer.feed(encode_produce(b"t", 0, A))
    peer.feed(encode_produce(b"t", 0, message_set) + encode_produce(b"t", 0, B))
    assert peer.closed
    assert peer.take() == b""
    assert stored(world) == A
    fresh = world.connect()
    fresh.feed(encode_produce(b"made", 0, message_set))
    assert world.memory.broker.find_topic("made") is not None, "topics are created before validation"


@pytest.mark.parametrize(
    ("message_set", "kept"),
    [
        (b"", b""),
        (b"\0", b""),
        (b"\0\0\0", b""),
        (A + B[:-1], A),
        (A + b"\0\0\1", A),
        (A + B + A, A + B + A),
        (encode_message(b"", 0) + encode_message(b""), encode_message(b"", 0) + encode_message(b"")),
        (wrap(b"", GZIP), b""),
        (wrap(A + B[:-1], GZIP), A),
        (wrap(A + B, SNAPPY), A + B),
        (B + wrap(A, GZIP) + B, B + A + B),
        (wrap(A + wrap(B + B, SNAPPY) + A, GZIP), A + B + B + A),
        (encode_message(zlib.compress(A, wbits=31) * 2, 1, GZIP), A + A),
        (A[:5] + b"\xfc" + A[6:], A),
        (wrap(encode_message(b"y" * 2_000_000), GZIP), encode_message(b"y" * 2_000_000)),
    ],
)
def test_accepted_sets(world: World, peer: Dialogue, message_set: bytes, kept: bytes | None) -> None:
    peer.feed(encode_produce(b"t", 0, message_set) + encode_produce(b"after", 0, A))
    assert not peer.closed
    assert world.memory.broker.find_topic("t") is not None
    assert fetched(peer, size=1 << 24) == (message_set if kept is None else kept)
    assert fetched(peer, b"after") == A


def test_raw_snappy_without_stream_framing(world: World, peer: Dialogue) -> None:
    block = bytes([len(A), (len(A) - 1) << 2]) + A
    peer.feed(encode_produce(b"t", 0, encode_message(block, 1, SNAPPY)))
    assert stored(world) == A


@pytest.mark.parametrize("size", [decoder.PAYLOAD_BYTES_MAX, decoder.PAYLOAD_BYTES_MAX + 1, LONGEST])
def test_a_payload_up_to_the_largest_record_is_accepted(peer: Dialogue, size: int) -> None:
    message = encode_message(b"x" * size)
    peer.feed(encode_produce(b"t", 0, A + message + B))
    assert fetched(peer, at=len(A), size=size + 10) == message
    assert fetched(peer, at=len(A + message)) == B


def test_a_message_that_is_too_long_is_logged(peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, TOO_LONG))
    assert peer.gave_up is not None
    assert peer.gave_up.message == f"message is too large bytes={LONGEST + 1} limit={LONGEST}"


def test_multiproduce_stores_up_to_the_invalid_set(world: World, peer: Dialogue) -> None:
    peer.feed(encode_multiproduce([(b"t", 0, A), (b"u", 1, BAD), (b"t", 0, B)]))
    assert peer.closed
    assert (stored(world), stored(world, b"u", 1)) == (A, b"")


def test_multiproduce_stores_up_to_the_missing_partition(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"u", 0, B) + encode_multiproduce([(b"t", 0, A), (b"u", 7, A), (b"t", 0, B)]))
    assert peer.closed
    assert (stored(world), stored(world, b"u")) == (A, B)


def test_multiproduce_stores_up_to_the_oversized_entry(world: World, peer: Dialogue) -> None:
    peer.feed(encode_multiproduce([(b"t", 0, A), (b"t", 0, TOO_LONG), (b"t", 0, B)]))
    assert peer.closed
    assert stored(world) == A


def test_multiproduce_with_a_wrong_count(world: World, peer: Dialogue) -> None:
    frame = encode_multiproduce([(b"t", 0, A), (b"t", 0, B)])
    peer.feed(frame[:6] + b"\0\1" + frame[8:])
    assert stored(world) == A
    peer.feed(frame[:6] + b"\0\3" + frame[8:])
    assert peer.closed
    assert stored(world) == A


def test_counts_of_zero(peer: Dialogue) -> None:
    assert peer.ask(encode_multiproduce([])) == b""
    assert peer.ask(encode_multifetch([])) == EMPTY
    assert not peer.closed


def test_many_entries_of_one_message(world: World, peer: Dialogue) -> None:
    """As the Hadoop producer sends them (spec: kafka-0.7#tools)."""
    entries = [(b"t", number % 3, encode_message(b"%d" % number)) for number in range(32_767)]
    peer.feed(encode_produce(b"t", 0, A) + encode_multiproduce(entries))
    assert not peer.closed
    for partition in range(3):
        expected = b"".join(message for _, number, message in entries if number == partition)
        assert stored(world, partition=partition) == (A if partition == 0 else b"") + expected


def test_fetching_a_missing_topic_returns_an_empty_set(peer: Dialogue) -> None:
    for address in (0, 12_345, -1):
        assert peer.ask(encode_fetch(b"nothing", 0, address, 100)) == EMPTY
    peer.feed(encode_produce(b"t", 0, A))
    assert peer.ask(encode_fetch(b"t", 1, 12_345, 100)) == EMPTY
    assert peer.world.memory.broker.find_topic("nothing") is None, "fetching creates no topic"


def test_fetch_ranges_and_sizes(peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A + B))
    end = len(A + B)
    assert peer.ask(encode_fetch(b"t", 0, end, 100)) == EMPTY
    for address in (end + 1, -1, -2, 2**62):
        assert peer.ask(encode_fetch(b"t", 0, address, 100)) == OUT_OF_RANGE
    assert peer.ask(encode_fetch(b"t", 0, 0, 0)) == EMPTY
    for size in (1, 2, 3, len(A) - 1):
        assert fetched(peer, size=size) == A[:size]
    assert fetched(peer, size=len(A)) == A
    for address in range(end):
        assert fetched(peer, at=address) == (A + B)[address:]
    assert peer.ask(encode_fetch(b"t", 3, 0, 100)) == WRONG_PARTITION
    assert peer.ask(encode_fetch(b"t", -1, 0, 100)) == WRONG_PARTITION
    assert peer.ask(encode_fetch(b"a/b", 0, 0, 100)) == UNKNOWN


def test_fetch_ends_at_a_record_boundary(peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A + B + A))
    for size in range(len(A), len(A + B + A)):
        assert fetched(peer, size=size) == (A if size < len(A + B) else A + B)


def test_multifetch_keeps_order_with_errors_and_duplicates(peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A + B))
    wanted = [
        (FetchEntry(b"t", 0, 0, 1000), (0, A + B)),
        (FetchEntry(b"t", 0, 500, 1000), (1, b"")),
        (FetchEntry(b"t", 9, 0, 1000), (3, b"")),
        (FetchEntry(b"a/b", 0, 0, 1000), (-1, b"")),
        (FetchEntry(b"t", 0, len(A), 1000), (0, B)),
        (FetchEntry(b"no", 0, 0, 1000), (0, b"")),
    ] * 200
    answer = peer.ask(encode_multifetch([entry for entry, _ in wanted]))
    assert struct.unpack_from(">ih", answer) == (len(answer) - 4, 0)
    found = [(code, bytes(part)) for code, part in split_multifetch_answer(answer[4:])]
    assert found == [expected for _, expected in wanted]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_sliced_response_is_freed_once_sent_or_cancelled(
    peer: Dialogue, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """Its buffers are a megabyte each: they must not wait for a garbage collection."""
    peer.feed(encode_produce(b"t", 0, A + B))
    looks = itertools.count()
    monkeypatch.setattr(SimulatedClock, "monotonic", lambda _: next(looks) * QUANTUM_S / 2)
    gc.disable()
    try:
        before = [one for one in gc.get_objects() if isinstance(one, fetch.FetchReply)]
        peer.feed(encode_multifetch([FetchEntry(b"t", 0, 0, 1000)] * 3))
        if is_cut:
            peer.session.close()
        peer.pass_by()
        assert bool(peer.take()) is not is_cut
        assert [one for one in gc.get_objects() if isinstance(one, fetch.FetchReply)] == before
    finally:
        gc.enable()


def test_a_long_message_is_complete_if_the_fetch_size_allows(peer: Dialogue) -> None:
    long = wrap(encode_message(b"z" * 5_000_000), GZIP)
    peer.feed(encode_produce(b"t", 0, A + long + B))
    plain = A + encode_message(b"z" * 5_000_000) + B
    assert fetched(peer, at=len(A), size=1 << 24) == plain[len(A) : -len(B)]
    assert fetched(peer, at=len(A), size=3_000_000) == plain[len(A) :][:3_000_000]
    entries = [FetchEntry(b"t", 0, len(A), 1 << 23)] * 3
    parts = split_multifetch_answer(peer.ask(encode_multifetch(entries))[4:])
    assert [bytes(part) for _, part in parts] == [plain[len(A) : -len(B)]] * 3


def offsets(peer: Dialogue, time_ms: int, count: int, topic: bytes = b"t", partition: int = 0) -> list[int]:
    return parse_offsets_answer(peer.ask(encode_offsets(topic, partition, time_ms, count))[4:])


def test_offsets_of_a_missing_topic(peer: Dialogue) -> None:
    for count in (0, 1, 10):
        assert offsets(peer, -1, count) == offsets(peer, -2, count) == [0]
    assert offsets(peer, 0, 5) == offsets(peer, 10**15, 5) == []
    assert peer.world.memory.broker.find_topic("t") is None


def test_offsets_by_time(world: World, peer: Dialogue) -> None:
    begun_ms = world.memory.clock.now_us() // 1000
    world.memory.advance(10)
    peer.feed(encode_produce(b"t", 0, A))
    world.memory.advance(10)
    peer.feed(encode_produce(b"t", 0, B))
    world.memory.advance(10)
    end = len(A + B)
    assert offsets(peer, -1, 1) == [end]
    assert offsets(peer, -1, 9) == [end, 0]
    assert offsets(peer, -1, 0) == []
    assert offsets(peer, -2, 9) == [0]
    assert offsets(peer, begun_ms + 40_000, 9) == [end, 0]
    assert offsets(peer, 2**62, 1) == [end]
    assert offsets(peer, begun_ms + 15_000, 9) == [len(A), 0]
    assert offsets(peer, begun_ms + 5_000, 9) == offsets(peer, 0, 9) == offsets(peer, -3, 9) == []


def test_after_a_purge_the_first_address_is_the_end(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A))
    topic = world.memory.broker.topic("t")
    world.memory.broker.purge_topic(topic)
    world.memory.run()
    assert offsets(peer, -2, 1) == offsets(peer, -1, 5) == [len(A)]
    assert peer.ask(encode_fetch(b"t", 0, 0, 100)) == OUT_OF_RANGE
    peer.feed(encode_produce(b"t", 0, B))
    assert fetched(peer, at=len(A)) == B


def test_addresses_survive_a_restart(world: World) -> None:
    peer = world.connect()
    for number in range(20):
        peer.feed(encode_produce(b"t", 0, encode_set([b"%d" % number] * 3, number % 2)))
    before = stored(world)
    world.restart()
    assert stored(world) == before
    assert offsets(world.connect(), -1, 2) == [len(before), 0]


def test_the_random_partition_is_chosen_per_set(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", -1, A + B) * 300)
    found = [stored(world, partition=number) for number in range(3)]
    assert all(part == (A + B) * (len(part) // len(A + B)) for part in found)
    assert sum(map(len, found)) == 300 * len(A + B)
    assert all(len(part) > 50 * len(A + B) for part in found)
    peer.feed(encode_produce(b"u", -1, wrap(A, GZIP)) * 60)
    assert all(len(stored(world, b"u", number)) >= len(A) for number in range(3))


def test_partition_counts_are_those_of_the_topic(world: World, peer: Dialogue) -> None:
    world.memory.broker.create_topic(TopicName("default", "wide"), 8)
    peer.feed(encode_produce(b"wide", 7, A))
    assert fetched(peer, b"wide", 7) == A
    assert peer.ask(encode_fetch(b"wide", 8, 0, 100)) == WRONG_PARTITION


def test_records_of_other_protocols_have_magic_1(world: World, peer: Dialogue) -> None:
    broker = world.memory.broker
    partition = broker.ensure_topic("t").partitions[0]
    batch = from_records([Record(b"value", key=b"key"), Record(None), Record(b"")])
    broker.produce(partition, batch, level=Level.WRITTEN, done=None)
    broker.commit()
    peer.feed(encode_produce(b"t", 0, B))
    assert fetched(peer) == encode_set([b"value", b"", b""]) + B


def test_a_client_that_disconnects_within_a_frame(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A) + encode_produce(b"t", 0, B)[:-1])
    peer.finish()
    assert peer.closed
    assert stored(world) == A


def test_complete_frames_of_a_disconnected_client_are_executed(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A) * 3)
    peer.finish()
    assert peer.closed
    assert stored(world) == A * 3


@pytest.mark.parametrize("codec_used", [GZIP, SNAPPY])
def test_decompression_bombs_close_the_connection(world: World, peer: Dialogue, codec_used: CompressionCodec) -> None:
    bomb = wrap(encode_message(bytes(EXPANDED_BYTES_MAX // 2)), codec_used)
    peer.feed(encode_produce(b"t", 0, bomb * 3))
    assert peer.closed
    assert peer.gave_up is not None
    assert peer.gave_up.message == f"compressed sets expand too far limit={EXPANDED_BYTES_MAX}"
    assert stored(world) == b""


def test_a_snappy_block_that_declares_too_large_a_size(peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, encode_message(b"\xff\xff\xff\x07abc", 1, SNAPPY)))
    assert peer.closed


def test_wrappers_nested_too_deeply(peer: Dialogue) -> None:
    nested = A
    for _ in range(20):
        nested = wrap(nested, GZIP)
    peer.feed(encode_produce(b"t", 0, nested))
    assert peer.closed


def test_a_long_set_becomes_several_batches_in_order(world: World, peer: Dialogue) -> None:
    message_set = encode_set([b"%06d" % number for number in range(40_000)], magic=0)
    peer.feed(encode_produce(b"t", 0, message_set))
    found = b""
    while len(found) < len(message_set):
        found += fetched(peer, at=len(found))
    assert found == message_set


def test_a_set_larger_than_a_batch(world: World) -> None:
    peer = world.connect()
    values = [bytes([number]) * 900_000 for number in range(16)]
    peer.feed(encode_produce(b"t", 0, encode_set(values)))
    found = b""
    while len(found) < 16 * 900_010:
        found += fetched(peer, at=len(found), size=3_000_000)
    assert found == encode_set(values)


@pytest.mark.parametrize("values", [[b"v" * 100], [b"v" * 100] * 700, [b"v" * 30_000] * 5])
def test_pipelined_sets_become_batches_that_can_be_stored(values: list[bytes]) -> None:
    limit = 400 * 1024
    world = World(BrokerSettings(batch_bytes_max=limit, record_bytes_max=100_000))
    peer, message_set = world.connect(), encode_set(values)
    count = 4 * limit // len(message_set)
    for topic in (b"t", b"u"):
        peer.feed(encode_produce(topic, 0, message_set) * count)
        assert not peer.closed
        found = b""
        while len(found) < count * len(message_set):
            found += fetched(peer, topic, at=len(found))
        assert found == message_set * count


def test_a_buffer_full_of_sets_is_more_than_a_batch(world: World, peer: Dialogue) -> None:
    frame = encode_produce(b"t", 0, encode_message(bytes(900_000)))
    room = 16 * 1024 * 1024 - 18 * len(frame)
    last = encode_produce(b"t", 0, encode_message(bytes(room - len(encode_produce(b"t", 0, encode_message(b""))))))
    peer.feed(frame * 18 + last)
    assert not peer.closed
    assert world.memory.broker.topic("t").partitions[0].log.next_offset == 19


@pytest.mark.parametrize("codec_used", [CompressionCodec.NONE, GZIP, SNAPPY])
def test_a_large_request_delays_its_own_connection_only(world: World, codec_used: CompressionCodec) -> None:
    peer, other = world.connect(), world.connect()
    message_set = encode_set([b"%03d" % (number % 100) * 20 for number in range(70_000)])
    part = wrap(message_set, codec_used)
    peer.patient = False
    peer.feed(encode_produce(b"t", 0, part) + encode_produce(b"t", 0, A) + encode_offsets(b"t", 0, -1, 1))
    other.feed(encode_produce(b"u", 0, A) + encode_fetch(b"u", 0, 0, 100))
    assert other.take()[6:] == A, "other connections do not wait"
    assert peer.take() == b""
    assert world.memory.broker.find_topic("t") is None
    peer.settle()
    assert parse_offsets_answer(peer.take()[4:]) == [len(message_set) + len(A)]
    found = b""
    while len(found) < len(message_set) + len(A):
        found += fetched(other, at=len(found))
    assert found == message_set + A


def test_a_large_request_is_stored_up_to_the_invalid_set(world: World, peer: Dialogue) -> None:
    large = encode_set([bytes(100)] * 30_000)
    entries = [(b"t", 0, wrap(large, GZIP)), (b"t", 1, wrap(A, GZIP)), (b"u", 0, wrap(BAD, GZIP)), (b"v", 0, A)]
    peer.feed(encode_multiproduce(entries))
    assert peer.closed
    assert peer.pins == 0
    assert stored(world, b"t", 1) == A
    assert world.memory.broker.topic("t").partitions[0].log.next_offset == 30_000
    assert world.memory.broker.find_topic("u") is not None
    assert world.memory.broker.find_topic("v") is None


def test_a_client_that_disconnects_while_its_request_is_decompressed(world: World, peer: Dialogue) -> None:
    peer.patient = False
    request = encode_produce(b"t", 0, wrap(encode_set([bytes(100)] * 30_000), GZIP))
    peer.feed(request)
    world.memory.run()
    peer.session.close()
    next_one = world.connect()
    next_one.feed(encode_produce(b"u", 0, wrap(encode_set([bytes(100)] * 30_000), GZIP)))
    assert world.memory.broker.topic("u").partitions[0].log.next_offset == 30_000, "nothing remains off the loop"


def test_many_tiny_wrappers_are_refused_quickly(world: World, peer: Dialogue) -> None:
    with processor_used() as used:
        peer.feed(encode_produce(b"t", 0, wrap(b"", GZIP) * 300_000))
    assert peer.closed
    assert used.seconds < 5.0


def test_produce_to_a_missing_topic_closes_without_automatic_creation(world: World) -> None:
    closed = World(BrokerSettings(auto_create=False))
    peer = closed.connect()
    peer.feed(encode_produce(b"t", 0, A))
    assert peer.closed


def test_a_client_that_does_not_read_is_not_read_from(world: World, peer: Dialogue) -> None:
    peer.feed(encode_produce(b"t", 0, A))
    peer.backlog = peer.backlog_max + 1
    assert peer.ask(encode_fetch(b"t", 0, 0, 100)) == b""
    peer.backlog = 0
    peer.session.drained()
    peer.feed(b"")
    assert peer.take()[6:] == A


def test_every_error_has_a_code() -> None:
    assert set(WIRE_ERRORS) == set(ErrorCode)


def test_detection(world: World) -> None:
    recognise = world.factory.recognise
    frames = [
        encode_produce(b"t", 0, A),
        encode_fetch(b"some.topic", 0, 0, 1),
        encode_multifetch([FetchEntry(b"t", 0, 0, 1)]),
        encode_multifetch([]),
        encode_multiproduce([(b"t", 0, A)]),
        encode_offsets(b"t", 0, -1, 1),
    ]
    for frame in frames:
        reported = [recognise(frame[:size]) for size in range(len(frame) + 1)]
        assert reported[-1] is True
        assert False not in reported
    others = [b"V1|1|PRODUCE|t k:v\n", b"PWIRE", bytes.fromhex("04000000010000 00"), b"\x16\x03\x01\x02\x00\x01"]
    others += [bytes.fromhex("00000006 0000") + b"LIST", bytes.fromhex("0000000c 0004") + b"testLIST", b"GET / HTTP"]
    for opening in others:
        assert recognise(opening.ljust(64, b" ")) is False


def test_very_many_sets_of_one_request_are_stored_in_order(world: World) -> None:
    peer = world.connect()
    count = 5 * ENTRIES_AT_ONCE_MAX
    sets = [(b"t", number % 2, encode_message(b"%d" % number)) for number in range(count)]
    peer.exchange(encode_multiproduce(sets))
    for partition in (0, 1):
        expected = b"".join(data for _, where, data in sets if where == partition)
        assert fetched(peer, partition=partition) == expected
    assert not peer.pins


def test_very_many_sets_are_stored_up_to_the_invalid_one(world: World) -> None:
    peer = world.connect()
    sets = [(b"t", 0, A if number != ENTRIES_AT_ONCE_MAX else BAD) for number in range(2 * ENTRIES_AT_ONCE_MAX)]
    peer.exchange(encode_multiproduce(sets))
    assert peer.closed
    assert not peer.pins
    assert stored(world) == A * ENTRIES_AT_ONCE_MAX


def test_a_client_that_disconnects_leaves_no_set_half_stored(world: World) -> None:
    peer = world.connect()
    peer.feed(encode_multiproduce([(b"t", 0, A + B)] * (2 * ENTRIES_AT_ONCE_MAX)))
    peer.session.close()
    peer.pass_by()
    assert not peer.pins
    found = stored(world) if world.memory.broker.find_topic("t") is not None else b""
    assert found == (A + B) * (len(found) // len(A + B))
