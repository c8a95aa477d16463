"""Checksums match their specifications at every length and alignment."""

from __future__ import annotations

import random
import zlib
from array import array

import pytest
import xxhash

from polywire.records import checksum


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_xxh64_has_the_specified_digests(data: bytes, digest: int) -> None:
    assert checksum.xxh64(data) == digest


@pytest.mark.parametrize("own", [False, True])
def test_checksums_equal_the_libraries(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr(checksum, "_library", None)  # our own code, even where the library would be used
    random_bytes = random.Random(1).randbytes
    for size in [*range(100), 1000, 4095]:
        data = random_bytes(size + 7)
        for start in (0, 1, 5):
            part = data[start : start + size]
            assert checksum.xxh64_at(data, start, start + size) == xxhash.xxh64_intdigest(part)
            assert checksum.crc32_at(data, start, start + size) == zlib.crc32(part)


def test_large_inputs_equal_the_libraries() -> None:
    data = random.Random(2).randbytes(300_001)
    assert checksum.xxh64(memoryview(data)) == xxhash.xxh64_intdigest(data)
    assert checksum.crc32_at(bytearray(data), 1, len(data)) == zlib.crc32(data[1:])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 5)])
def test_ranges_outside_of_the_buffer_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError):
        checksum.xxh64_at(b"four", start, stop)
    with pytest.raises(ValueError):
        checksum.crc32_at(b"four", start, stop)


def test_crc_column() -> None:
    values = [b"", b"123456789", b"x" * 100]
    column = checksum.crc32_column(array("i", [0, 0, 9, 109]), b"".join(values))
    assert list(memoryview(column).cast("I")) == [zlib.crc32(value) for value in values]
    assert checksum.crc32_column(array("i", [0]), b"") == b""


@pytest.mark.parametrize("offsets", [[0, 5, 4], [0, 7], [-1, 2], []])
def test_crc_column_refuses_wrong_offsets(offsets: list[int]) -> None:
    with pytest.raises(ValueError):
        checksum.crc32_column(array("i", offsets), b"sixbyt")
