"""Clients that add message sizes to addresses can cross gaps of a compacted partition (decision 0119)."""

from __future__ import annotations

import gzip
import random
import struct
import zlib
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from polywire.protocols.kafka07 import fetch, holes
from polywire.protocols.kafka07.messages import (
    EARLIEST,
    encode_fetch,
    encode_message,
    encode_offsets,
    encode_produce,
    encode_set,
)
from polywire.protocols.kafka07.produce import topic_name
from polywire.records.batch import address_of, keep, read_header, stamp
from polywire.records.columns import Record
from polywire.records.compression import Compression, compress_body
from polywire.records.rows import from_records
from polywire.testing.memory_log import MemoryPartition
from tests.unit.protocols.kafka07.dialogue import World

HEAD_BYTES = 10


class Compacted:
    """A compacted partition: ``kept`` has (address, value) of each record, ``boundaries`` all original starts."""

    def __init__(self, batches: list[list[tuple[bytes, bool]]], pack: Compression | None = None) -> None:
        """batches: values, and whether they stay; the last one always does."""
        self.world = World()
        self.peer = self.world.connect()
        self.peer.feed(encode_produce(b"t", 0, b""))
        topic = self.world.memory.broker.find_topic(topic_name(b"t"))
        assert topic is not None
        log = topic.partitions[0].log
        assert isinstance(log, MemoryPartition)
        self.kept: list[tuple[int, bytes]] = []
        self.boundaries = [0]
        covered = offset = address = 0
        for number, rows in enumerate(batches):
            batch = from_records([Record(value, b"key") for value, _ in rows])
            stamp(batch, 0, log.incarnation, 1, offset, address, 5)
            stay = [row for row, (_, stays) in enumerate(rows) if stays]
            if number == len(batches) - 1 and len(rows) - 1 not in stay:
                stay.append(len(rows) - 1)
            self.kept += [(address_of(batch, row), rows[row][0]) for row in stay]
            self.boundaries += [address_of(batch, row) for row in range(1, len(rows))]
            if stay:
                kept = keep(batch, array("i", stay), base_offset=log.next_offset, base_address=covered)
                header = read_header(kept)
                covered = header.base_address + header.address_span
                log.add(bytes(kept if pack is None else compress_body(kept, pack)))
            before = read_header(batch)
            offset, address = before.next_offset, before.base_address + before.address_span
            self.boundaries.append(address)
        log.synced_offset = log.next_offset
        self.end = log.next_address

    def behind(self, address: int) -> list[bytes]:
        """Return the values of the records that start at or after an address."""
        return [value for at, value in self.kept if at >= address]

    def fetch(self, address: int, size: int) -> bytes:
        answer = self.peer.ask(encode_fetch(b"t", 0, address, size))
        assert answer[:6] == struct.pack(">ih", len(answer) - 4, 0), answer[:20]
        return answer[6:]

    def read(self, address: int, size: int) -> list[tuple[int, bytes, bool]]:
        """Read all from an address on like the official client: (next address, value, whether it came in a wrapper)."""
        found: list[tuple[int, bytes, bool]] = []
        while address < self.end:
            data = self.fetch(address, size)
            assert len(data) <= size
            address, messages = official(data, address)
            assert messages, "the official iterator fails on a response without a message"
            found += messages
        assert address == self.end, "only a reader at the end gets an empty response"
        return found


def official(data: bytes, address: int) -> tuple[int, list[tuple[int, bytes, bool]]]:
    """Decode a set like the official client: its end, and (next address, value, came in a wrapper)."""
    found: list[tuple[int, bytes, bool]] = []
    at = 0
    while len(data) - at >= 4:
        size = int.from_bytes(data[at : at + 4], "big", signed=True)
        if size < 0 or size > len(data) - at - 4:
            assert at > 0, "InvalidMessageSizeException"
            break
        magic, codec, crc = struct.unpack_from(">BBI", data, at + 4)
        payload = data[at + HEAD_BYTES : at + 4 + size]
        assert (magic, crc) == (1, zlib.crc32(payload))
        if codec:
            inner = official(gzip.decompress(payload), 0)[1] if gzip.decompress(payload) else []
            places = [address + at] * (len(inner) - 1) + [address + at + 4 + size]
            found += [(place, value, True) for place, (_, value, _) in zip(places, inner, strict=False)]
        else:
            found.append((address + at + 4 + size, payload, False))
        at += 4 + size
    return address + at, found


def plain(*values: bytes, stay: bool = True) -> list[tuple[bytes, bool]]:
    return [(value, stay) for value in values]


GONE = plain(b"v" * 40, stay=False)


