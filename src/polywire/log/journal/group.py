"""Build and verify journal groups, which are written atomically: header, directory, entries (decision 0102).

``GroupHead`` has a method for each kind of entry; ``batch`` and ``published`` also assign offsets. Verification never
reads beyond the buffer, whatever lengths the bytes contain.

```
group header, 64 bytes                             directory entry, 32 bytes
 0 u32 magic "PWG1" (0x31475750)                    0 u32 kind (``EntryKind``)
 4 u32 length   whole group, multiple of 8          4 u32 length, unpadded; entries start at multiples of 8
 8 u64 start                                        8 u64 partition
16 u64 sequence                                    16 u64 argument
24 u64 synced                                      24 u64 checksum  batch: its header_checksum;
32 u64 previous                                                     staged: XXH64 of token and batch header;
40 u32 entries   44 u32 mark   48 i64 time_us                       others: XXH64 of the entry
56 u64 checksum  XXH64 of the journal's seed, bytes 0..56 and the directory
64 directory, then entries in its order
```

The seed is secret, so a producer cannot forge bytes that are accepted as a group when a journal file is reused. The
mark is 32 bits of the XXH64 of the seed and bytes 0..44. It is verified first. Bytes that are not a group nearly always
fail there, before the checksum over the directory is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

import cython

from polywire.errors import ErrorCode, Invalid
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.checksum import xxh64_raw
    from cython.cimports.polywire.records.fields import (
        load_address_span,
        load_columns,
        load_header_checksum,
        load_length,
        load_offset_span,
        load_producer_epoch,
    )
    from cython.cimports.polywire.records.header import is_sound, number_header
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )
else:
    from polywire.records.checksum import xxh64_raw
    from polywire.records.fields import (
        load_address_span,
        load_columns,
        load_header_checksum,
        load_length,
        load_offset_span,
        load_producer_epoch,
    )
    from polywire.records.header import is_sound, number_header
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        load_u64,
        move,
        store_i64,
        store_u32,
        store_u64,
    )

GROUP_MAGIC: Final = b"PWG1"
GROUP_HEADER_BYTES: Final = 64
ENTRY_BYTES: Final = 32
GROUP_BYTES_MAX: Final = 16 * 1024 * 1024
TOKEN_BYTES: Final = 16

_MAGIC = cython.declare(cython.uint, 0x31475750)
_BATCH_MAGIC = cython.declare(cython.uint, 0x31425750)
_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 64)
_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 32)
_ENTRIES_MAX = cython.declare(cython.Py_ssize_t, 524288)  # as many as fit 16 MiB
_BYTES_MAX = cython.declare(cython.Py_ssize_t, 16777216)
_BATCH_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_PRODUCER_BIT = cython.declare(cython.uint, 64)
_SHIFT = cython.declare(
    cython.Py_ssize_t, 8
)  # seed, header and directory are hashed contiguously, without the checksum between them
_MARK_BYTES = cython.declare(cython.Py_ssize_t, 44)
_SCRATCH_BYTES = cython.declare(cython.Py_ssize_t, 1024)  # a header and 30 entries; more entries get their own memory
_NAMING = cython.declare(cython.longlong, 0xC00)  # bits of SNAPSHOT and START
_NOGIL_BYTES_MIN = cython.declare(cython.Py_ssize_t, 262144)

_HEADER: Final = Struct("<IIQQQQIIqQ")
_ENTRY: Final = Struct("<IIQQQ")


class EntryKind(IntEnum):
    BATCH = 1
    STAGED = 2
    PUBLISH = 3
    ABANDON = 4
    CHANGE = 5
    OPEN = 6
    DROP = 7
    TRIM = 8
    SEALED = 9
    SNAPSHOT = 10
    START = 11


class GroupFields(NamedTuple):
    length: int
    start: int
    sequence: int
    synced: int
    previous: int
    entries: int
    time_us: int
    checksum: int
    kinds: int
    """Bit k is set if the group has an entry of kind k."""


class Entry(NamedTuple):
    """One entry of a journal write: where it is, and what it contains.

    Attributes:
        position: byte position of the content in the journal file.
    """

    kind: int
    partition: int
    argument: int
    position: int
    length: int
    checksum: int


class GroupRun(NamedTuple):
    """Journal writes of one start with consecutive sequence numbers, in one journal file.

    Attributes:
        first: sequence number of the first one.
        positions: byte position of each.
        naming: sequence numbers of those that can name segments.
        damaged: sequence numbers of those with a damaged entry.
    """

    start: int
    first: int
    positions: array[int]
    naming: array[int]
    damaged: array[int]


@cython.cclass
class GroupHead:
    """Header and list of entries of the journal write being built. The object is reused for the next journal write.

    Attributes:
        count: number of entries.
        payload: size of the entries in bytes, with padding, without the header.
        producers: whether a batch has a producer id and epoch, so that the broker remembers its sequence numbers.
        checksum: checksum of the journal write, after ``finish``.
        offset_span: number of offsets of the last batch.
        address_span: size of the last batch in bytes in Kafka 0.7's format.

    Args:
        seed: secret of the journal, included in the checksum.
    """

    if not cython.compiled:  # in the compiled module, group.pxd declares the fields
        __slots__ = (
            "_data",
            "_lent",
            "_seed",
            "address_span",
            "checksum",
            "count",
            "offset_span",
            "payload",
            "producers",
        )

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._data = bytearray()
        self._grow(16)
        self.count = 0
        self.payload = 0
        self.producers = False
        self.checksum = 0
        self.offset_span = self.address_span = 0

    @property
    def size(self) -> int:
        """Size of the whole journal write in bytes, if no more entries are added."""
        return _HEADER_BYTES + self.count * _ENTRY_BYTES + self.payload

    @cython.ccall
    def clear(self) -> None:
        self.count = 0
        self.payload = 0
        self.producers = False

    @cython.cfunc
    def _grow(self, capacity: cython.Py_ssize_t) -> cython.void:
        data = bytearray(_HEADER_BYTES + capacity * _ENTRY_BYTES)
        if capacity > 16:
            data[: len(self._data)] = self._data
        self._data = data
        self._lent = lend_writable(data)

    @cython.cfunc
    def _enter(
        self,
        kind: cython.uint,
        length: cython.Py_ssize_t,
        partition: cython.ulonglong,
        argument: cython.ulonglong,
        checksum: cython.ulonglong,
    ) -> cython.void:
        at: cython.Py_ssize_t = _HEADER_BYTES + self.count * _ENTRY_BYTES
        if at + _ENTRY_BYTES > self._lent.size:
            if self.count >= _ENTRIES_MAX:
                raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"journal group has too many entries limit={_ENTRIES_MAX}")
            self._grow(2 * self.count)
        store_u32(self._lent.p, at, kind)
        store_u32(self._lent.p, at + 4, length)
        store_u64(self._lent.p, at + 8, partition)
        store_u64(self._lent.p, at + 16, argument)
        store_u64(self._lent.p, at + 24, checksum)
        self.count += 1
        self.payload += (length + 7) & ~7

    @cython.ccall
    def batch(
        self,
        batch: Buffer,
        partition: cython.ulonglong,
        epoch: cython.ulonglong,
        base_offset: cython.ulonglong,
        base_address: cython.ulonglong,
        time_us: cython.longlong,
    ) -> bytearray | None:
        """Add a batch to the journal write and assign its offset, epoch, time and Kafka 0.7 offset (``base_address``).

        Returns None if ``batch`` is writable: it is changed in place. Otherwise returns a header that the caller must
        write instead of the batch's own.

        Raises Invalid(INVALID_BATCH) unless ``batch`` is exactly one whole batch.
        """
        lent: Lent = lend(batch)
        size: cython.Py_ssize_t = lent.size
        if (
            size < _BATCH_HEADER_BYTES
            or size & 7
            or load_u32(lent.p, 0) != _BATCH_MAGIC
            or load_length(lent.p, 0) != size
        ):
            raise Invalid(ErrorCode.INVALID_BATCH, f"expected exactly one complete batch size={size}")
        header: bytearray | None = None
        readonly: cython.bint = lent.view.readonly if cython.compiled else lent.p.readonly  # type: ignore[attr-defined, unused-ignore]
        if readonly:
            header = bytearray(batch[:104])
            lent = lend_writable(header)
        number_header(lent.p, 0, partition, epoch, base_offset, base_address, time_us)
        self._enter(1, size, partition, 0, load_header_checksum(lent.p, 0))
        if load_columns(lent.p, 0) & _PRODUCER_BIT and load_producer_epoch(lent.p, 0) >= 0:
            self.producers = True
        self.offset_span, self.address_span = load_offset_span(lent.p, 0), load_address_span(lent.p, 0)
        return header

    def entry(self, kind: int, partition: int, argument: int, content: Buffer) -> None:
        """Add an entry other than a batch, with its own checksum. Its bytes must be written padded to a multiple of 8."""
        lent: Lent = lend(content)
        self._enter(kind, lent.size, partition, argument, xxh64_raw(lent.p, 0, lent.size))

    def published(self, content: Buffer, entries: Lendable, numbers: Lendable, epoch: int) -> None:
        """Assign offsets to the batches of a publish and add them to the journal write.

        Args:
            content: writable buffer of the entries. Each entry is a token and the headers of the batches stored under
                it for one partition.
            entries: for each entry, its end in ``content`` and the index of its partition, or -1 if the token is
                abandoned.
            numbers: (incarnation, next offset, next address, time) of each partition. Updated in place.
            epoch: leader epoch of this start.

        Raises:
            IndexError: the arguments contradict each other.
        """
        lent: Lent = lend_writable(content)
        ends: Lent = lend(entries)
        of: Lent = lend_writable(numbers)
        start: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t
        i: cython.Py_ssize_t
        for i in range(ends.size // 16):
            end: cython.Py_ssize_t = load_i64(ends.p, 16 * i)
            row: cython.Py_ssize_t = 32 * load_i64(ends.p, 16 * i + 8)
            if end < start + 16 or end > lent.size or (end - start - 16) % 104 or row > of.size - 32:
                raise IndexError(i)
            if row < 0:
                self._enter(4, end - start, 0, 0, xxh64_raw(lent.p, start, end - start))
                start = end
                continue
            partition: cython.ulonglong = load_u64(of.p, row)
            for at in range(start + 16, end, 104):
                offset: cython.ulonglong = load_u64(of.p, row + 8)
                address: cython.ulonglong = load_u64(of.p, row + 16)
                number_header(lent.p, at, partition, epoch, offset, address, load_i64(of.p, row + 24))
                store_u64(of.p, row + 8, offset + load_offset_span(lent.p, at))
                store_u64(of.p, row + 16, address + load_address_span(lent.p, at))
            self._enter(3, end - start, partition, 0, xxh64_raw(lent.p, start, end - start))
            start = end

    def staged(self, front: bytes, batch_bytes: int, partition: int, expires_at_us: int) -> None:
        """Add a batch that is invisible until it is published.

        Args:
            front: token and batch header. The entry's checksum covers only these.
            batch_bytes: size of the batch, header included.
        """
        lent: Lent = lend(front)
        self._enter(2, 16 + batch_bytes, partition, expires_at_us, xxh64_raw(lent.p, 0, lent.size))

    @cython.ccall
    def finish(
        self,
        start: cython.ulonglong,
        sequence: cython.ulonglong,
        synced: cython.ulonglong,
        previous: cython.ulonglong,
        time_us: cython.longlong,
    ) -> bytes:
        """Return the header and the list of entries, which the caller writes before the entries."""
        lent: Lent = self._lent
        stop: cython.Py_ssize_t = _HEADER_BYTES + self.count * _ENTRY_BYTES
        store_u64(lent.p, 0, self._seed)
        store_u32(lent.p, _SHIFT, _MAGIC)
        store_u32(lent.p, _SHIFT + 4, stop + self.payload)
        store_u64(lent.p, _SHIFT + 8, start)
        store_u64(lent.p, _SHIFT + 16, sequence)
        store_u64(lent.p, _SHIFT + 24, synced)
        store_u64(lent.p, _SHIFT + 32, previous)
        store_u32(lent.p, _SHIFT + 40, self.count)
        store_u32(lent.p, _SHIFT + 44, xxh64_raw(lent.p, 0, _SHIFT + _MARK_BYTES) & 0xFFFFFFFF)
        store_i64(lent.p, _SHIFT + 48, time_us)
        self.checksum = xxh64_raw(lent.p, 0, stop)
        i: cython.int
        for i in range(7):  # move eight bytes at a time towards the front, because the ranges overlap
            store_u64(lent.p, 8 * i, load_u64(lent.p, 8 * i + _SHIFT))
        store_u64(lent.p, 56, self.checksum)
        return bytes(lent.p[:stop])  # for a few entries, a copy costs less than a view


# ---- reading
# -----------------------------------------------------------------------------------------------------------------


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _group_bytes(p: cython.p_const_uchar, at: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the length of the journal write at ``at``, or 0 if its sizes are inconsistent or it ends after ``limit``."""
    if at < 0 or limit - at < _HEADER_BYTES or load_u32(p, at) != _MAGIC:
        return 0
    length: cython.Py_ssize_t = load_u32(p, at + 4)
    count: cython.Py_ssize_t = load_u32(p, at + 40)
    if length > _BYTES_MAX or length & 7 or count > _ENTRIES_MAX or _HEADER_BYTES + count * _ENTRY_BYTES > length:
        return 0
    return length if length <= limit - at else 0


