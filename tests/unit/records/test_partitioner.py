"""Partitioners choose the partitions that real clients of each protocol compute."""

from __future__ import annotations

import random
from array import array
from struct import pack

import pytest
import xxhash

from polywire.records import partitioner
from polywire.types import KeyHash
from tests.unit.records.samples import spans


@pytest.mark.parametrize(
    ("key", "digest", "of_3", "of_4"),
    [(b"", 0x811C9DC5, 1, 1), (b"a", 0xE40C292C, 1, 0), (b"foobar", 0xBF9CF968, 1, 0)],  # spec: flux#partitions
)
def test_fnv_32(key: bytes, digest: int, of_3: int, of_4: int) -> None:
    assert partitioner.fnv1a_32(key) == digest
    source, keys = spans([(key, None)])
    assert list(partitioner.partitions_of(source, keys, 3, KeyHash.FNV32)) == [of_3]
    assert list(partitioner.partitions_of(source, keys, 4, KeyHash.FNV32)) == [of_4]


@pytest.mark.parametrize("kind", list(KeyHash))
def test_a_key_hashes_the_same_alone_and_among_many(kind: KeyHash) -> None:
    for key in (b"", b"a", b"user-1", bytes(range(100))):
        source, keys = spans([(key, None)])
        assert partitioner.partition_of(memoryview(key), 7, kind) == partitioner.partitions_of(source, keys, 7, kind)[0]
    with pytest.raises(ValueError, match="partition count must be at least 1"):
        partitioner.partition_of(b"a", 0, kind)


@pytest.mark.parametrize(
    ("key", "digest"), [(b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)]
)
def test_fnv_64(key: bytes, digest: int) -> None:
    assert partitioner.fnv1a_64(b"<" + key + b">", 1, 1 + len(key)) == digest
    source, keys = spans([(key, b"value")])
    assert list(partitioner.partitions_of(source, keys, 7, KeyHash.FNV64)) == [digest % 7]


@pytest.mark.parametrize(
    ("key", "murmur", "of_3", "of_10", "xxh32", "xxh32_of_3"),  # spec: iggy#key-hashing, remainders from 1
    [
        (b"user-1", 0x418D9D535E58505261ACCD4B12FF3576, 1, 8, 0xA43FB6AD, 3),
        (b"user-2", 0x286A63945BF5518F62C70EDB7001F22F, 1, 5, 0xEF207309, 2),
        (b"hello world", 0xAB97467D60EB63B1533F6046EB7F610E, 1, 4, 0xCEBB6622, 1),
        (pack("<I", 1), 0xD3E47DEE85E9BE408895A3F5AF28CAFE, 2, 6, 0xF3BB7693, 2),
        (pack("<I", 2), 0xDD3F73654308AD15DA0CE907E4355B60, 3, 2, 0x1F748196, 3),
        (pack("<Q", 1), 0x3D8ACDB4D36D9C06004403B7FB05C44A, 1, 6, 0x08ED6331, 3),
    ],
)
def test_iggy_keys(key: bytes, murmur: int, of_3: int, of_10: int, xxh32: int, xxh32_of_3: int) -> None:
    assert partitioner.murmur3_128(key) == murmur
    assert partitioner.xxh32(key) == xxh32
    source, keys = spans([(key, b"")])
    assert partitioner.partitions_of(source, keys, 3, KeyHash.MURMUR3)[0] == of_3 % 3
    assert partitioner.partitions_of(source, keys, 10, KeyHash.MURMUR3)[0] == of_10 % 10
    assert partitioner.partitions_of(source, keys, 10_000, KeyHash.MURMUR3)[0] == murmur % 10_000
    assert partitioner.partitions_of(source, keys, 3, KeyHash.XXH32)[0] == xxh32_of_3 % 3


def test_xxh32_equals_the_library() -> None:
    data = random.Random(4).randbytes(100)
    for stop in range(3, 100):
        assert partitioner.xxh32(data, 3, stop) == xxhash.xxh32_intdigest(data[3:stop])


@pytest.mark.parametrize("hash_kind", KeyHash)
def test_a_null_key_counts_as_an_empty_one(hash_kind: KeyHash) -> None:
    source, keys = spans([(None, b"v"), (b"", b"v"), (b"k", b"v")])
    null, empty, _ = partitioner.partitions_of(source, keys, 1000, hash_kind)
    assert null == empty


def test_no_byte_outside_of_the_source_is_read() -> None:
    for position, length in [(-1, 1), (0, 7), (6, 1), (0, -2), (2**62, 2**62)]:
        with pytest.raises(ValueError):
            partitioner.partitions_of(b"source", array("q", [position, length, 0, 0]), 3, KeyHash.FNV32)
    with pytest.raises(ValueError):
        partitioner.partitions_of(b"source", array("q", [0, 1, 0, 0]), 0, KeyHash.FNV32)
    with pytest.raises(ValueError):
        partitioner.fnv1a_32(b"abc", 2, 4)


def test_rows_by_partition_keep_their_order() -> None:
    rows, starts = partitioner.rows_by_partition(array("i", [2, 0, 2, 3, 0]), 5)
    assert [list(rows[starts[number] : starts[number + 1]]) for number in range(5)] == [[1, 4], [], [0, 2], [3], []]
    assert partitioner.rows_by_partition(array("i"), 1)[0] == array("i")
    for numbers, count in (([5], 5), ([-1], 5), ([0], 0)):
        with pytest.raises(ValueError):
            partitioner.rows_by_partition(array("i", numbers), count)
