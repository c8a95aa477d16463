"""Index of a partition's batches that are not in a segment yet. One call finds the batches of a range of offsets.

Nothing is allocated per batch, and every search is binary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import cython

from polywire.log.segments.search import NO_END
from polywire.records.memory import Lendable
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.records.fields import (
        load_append_time_us,
        load_base_address,
        load_base_offset,
        load_length,
    )
    from cython.cimports.polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u64,
    )
else:
    from polywire.records.fields import load_append_time_us, load_base_address, load_base_offset, load_length
    from polywire.records.memory import (
        Lent,
        lend,
        lend_writable,
        load_i64,
        load_u32,
        move,
        store_i64,
        store_u64,
    )

_ENTRY_BYTES = cython.declare(cython.Py_ssize_t, 40)


@cython.cfunc
@cython.inline
def _bytes_of(data: bytearray) -> cython.p_uchar:
    """Return a pointer to the content of a bytearray. It is valid until the bytearray is resized."""
    if cython.compiled:
        return cython.cast(cython.p_uchar, cython.cast(cython.p_char, data))
    else:  # Cython reports a plain return as unreachable
        return data


@cython.cclass
class TailIndex:
    """Index of one partition's batches that are in the journal only, in offset order.

    An entry is (offset, position, length, slot, address, append time), 40 bytes. ``slot`` is a number that the caller
    chooses for the memory that contains the batch, such as a journal file. ``address`` is the batch's offset in Kafka
    0.7. Entries can be appended, removed at the front and joined. Offsets and addresses increase from entry to entry,
    and times never decrease. An empty index costs 112 bytes.
    """

    if not cython.compiled:  # in the compiled module, tail_index.pxd declares the fields
        __slots__ = ("_count", "_data", "_head")

    def __init__(self) -> None:
        self._data = bytearray()
        self._head = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def nbytes(self) -> int:
        """Memory of the entries in bytes, spare capacity included."""
        return len(self._data)

    @cython.ccall
    def append(
        self,
        offset: cython.longlong,
        position: cython.longlong,
        length: cython.uint,
        slot: cython.uint,
        address: cython.longlong,
        time_us: cython.longlong,
    ) -> None:
        at: cython.Py_ssize_t = (self._head + self._count) * _ENTRY_BYTES
        if at == len(self._data):
            at = self._grow()
        p: cython.p_uchar = _bytes_of(self._data)
        store_i64(p, at, offset)
        store_i64(p, at + 8, position)
        store_u64(p, at + 16, cython.cast(cython.ulonglong, slot) << 32 | length)
        store_i64(p, at + 24, address)
        store_i64(p, at + 32, time_us)
        self._count += 1

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _grow(self) -> cython.Py_ssize_t:
        """Move the entries to the front of a larger array. Return the position for the next entry."""
        start: cython.Py_ssize_t = self._head * _ENTRY_BYTES
        used: cython.Py_ssize_t = self._count * _ENTRY_BYTES
        data = bytearray((self._count + (self._count >> 1) + 4) * _ENTRY_BYTES)
        data[:used] = self._data[start : start + used]
        self._data = data
        self._head = 0
        return used

    def entry(self, index: cython.Py_ssize_t) -> tuple[int, int, int, int, int, int]:
        """Return (offset, position, length, slot, Kafka 0.7 offset, append time) of an entry. Raises IndexError."""
        if index < 0 or index >= self._count:
            raise IndexError(index)
        p: cython.p_const_uchar = _bytes_of(self._data)
        at: cython.Py_ssize_t = (self._head + index) * _ENTRY_BYTES
        return (
            load_i64(p, at),
            load_i64(p, at + 8),
            load_u32(p, at + 16),
            load_u32(p, at + 20),
            load_i64(p, at + 24),
            load_i64(p, at + 32),
        )

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _last_at(self, field: cython.Py_ssize_t, key: cython.longlong) -> cython.Py_ssize_t:
        """Return the index of the last entry whose value at byte ``field`` of the entry is at most ``key``, or -1."""
        p: cython.p_const_uchar = _bytes_of(self._data)
        base: cython.Py_ssize_t = self._head * _ENTRY_BYTES + field
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = self._count
        while low < high:
            middle: cython.Py_ssize_t = (low + high) >> 1
            if load_i64(p, base + middle * _ENTRY_BYTES) <= key:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def find_offset(self, offset: cython.longlong) -> int:
        """Return the index of the last entry that begins at or below ``offset``, or -1.

        Only this batch can contain the offset.
        """
        return self._last_at(0, offset)

    def find_address(self, address: cython.longlong) -> int:
        """Return the index of the last entry that begins at or below a Kafka 0.7 offset (a byte position), or -1."""
        return self._last_at(24, address)

    def find_time(self, time_us: cython.longlong) -> int:
        """Return the index of the first entry appended at or after ``time_us``.

        If there is none, return the number of entries.
        """
        return self._last_at(32, time_us - 1) + 1

    def take(
        self, offset: cython.longlong, bytes_max: cython.longlong, offset_end: cython.longlong = NO_END
    ) -> tuple[int, int, int]:
        """Select the entries of a read. Return (index of the first entry, index after the last one, total size).

        The first entry is the batch that contains ``offset``. More batches follow as long as they fit ``bytes_max`` and
        begin below ``offset_end``. The selection is empty if all entries begin above ``offset``.
        """
        start: cython.Py_ssize_t = self._last_at(0, offset)
        if start < 0:
            return 0, 0, 0
        p: cython.p_const_uchar = _bytes_of(self._data)
        stop: cython.Py_ssize_t = start
        total: cython.longlong = 0
        while stop < self._count:
            at: cython.Py_ssize_t = (self._head + stop) * _ENTRY_BYTES
            length: cython.longlong = load_u32(p, at + 16)
            if stop > start and (total + length > bytes_max or load_i64(p, at) >= offset_end):
                break
            total += length
            stop += 1
        return start, stop, total

    def extents(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> list[tuple[int, int, int]]:
        """Return (slot, position, bytes) of the memory of entries [start, stop).

        Adjacent entries are joined. Raises IndexError.
        """
        self._check_range(start, stop)
        p: cython.p_const_uchar = _bytes_of(self._data)
        found: list[tuple[int, int, int]] = []
        slot: cython.longlong = -1
        position: cython.longlong = 0
        end: cython.longlong = 0
        index: cython.Py_ssize_t
        for index in range(start, stop):
            at: cython.Py_ssize_t = (self._head + index) * _ENTRY_BYTES
            if slot != load_u32(p, at + 20) or end != load_i64(p, at + 8):
                if slot >= 0:
                    found.append((slot, position, end - position))
                slot = load_u32(p, at + 20)
                position = load_i64(p, at + 8)
                end = position
            end += load_u32(p, at + 16)
        if slot >= 0:
            found.append((slot, position, end - position))
        return found

    def copy(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t, slots: Mapping[int, Buffer], out: Buffer) -> int:
        """Copy the batches of entries [start, stop) back to back into ``out`` and return their total size.

        Args:
            slots: memory to which the entries refer, by ``slot`` number.

        Raises:
            IndexError: an entry is outside its memory, or ``out`` is too small.
        """
        self._check_range(start, stop)
        p: cython.p_const_uchar = _bytes_of(self._data)
        target: Lent = lend_writable(out)
        source: Lent = target
        slot: cython.longlong = -1
        filled: cython.Py_ssize_t = 0
        index: cython.Py_ssize_t
        for index in range(start, stop):
            at: cython.Py_ssize_t = (self._head + index) * _ENTRY_BYTES
            if slot != load_u32(p, at + 20):
                slot = load_u32(p, at + 20)
                source = lend(slots[slot])
            position: cython.longlong = load_i64(p, at + 8)
            length: cython.longlong = load_u32(p, at + 16)
            if position < 0 or position > source.size - length or length > target.size - filled:
                raise IndexError(index)
            move(target.p, filled, source.p, position, length)
            filled += length
        return filled

    def join(
        self,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        position: cython.longlong,
        length: cython.uint,
        slot: cython.uint,
    ) -> None:
        """Replace entries [start, stop) by one that begins where the first of them does. Raises IndexError.

        Args:
            position: position of the new batch in ``slot``.
            length: length of the new batch.
        """
        self._check_range(start, stop)
        if start == stop:
            raise IndexError((start, stop))
        at: cython.Py_ssize_t = (self._head + start) * _ENTRY_BYTES
        p: cython.p_uchar = _bytes_of(self._data)
        store_i64(p, at + 8, position)
        store_u64(p, at + 16, cython.cast(cython.ulonglong, slot) << 32 | length)
        del self._data[at + _ENTRY_BYTES : (self._head + stop) * _ENTRY_BYTES]
        self._count -= stop - start - 1

    def drop_front(self, count: cython.Py_ssize_t) -> None:
        """Remove the first ``count`` entries. Raises IndexError."""
        self._check_range(0, count)
        self._head += count
        self._count -= count
        if self._count == 0 or self._head > 4 * (self._count + 16):  # mostly removed entries: release the memory
            used: cython.Py_ssize_t = self._head * _ENTRY_BYTES
            self._data = self._data[used : used + self._count * _ENTRY_BYTES]
            self._head = 0

    def drop_slot(self, slot: cython.uint) -> int:
        """Remove the leading entries that are in ``slot``. Return their number."""
        p: cython.p_const_uchar = _bytes_of(self._data)
        count: cython.Py_ssize_t = 0
        while count < self._count and load_u32(p, (self._head + count) * _ENTRY_BYTES + 20) == slot:
            count += 1
        self.drop_front(count)
        return count

    @cython.cfunc
    def _check_range(self, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> None:
        if start < 0 or stop < start or stop > self._count:
            raise IndexError((start, stop))


def attach(tails: list[TailIndex], content: Buffer, entries: Lendable, positions: Lendable, slot: cython.uint) -> None:
    """Append the batches of a publish to the indexes of their partitions.

    Args:
        tails: index of each partition.
        content: the publish's journal entries, as passed to ``GroupHead.published``.
        entries: for each journal entry, its end in ``content`` and the index of its partition.
        positions: position of each batch.
        slot: number of the memory that contains all batches.

    Raises:
        IndexError: the arguments contradict each other.
    """
    lent: Lent = lend(content)
    ends: Lent = lend(entries)
    positions_at: Lent = lend(positions)
    start: cython.Py_ssize_t = 0
    attached: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t
    i: cython.Py_ssize_t
    for i in range(ends.size // 16):
        end: cython.Py_ssize_t = load_i64(ends.p, 16 * i)
        index: cython.Py_ssize_t = load_i64(ends.p, 16 * i + 8)
        if end < start + 16 or end > lent.size or (end - start - 16) % 104 or index >= len(tails):
            raise IndexError(i)
        start += 16
        if index < 0:
            start = end
            continue
        if attached + (end - start) // 104 > positions_at.size // 8:
            raise IndexError(i)
        tail: TailIndex = tails[index]
        for at in range(start, end, 104):
            tail.append(
                load_base_offset(lent.p, at),
                load_i64(positions_at.p, 8 * attached),
                load_length(lent.p, at),
                slot,
                load_base_address(lent.p, at),
                load_append_time_us(lent.p, at),
            )
            attached += 1
        start = end


def spans_of(
    tails: list[TailIndex], first_slot: cython.uint, last_slot: cython.uint, joined: cython.uint
) -> tuple[array[int], array[int], array[int], array[int]]:
    """Return the index entries whose ``slot`` is ``joined`` or from ``first_slot`` to ``last_slot``, in offset order.

    The result is (end of each index's entries, slots, positions, lengths), each an ``array('q')``.
    """
    ends: array[int] = array("q", bytes(8 * len(tails)))
    count: cython.Py_ssize_t = _fill_spans(tails, first_slot, last_slot, joined, False, ends, ends, ends, ends)
    slots: array[int] = array("q", bytes(8 * count))
    positions: array[int] = array("q", bytes(8 * count))
    lengths: array[int] = array("q", bytes(8 * count))
    _fill_spans(tails, first_slot, last_slot, joined, True, ends, slots, positions, lengths)
    return ends, slots, positions, lengths


@cython.cfunc
def _fill_spans(
    tails: list[TailIndex],
    first_slot: cython.uint,
    last_slot: cython.uint,
    joined: cython.uint,
    fills: cython.bint,
    ends: array[int],
    slots: array[int],
    positions: array[int],
    lengths: array[int],
) -> cython.Py_ssize_t:
    """Count the selected entries of each index into ``ends``.

    With ``fills``, also fill the other arrays, which must be large enough.
    """
    counted: Lent = lend_writable(memoryview(ends))
    holders: Lent = lend_writable(memoryview(slots))
    starts: Lent = lend_writable(memoryview(positions))
    sizes: Lent = lend_writable(memoryview(lengths))
    found: cython.Py_ssize_t = 0
    number: cython.Py_ssize_t
    for number in range(len(tails)):
        tail: TailIndex = tails[number]
        p: cython.p_const_uchar = _bytes_of(tail._data)
        index: cython.Py_ssize_t
        for index in range(tail._head, tail._head + tail._count):
            at: cython.Py_ssize_t = index * _ENTRY_BYTES
            slot: cython.uint = load_u32(p, at + 20)
            if slot != joined and (slot < first_slot or slot > last_slot):
                continue
            if fills:
                store_i64(holders.p, found * 8, slot)
                store_i64(starts.p, found * 8, load_i64(p, at + 8))
                store_i64(sizes.p, found * 8, load_u32(p, at + 16))
            found += 1
        store_i64(counted.p, number * 8, found)
    return found