@cython.cfunc
@cython.exceptval(-2, check=True)
def _kinds_at(lent: Lent, at: cython.Py_ssize_t, seed: cython.ulonglong, scratch: Lent) -> cython.longlong:
    """Return the kinds of entries of the journal write at ``at`` as a bit set. Its entries are not checked.

    Returns -1 if the header or the list of entries is damaged, or the journal write does not fit the file.

    Args:
        scratch: memory of ``_SCRATCH_BYTES``, which is overwritten.
    """
    if _group_bytes(lent.p, at, lent.size) == 0:
        return -1
    copy: Lent = scratch
    store_u64(copy.p, 0, seed)
    move(copy.p, 8, lent.p, at, 56)
    if xxh64_raw(copy.p, 0, _SHIFT + _MARK_BYTES) & 0xFFFFFFFF != load_u32(lent.p, at + 44):
        return -1
    stop: cython.Py_ssize_t = _HEADER_BYTES + load_u32(lent.p, at + 40) * _ENTRY_BYTES
    if stop > copy.size:
        copy = lend_writable(bytearray(scratch.p[:64]) + bytearray(stop - 64))
    move(copy.p, 64, lent.p, at + 64, stop - 64)
    if xxh64_raw(copy.p, 0, stop) != load_u64(lent.p, at + 56):
        return -1
    kinds: cython.uint = 0
    entry: cython.Py_ssize_t = 64
    while entry < stop:
        kinds |= cython.cast(cython.uint, 1) << (load_u32(copy.p, entry) & 31)
        entry += _ENTRY_BYTES
    return kinds


