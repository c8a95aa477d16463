"""Decoding of producers' batches: refused batches, and limits of decompression."""

from __future__ import annotations

import gzip
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import cramjam
import pytest

from polywire.protocols.kafka.client_batches import CONTROL, TIME_APPEND, decode_batches, encode_batch
from polywire.protocols.kafka.compression import EXPANDED_BYTES_MAX, compress, decode_batch, expand
from polywire.protocols.kafka.crc32c import crc32c, crc32c_by_tables
from polywire.protocols.kafka.decoder import BATCH_BYTES_MAX, BATCH_HEAD_BYTES, build, check_batch
from polywire.protocols.kafka.messages import Codec, Refused, WireError
from polywire.records.batch import read_header, validate
from polywire.records.columns import BATCH_BYTES_MAX as STORED_BYTES_MAX
from polywire.records.columns import Column, Header, Record
from polywire.records.rows import to_records
from polywire.types import Buffer
from tests.hostile.dialogues import TRANSACTIONAL

TIME_US = 1_700_000_000_000_000
RECORDS = [Record(value=b"one", origin_time_us=TIME_US), Record(value=b"two", key=b"k", origin_time_us=TIME_US)]
BATCH = encode_batch(RECORDS)


def refused(batch: bytes | None, *, bytes_max: int = BATCH_BYTES_MAX) -> WireError:
    with pytest.raises(Refused) as caught:
        decode_batch(batch, bytes_max=bytes_max)
    return caught.value.error


def changed(at: int, data: bytes, batch: bytes = BATCH) -> bytes:
    """Return the batch with other bytes at a position, and the matching checksum."""
    rest = batch[:at] + data + batch[at + len(data) :]
    return rest[:17] + struct.pack(">I", crc32c(rest[21:])) + rest[21:]


def with_records(body: bytes, *, count: int = 1, codec: int = 0) -> bytes:
    """Return a batch with this content for its records."""
    rest = struct.pack(">hiqqqhii", codec, count - 1, 0, 0, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, 9 + len(rest), -1, 2, crc32c(rest)) + rest


def test_the_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283 == crc32c_by_tables(b"123456789")
    data = os.urandom(7000)
    for size in [*range(64), *range(370, 400), *range(3060, 3090), 6143, 6144, 6145, 7000]:
        assert crc32c(data[:size]) == crc32c_by_tables(data[:size]), size


