"""Index of a partition's runs, its contiguous parts of segments, in about ten bytes each.

A segment contains one run for each partition with data in it: 100 GB with ten thousand partitions have fifteen million
runs. So the index is packed, in blocks of 64 entries. For each field, a block stores the minimum of all entries. An
entry is the difference from that minimum, in as many bits as the largest difference needs.

```
block: 5 × i64 minimum of offset, bytes, segment's location, address, append time | 5 × u8 bits of the differences |
       3 zeros | the differences, entry by entry, bit by bit from the lowest, and zeros up to a byte
```

Searches are binary over blocks, then over the entries of one block.
"""

from __future__ import annotations

from array import array
from typing import Final

import cython

from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u64,
        store_i64,
        store_u64,
    )
else:
    from polywire.records.memory import Lent, lend, lend_writable, load_i64, load_u64, store_i64, store_u64

BLOCK_ENTRIES: Final = 64

Entry = tuple[int, int, int, int, int, int]
"""(first offset, 0, bytes, segment's location, first address, first append time), as in ``TailIndex``."""

_BLOCK = cython.declare(cython.Py_ssize_t, 64)
_FIELDS = cython.declare(cython.Py_ssize_t, 5)
_ROW_BYTES = cython.declare(cython.Py_ssize_t, 40)  # size of an entry that is not packed yet
_HEAD_BYTES = cython.declare(cython.Py_ssize_t, 48)
_WIDTHS_AT = cython.declare(cython.Py_ssize_t, 40)
_RUN_BYTES = cython.declare(cython.Py_ssize_t, 112)
_OFFSET = cython.declare(cython.Py_ssize_t, 0)
_ADDRESS = cython.declare(cython.Py_ssize_t, 3)
_TIME = cython.declare(cython.Py_ssize_t, 4)
_ALL_BITS = cython.declare(cython.ulonglong, 0xFFFF_FFFF_FFFF_FFFF)


@cython.cfunc
@cython.inline
def _written(data: bytearray) -> cython.p_uchar:
    """Return a pointer to the content of a bytearray. It is valid until the bytearray is resized."""
    if cython.compiled:
        return cython.cast(cython.p_uchar, cython.cast(cython.p_char, data))
    else:
        return data


@cython.cfunc
@cython.inline
def _read(data: bytes) -> cython.p_const_uchar:
    if cython.compiled:
        return cython.cast(cython.p_const_uchar, cython.cast(cython.p_const_char, data))
    else:
        return data


@cython.cfunc
def _get_bits(p: cython.p_const_uchar, at: cython.Py_ssize_t, width: cython.Py_ssize_t) -> cython.ulonglong:
    value: cython.ulonglong = 0
    got: cython.Py_ssize_t = 0
    while got < width:
        shift: cython.Py_ssize_t = at & 7
        piece: cython.ulonglong = p[at >> 3] >> shift
        value |= piece << got
        got += 8 - shift
        at += 8 - shift
    one: cython.ulonglong = 1
    return value & ((one << width) - 1)


