"""Searches over index entries and batch headers: compiled, one call per request.

Promises: nothing here allocates per batch; searches are binary over entries and linear only between two entries (64 KiB). Must not
know: files, slots, segments; it sees numbers, buffers and the fixed header of decision 0001. Little-endian machines only when compiled.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.libc.string import memcpy

View = memoryview  # the typed view of bytes in the compiled module

TAIL_ENTRY_BYTES: Final = 40  # decision 0002: an index entry of 40 bytes per unsealed batch
RUN_ENTRY_BYTES: Final = 32
RUN_BYTES: Final = 112

BY_OFFSET: Final = 0  # fields of a run's index entry, in their stored order
BY_POSITION: Final = 1
BY_ADDRESS: Final = 2
BY_TIME: Final = 3

_HEADER_BYTES = cython.declare(cython.Py_ssize_t, 104)
_MAGIC = cython.declare(cython.uint, 0x31425750)
_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 40)
_RUN_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 32)
_RUN_BYTES = cython.declare(cython.Py_ssize_t, 112)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _u64(view: View, at: cython.Py_ssize_t) -> cython.ulonglong:
    if cython.compiled:
        return cython.cast("const unsigned long long*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 8], "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _u32(view: View, at: cython.Py_ssize_t) -> cython.uint:
    if cython.compiled:
        return cython.cast("const unsigned int*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 4], "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="const unsigned char[::1]")
def _i64(view: View, at: cython.Py_ssize_t) -> cython.longlong:
    if cython.compiled:
        return cython.cast("const long long*", cython.address(view[at]))[0]
    else:
        return int.from_bytes(view[at : at + 8], "little", signed=True)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(view="unsigned char[::1]")
def _put64(view: View, at: cython.Py_ssize_t, value: cython.ulonglong) -> cython.void:
    if cython.compiled:
        cython.cast("unsigned long long*", cython.address(view[at]))[0] = value
    else:
        view[at : at + 8] = (value & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.locals(out="unsigned char[::1]", source="const unsigned char[::1]")
def _copy(
    out: View, at: cython.Py_ssize_t, source: View, start: cython.Py_ssize_t, count: cython.Py_ssize_t
) -> cython.void:
    """Copy ``count`` > 0 bytes; both ranges were checked by the caller."""
    if cython.compiled:
        memcpy(cython.address(out[at]), cython.address(source[start]), count)
    else:
        out[at : at + count] = source[start : start + count]


# ---- a partition's tail ---------------------------------------------------------------------------------------------------------


@cython.cclass
class TailIndex:
    """Where the batches of one partition lie: entries in offset order, added at the end, dropped at the front.

    Guards: offsets and addresses rise from entry to entry, times never fall, so every search is binary. An entry is
    (offset, position, length, slot, address, append time); ``slot`` is any number the owner gives to what holds the bytes. The owner of
    sealed runs may keep them in one of these too, a segment's number for its slot. Fixed cost: 56 bytes and a bytearray of 56.
    """

    _data: bytearray
    _head: cython.Py_ssize_t
    _count: cython.Py_ssize_t

    def __init__(self) -> None:
        self._data = bytearray()
        self._head = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def nbytes(self) -> int:
        """Bytes of memory, without the fixed cost of the objects."""
        return len(self._data)

    @cython.locals(view="unsigned char[::1]", at=cython.Py_ssize_t)
    def append(
        self,
        offset: cython.ulonglong,
        position: cython.ulonglong,
        length: cython.uint,
        slot: cython.uint,
        address: cython.ulonglong,
        time_us: cython.longlong,
    ) -> None:
        """Add the entry of the next batch."""
        at = (self._head + self._count) * _ENTRY_BYTES
        if at == len(self._data):
            at = self._make_room()
        view = memoryview(self._data)
        _put64(view, at, offset)
        _put64(view, at + 8, position)
        _put64(view, at + 16, cython.cast(cython.ulonglong, slot) << 32 | length)
        _put64(view, at + 24, address)
        _put64(view, at + 32, cython.cast(cython.ulonglong, time_us))
        self._count += 1

    @cython.cfunc
    def _make_room(self) -> cython.Py_ssize_t:
        """Move entries to the front, and grow by half if that freed little. Returns where the next entry goes."""
        start = self._head * _ENTRY_BYTES
        used = self._count * _ENTRY_BYTES
        capacity = self._count + (self._count >> 1) + 4
        data = bytearray(capacity * _ENTRY_BYTES)
        data[:used] = self._data[start : start + used]
        self._data = data
        self._head = 0
        return used

    @cython.locals(view="const unsigned char[::1]", at=cython.Py_ssize_t, word=cython.ulonglong)
    def entry(self, index: cython.Py_ssize_t) -> tuple[int, int, int, int, int, int]:
        """(offset, position, length, slot, address, append time) of an entry. Raises IndexError."""
        if index < 0 or index >= self._count:
            raise IndexError(index)
        view = memoryview(self._data)
        at = (self._head + index) * _ENTRY_BYTES
        word = _u64(view, at + 16)
        return (
            _u64(view, at),
            _u64(view, at + 8),
            word & 0xFFFF_FFFF,
            word >> 32,
            _u64(view, at + 24),
            _i64(view, at + 32),
        )

    @cython.cfunc
    @cython.locals(
        view="const unsigned char[::1]",
        low=cython.Py_ssize_t,
        high=cython.Py_ssize_t,
        middle=cython.Py_ssize_t,
        base=cython.Py_ssize_t,
    )
    def _last_at(self, field: cython.Py_ssize_t, key: cython.longlong) -> cython.Py_ssize_t:
        """Last entry whose 8-byte field is at most ``key``, -1 if there is none. Numbers stay below 2**63."""
        view = memoryview(self._data)
        base = self._head * _ENTRY_BYTES + field
        low, high = 0, self._count
        while low < high:
            middle = (low + high) >> 1
            if _i64(view, base + middle * _ENTRY_BYTES) <= key:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def find_offset(self, offset: cython.longlong) -> int:
        """Entry of the batch that holds ``offset`` if any does: the last one that begins at or below it, -1 if all begin above."""
        return self._last_at(0, offset)

    def find_address(self, address: cython.longlong) -> int:
        """The last entry whose batch begins at or below a Kafka 0.7 address, -1 if all begin above."""
        return self._last_at(24, address)

    def find_time(self, time_us: cython.longlong) -> int:
        """The first entry appended at or after ``time_us``; the number of entries if there is none."""
        return self._last_at(32, time_us - 1) + 1

    @cython.locals(
        view="const unsigned char[::1]",
        start=cython.Py_ssize_t,
        stop=cython.Py_ssize_t,
        at=cython.Py_ssize_t,
        total=cython.longlong,
        length=cython.longlong,
    )
    def take(
        self, offset: cython.longlong, bytes_max: cython.longlong, offset_end: cython.longlong = 0x7FFF_FFFF_FFFF_FFFF
    ) -> tuple[int, int, int]:
        """Entries a read gets: (start, stop, bytes). At least the batch that holds ``offset``, then whole batches while they fit
        ``bytes_max`` and begin below ``offset_end``. An empty range when all entries begin above ``offset``."""
        start = self._last_at(0, offset)
        if start < 0:
            return 0, 0, 0
        view = memoryview(self._data)
        stop, total = start, 0
        while stop < self._count:
            at = (self._head + stop) * _ENTRY_BYTES
            length = _u32(view, at + 16)
            if stop > start and (total + length > bytes_max or _i64(view, at) >= offset_end):
                break
            total += length
            stop += 1
        return start, stop, total

    @cython.locals(
        view="const unsigned char[::1]",
        index=cython.Py_ssize_t,
        at=cython.Py_ssize_t,
        slot=cython.longlong,
        position=cython.longlong,
        end=cython.longlong,
    )
    def extents(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> list[tuple[int, int, int]]:
        """(slot, position, bytes) of entries [start, stop), neighbours in place joined. Raises IndexError."""
        self._check_range(start, stop)
        view = memoryview(self._data)
        found: list[tuple[int, int, int]] = []
        slot, position, end = -1, 0, 0
        for index in range(start, stop):
            at = (self._head + index) * _ENTRY_BYTES
            if slot != _u32(view, at + 20) or end != _i64(view, at + 8):
                if slot >= 0:
                    found.append((slot, position, end - position))
                slot, position = _u32(view, at + 20), _i64(view, at + 8)
                end = position
            end += _u32(view, at + 16)
        if slot >= 0:
            found.append((slot, position, end - position))
        return found

    @cython.locals(
        view="const unsigned char[::1]",
        source="const unsigned char[::1]",
        target="unsigned char[::1]",
        index=cython.Py_ssize_t,
        at=cython.Py_ssize_t,
        slot=cython.longlong,
        filled=cython.Py_ssize_t,
        position=cython.Py_ssize_t,
        length=cython.Py_ssize_t,
    )
    def gather(
        self,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        slots: Mapping[int, Buffer],
        out: bytearray | memoryview,
    ) -> int:
        """Copy the batches of entries [start, stop) back to back into ``out``; returns their bytes. ``slots`` gives the bytes of every
        slot they lie in. Raises IndexError when a range lies outside a slot or does not fit ``out``."""
        self._check_range(start, stop)
        view, target = memoryview(self._data), memoryview(out)
        slot, filled = -1, 0
        source = view
        for index in range(start, stop):
            at = (self._head + index) * _ENTRY_BYTES
            if slot != _u32(view, at + 20):
                slot = _u32(view, at + 20)
                source = memoryview(slots[slot])
            position, length = _i64(view, at + 8), _u32(view, at + 16)
            if position < 0 or position + length > len(source) or filled + length > len(target):
                raise IndexError(index)
            if length:
                _copy(target, filled, source, position, length)
            filled += length
        return filled

    @cython.locals(
        view="const unsigned char[::1]",
        starts="long long[::1]",
        sizes="long long[::1]",
        index=cython.Py_ssize_t,
        count=cython.Py_ssize_t,
        at=cython.Py_ssize_t,
    )
    def spans(self, slot: cython.uint) -> tuple[array[int], array[int]]:
        """Positions and lengths (``array('q')``) of all entries of one slot, in offset order: what a sealer gives to a run."""
        view = memoryview(self._data)
        count = 0
        for index in range(self._count):
            if _u32(view, (self._head + index) * _ENTRY_BYTES + 20) == slot:
                count += 1
        positions, lengths = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        starts, sizes = memoryview(positions), memoryview(lengths)
        count = 0
        for index in range(self._count):
            at = (self._head + index) * _ENTRY_BYTES
            if _u32(view, at + 20) == slot:
                starts[count] = _i64(view, at + 8)
                sizes[count] = _u32(view, at + 16)
                count += 1
        return positions, lengths

    def drop_front(self, count: cython.Py_ssize_t) -> None:
        """Forget the first ``count`` entries. Raises IndexError."""
        self._check_range(0, count)
        self._head += count
        self._count -= count
        if self._count == 0 or self._head > 4 * (self._count + 16):
            used = self._head * _ENTRY_BYTES
            self._data = bytearray(self._data[used : used + self._count * _ENTRY_BYTES])
            self._head = 0

    @cython.locals(view="const unsigned char[::1]", count=cython.Py_ssize_t)
    def drop_slot(self, slot: cython.uint) -> int:
        """Forget the leading entries that lie in ``slot``; returns how many."""
        view = memoryview(self._data)
        count = 0
        while count < self._count and _u32(view, (self._head + count) * _ENTRY_BYTES + 20) == slot:
            count += 1
        del view
        self.drop_front(count)
        return count

    @cython.cfunc
    def _check_range(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> None:
        if start < 0 or stop < start or stop > self._count:
            raise IndexError((start, stop))


# ---- walking headers ------------------------------------------------------------------------------------------------------------


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
@cython.locals(view="const unsigned char[::1]", length=cython.Py_ssize_t)
def _batch_bytes(view: View, at: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Length of the whole batch at ``at``, or -1 when there is none before ``size``."""
    if at < 0 or at + _HEADER_BYTES > size or _u32(view, at) != _MAGIC:
        return -1
    length = _u32(view, at + 4)
    if length < _HEADER_BYTES or length % 8 != 0 or at + length > size:
        return -1
    return length


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
@cython.locals(
    view="const unsigned char[::1]", length=cython.Py_ssize_t, size=cython.Py_ssize_t, reached=cython.longlong
)
def _scan(
    view: View, size: cython.Py_ssize_t, at: cython.Py_ssize_t, field: cython.int, key: cython.longlong
) -> cython.Py_ssize_t:
    """Position of the first batch that reaches beyond ``key`` in ``field``; ``size`` if none does, -1 where there is no batch."""
    while at < size:
        length = _batch_bytes(view, at, size)
        if length < 0:
            return -1
        if field == 0:
            reached = _i64(view, at + 32) + _u32(view, at + 84)
        elif field == 1:
            reached = at + length
        elif field == 2:
            reached = _i64(view, at + 40) + _u32(view, at + 80)
        else:
            reached = _i64(view, at + 48)
        if reached > key:
            return at
        at += length
    return size


