"""The order of unfinished records with the same key, in a share group whose records are ordered by key.

* Of the records with one key, only the one with the lowest offset can be acquired, and only if no other one is locked.
* A key is known by its hash. Two keys with the same hash are ordered like one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from heapq import heappop, heappush
from typing import Final

Key = int | None
"""Hash of a key, or None for a record without one."""


class KeyOrder:
    """The keys of the unfinished records of a partition.

    Attributes:
        unknown: offsets whose keys must first be read from the log. Nothing can be acquired until then.
    """

    __slots__ = ("_by_key", "_counts", "_keys", "_locked", "_locks", "unknown")

    def __init__(self, counts: Mapping[int, int], locks: Container[int]) -> None:
        """Create the order of all unfinished records.

        Args:
            counts: unfinished records by offset; the caller changes it later.
            locks: offsets of the locked records; the caller changes it later.
        """
        self._counts: Final = counts
        self._locks: Final = locks
        self.unknown: set[int] = set(counts)
        self._keys: dict[int, int] = {}
        self._by_key: dict[int, list[int]] = {}  # heaps, with some records that are finished
        self._locked: dict[int, set[int]] = {}  # with some records that are not locked any more

    def learn(self, keys: Iterable[tuple[int, Key]]) -> None:
        """Add unfinished records and their keys."""
        for offset, key in keys:
            self.unknown.discard(offset)
            if key is None or offset in self._keys or offset not in self._counts:
                continue
            self._keys[offset] = key
            heappush(self._by_key.setdefault(key, []), offset)
            if offset in self._locks:
                self.lock(offset)

    def lock(self, offset: int) -> None:
        """Note that a record was locked."""
        key = self._keys.get(offset)
        if key is not None:
            self._locked.setdefault(key, set()).add(offset)

    def head(self, key: int) -> int | None:
        """Return the lowest unfinished record with a key."""
        heap = self._by_key.get(key)
        if heap is None:
            return None
        while heap and heap[0] not in self._counts:
            self._keys.pop(heappop(heap), None)
        if heap:
            return heap[0]
        del self._by_key[key]
        self._locked.pop(key, None)
        return None

    def is_free(self, offset: int) -> bool:
        """Return whether no other record with the same key is before this one, or locked."""
        if offset in self.unknown:
            return False
        key = self._keys.get(offset)
        return key is None or (self.head(key) == offset and not self._is_locked(key))

    def _is_locked(self, key: int) -> bool:
        locked = self._locked.get(key)
        if not locked:
            return False
        locked -= {offset for offset in locked if offset not in self._locks}
        return bool(locked)

    def freed(self, offsets: Iterable[int]) -> Iterable[int]:
        """Return the records that may be available because these are finished, or not locked any more."""
        found = set()
        for offset in offsets:
            is_finished = offset not in self._counts
            if is_finished:
                self.unknown.discard(offset)
            key = self._keys.get(offset)
            if key is not None:
                found.add(key)
                if is_finished:
                    del self._keys[offset]
        return [head for key in found if (head := self.head(key)) is not None]

    def below(self, offset: int) -> list[int]:
        """Return the known records below an offset."""
        return [at for at in self._keys if at < offset]