@cython.cfunc
def _pack(rows: cython.p_const_uchar, count: cython.Py_ssize_t) -> bytes:
    head: bytearray = bytearray(48)
    h: cython.p_uchar = _written(head)
    bits: cython.Py_ssize_t = 0
    field: cython.Py_ssize_t
    row: cython.Py_ssize_t
    for field in range(_FIELDS):
        low: cython.longlong = load_i64(rows, field * 8)
        high: cython.longlong = low
        for row in range(1, count):
            value: cython.longlong = load_i64(rows, row * _ROW_BYTES + field * 8)
            low = min(low, value)
            high = max(high, value)
        width: cython.Py_ssize_t = 0
        while (high - low) >> width:
            width += 1
        store_i64(h, field * 8, low)
        h[_WIDTHS_AT + field] = width
        bits += width
    block: bytearray = bytearray(_HEAD_BYTES + (bits * count + 7) // 8)
    block[:48] = head
    b: cython.p_uchar = _written(block)
    at: cython.Py_ssize_t = _HEAD_BYTES
    gathered: cython.ulonglong = 0
    have: cython.Py_ssize_t = 0
    for row in range(count):
        for field in range(_FIELDS):
            taken: cython.ulonglong = load_i64(rows, row * _ROW_BYTES + field * 8) - load_i64(h, field * 8)
            width = h[_WIDTHS_AT + field]
            gathered |= (taken << have) & _ALL_BITS
            have += width
            if have >= 64:
                store_u64(b, at, gathered)
                at += 8
                have -= 64
                gathered = taken >> (width - have) if have else 0
    while have > 0:
        b[at] = gathered & 0xFF
        gathered >>= 8
        at += 1
        have -= 8
    return bytes(block)


@cython.cfunc
def _field_of(b: cython.p_const_uchar, row: cython.Py_ssize_t, field: cython.Py_ssize_t) -> cython.longlong:
    bits: cython.Py_ssize_t = 0
    before: cython.Py_ssize_t = 0
    number: cython.Py_ssize_t
    for number in range(_FIELDS):
        if number < field:
            before += b[_WIDTHS_AT + number]
        bits += b[_WIDTHS_AT + number]
    at: cython.Py_ssize_t = _HEAD_BYTES * 8 + row * bits + before
    difference: cython.longlong = _get_bits(b, at, b[_WIDTHS_AT + field])
    return load_i64(b, field * 8) + difference


@cython.cclass
class RunIndex:
    """Index of one partition's records in segments: one entry for each segment, in offset order.

    Entries can be appended, removed at the front and joined. Offsets and addresses (byte positions, for Kafka 0.7)
    increase from entry to entry, and times never decrease.
    """

    if cython.compiled:
        _blocks: list
        _counts: bytearray
        _rows: bytearray
        _head: cython.Py_ssize_t
        _open: cython.Py_ssize_t
        _packed: cython.Py_ssize_t
    else:
        __slots__ = ("_blocks", "_counts", "_head", "_open", "_packed", "_rows")

    def __init__(self) -> None:
        # packed blocks
        self._blocks: list[bytes] = []
        # number of entries of each block
        self._counts = bytearray()
        # newest entries, not packed, less than a block
        self._rows = bytearray()
        # number of removed entries at the front of the first block
        self._head = 0
        self._open = 0
        self._packed = 0

    def __len__(self) -> int:
        return self._packed + self._open

    def nbytes(self) -> int:
        """Memory of the entries in bytes, spare capacity included."""
        blocks: int = sum(map(len, self._blocks))
        return blocks + len(self._counts) + len(self._rows)

    def append(
        self,
        offset: cython.longlong,
        size: cython.longlong,
        location: cython.longlong,
        address: cython.longlong,
        time_us: cython.longlong,
    ) -> None:
        self._append(offset, size, location, address, time_us)

    @cython.cfunc
    def _append(
        self,
        offset: cython.longlong,
        size: cython.longlong,
        location: cython.longlong,
        address: cython.longlong,
        time_us: cython.longlong,
    ) -> cython.Py_ssize_t:
        at: cython.Py_ssize_t = self._open * _ROW_BYTES
        if at == len(self._rows):
            rows = bytearray(min(self._open + self._open // 2 + 4, _BLOCK) * _ROW_BYTES)
            rows[:at] = self._rows
            self._rows = rows
        p: cython.p_uchar = _written(self._rows)
        store_i64(p, at, offset)
        store_i64(p, at + 8, size)
        store_i64(p, at + 16, location)
        store_i64(p, at + 24, address)
        store_i64(p, at + 32, time_us)
        self._open += 1
        if self._open == _BLOCK:
            self._blocks.append(_pack(p, _BLOCK))
            self._counts.append(64)
            self._packed += _BLOCK
            self._rows = bytearray()
            self._open = 0
        return 0

    @cython.cfunc
    def _value(self, index: cython.Py_ssize_t, field: cython.Py_ssize_t) -> cython.longlong:
        if index >= self._packed:
            return load_i64(_written(self._rows), (index - self._packed) * _ROW_BYTES + field * 8)
        block: cython.Py_ssize_t = 0
        index += self._head
        counts: cython.p_const_uchar = _written(self._counts)
        while index >= counts[block]:
            index -= counts[block]
            block += 1
        return _field_of(_read(self._blocks[block]), index, field)

    def entry(self, index: cython.Py_ssize_t) -> Entry:
        """Return an entry by index. Raises IndexError."""
        if index < 0 or index >= self._packed + self._open:
            raise IndexError(index)
        return (
            self._value(index, 0),
            0,
            self._value(index, 1),
            self._value(index, 2),
            self._value(index, 3),
            self._value(index, 4),
        )

    @cython.cfunc
    def _last_at(self, field: cython.Py_ssize_t, key: cython.longlong) -> cython.Py_ssize_t:
        """Return the index of the last entry whose value in ``field`` is at most ``key``, or -1."""
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = self._packed + self._open
        while low < high:
            middle: cython.Py_ssize_t = (low + high) >> 1
            if self._value(middle, field) <= key:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def find_offset(self, offset: cython.longlong) -> int:
        """Return the index of the last entry that begins at or below ``offset``, or -1.

        Only this segment can contain the offset.
        """
        return self._last_at(_OFFSET, offset)

    def find_address(self, address: cython.longlong) -> int:
        """Return the index of the last entry that begins at or below a byte position (Kafka 0.7), or -1."""
        return self._last_at(_ADDRESS, address)

    def find_time(self, time_us: cython.longlong) -> int:
        """Return the index of the first entry appended at or after ``time_us``.

        If there is none, return the number of entries.
        """
        return self._last_at(_TIME, time_us - 1) + 1

    def locations_and_sizes(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> tuple[array[int], array[int]]:
        """Return the segment locations and the sizes of entries [start, stop), each as an ``array('q')``.

        Raises IndexError.
        """
        self._check_range(start, stop)
        locations: array[int] = array("q", bytes(8 * (stop - start)))
        sizes: array[int] = array("q", bytes(8 * (stop - start)))
        index: cython.Py_ssize_t
        for index in range(stop - start):
            locations[index] = self._value(start + index, 2)
            sizes[index] = self._value(start + index, 1)
        return locations, sizes

    def size_of(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> int:
        """Return the total size of entries [start, stop) in bytes. Raises IndexError."""
        self._check_range(start, stop)
        total: cython.longlong = 0
        index: cython.Py_ssize_t
        for index in range(start, stop):
            total += self._value(index, 1)
        return total

    def join(
        self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t, size: cython.longlong, location: cython.longlong
    ) -> None:
        """Replace entries [start, stop) by one that begins where the first of them does. Raises IndexError.

        Args:
            size: size in bytes of the partition's records in the new segment.
            location: the new segment.
        """
        self._check_range(start, stop)
        if start == stop:
            raise IndexError((start, stop))
        first: Entry = self.entry(start)
        counts: bytearray = self._counts
        block: cython.Py_ssize_t = 0
        begun: cython.Py_ssize_t = -self._head
        while block < len(counts) and begun + counts[block] <= start:
            begun += counts[block]
            block += 1
        last: cython.Py_ssize_t = block
        end: cython.Py_ssize_t = begun
        while last < len(counts) and end < stop:
            end += counts[last]
            last += 1
        if last == len(counts):  # unpacked entries are packed, too
            end = self._packed + self._open
        behind: list[Entry] = [self.entry(index) for index in range(max(begun, 0), start)]
        behind.append((first[0], 0, size, location, first[4], first[5]))
        behind += [self.entry(index) for index in range(stop, end)]
        self._repack(block, last, behind)

    @cython.cfunc
    def _repack(self, block: cython.Py_ssize_t, last: cython.Py_ssize_t, entries: list[Entry]) -> cython.void:
        """Replace the packed entries of blocks [block, last) by ``entries``.

        If these are the last blocks, entries that are not packed yet are replaced, too.
        """
        made: RunIndex = RunIndex()
        for entry in entries:
            made._append(entry[0], entry[2], entry[3], entry[4], entry[5])
        if last < len(self._counts) and made._open:
            made._blocks.append(_pack(_written(made._rows), made._open))
            made._counts.append(made._open)
        elif last == len(self._counts):
            self._rows = made._rows
            self._open = made._open
        self._blocks[block:last] = made._blocks
        self._counts[block:last] = made._counts
        if block == 0:
            self._head = 0
        self._packed = sum(self._counts) - self._head

    def drop_front(self, count: cython.Py_ssize_t) -> None:
        """Remove the first ``count`` entries. Raises IndexError."""
        self._check_range(0, count)
        if count >= self._packed:
            left: cython.Py_ssize_t = count - self._packed
            self._rows = self._rows[left * _ROW_BYTES : self._open * _ROW_BYTES]
            self._open -= left
            self._blocks = []
            self._counts = bytearray()
            self._head = 0
            self._packed = 0
            return
        self._packed -= count
        self._head += count
        gone: cython.Py_ssize_t = 0
        while self._head >= self._counts[gone]:
            self._head -= self._counts[gone]
            gone += 1
        del self._blocks[:gone], self._counts[:gone]

    @cython.cfunc
    def _check_range(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> None:
        if start < 0 or stop < start or stop > self._packed + self._open:
            raise IndexError((start, stop))


def assign_runs(
    runs: Buffer,
    location: cython.longlong,
    partitions: Buffer,
    indexes: list[RunIndex],
    kept: Buffer,
    ends: Buffer,
    sizes: Buffer,
    breaks: list[tuple[int, int, int]],
    staged: list[int],
) -> tuple[int, int, int, bool]:
    """Add the entries of a segment's footer to the indexes of their partitions.

    Returns (number of added entries, their total size, their earliest append time, whether entries of other partitions
    were skipped). Entries that end at or below the first retained offset are skipped as well.

    ``partitions`` are sorted incarnations (``array('Q')``). For each, ``kept`` has the first retained offset, ``ends``
    the end of the last added entry or -1, and ``sizes`` the added bytes. The last two are updated. ``breaks`` receives
    (index of the partition, index of the entry, end of the previous entry) for each gap, ``staged`` the number of each
    entry of unpublished batches.
    """
    table: Lent = lend(runs)
    numbers: Lent = lend(memoryview(partitions))
    floor: Lent = lend(memoryview(kept))
    end: Lent = lend_writable(memoryview(ends))
    given: Lent = lend_writable(memoryview(sizes))
    count: cython.Py_ssize_t = len(indexes)
    p: cython.p_const_uchar = table.p
    at: cython.Py_ssize_t = 0
    found: cython.Py_ssize_t = 0
    live: cython.Py_ssize_t = 0
    live_bytes: cython.longlong = 0
    begun: cython.longlong = 0x7FFF_FFFF_FFFF_FFFF
    lost: bool = False
    while at + _RUN_BYTES <= table.size:
        partition: cython.ulonglong = load_u64(p, at)
        if load_u64(p, at + 8) | load_u64(p, at + 16):
            staged.append(at // _RUN_BYTES)
            at += _RUN_BYTES
            continue
        while found < count and load_u64(numbers.p, found * 8) < partition:
            found += 1
        if found == count or load_u64(numbers.p, found * 8) != partition:
            lost = True
        elif load_i64(p, at + 48) > load_i64(floor.p, found * 8):
            index: RunIndex = indexes[found]
            first: cython.longlong = load_i64(p, at + 40)
            before: cython.longlong = load_i64(end.p, found * 8)
            if before >= 0 and before != first:
                breaks.append((found, len(index), before))
            size: cython.longlong = load_i64(p, at + 32)
            time_us: cython.longlong = load_i64(p, at + 72)
            index._append(first, size, location, load_i64(p, at + 56), time_us)
            store_i64(end.p, found * 8, load_i64(p, at + 48))
            store_i64(given.p, found * 8, load_i64(given.p, found * 8) + size)
            live += 1
            live_bytes += size
            begun = min(begun, time_us)
        at += _RUN_BYTES
    return live, live_bytes, begun, lost