@pytest.mark.parametrize("size", range(1, BATCH_HEAD_BYTES))
def test_bytes_shorter_than_a_batch_header_are_corrupt(size: int) -> None:
    assert refused(BATCH[:size]) is WireError.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (None, WireError.INVALID_RECORD),
        (b"", WireError.INVALID_RECORD),
        (BATCH[:-1], WireError.INVALID_RECORD),
        (BATCH + BATCH, WireError.INVALID_RECORD),
        (BATCH[:17] + bytes(4) + BATCH[21:], WireError.CORRUPT_MESSAGE),
        (BATCH[:-1] + b"?", WireError.CORRUPT_MESSAGE),
        (BATCH[:16] + b"\1" + BATCH[17:], WireError.CORRUPT_MESSAGE),
        (changed(8, struct.pack(">i", 48)), WireError.CORRUPT_MESSAGE),
        (changed(8, struct.pack(">i", -1)), WireError.CORRUPT_MESSAGE),
        (changed(57, struct.pack(">i", 0)), WireError.INVALID_RECORD),
        (changed(57, struct.pack(">i", 3)), WireError.INVALID_RECORD),
        (changed(57, struct.pack(">i", -1)), WireError.INVALID_RECORD),
        (changed(23, struct.pack(">i", 5)), WireError.INVALID_RECORD),
        (changed(0, struct.pack(">q", 7)), WireError.INVALID_RECORD),
        (changed(21, struct.pack(">h", 5)), WireError.INVALID_RECORD),
        (changed(21, struct.pack(">h", 7)), WireError.INVALID_RECORD),
        (changed(21, struct.pack(">h", CONTROL)), WireError.INVALID_RECORD),
        (changed(43, struct.pack(">q", 5)), WireError.INVALID_RECORD),  # a producer without a sequence
        (changed(43, struct.pack(">q", -2)), WireError.INVALID_RECORD),
        (changed(27, struct.pack(">q", 2**62)), WireError.INVALID_TIMESTAMP),
        (changed(27, struct.pack(">q", 2**63 - 1)), WireError.INVALID_TIMESTAMP),
        (changed(27, struct.pack(">q", -(2**63))), WireError.INVALID_TIMESTAMP),
        (with_records(b""), WireError.INVALID_RECORD),
        (with_records(b"", count=2**31 - 1), WireError.INVALID_RECORD),
        (with_records(b"\x0e\0\0\0\1\1\0"), WireError.INVALID_RECORD),  # its length exceeds the batch
        (with_records(b"\x0a\0\0\0\1\1\0"), WireError.INVALID_RECORD),  # or ends before it
        (with_records(b"\x0c\0\0\0\1\1\0\0"), WireError.INVALID_RECORD),  # bytes after the last record
        (with_records(b"\x0b\0\0\0\1\1\0"), WireError.INVALID_RECORD),  # a negative length
        (with_records(b"\x0c\0\0\0\1\1\1"), WireError.INVALID_RECORD),  # -1 headers
        (with_records(b"\x0c\0\0\0\3\1\0"), WireError.INVALID_RECORD),  # a key of -2 bytes
        (with_records(b"\x10\0\0\0\1\1\2\1\1"), WireError.INVALID_RECORD),  # a null header name
        (with_records(b"\x18\0\0\0\1\1\xfe\xff\xff\xff\x0f\0"), WireError.INVALID_RECORD),
        (with_records(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), WireError.INVALID_RECORD),
        (with_records(b"\x1e\0" + b"\xfe" + b"\xff" * 8 + b"\1" + b"\0\1\1\0"), WireError.INVALID_TIMESTAMP),
    ],
)
def test_each_refusal(batch: bytes | None, error: WireError) -> None:
    assert refused(batch) is error


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize(
    "body", [b"", b"\0" * 40, b"garbage garbage garbage", b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"]
)
def test_records_that_cannot_be_decompressed_are_invalid(codec: Codec, body: bytes) -> None:
    assert refused(with_records(body, codec=codec)) is WireError.INVALID_RECORD


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_compressed_batch_truncated_at_every_byte(codec: Codec) -> None:
    packed = bytes(compress(b"some records, some records, some records" * 20, codec))
    heads = {16} if codec is Codec.SNAPPY else set()  # no blocks at all are no bytes
    for size in set(range(len(packed))) - heads:
        with pytest.raises(Refused) as caught:
            expand(packed[:size], codec, 100_000)
        assert caught.value.error is WireError.INVALID_RECORD, size


def _zstd(plain: bytes, level: int) -> bytes:
    packer = cramjam.zstd.Compressor(level)  # as clients that stream: it declares a window, and no size
    packer.compress(plain)
    return bytes(packer.finish())


def _lz4(plain: bytes, level: int) -> bytes:
    packer = cramjam.lz4.Compressor(level=level, content_checksum=True, block_linked=bool(level % 2))
    packer.compress(plain)
    return bytes(packer.finish())


@pytest.mark.parametrize(
    ("codec", "pack", "levels"),
    [
        (Codec.GZIP, partial(gzip.compress, mtime=0), range(10)),
        (Codec.LZ4, _lz4, range(13)),
        (Codec.ZSTD, _zstd, range(-7, 23)),
        (Codec.ZSTD, cramjam.zstd.compress, range(-7, 23)),
    ],
    ids=["gzip", "lz4", "zstd as a stream", "zstd"],
)
def test_every_compression_level_of_clients_is_decompressed(
    codec: Codec, pack: Callable[[bytes, int], Buffer], levels: range
) -> None:
    # Larger than a block of each codec, so that there are blocks of one byte, of matches and of literals.
    plain = bytes(150_000) + b"some records %d " * 10_000 + random.Random(1).randbytes(150_000)
    for level in levels:
        assert bytes(expand(pack(plain, level), codec)) == plain, level


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_decompression_stops_at_the_size_of_a_stored_batch(codec: Codec) -> None:
    assert EXPANDED_BYTES_MAX == STORED_BYTES_MAX
    plain = bytes(3_000_000)
    packed = compress(plain, codec)
    assert bytes(expand(packed, codec, len(plain))) == plain
    with pytest.raises(Refused) as caught:
        expand(packed, codec, len(plain) - 1)
    assert caught.value.error is WireError.MESSAGE_TOO_LARGE


def test_many_small_parts_are_too_many() -> None:
    for packed, codec in ((gzip.compress(b"") * 2000, Codec.GZIP), (bytes(compress(b"", Codec.LZ4)) * 2000, Codec.LZ4)):
        with pytest.raises(Refused) as caught:
            expand(packed, codec, 1_000_000)
        assert caught.value.error is WireError.MESSAGE_TOO_LARGE


def test_a_batch_is_limited_as_sent_and_as_stored() -> None:
    assert refused(BATCH, bytes_max=len(BATCH) - 1) is WireError.MESSAGE_TOO_LARGE
    assert decode_batch(BATCH, bytes_max=len(BATCH))[0].end == len(BATCH)
    tiny = b"\x0c\0\0\0\1\1\0"  # seven bytes as sent, and twelve in a batch with times
    count = 1_000_000
    fitting = with_records(tiny * count, count=count)
    assert read_header(decode_batch(fitting, bytes_max=len(fitting))[1].batch).record_count == count
    count = STORED_BYTES_MAX // 12 + 1
    many = with_records(tiny * count, count=count)
    assert len(many) < STORED_BYTES_MAX
    with pytest.raises(Refused) as caught:
        decode_batch(many, bytes_max=len(many))
    assert caught.value.error is WireError.MESSAGE_TOO_LARGE


def test_surplus_bytes_too_short_for_a_batch_are_ignored() -> None:
    head, built = decode_batch(BATCH + bytes(BATCH_HEAD_BYTES - 1), bytes_max=BATCH_BYTES_MAX)
    assert head.end == len(BATCH)
    assert [record.value for record in to_records(built.batch)] == [b"one", b"two"]
    assert refused(BATCH + bytes(BATCH_HEAD_BYTES)) is WireError.INVALID_RECORD


@pytest.mark.parametrize(
    "batch",
    [
        changed(35, struct.pack(">q", 5)),  # a wrong maximum timestamp
        changed(21, struct.pack(">h", 0x7F00)),  # reserved attributes
        changed(12, struct.pack(">i", 99)),
        changed(51, struct.pack(">h", 5)),
        BATCH.replace(b"\x12\0\0\0", b"\x12\x7f\0\0"),
    ],
)
def test_unused_header_fields_are_ignored(batch: bytes) -> None:
    _, built = decode_batch(changed(0, b"", batch), bytes_max=BATCH_BYTES_MAX)
    assert [(record.value, record.origin_time_us) for record in to_records(built.batch)] == [
        (b"one", TIME_US),
        (b"two", TIME_US),
    ]


def test_offset_deltas_are_ignored() -> None:
    body = b"\x0c\0\0\x0a\1\1\0" + b"\x0c\0\0\x02\1\1\0"
    _, built = decode_batch(with_records(body, count=2), bytes_max=BATCH_BYTES_MAX)
    header = read_header(built.batch)
    assert (header.record_count, header.offset_span) == (2, 2)


def test_null_and_empty_values_are_distinguished() -> None:
    records = [Record(value=value, key=key) for value in (None, b"", b"v") for key in (None, b"", b"k")]
    _, built = decode_batch(encode_batch(records), bytes_max=BATCH_BYTES_MAX)
    validate(built.batch)
    assert [(record.value, record.key) for record in to_records(built.batch)] == [(r.value, r.key) for r in records]
    assert built.null_keys == 3


def test_times_of_the_producer_are_stored_unless_append_times_are_used() -> None:
    times = [TIME_US, None, TIME_US - 5_000_000, 0, -7_000_000]
    batch = encode_batch([Record(value=b"", origin_time_us=time) for time in times])
    _, built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX)
    assert [record.origin_time_us for record in to_records(built.batch)] == times
    assert built.max_time_ms == TIME_US // 1000
    _, built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX, keep_times=False)
    assert not read_header(built.batch).columns & 1 << Column.ORIGIN_TIMES_US
    _, built = decode_batch(encode_batch([Record(value=b"")]), bytes_max=BATCH_BYTES_MAX)
    assert not read_header(built.batch).columns & 1 << Column.ORIGIN_TIMES_US
    assert built.max_time_ms == -1
    stamped = changed(21, struct.pack(">h", TIME_APPEND), changed(35, struct.pack(">q", 77), batch))
    _, built = decode_batch(stamped, bytes_max=BATCH_BYTES_MAX)
    assert {record.origin_time_us for record in to_records(built.batch)} == {77_000}