def read_group(slot: Buffer, at: int, seed: int) -> GroupFields | None:
    """Parse the header of the journal write at byte position ``at``. Its entries are not checked.

    Returns None if the header or the list of entries is damaged, or the journal write does not fit the file.
    """
    kinds = _kinds_at(lend(slot), at, seed, lend_writable(bytearray(_SCRATCH_BYTES)))
    if kinds < 0:
        return None
    fields = _HEADER.unpack_from(slot, at)
    return GroupFields(fields[1], fields[2], fields[3], fields[4], fields[5], fields[6], fields[8], fields[9], kinds)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _batch_fits(p: cython.p_const_uchar, at: cython.Py_ssize_t, length: cython.Py_ssize_t) -> cython.bint:
    """Return whether ``length`` bytes at ``at`` are exactly one batch, with a valid header and body."""
    return is_sound(p, at, at + length) and load_length(p, at) == length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _entry_fits(
    p: cython.p_const_uchar, entry: cython.Py_ssize_t, at: cython.Py_ssize_t, length: cython.Py_ssize_t
) -> cython.bint:
    """Return whether the bytes at ``at`` match the checksum of the entry described at ``entry``."""
    kind: cython.uint = load_u32(p, entry)
    checksum: cython.ulonglong = load_u64(p, entry + 24)
    if kind == 1:
        return _batch_fits(p, at, length) and load_header_checksum(p, at) == checksum
    if kind == 2:
        return length > 120 and xxh64_raw(p, at, 120) == checksum and _batch_fits(p, at + 16, length - 16)
    return xxh64_raw(p, at, length) == checksum


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _bad_entry(p: cython.p_const_uchar, at: cython.Py_ssize_t, length: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Return the index of the first damaged entry of a journal write.

    Returns -1 if all are valid and their sizes add up.
    """
    count: cython.Py_ssize_t = load_u32(p, at + 40)
    position: cython.Py_ssize_t = at + _HEADER_BYTES + count * _ENTRY_BYTES
    size: cython.Py_ssize_t
    number: cython.Py_ssize_t = 0
    while number < count:
        size = load_u32(p, at + _HEADER_BYTES + number * _ENTRY_BYTES + 4)
        if position + size > at + length or not _entry_fits(
            p, at + _HEADER_BYTES + number * _ENTRY_BYTES, position, size
        ):
            return number
        position += (size + 7) & ~7
        number += 1
    return -1 if position == at + length else count


def bad_entry(slot: Buffer, at: int) -> int:
    """Return the index of the first damaged entry of a journal write with a valid header, or -1."""
    lent: Lent = lend(slot)
    position: cython.Py_ssize_t = at
    found: cython.Py_ssize_t
    length: cython.Py_ssize_t = _group_bytes(lent.p, position, lent.size)
    if length == 0:
        return 0
    if length < _NOGIL_BYTES_MIN:
        return _bad_entry(lent.p, position, length)
    with cython.nogil:
        found = _bad_entry(lent.p, position, length)
    return found


def find_groups(slot: Buffer, seed: int, find: Callable[[int], int]) -> list[GroupRun]:
    """Find every journal write with a valid header, at any position of a journal file.

    A journal write can be valid although earlier ones were never synced, so every position is searched. Only the bytes
    inside undamaged writes are skipped. Damaged writes are searched, because newer writes may have overwritten their end.

    Args:
        find: returns the next position of ``GROUP_MAGIC`` from a position on, or -1.
    """
    lent: Lent = lend(slot)
    size: cython.Py_ssize_t = lent.size
    at: cython.Py_ssize_t = 0
    following: cython.ulonglong = 0
    begun: cython.ulonglong = 0
    runs: list[GroupRun] = []
    positions, naming, damaged = array("Q"), array("Q"), array("Q")
    scratch: Lent = lend_writable(bytearray(_SCRATCH_BYTES))
    while at <= size - _HEADER_BYTES:
        if load_u32(lent.p, at) != _MAGIC:
            at = find(at)
            if at < 0:
                break
        kinds: cython.longlong = _kinds_at(lent, at, seed, scratch) if at & 7 == 0 else -1
        if kinds < 0:
            at += 1
            continue
        start: cython.ulonglong = load_u64(lent.p, at + 8)
        sequence: cython.ulonglong = load_u64(lent.p, at + 16)
        if not runs or start != begun or sequence != following:
            positions, naming, damaged = array("Q"), array("Q"), array("Q")
            runs.append(GroupRun(start, sequence, positions, naming, damaged))
        begun, following = start, sequence + 1
        positions.append(at)
        if kinds & _NAMING:
            naming.append(sequence)
        length: cython.Py_ssize_t = load_u32(lent.p, at + 4)
        if _bad_entry(lent.p, at, length) < 0:
            at += length
        else:
            damaged.append(sequence)
            at += 1
    return runs


def read_directory(slot: Buffer, at: int) -> list[Entry]:
    """Return the entries of a valid journal write, in order."""
    count = int.from_bytes(slot[at + 40 : at + 44], "little")
    position = at + GROUP_HEADER_BYTES + count * ENTRY_BYTES
    entries = []
    for number in range(count):
        kind, length, partition, argument, checksum = _ENTRY.unpack_from(
            slot, at + GROUP_HEADER_BYTES + number * ENTRY_BYTES
        )
        entries.append(Entry(kind, partition, argument, position, length, checksum))
        position += (length + 7) & ~7
    return entries
