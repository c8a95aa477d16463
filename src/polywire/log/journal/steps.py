"""The parts of a journal write that are not appended batches: changes, staged batches, publishes (decision 0107).

Each part is a step. Its method ``prepare`` may fail; ``enter`` adds the part to the journal group and cannot fail.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import msgspec

from polywire.log.base import NO_OFFSET, Completion, Ranges
from polywire.log.journal.group import EntryKind, GroupHead
from polywire.log.journal.publishing import FilePublication
from polywire.log.journal.staging import StagedBatch
from polywire.log.journal.write_batch import Draft
from polywire.log.partition.partition import FilePartition
from polywire.records.columns import HEADER_BYTES
from polywire.types import Buffer, Level

CHANGE: Final = EntryKind.CHANGE  # read for every change; a module constant is ten times as fast as an attribute
_NAMED: Final = Struct("<II")


class _Simple(msgspec.Struct, frozen=True):
    def prepare(self) -> None:
        pass

    def owners(self) -> Sequence[Completion[Any]]:
        return ()


class Entered(_Simple, frozen=True):
    """A journal entry that does not change the log's own state.

    This is a change of the broker's state, a barrier (kind None), or an entry for the log's bookkeeping.
    """

    kind: EntryKind | None
    content: Buffer
    argument: int
    level: Level
    done: Completion[int] | None

    def enter(self, draft: Draft) -> None:
        if self.kind is not None:
            draft.enter(self.kind, self.content, argument=self.argument)
            draft.state_changed |= self.kind is CHANGE
        draft.notify(self.level, self.done, NO_OFFSET)

    def owners(self) -> Sequence[Completion[Any]]:
        return () if self.done is None else (self.done,)


class Open(_Simple, frozen=True):
    partition: FilePartition

    def enter(self, draft: Draft) -> None:
        self.partition.opened = True
        draft.enter(EntryKind.OPEN, partition=self.partition.incarnation)
        draft.after(self.partition, _nothing)


class Drop(_Simple, frozen=True):
    partition: FilePartition

    def enter(self, draft: Draft) -> None:
        self.partition.opened = False
        draft.enter(EntryKind.DROP, partition=self.partition.incarnation)
        draft.after(self.partition, lambda _: draft.state.drop(self.partition))


class Trim(_Simple, frozen=True):
    partition: FilePartition
    first_offset: int

    def enter(self, draft: Draft) -> None:
        end = self.partition.next_offset  # records that are appended later in the same journal write are not trimmed
        first_offset = min(self.first_offset, end)
        draft.enter(EntryKind.TRIM, partition=self.partition.incarnation, argument=first_offset)
        draft.after(self.partition, lambda _: draft.state.trim(self.partition, first_offset, end))


class Begin(_Simple, frozen=True):
    """Set the offset of the next record of an empty partition, by trimming it beyond its end."""

    partition: FilePartition
    offset: int

    def enter(self, draft: Draft) -> None:
        partition, end = self.partition, self.partition.next_offset
        offset = max(self.offset, end)
        draft.enter(EntryKind.TRIM, partition=partition.incarnation, argument=offset)
        draft.touch([partition], [end], lambda _: draft.state.trim(partition, offset, end))
        partition.next_offset = offset


class Stage(_Simple, frozen=True):
    token: bytes
    batch: Buffer
    staged: StagedBatch
    expires_at_us: int
    level: Level
    done: Completion[int] | None

    def enter(self, draft: Draft) -> None:
        position = draft.head.payload
        front = self.token + self.staged.header
        draft.head.staged(front, self.staged.length, self.staged.incarnation, self.expires_at_us)
        draft.parts += (front, memoryview(self.batch)[HEADER_BYTES:])
        draft.placed.append((self.staged, position + len(self.token)))
        draft.notify(self.level, self.done, NO_OFFSET)

    def owners(self) -> Sequence[Completion[Any]]:
        return () if self.done is None else (self.done,)


class Publish(_Simple, frozen=True):
    """Publish all batches under some tokens.

    One publish may have tens of thousands of batches, so this step does no work per batch.
    """

    publication: FilePublication
    change: bytes
    level: Level
    done: Completion[Ranges] | None

    def enter(self, draft: Draft) -> None:
        made = self.publication.without_dropped()
        partitions, numbers = made.partitions, array("q")
        for partition in partitions:
            if partition.last_epoch != draft.epoch:
                partition.begin_epoch(draft.epoch)
            time_us = max(draft.now_us, partition.last_append_time_us)
            numbers.extend((partition.incarnation, partition.next_offset, partition.next_address, time_us))
        draft.enter_published(made, numbers)
        found, after = [], numbers.tolist()
        for index, partition in enumerate(partitions):
            first, at = partition.next_offset, 4 * index
            _, partition.next_offset, partition.next_address, partition.last_append_time_us = after[at : at + 4]
            found.append((partition.incarnation, first, partition.next_offset))
        draft.touch(partitions, [first for _, first, _ in found], made.settle)
        draft.enter(EntryKind.CHANGE, self.change)
        draft.state_changed = True
        draft.notify(self.level, self.done, found)

    def owners(self) -> Sequence[Completion[Any]]:
        return () if self.done is None else (self.done,)


class Abandon(_Simple, frozen=True):
    tokens: Sequence[bytes]

    def enter(self, draft: Draft) -> None:
        draft.enter(EntryKind.ABANDON, b"".join(self.tokens))
        draft.after(None, lambda _: draft.state.unstage(self.tokens))


def enter(head: GroupHead, parts: list[Buffer], kind: EntryKind, argument: int, content: bytes) -> None:
    """Add an entry to a journal write that is made without a write batch, and its bytes to ``parts``."""
    head.entry(kind, 0, argument, content)
    parts.append(content + bytes(-len(content) % 8))


def sealed_content(new: Sequence[int], removed: Sequence[int]) -> bytes:
    """Return the content of a SEALED journal entry: counts of new and removed segments, then their numbers."""
    numbers = [*new, *removed]
    return _NAMED.pack(len(new), len(removed)) + Struct(f"<{len(numbers)}Q").pack(*numbers)


def read_sealed(content: Buffer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the new and the removed segments of a SEALED journal entry."""
    new, removed = _NAMED.unpack_from(content)
    numbers = Struct(f"<{new + removed}Q").unpack_from(content, _NAMED.size)
    return numbers[:new], numbers[new:]


def _nothing(_: int) -> None:
    pass
