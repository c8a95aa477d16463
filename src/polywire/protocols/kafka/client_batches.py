"""For Kafka clients in tests and tools: encode records as a record batch, and decode fetched batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.kafka.compression import compress, expand
from polywire.protocols.kafka.crc32c import crc32c
from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES
from polywire.protocols.kafka.messages import Codec, Refused
from polywire.records.columns import Header, Record
from polywire.types import Buffer

TIME_APPEND: Final = 8  # bit in a batch's attributes: append times
CONTROL: Final = 32

_FRONT: Final = Struct(">qiibI")  # base offset, length, leader epoch, magic, CRC
_REST: Final = Struct(
    ">hiqqqhii"
)  # attributes, last offset delta, first and greatest time, producer id, epoch, sequence, record count
_LOG_BYTES: Final = 12
_MAGIC: Final = 2
_NO_TIME_MS: Final = -1


def encode_batch(
    records: Sequence[Record],
    *,
    codec: Codec = Codec.NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
) -> bytes:
    """Return a batch with these records, in order. The records' offsets are ignored."""
    times = [_NO_TIME_MS if record.origin_time_us is None else record.origin_time_us // 1000 for record in records]
    body = b"".join(
        _encode_record(record, time - times[0], number)
        for number, (record, time) in enumerate(zip(records, times, strict=True))
    )
    rest = _REST.pack(
        attributes | codec,
        len(records) - 1,
        times[0] if times else _NO_TIME_MS,
        max(times, default=_NO_TIME_MS),
        producer_id,
        producer_epoch,
        base_sequence,
        len(records),
    ) + bytes(compress(body, codec))
    return _FRONT.pack(0, _FRONT.size - _LOG_BYTES + len(rest), -1, _MAGIC, crc32c(rest)) + rest


def decode_batches(data: Buffer, *, offset: int = 0) -> list[Record]:
    """Return the records of fetched batches from ``offset`` on.

    Control batches and a truncated last batch are skipped. Raises PeerError for malformed batches.
    """
    view = memoryview(data).cast("B")
    found: list[Record] = []
    at = 0
    while len(view) - at >= BATCH_HEAD_BYTES:
        base, length, _, magic, crc = _FRONT.unpack_from(view, at)
        end = at + _LOG_BYTES + length
        if magic != _MAGIC or end < at + BATCH_HEAD_BYTES:
            raise PeerError(f"not a record batch of version 2 magic={magic} bytes={length}", fatal=True)
        if end > len(view):
            break
        if crc32c(view[at + _FRONT.size : end]) != crc:
            raise PeerError("batch checksum does not match", fatal=True)
        found += _decode_batch(view[at + _FRONT.size : end], base)
        at = end
    return [record for record in found if record.offset >= offset]


def _encode_record(record: Record, time_delta: int, offset_delta: int) -> bytes:
    parts = [b"\0", _varint(time_delta), _varint(offset_delta), _sized(record.key), _sized(record.value)]
    parts.append(_varint(len(record.headers)))
    for header in record.headers:
        parts += [_sized(header.key), _sized(header.value)]
    body = b"".join(parts)
    return _varint(len(body)) + body


def _varint(number: int) -> bytes:
    rest = (number << 1) ^ (number >> 63)
    found = bytearray()
    while rest > 127:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def _sized(data: bytes | None) -> bytes:
    return _varint(-1) if data is None else _varint(len(data)) + data


def _decode_batch(rest: memoryview, base: int) -> Iterator[Record]:
    attributes, _, first_time, max_time, _, _, _, count = _REST.unpack_from(rest)
    if attributes & CONTROL:
        return
    try:
        reader = _Reader(expand(rest[_REST.size :], Codec(attributes & 7)))
    except (Refused, ValueError) as error:
        raise PeerError(f"batch cannot be decompressed reason={error}", fatal=True) from None
    for _ in range(count):
        reader.varint()
        reader.take(1)
        time_delta, offset_delta = reader.varint(), reader.varint()
        key, value = reader.sized(), reader.sized()
        headers = tuple(Header(reader.sized() or b"", reader.sized()) for _ in range(reader.varint()))
        time = max_time if attributes & TIME_APPEND else first_time + time_delta
        stamped = bool(attributes & TIME_APPEND)
        yield Record(
            value=value,
            key=key,
            headers=headers,
            offset=base + offset_delta,
            append_time_us=time * 1000 if stamped else 0,
            origin_time_us=None if stamped or time == _NO_TIME_MS else time * 1000,
        )


class _Reader:
    """A reader of records. Raises PeerError if the data ends too early."""

    def __init__(self, data: Buffer) -> None:
        self._view = memoryview(data).cast("B")
        self._at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._view) - self._at:
            raise PeerError("batch ends early", fatal=True)
        self._at += size
        return bytes(self._view[self._at - size : self._at])

    def varint(self) -> int:
        found = shift = 0
        while True:
            (byte,) = self.take(1)
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return (found >> 1) ^ -(found & 1)
            if shift > 63:
                raise PeerError("varint is too long", fatal=True)

    def sized(self) -> bytes | None:
        size = self.varint()
        return None if size < 0 else self.take(size)
