"""Decompression of zstd frames: declared sizes are trusted only up to the limit."""

from __future__ import annotations

import random
from struct import pack

import cramjam
import pytest

from polywire.records import inflate as module
from polywire.records.inflate import (
    PARTS_MIN,
    PLAIN_WINDOW_BYTES_MAX,
    WINDOW_BYTES_MAX,
    ZSTD_MAGIC,
    Damaged,
    TooFar,
    unzstd,
)
from polywire.types import Buffer
from tests.processor import processor_used

DATA = bytes(range(256)) * 5_000
LAST, RAW, REPEATED, COMPRESSED, RESERVED = 1, 0, 1, 2, 3
SKIPPED = b"\x5f\x2a\x4d\x18" + pack("<I", 3) + b"abc"


def block(kind: int, size: int, content: bytes, last: int = LAST) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + content


def framed(blocks: bytes, content: int | None = None, window: int = 0) -> bytes:
    """Return a frame; window: the encoded window descriptor."""
    if content is None:
        return ZSTD_MAGIC + bytes([0x00, window]) + blocks
    return ZSTD_MAGIC + b"\xa0" + pack("<I", content) + blocks


def streamed(data: bytes) -> bytes:
    """Return a frame that does not declare its size."""
    packer = cramjam.zstd.Compressor()
    packer.compress(data)
    return bytes(packer.finish())


PIECES = [DATA[at : at + 128_000] for at in range(0, len(DATA), 128_000)]
RAW_BLOCKS = b"".join(block(RAW, len(piece), piece, 0) for piece in PIECES) + block(RAW, 0, b"")


@pytest.mark.parametrize(
    "packed",
    [
        bytes(cramjam.zstd.compress(DATA)),
        streamed(DATA),
        framed(RAW_BLOCKS, window=10 << 3),
        bytes(cramjam.zstd.compress(DATA[:1_000])) + SKIPPED + streamed(DATA[1_000:]),
    ],
    ids=["declared", "streamed", "raw", "several"],
)
def test_frames_decompress_to_their_content(packed: bytes) -> None:
    assert unzstd(packed, len(DATA)) == DATA
    with pytest.raises(TooFar):
        unzstd(packed, len(DATA) - 1)
    for cut in (1, len(packed) // 2, len(packed) - 1, len(packed)):
        with pytest.raises(Damaged):
            unzstd(packed[:-cut], len(DATA))


@pytest.mark.parametrize(
    "packed",
    [
        SKIPPED,
        b"plain",
        framed(block(RESERVED, 1, b"x")),
        framed(block(RAW, 128 * 1024 + 1, bytes(128 * 1024 + 1))),
        framed(block(COMPRESSED, 4, b"abcd")),
        framed(block(RAW, 1, b"x"), content=2),
        framed(block(RAW, 2, b"xx"), content=1),
        ZSTD_MAGIC + b"\x21\x07\x01" + block(RAW, 1, b"x"),  # a dictionary
        ZSTD_MAGIC + b"\x28\x01" + block(RAW, 1, b"x"),  # the reserved bit
        framed(block(RAW, 1, b"x")) + b"y",
    ],
)
def test_invalid_frames_are_refused(packed: bytes) -> None:
    with pytest.raises(Damaged):
        unzstd(packed, 1 << 20)


@pytest.mark.parametrize("level", range(-7, 23))
def test_frames_of_every_level_are_opened(level: int) -> None:
    packer = cramjam.zstd.Compressor(level)
    packer.compress(DATA)
    assert unzstd(bytes(cramjam.zstd.compress(DATA, level)), len(DATA)) == DATA
    assert unzstd(bytes(packer.finish()), len(DATA)) == DATA


@pytest.mark.parametrize("size", [1, 1_000, len(DATA)])
@pytest.mark.parametrize("log", range(23, 28))
def test_the_window_is_limited_to_the_size_a_frame_may_expand_to(
    log: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder allocates the window that a frame declares, however short the frame is."""
    seen: list[int] = []

    class Watched:
        DecompressionError = cramjam.DecompressionError

        class zstd:
            @staticmethod
            def decompress_into(source: Buffer, target: Buffer) -> int:
                seen.append(10 + (memoryview(source)[5] >> 3))
                return cramjam.zstd.decompress_into(source, target)

    packer = cramjam.zstd.Compressor(3)
    packer.compress(DATA[:size])
    packed = bytearray(packer.finish())
    packed[5] = log - 10 << 3
    monkeypatch.setattr(module, "cramjam", Watched)
    assert unzstd(packed, 1 << 21) == DATA[:size]
    [window] = seen
    assert size <= 1 << window <= PLAIN_WINDOW_BYTES_MAX


def test_a_long_match_works_with_a_reduced_window() -> None:
    half = random.Random(1).randbytes(9 << 20)
    packer = cramjam.zstd.Compressor(22)
    for _ in range(2):
        packer.compress(half)
    packed = bytes(packer.finish())
    assert len(packed) < len(half) * 11 // 10, "the second half is a match of the first"
    assert unzstd(packed, 2 * len(half)) == half * 2
    with pytest.raises(TooFar):
        unzstd(packed, 2 * len(half) - 1)


def test_frames_that_need_too_much_memory_are_not_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 17 << 3  # 128 MiB
    assert bytes(unzstd(framed(block(RAW, 1, b"x"), window=largest), 1 << 20)) == b"x"
    monkeypatch.setattr(module, "cramjam", None)  # nothing may be decompressed any more
    for packed in (
        framed(block(RAW, 1, b"x"), window=largest + 1),
        framed(block(COMPRESSED, 1, b"x", 0) * 100 + block(COMPRESSED, 1, b"x"), content=WINDOW_BYTES_MAX + 1),
        framed(block(REPEATED, 128 * 1024, b"x", 0) * 9 + block(RAW, 0, b""), content=9 * 128 * 1024),
        framed(block(RAW, 0, b"", 0) * (PARTS_MIN + 1024) + block(RAW, 0, b"")),
        framed(block(RAW, 0, b"")) * (PARTS_MIN // 2 + 513),
        SKIPPED * (PARTS_MIN + 1025),
    ):
        with pytest.raises(TooFar):
            unzstd(packed, 1 << 20)


def test_short_frames_that_expand_far_stay_within_the_limit() -> None:
    bomb = framed(block(REPEATED, 128 * 1024, b"x", 0) * 60_000 + block(RAW, 0, b""), window=10 << 3)
    with processor_used() as used, pytest.raises(TooFar):
        unzstd(bomb, 64 << 20)
    assert used.seconds < 5.0