def test_the_header_names_the_producer() -> None:
    batch = encode_batch(RECORDS, producer_id=2**40, producer_epoch=3, base_sequence=9, attributes=TRANSACTIONAL)
    head, built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX)
    assert head.is_transactional
    header = read_header(built.batch)
    assert (header.producer_epoch, header.base_sequence) == (3, 9)
    assert b"k" + (2**40).to_bytes(8, "big") in bytes(built.batch)
    assert [record.sequence for record in to_records(built.batch)] == [9, 10]
    header = read_header(decode_batch(BATCH, bytes_max=BATCH_BYTES_MAX)[1].batch)
    assert not header.columns & 1 << Column.PRODUCER_ID


@pytest.mark.parametrize("attributes", [0, TRANSACTIONAL])
@pytest.mark.parametrize("epoch", [-1, -2, -(2**15)])
def test_a_producer_without_an_epoch_is_refused(epoch: int, attributes: int) -> None:
    batch = encode_batch(RECORDS, producer_id=5, producer_epoch=epoch, base_sequence=0, attributes=attributes)
    with pytest.raises(Refused) as caught:
        decode_batch(batch, bytes_max=BATCH_BYTES_MAX)
    assert caught.value.error == WireError.INVALID_PRODUCER_EPOCH


@pytest.mark.parametrize(("epoch", "sequence"), [(0, 0), (0, -1), (7, 9)])
def test_fields_of_a_producer_are_ignored_without_a_producer(epoch: int, sequence: int) -> None:
    """KafkaJS sends epoch 0 and sequence 0 without a producer."""
    batch = encode_batch(RECORDS, producer_id=-1, producer_epoch=epoch, base_sequence=sequence)
    head, built = decode_batch(batch, bytes_max=BATCH_BYTES_MAX)
    assert head.producer_id == -1
    validate(built.batch)
    assert not read_header(built.batch).columns & 1 << Column.PRODUCER_ID