@pytest.mark.parametrize("pack", [None, *Compression])
def test_a_gap_is_filled_before_the_next_message(pack: Compression | None) -> None:
    partition = Compacted([[*plain(b"a"), *GONE, *plain(b"b", b"c")]], pack)
    data = partition.fetch(0, 1000)
    assert data.startswith(encode_set([b"a"]))
    assert data.endswith(encode_set([b"b", b"c"]))
    assert partition.read(0, 1000) == [(11, b"a", False), (72, b"b", False), (83, b"c", False)]


def test_a_partition_that_starts_with_a_gap() -> None:
    partition = Compacted([[*GONE, *plain(b"b")]])
    answer = partition.peer.ask(encode_offsets(b"t", 0, EARLIEST, 1))
    assert int.from_bytes(answer[-8:], "big") == 50, "the first record's address"
    assert [value for _, value, _ in partition.read(0, 1000)] == [b"b"], "for a reader from before the compaction"


def test_a_reader_inside_a_gap_continues_after_it() -> None:
    partition = Compacted([[*plain(b"a"), *GONE, *GONE, *plain(b"b")]])
    assert partition.read(61, 1000) == [(122, b"b", False)]
    answer = partition.peer.ask(encode_fetch(b"t", 0, 111 - 5, 1000))
    assert answer == bytes.fromhex("00000002 0001"), (
        "no record was that short, so the broker never returned this address"
    )


def test_a_gap_over_several_batches() -> None:
    partition = Compacted([[*plain(b"a"), *GONE], GONE, [*GONE, *plain(b"b")]])
    assert [value for _, value, _ in partition.read(0, 1000)] == [b"a", b"b"]


def test_small_gaps_share_a_wrapper_with_the_messages_between_them() -> None:
    partition = Compacted([[row for number in range(100) for row in [*plain(b"x%d" % number), (b"12", False)]]])
    found = partition.read(0, 1000)
    assert [value for _, value, _ in found] == partition.behind(0)
    assert any(is_packed for _, _, is_packed in found)


def test_a_small_gap_before_compressible_messages() -> None:
    text = b'{"carrier": "UA", "flight": 1545, "from": "EWR", "to": "IAH", "carrier_name": "United Air Lines"}'
    partition = Compacted([[*plain(b"a"), (b"", False), *plain(text, text)]])
    assert [value for _, value, _ in partition.read(0, 1000)] == [b"a", text, text]


def test_a_small_gap_before_incompressible_messages_becomes_a_blank_message() -> None:
    noise = bytes(range(256))
    partition = Compacted([[*plain(b"a"), (b"123", False), *plain(noise)]])
    assert [value for _, value, _ in partition.read(0, 1000)] == [b"a", b"\0\0\0", noise]


def test_a_gap_larger_than_a_response_repeats_the_next_message() -> None:
    partition = Compacted([[*plain(b"a"), *[row for _ in range(100) for row in GONE], *plain(b"b")]])
    found = [value for _, value, _ in partition.read(0, 1000)]
    assert found == [b"a", *[b"b"] * (len(found) - 1)]
    assert 5 <= len(found) - 1 <= 7, "5,000 bytes in responses of 1,000"


@pytest.mark.parametrize("value", [b"z" * 100_000, random.Random(1).randbytes(100_000), b"short"])
@pytest.mark.parametrize("size", [200_100, 300_000, 1 << 20])
def test_a_gap_larger_than_a_response_also_repeats_a_long_message(value: bytes, size: int) -> None:
    partition = Compacted([[*plain(b"v" * 50_000, stay=False), *plain(b"v" * 80_000, stay=False) * 40, *plain(value)]])
    assert {found for _, found, _ in partition.read(0, size)} == {value}


@pytest.mark.parametrize("size", [10, 500, 50_009])
def test_a_message_after_a_gap_longer_than_the_fetch_size_is_truncated(size: int) -> None:
    """As without a gap, so that clients report that the fetch size is too small."""
    value = random.Random(1).randbytes(50_000)
    partition = Compacted([[*plain(b"v" * 80_000, stay=False) * 3, *plain(value)]])
    assert partition.fetch(0, size) == encode_message(value)[:size]
    assert [found for _, found, _ in partition.read(0, 400_000)] == [value]


def test_a_gap_and_a_long_message_after_it() -> None:
    noise = bytes(range(256)) * 4
    partition = Compacted([[*plain(b"a"), *GONE, *plain(noise)]])
    assert [value for _, value, _ in partition.read(0, len(noise) + 10)] == [b"a", bytes(40), noise]
    assert [value for _, value, _ in partition.read(0, len(noise) + 60)] == [b"a", noise]


