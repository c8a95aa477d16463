"""For Kafka clients in tests and tools: encode records as a record batch, and decode fetched batches."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter, lt
from struct import Struct
from typing import Final

from polywire.errors import PeerError
from polywire.protocols.kafka.compression import EXPANDED_BYTES_MAX, compress, expand
from polywire.protocols.kafka.crc32c import crc32c
from polywire.protocols.kafka.decoder import BATCH_HEAD_BYTES, BatchHead, build
from polywire.protocols.kafka.messages import Codec, Refused
from polywire.records.batch import slice_records
from polywire.records.columns import Header, Record
from polywire.records.pieces import Piece
from polywire.types import Buffer

TIME_APPEND: Final = 8  # bit in a batch's attributes: append times
CONTROL: Final = 32
_TRANSACTIONAL: Final = 16
_ABORT: Final = b"\0\0"  # the type in the key of a control record
_OFFSET_MAX: Final = 2**62

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


def decode_pieces(
    data: Buffer, *, offset: int, aborted: Iterable[tuple[int, int]], expanded_max: int = EXPANDED_BYTES_MAX
) -> tuple[list[Piece], int]:
    """Return the committed records of fetched batches from ``offset`` on, and the offset after the last batch.

    Control batches, records of aborted transactions, and a truncated last batch are skipped. Decoding stops after the
    batch with which the decompressed bytes exceed ``expanded_max``.

    Args:
        data: may come from a hostile source.
        aborted: producer id and first offset of each aborted transaction, from the fetch response.

    Raises:
        PeerError: a batch is malformed, or its offsets do not follow those of the batch before.
    """
    view = memoryview(data).cast("B")
    transactions = _Aborted(aborted)
    pieces: list[Piece] = []
    at, following, expanded = 0, offset, 0
    while len(view) - at >= BATCH_HEAD_BYTES and expanded <= expanded_max:
        base, length, _, magic, crc = _FRONT.unpack_from(view, at)
        end = at + _LOG_BYTES + length
        if magic != _MAGIC or end < at + BATCH_HEAD_BYTES:
            raise PeerError(f"not a record batch of version 2 magic={magic} bytes={length}", fatal=True)
        if end > len(view):
            break
        if crc32c(view[at + _FRONT.size : end]) != crc:
            raise PeerError(f"batch checksum does not match offset={base}", fatal=True)
        head = _REST.unpack_from(view, at + _FRONT.size)
        last = base + head[1]
        if head[7] < 0:
            raise PeerError(f"number of records is negative records={head[7]} offset={base}", fatal=True)
        if head[1] < 0 or not 0 <= base <= _OFFSET_MAX or last < following or (at and base < following):
            raise PeerError(
                f"offsets of batches do not ascend offset={base} last={last} expected={following}", fatal=True
            )
        if transactions.admits(head, last, view[at + BATCH_HEAD_BYTES : end]):
            piece = _piece(view, at, end, head, base)
            expanded += len(piece.batch)
            pieces += _from(piece, offset)
        at, following = end, last + 1
    if following == offset and len(view):
        raise PeerError(f"response has no complete batch offset={offset} bytes={len(view)}", fatal=True)
    return pieces, following


class _Aborted:
    """The aborted transactions of a fetch response, while its batches are read in order."""

    def __init__(self, aborted: Iterable[tuple[int, int]]) -> None:
        self._later: Final = deque(sorted(aborted, key=itemgetter(1)))
        self._open: Final[set[int]] = set()

    def admits(self, head: Sequence[int], last: int, body: memoryview) -> bool:
        """Return whether a batch has records that were not aborted. ``last`` is its last offset."""
        attributes, producer_id, count = head[0], head[4], head[7]
        while self._later and self._later[0][1] <= last:
            self._open.add(self._later.popleft()[0])
        if attributes & CONTROL:
            if _is_abort(body):
                self._open.discard(producer_id)
            return False
        return count > 0 and not (attributes & _TRANSACTIONAL and producer_id in self._open)


def _is_abort(body: memoryview) -> bool:
    """Return whether a control record is the end of an aborted transaction. Its key is: i16 version, i16 type."""
    reader = _Reader(body)
    reader.varint()
    reader.take(1)
    reader.varint()
    reader.varint()
    key = reader.sized()
    return key is not None and key[2:4] == _ABORT


def _piece(view: memoryview, start: int, end: int, head: Sequence[int], base: int) -> Piece:
    """Return the records of a batch. Raises PeerError."""
    attributes, last_delta, first_time, max_time, _, _, _, count = head
    facts = BatchHead(
        end, attributes & 7, count, attributes & TIME_APPEND != 0, False, first_time, max_time, -1, -1, -1
    )
    try:
        source, begin, stop = view, start + BATCH_HEAD_BYTES, end
        if facts.codec:
            plain = expand(view[begin:end], Codec(facts.codec))
            source, begin, stop = memoryview(plain), 0, len(plain)
        deltas = bytearray(4 * min(count, stop - begin))  # build checks that there are bytes for so many records
        batch = build(source, begin, stop, facts, deltas=deltas).batch
    except (Refused, ValueError) as error:
        raise PeerError(f"batch is malformed reason={error} offset={base}", fatal=True) from None
    dense = count == last_delta + 1 and deltas == array("I", range(count)).tobytes()
    if not dense:
        found = array("I", deltas)
        if found[-1] > last_delta or not all(map(lt, found, found[1:])):
            raise PeerError(f"offsets of records do not ascend offset={base} last={base + last_delta}", fatal=True)
    return Piece(base, batch, base + last_delta + 1, None if dense else deltas, max_time * 1000)


def _from(piece: Piece, offset: int) -> Iterator[Piece]:
    """Yield the records of a piece from an offset on."""
    if piece.first >= offset:
        yield piece
        return
    count = piece.record_count
    deltas = array("I", range(count)) if piece.deltas is None else array("I", bytes(piece.deltas))
    row = bisect_left(deltas, offset - piece.first)
    if row < count:
        first = piece.first + deltas[row]
        rest = array("I", [delta - deltas[row] for delta in deltas[row:]]) if piece.deltas is not None else None
        yield Piece(first, slice_records(piece.batch, row, count), piece.next_offset, rest, piece.newest_us)


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
