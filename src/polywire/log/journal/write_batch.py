"""The write batch: all appends and changes between two commits, which become one journal write (decision 0107).

* Appends and changes are stored in the order of the calls. Small batches of one partition are merged.
* Every callback is called exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

import cython

from polywire.log.base import NO_OFFSET, Completion
from polywire.log.callbacks import Call
from polywire.log.journal.group import EntryKind
from polywire.log.journal.merging import answer, merged
from polywire.log.journal.publishing import FilePublication
from polywire.log.journal.staging import StagedBatch
from polywire.log.partition.partition import Append
from polywire.log.settings import MERGE_SLACK_BYTES
from polywire.log.state import Contents, LogState
from polywire.records.columns import HEADER_BYTES
from polywire.types import Buffer, Level

if cython.compiled:
    from cython.cimports.polywire.log.journal.group import GroupHead
    from cython.cimports.polywire.log.partition.partition import FilePartition
    from cython.cimports.polywire.log.partition.tail_index import TailIndex
else:
    from polywire.log.journal.group import GroupHead
    from polywire.log.partition.partition import FilePartition
    from polywire.log.partition.tail_index import TailIndex

_PADDING: Final = bytes(8)

_Result = TypeVar("_Result")

_REMOVING: Final = (EntryKind.DROP, EntryKind.TRIM, EntryKind.ABANDON)  # no set, because hashing an enum is slow
_SEALED: Final = EntryKind.SEALED  # read for every entry; a module constant is ten times as fast as an attribute
_WRITTEN: Final = Level.WRITTEN


@cython.cclass
class Draft:
    """The journal write being built.

    Attributes:
        head: header and list of entries.
        parts: bytes of the entries, in order.
        written: completions to call once everything is written.
        synced: completions to call once everything is synced.
        only_appends: whether there are only appends and the log's bookkeeping.
    """

    if not cython.compiled:  # in the compiled module, write_batch.pxd declares the fields
        __slots__ = (
            "all_synced",
            "epoch",
            "head",
            "indexed",
            "now_us",
            "only_appends",
            "parts",
            "placed",
            "removes",
            "state",
            "state_changed",
            "synced",
            "then",
            "written",
        )

    def __init__(self, state: LogState, *, epoch: int, floor: Level, seed: int) -> None:
        self.state: Final = state
        self.epoch: Final = epoch
        self.all_synced: Final = floor > Level.WRITTEN
        self.head: Final = GroupHead(seed)
        self.placed: list[tuple[StagedBatch, int]] = []
        self.then: list[Callable[[int], None]] = []
        """Called with the journal file's serial after writing, once the earlier entries of ``indexed`` are indexed."""
        self.begin(0)

    @cython.ccall
    def begin(self, now_us: cython.longlong) -> None:
        self.now_us = now_us
        self.head.clear()
        self.parts: list[Buffer] = []
        self.indexed: list[tuple[FilePartition | None, int, int, int, int, int]] = []
        """(partition, its next offset before, position among the entries, length, address, time). A position of -1 - n
        refers to entry n of ``then``. The offset is NO_OFFSET if the entry assigns no offsets.
        """
        if self.placed:  # these are rarely used, and a new list costs time
            self.placed = []
        if self.then:
            self.then = []
        self.written: list[Call] = []
        self.synced: list[Call] = []  # always new, because the last one may still wait for its sync
        self.state_changed = False
        self.only_appends = True
        self.removes = False

    @cython.ccall
    def notify(self, level: Level, done: Completion[_Result] | None, result: _Result) -> None:
        """Call ``done`` with ``result`` once this journal write has reached the durability ``level``."""
        if done is not None:
            waiting = self.synced if self.all_synced or level > _WRITTEN else self.written
            waiting.append((done, (result,)))

    @cython.cfunc
    def notify_all(self, owners: Sequence[Append], counts: Sequence[int], offset: cython.longlong) -> None:
        """Queue the completions of the appends that were merged into one batch.

        Args:
            owners: the appends.
            counts: number of records of each append. Empty if there is only one.
            offset: offset of the batch.
        """
        answer(owners, counts, offset, self.synced if self.all_synced else self.written, self.synced)

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def number(self, partition: FilePartition, batch: Buffer) -> cython.longlong:
        """Assign offsets to a batch and add it to the journal write. Return its first offset."""
        head: GroupHead = self.head
        offset: cython.longlong = partition.next_offset
        address: cython.longlong = partition.next_address
        time_us: cython.longlong = partition.last_append_time_us
        if self.now_us > time_us:
            time_us = self.now_us
        position: cython.Py_ssize_t = head.payload
        header = head.batch(batch, partition.incarnation, self.epoch, offset, address, time_us)
        if header is None:
            self.parts.append(batch)
        else:
            self.parts += (header, memoryview(batch)[HEADER_BYTES:])
        if partition.last_epoch != self.epoch:
            partition.begin_epoch(self.epoch)
        self.indexed.append((partition, offset, position, len(batch), address, time_us))
        partition.next_offset = offset + head.offset_span
        partition.next_address = address + head.address_span
        partition.last_append_time_us = time_us
        return offset

    def enter(self, kind: EntryKind, content: Buffer = b"", *, partition: int = 0, argument: int = 0) -> None:
        """Add an entry other than a batch."""
        self.only_appends &= kind >= _SEALED
        self.removes |= kind in _REMOVING
        self.head.entry(kind, partition, argument, content)
        size = len(content)
        if size:
            self.parts.append(content)
        if size & 7:
            self.parts.append(_PADDING[size & 7 :])

    def enter_published(self, made: FilePublication, numbers: array[int]) -> None:
        """Assign offsets to the batches of a publish and add them to the journal write."""
        self.only_appends = False
        self.head.published(made.content, made.entries, numbers, self.epoch)
        self.parts.append(made.content)

    def after(self, partition: FilePartition | None, then: Callable[[int], None]) -> None:
        """Call ``then`` with the journal file's serial once the entries added so far are written and indexed.

        ``then`` may change ``partition``.
        """
        self.then.append(then)
        self.indexed.append((partition, NO_OFFSET, -len(self.then), 0, 0, 0))

    def touch(self, partitions: Sequence[FilePartition], offsets: Sequence[int], then: Callable[[int], None]) -> None:
        """Call ``then`` with the journal file's serial once the entries added so far are written and indexed.

        ``then`` may change ``partitions``.

        Args:
            offsets: next offset of each partition before the entries.
        """
        self.then += (_nothing, then)
        index = 1 - len(self.then)
        self.indexed += [
            (partition, offset, index, 0, 0, 0) for partition, offset in zip(partitions, offsets, strict=True)
        ]
        self.indexed.append((None, NO_OFFSET, index - 1, 0, 0, 0))

    def undo_offsets(self) -> None:
        """Undo the assignment of offsets after a failed write."""
        for partition, offset, _, _, _, _ in reversed(self.indexed):
            if partition is not None and offset != NO_OFFSET:
                partition.next_offset = offset

    @cython.ccall
    def settle(self, contents: Contents, serial: cython.longlong, start: cython.longlong) -> None:
        """Apply what was written to the log's state.

        Its entries begin at position ``start`` of the journal file ``serial``.
        """
        touched = contents.partitions
        partition: FilePartition | None
        for partition, offset, position, length, address, time_us in self.indexed:
            if partition is not None:
                touched[partition] = None
            if position < 0:
                self.then[-1 - position](serial)
                continue
            assert partition is not None, "a batch has a partition"
            tail: TailIndex = partition.tail
            tail.append(offset, start + position, length, serial, address, time_us)
            partition.tail_bytes += length
        for batch, position in self.placed:
            batch.serial, batch.position = serial, start + position
            contents.staged.append(batch)


