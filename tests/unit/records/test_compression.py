"""Compression of bodies round-trips, and expansion never exceeds its limit."""

from __future__ import annotations

from struct import pack_into

import pytest

from polywire.errors import ErrorCode, Invalid
from polywire.records import batch
from polywire.records.columns import BatchFlags
from polywire.records.compression import Compression, compress_body, expand_body
from tests.unit.records.samples import reseal, spans

PLAIN = batch.from_spans(*spans([(b"key", b"value " * 1000)] * 10))


@pytest.mark.parametrize("kind", Compression)
def test_a_body_round_trips(kind: Compression) -> None:
    numbered = bytearray(PLAIN)
    batch.stamp(numbered, 0, 3, 1, 50, 500, 9)
    packed = bytearray(compress_body(numbered, kind))
    assert len(packed) < len(PLAIN) / 10
    assert batch.check_header(packed, 0)
    assert batch.check_body(packed, 0)
    assert list(batch.walk(packed)) == [0]
    assert batch.read_header(packed).flags & (BatchFlags.LZ4 | BatchFlags.ZSTD)
    assert expand_body(packed) == numbered
    batch.stamp(packed, 0, 4, 2, 60, 600, 10)
    batch.stamp(numbered, 0, 4, 2, 60, 600, 10)
    assert expand_body(packed) == numbered
    with pytest.raises(Invalid, match="wrong header, compressed"):
        batch.validate(packed)


@pytest.mark.parametrize("kind", Compression)
def test_bodies_that_are_plain_or_do_not_shrink_are_unchanged(kind: Compression) -> None:
    small = batch.from_spans(*spans([(None, b"v")]))
    assert compress_body(small, kind) is small
    assert expand_body(small, 0) is small
    packed = compress_body(PLAIN, kind)
    assert compress_body(packed, kind) is packed


@pytest.mark.parametrize("kind", Compression)
def test_expansion_stops_at_the_limit(kind: Compression) -> None:
    packed = compress_body(PLAIN, kind)
    assert expand_body(packed, len(PLAIN)) == PLAIN
    with pytest.raises(Invalid) as caught:
        expand_body(packed, len(PLAIN) - 1)
    assert caught.value.code is ErrorCode.RECORD_TOO_LARGE


@pytest.mark.parametrize("kind", Compression)
@pytest.mark.parametrize("raw", [0, 1, 1000, len(PLAIN) - 105, len(PLAIN), 2**24, 2**32 - 1])
def test_a_wrong_declared_size_is_refused(kind: Compression, raw: int) -> None:
    packed = bytearray(compress_body(PLAIN, kind))
    if raw == batch.read_header(packed).body_bytes_raw:
        raw -= 1
    pack_into("<I", packed, 76, raw)
    with pytest.raises(Invalid):
        expand_body(reseal(packed))


@pytest.mark.parametrize("kind", Compression)
def test_damage_is_refused(kind: Compression) -> None:
    packed = compress_body(PLAIN, kind)
    for position in range(0, 104 + batch.read_header(packed).body_bytes, 7):
        damaged = bytearray(packed)
        damaged[position] ^= 0x10
        try:
            assert expand_body(damaged) is damaged, "only a changed flag that means uncompressed may pass"
        except Invalid:
            continue
    sealed = bytearray(packed)
    sealed[104:120] = b"\xff" * 16
    with pytest.raises(Invalid):
        expand_body(reseal(sealed))


def test_two_compressions_at_once_are_refused() -> None:
    packed = bytearray(compress_body(PLAIN, Compression.LZ4))
    pack_into("<I", packed, 8, batch.read_header(packed).flags | BatchFlags.ZSTD)
    with pytest.raises(Invalid):
        expand_body(reseal(packed))