def test_headers_keep_their_order_and_duplicates() -> None:
    headers = (Header(b"b", b"1"), Header(b"a", None), Header(b"b", b""), Header(b"", b"x" * 300))
    records = [Record(value=b"v", headers=headers), Record(value=b"w"), Record(value=b"x", headers=headers[:1])]
    _, built = decode_batch(encode_batch(records), bytes_max=BATCH_BYTES_MAX)
    validate(built.batch)
    found = [[(h.key, h.value) for h in record.headers] for record in to_records(built.batch)]
    assert found == [[(h.key, h.value) for h in record.headers] for record in records]


def test_records_outside_of_their_buffer_raise_an_internal_error() -> None:
    head = check_batch(BATCH)
    for start, stop in ((-1, 10), (10, 5), (61, len(BATCH) + 1)):
        with pytest.raises(ValueError, match="outside"):
            build(BATCH, start, stop, head)


def test_a_client_skips_truncated_and_control_batches() -> None:
    control = changed(21, struct.pack(">h", CONTROL + TRANSACTIONAL))
    found = decode_batches(BATCH + control + changed(0, struct.pack(">q", 2)) + BATCH[:70], offset=1)
    assert [record.offset for record in found] == [1, 2, 3]
    assert [replace(record, offset=-1) for record in found] == [RECORDS[1], *RECORDS]