@cython.locals(view="const unsigned char[::1]")
def scan_to(chunk: Buffer, start: cython.Py_ssize_t, field: cython.int, key: cython.longlong) -> int:
    """Walk headers from ``start`` (a batch's beginning) to the first batch that ends beyond ``key`` in a field (BY_OFFSET: holds that
    offset or a later one; BY_ADDRESS alike; BY_POSITION: does not end by then; BY_TIME: was appended later than that).

    Returns its position, the chunk's size when there is none, -1 where no batch begins.
    """
    view = memoryview(chunk)
    return _scan(view, len(view), start, field, key)


def scan_to_offset(chunk: Buffer, offset: cython.longlong) -> int:
    """Position of the batch that holds ``offset`` in a chunk of whole batches; the chunk's size when it ends below, -1 when broken."""
    return scan_to(chunk, 0, 0, offset)


@cython.locals(
    view="const unsigned char[::1]",
    start=cython.Py_ssize_t,
    at=cython.Py_ssize_t,
    size=cython.Py_ssize_t,
    length=cython.Py_ssize_t,
    next_offset=cython.longlong,
)
def scan_read(
    chunk: Buffer,
    offset: cython.longlong,
    bytes_max: cython.longlong,
    offset_end: cython.longlong = 0x7FFF_FFFF_FFFF_FFFF,
) -> tuple[int, int, int]:
    """What a read gets of a chunk of whole batches: (start, stop, offset after its last record). At least the batch that holds
    ``offset`` (or the first beyond it), then whole batches while they fit ``bytes_max`` and begin below ``offset_end``.

    start is the chunk's size when the chunk ends below ``offset``, -1 where a batch is broken.
    """
    view = memoryview(chunk)
    size = len(view)
    start = _scan(view, size, 0, 0, offset)
    at, next_offset = start, offset
    while 0 <= at < size:
        length = _batch_bytes(view, at, size)
        if length < 0:
            return -1, -1, offset
        if at > start and (at + length - start > bytes_max or _i64(view, at + 32) >= offset_end):
            break
        next_offset = _i64(view, at + 32) + _u32(view, at + 84)
        at += length
    return start, at, next_offset