class Step(Protocol):
    """One append or change that waits for the next journal write."""

    def prepare(self) -> None:
        """Do everything that may fail. Change only the step itself."""

    def enter(self, draft: Draft) -> None:
        """Add the step to the journal write. This must not fail, because offsets are assigned here."""

    def owners(self) -> Sequence[Completion[Any]]:
        """Return the completions to call with an error if the step is not written."""


@cython.cclass
class Appends:
    """Appended batches of one partition, in order."""

    if not cython.compiled:
        __slots__ = ("_entries", "items", "partition")

    def __init__(self, partition: FilePartition) -> None:
        self.partition: Final = partition
        self.items: Final[list[Append]] = []
        # if there are several appends: (batch, its appends, record count of each)
        self._entries: list[tuple[Buffer, Sequence[Append], Sequence[int]]] = []

    @cython.ccall
    def prepare(self) -> None:
        if len(self.items) > 1:
            self._entries = merged(self.items, MERGE_SLACK_BYTES)

    @cython.ccall
    def enter(self, draft: Draft) -> None:
        partition, items = self.partition, self.items
        if len(items) == 1:
            batch, level, done = items[0]
            draft.notify(level, done, draft.number(partition, batch))
            return
        for batch, owners, counts in self._entries:
            draft.notify_all(owners, counts, draft.number(partition, batch))

    def owners(self) -> Sequence[Completion[Any]]:
        return [done for _, _, done in self.items if done is not None]


@cython.cclass
class WriteBatch:
    """Appends and changes for the next journal write, in the order of the calls.

    Attributes:
        size: upper bound of their size in the journal.
        granted: bytes that callers have reserved.
        open: partitions whose last step accepts more batches.
    """

    if not cython.compiled:
        __slots__ = ("granted", "open", "size", "steps")

    def __init__(self) -> None:
        self.steps: Final[list[Step]] = []
        self.size = 0
        self.granted = 0
        self.open: Final[list[FilePartition]] = []

    @cython.ccall
    def close(self) -> None:
        """Write later appends after everything added so far, instead of merging them with earlier ones."""
        for partition in self.open:
            partition.pending = None
        self.open.clear()

    def owners(self) -> list[Completion[Any]]:
        """Return the completions to call with an error if nothing is written. Also calls ``close``."""
        self.close()
        return [owner for step in self.steps for owner in step.owners()]


def _nothing(_: int) -> None:
    pass
