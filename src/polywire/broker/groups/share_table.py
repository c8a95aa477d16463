"""The stored state of all share groups: their settings, and their progress in each partition.

This module is compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import cython

from polywire.broker import changes
from polywire.broker.groups.share import NO_DELAYS, DueCursor, Run
from polywire.broker.owners import UNOWNED
from polywire.broker.quotas import GROUP_BYTES, NUMBER_BYTES, READER_BYTES, Kind, Usage
from polywire.broker.view import Views, encoded
from polywire.errors import Conflict, ErrorCode
from polywire.share_settings import DEFAULT_SETTINGS, ShareSettings, decoded

if cython.compiled:
    from cython.cimports.polywire.broker.groups.share import ShareProgress
else:
    from polywire.broker.groups.share import ShareProgress

_READERS: Final = Kind.READERS  # read for every change; a module constant is ten times as fast as an attribute
Key = tuple[str, int]
"""Name of the group and incarnation number of the partition."""


def flat(runs: Sequence[Run]) -> tuple[int, ...]:
    """Return runs as they are stored: three numbers each, one after another."""
    return tuple(chain.from_iterable(runs))


def unflat(numbers: Sequence[int]) -> list[Run]:
    """Return stored runs."""
    return [Run(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)]


@cython.cclass
class ShareTable:
    """All share groups of one broker.

    Attributes:
        groups: settings and owner of each group.
    """

    if not cython.compiled:  # when compiled, share_table.pxd declares the fields
        __slots__ = ("_by_group", "_by_partition", "_progress", "_settings", "_usage", "_views", "_waiting", "groups")

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self.groups: Final[dict[str, changes.ShareGroupStored]] = {}
        self._settings: dict[str, ShareSettings] = {}  # of ``groups``, decoded
        self._progress: dict[Key, ShareProgress] = {}
        self._by_group: dict[str, set[int]] = {}  # indexes of ``_progress``
        self._by_partition: dict[int, set[str]] = {}
        self._waiting: dict[int, set[str]] = {}  # groups for which delayed records wait, by partition
        self._views: Final = Views(self._stored)

    def find(self, group: str, incarnation: int) -> ShareProgress | None:
        return self._progress.get((group, incarnation))

    def check_no_members(self, name: str) -> None:
        """Raise Conflict(GROUP_PROTOCOL_MISMATCH) if a share group with this name has or had members."""
        stored = self.groups.get(name)
        if stored is not None and stored.has_members:
            raise Conflict(
                ErrorCode.GROUP_PROTOCOL_MISMATCH, f"a share group has this name (use another one) group={name!r}"
            )

    def incarnations(self, group: str) -> Collection[int]:
        """Return the incarnation numbers of the partitions in which a group has progress."""
        return self._by_group.get(group, ())

    @property
    def has_waiting(self) -> bool:
        """Whether delayed records wait for any group."""
        return bool(self._waiting)

    def waiting_incarnations(self) -> Collection[int]:
        """Return the partitions in which delayed records wait for a group."""
        return self._waiting.keys()

    def passed_ms(self, incarnation: int) -> int | None:
        """Return the time before which no delayed record of a partition waits, or None if none waits at all."""
        groups = self._waiting.get(incarnation, ())
        return min((self._progress[group, incarnation].cursor.due_ms for group in groups), default=None)

    def _note_waiting(self, key: Key) -> None:
        group, incarnation = key
        progress = self._progress.get(key)
        if progress is not None and progress.cursor.waiting:
            self._waiting.setdefault(incarnation, set()).add(group)
        elif group in (groups := self._waiting.get(incarnation, set())):
            groups.remove(group)
            if not groups:
                del self._waiting[incarnation]

    def owner(self, group: str) -> int:
        stored = self.groups.get(group)
        return UNOWNED if stored is None else stored.owner

    def settings(self, group: str) -> ShareSettings:
        return self._settings.get(group, DEFAULT_SETTINGS)

    def apply(
        self,
        change: changes.ShareGroupStored
        | changes.ShareGroupDeleted
        | changes.ShareStored
        | changes.ShareProgressed
        | changes.ShareDeleted
        | changes.ShareCursorMoved,
    ) -> None:
        if isinstance(change, (changes.ShareProgressed, changes.ShareCursorMoved)):
            self._advance(change)
        elif isinstance(change, changes.ShareStored):
            self._put(change)
        elif isinstance(change, changes.ShareDeleted):
            for incarnation in change.incarnations:
                self._drop((change.group, incarnation))
        elif isinstance(change, changes.ShareGroupStored):
            self._put_group(change)
        else:
            for incarnation in list(self._by_group.get(change.name, ())):
                self._drop((change.name, incarnation))
            self._drop_group(change.name)

    @cython.cfunc
    def _advance(self, change: Any) -> Any:
        key = change.group, change.incarnation
        self._views.changing(key)
        progress: ShareProgress = self._progress[key]
        was: cython.Py_ssize_t = len(progress.counts)
        numbers = iter(change.runs)
        runs = zip(numbers, numbers, numbers, strict=True)
        if isinstance(change, changes.ShareProgressed):
            progress.apply(runs, change.due_ms)
        else:
            progress.apply(runs, NO_DELAYS, DueCursor(*change.cursor))
            self._note_waiting(key)
        self._charge_records(change.group, len(progress.counts) - was)

    @cython.cfunc
    def _charge_records(self, group: Any, added: cython.Py_ssize_t) -> Any:
        if added:
            self._usage.charge(_READERS, self.owner(group), 0, added * NUMBER_BYTES)

    def _put(self, change: changes.ShareStored) -> None:
        key = change.group, change.incarnation
        self._drop(key)
        self._views.changing(key)
        cursor = DueCursor(*change.cursor)
        progress = ShareProgress(change.start, change.end, unflat(change.runs), change.due_ms, cursor)
        self._progress[key] = progress
        self._note_waiting(key)
        self._by_group.setdefault(change.group, set()).add(change.incarnation)
        self._by_partition.setdefault(change.incarnation, set()).add(change.group)
        self._usage.charge(_READERS, self.owner(change.group), 1, READER_BYTES + len(change.group))
        self._charge_records(change.group, len(progress.counts))

    def _drop(self, key: Key) -> None:
        self._views.changing(key)
        progress = self._progress.pop(key, None)
        if progress is None:
            return
        progress.is_dropped = True
        self._note_waiting(key)
        group, incarnation = key
        self._by_group[group].discard(incarnation)
        if not self._by_group[group]:
            del self._by_group[group]
        self._by_partition[incarnation].discard(group)
        if not self._by_partition[incarnation]:
            del self._by_partition[incarnation]
        self._usage.charge(_READERS, self.owner(group), -1, -READER_BYTES - len(group))
        self._charge_records(group, -len(progress.counts))

    def _put_group(self, change: changes.ShareGroupStored) -> None:
        held = [self._progress[change.name, incarnation] for incarnation in self._by_group.get(change.name, ())]
        size = sum(READER_BYTES + len(change.name) + NUMBER_BYTES * len(progress.counts) for progress in held)
        self._usage.charge(_READERS, self.owner(change.name), -len(held), -size)
        self._drop_group(change.name)
        self.groups[change.name] = change
        self._settings[change.name] = decoded(change.settings)
        self._usage.charge(Kind.GROUPS, change.owner, 1, share_group_size(change))
        self._usage.charge(_READERS, change.owner, len(held), size)

    def _drop_group(self, name: str) -> None:
        stored = self.groups.pop(name, None)
        if stored is not None:
            del self._settings[name]
            self._usage.charge(Kind.GROUPS, stored.owner, -1, -share_group_size(stored))

    def drop_partitions(self, incarnations: Collection[int]) -> None:
        for incarnation in incarnations:
            for group in list(self._by_partition.get(incarnation, ())):
                self._drop((group, incarnation))

    # Snapshots

    def encoded_groups(self) -> Iterator[bytes]:
        groups = list(self.groups.values())
        return encoded(len(groups), ((group,) for group in groups))

    def encoded(self) -> Iterator[bytes]:
        """Yield the progress of all groups as it is at the time of the call, encoded in pieces."""
        keys = list(self._progress)
        return encoded(len(keys), self._views.open(keys), lambda stored: len(stored.runs) // 3)

    def _stored(self, key: Key) -> Sequence[changes.ShareStored]:
        progress = self._progress.get(key)
        if progress is None:
            return ()
        runs, due_ms = flat(progress.runs()), dict(progress.due_ms)
        return (changes.ShareStored(*key, progress.start, progress.end, runs, due_ms, progress.cursor),)


def share_group_size(group: changes.ShareGroupStored) -> int:
    """Return the bytes that a share group counts against its owner's quota, without its progress."""
    return GROUP_BYTES + len(group.name) + sum(len(name) + len(value) for name, value in group.settings.items())


def progressed(
    group: str, incarnation: int, runs: Sequence[Run], due_ms: Mapping[int, int] = NO_DELAYS
) -> changes.ShareProgressed:
    """Return the change that stores new delivery counts, that records are finished, and delays."""
    return changes.ShareProgressed(group, incarnation, flat(runs), dict(due_ms) if due_ms else {})