@cython.locals(
    view="const unsigned char[::1]",
    at=cython.Py_ssize_t,
    size=cython.Py_ssize_t,
    length=cython.Py_ssize_t,
    count=cython.Py_ssize_t,
    starts="long long[::1]",
    sizes="long long[::1]",
)
def split_batches(chunk: Buffer) -> tuple[array[int], array[int]]:
    """Positions and lengths (``array('q')``) of the batches that lie back to back in a chunk. Stops where no whole batch begins."""
    view = memoryview(chunk)
    size = len(view)
    at, count = 0, 0
    while at < size:
        length = _batch_bytes(view, at, size)
        if length < 0:
            break
        at += length
        count += 1
    positions, lengths = array("q", bytes(8 * count)), array("q", bytes(8 * count))
    starts, sizes = memoryview(positions), memoryview(lengths)
    at = 0
    for count in range(len(positions)):
        length = _batch_bytes(view, at, size)
        starts[count] = at
        sizes[count] = length
        at += length
    return positions, lengths


# ---- tables of a segment's footer -----------------------------------------------------------------------------------------------


@cython.locals(
    view="const unsigned char[::1]",
    low=cython.Py_ssize_t,
    high=cython.Py_ssize_t,
    middle=cython.Py_ssize_t,
    base=cython.Py_ssize_t,
)
def find_entry(
    entries: Buffer, start: cython.Py_ssize_t, count: cython.Py_ssize_t, field: cython.int, key: cython.longlong
) -> int:
    """Among run index entries [start, start + count): number, counted from ``start``, of the last whose field (BY_…) is at most
    ``key``; -1 if there is none. Raises IndexError when the entries are not there."""
    view = memoryview(entries)
    if start < 0 or count < 0 or field < 0 or field > 3 or (start + count) * _RUN_ENTRY_BYTES > len(view):
        raise IndexError((start, count, field))
    base = start * _RUN_ENTRY_BYTES + field * 8
    low, high = 0, count
    while low < high:
        middle = (low + high) >> 1
        if _i64(view, base + middle * _RUN_ENTRY_BYTES) <= key:
            low = middle + 1
        else:
            high = middle
    return low - 1


@cython.locals(view="const unsigned char[::1]", low=cython.Py_ssize_t, high=cython.Py_ssize_t, middle=cython.Py_ssize_t)
def find_run(runs: Buffer, partition: cython.ulonglong) -> int:
    """Number of the first run of a partition in a table sorted by partition, or of the first above it. The table may end below."""
    view = memoryview(runs)
    low, high = 0, len(view) // _RUN_BYTES
    while low < high:
        middle = (low + high) >> 1
        if _u64(view, middle * _RUN_BYTES) < partition:
            low = middle + 1
        else:
            high = middle
    return low