def test_sizes_too_small_for_a_message_are_truncated() -> None:
    partition = Compacted([[*GONE, *plain(b"b")]])
    for size in range(1, 10):
        data = partition.fetch(0, size)
        assert len(data) == size
        assert int.from_bytes((data + bytes(4))[:4], "big") + 4 > size or size < 4, "longer than the fetch size"
    assert partition.fetch(0, 0) == b""


def test_a_long_message_after_a_gap_is_complete_if_the_fetch_size_allows() -> None:
    partition = Compacted([[*plain(b"a"), *GONE, *plain(b"z" * 5_000_000)]])
    assert [len(value) for _, value, _ in partition.read(11, 1 << 24)] == [5_000_000]
    assert partition.fetch(11, 1 << 24).endswith(encode_message(b"z" * 5_000_000))


def test_the_number_of_gaps_bridged_by_a_response_is_bounded() -> None:
    rows = [row for number in range(200) for row in [*GONE, *plain(b"%d" % number)]]
    partition = Compacted([rows])
    _, messages = official(partition.fetch(0, 1 << 20), 0)
    assert len(messages) == fetch.BRIDGES_MAX
    assert [value for _, value, _ in partition.read(0, 1 << 20)] == partition.behind(0)


def test_packing_is_bounded() -> None:
    partition = Compacted([[*plain(b"a"), (b"123", False), *plain(b"long " * 4_000)]])
    assert [value for _, value, _ in partition.read(0, 1 << 20)] == [b"a", b"\0\0\0", b"long " * 4_000]
    rows = [row for number in range(2_000) for row in [*plain(b"x%d" % number), (b"12", False)]]
    partition = Compacted([rows])
    data = partition.fetch(0, 1 << 20)
    assert len(data) <= fetch.BRIDGES_MAX * holes.PACKED_BYTES_MAX
    assert [value for _, value, _ in partition.read(0, 1 << 20)] == partition.behind(0)


VALUES = st.one_of(st.sampled_from([b"", b"v", b"12345"]), st.binary(max_size=80), st.just(b"text " * 30))
BATCHES = st.lists(st.lists(st.tuples(VALUES, st.booleans()), min_size=1, max_size=10), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    batches=BATCHES,
    size=st.sampled_from([200, 300, 1000, 50_000]),
    pack=st.sampled_from([None, Compression.LZ4]),
    data=st.data(),
)
@example(batches=[[(b"text " * 30, False), (b"", False), (b"", False), (b"", True)]], size=50_000, pack=None, data=None)
@example(batches=[[(b"", True)] * 3 + [(b"", False)] + [(b"", True)]], size=200, pack=None, data=None)
def test_every_reader_gets_every_retained_record(
    batches: list[list[tuple[bytes, bool]]], size: int, pack: Compression | None, data: st.DataObject | None
) -> None:
    partition = Compacted(batches, pack)
    address = 0 if data is None else data.draw(st.sampled_from(partition.boundaries))
    found = partition.read(address, size)
    values, wanted = [value for _, value, _ in found], partition.behind(address)
    if size > 5_000 and all(hole >= holes.FILLER_BYTES_MIN for hole in _holes(partition, address)):
        assert values == wanted, "each once, and nothing else"
    assert all(value in wanted or not value.strip(b"\0") for value in values)
    for number, (place, _, _) in enumerate(found[:20]):
        reported = values[: number + 1]
        assert _is_subsequence(wanted, reported + partition.behind(place)), (
            "a reader that stops here and resumes there misses no record"
        )
    assert _is_subsequence(wanted, values)


def _holes(partition: Compacted, address: int) -> list[int]:
    """Return the sizes of the gaps that a reader meets from an address on."""
    found = []
    for at, value in partition.kept:
        if at >= address:
            found.append(at - address)
            address = at + HEAD_BYTES + len(value)
    return [hole for hole in found if hole]


def _is_subsequence(wanted: list[bytes], found: list[bytes]) -> bool:
    rest = iter(found)
    return all(value in rest for value in wanted)


@pytest.mark.parametrize("inner", [b"", encode_set([b"a", b"bb"])])
def test_a_wrapper_can_have_any_size_above_the_minimum(inner: bytes) -> None:
    smallest = next(size for size in range(200) if holes.wrapper(inner, size))
    assert smallest == holes.FILLER_BYTES_MIN or inner
    for size in (*range(smallest, smallest + 50), *range(65_530 + smallest, 65_550 + smallest), 1_000_000):
        wrapped = holes.wrapper(inner, size)
        assert len(wrapped or b"") == size
        assert wrapped is not None
        assert int.from_bytes(wrapped[:4], "big") == size - 4
        assert gzip.decompress(wrapped[HEAD_BYTES:]) == inner
    assert all(holes.wrapper(inner, size) is None for size in range(smallest))
