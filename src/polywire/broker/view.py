"""Iterate over a changing table as it was at one moment, to encode a snapshot in slices (decision 0106).

A view yields each entry as it was when the view was opened. An entry is copied only if it changes before the view has
yielded it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

# records, including their members, partitions or batches, to encode per slice, which takes some 5 ms
SLICE_WEIGHT: Final = 4_000

Key = TypeVar("Key", bound=Hashable)

_ENCODER: Final = msgspec.msgpack.Encoder()


class Views(Generic[Key]):
    """Snapshots of one table that are read piece by piece. The table must call ``changing`` before it changes a key.

    Args:
        records_of: returns the current records of a key, or none if the key does not exist.
    """

    __slots__ = ("_kept", "_records_of")

    def __init__(self, records_of: Callable[[Key], Sequence[Any]]) -> None:
        self._records_of: Final = records_of
        self._kept: Final[list[dict[Key, Sequence[Any]]]] = []

    def changing(self, key: Key) -> None:
        """Save the current records of a key for readers that began earlier. The caller is about to change them."""
        for kept in self._kept:
            if key not in kept:
                kept[key] = self._records_of(key)

    def open(self, keys: Iterable[Key]) -> Iterator[Sequence[Any]]:
        """Yield the records that these keys have at the time of the call.

        The caller passes all keys of the table, and must iterate to the end.
        """
        kept: dict[Key, Sequence[Any]] = {}
        self._kept.append(kept)
        return self._look_through(keys, kept)

    def _look_through(self, keys: Iterable[Key], kept: dict[Key, Sequence[Any]]) -> Iterator[Sequence[Any]]:
        for key in keys:
            records = kept.get(key)
            yield self._records_of(key) if records is None else records
        self._kept[:] = [other for other in self._kept if other is not kept]


def _light(_: Any) -> int:
    return 0


def one_by_one(records: Sequence[Any], weight: Callable[[Any], int] = _light) -> Iterator[bytes]:
    """Encode immutable records as a MessagePack array, in pieces.

    Args:
        weight: returns the additional cost of encoding a record; 1 is the cost of a small record.
    """
    return encoded(len(records), ((record,) for record in records), weight)


def encoded(count: int, found: Iterable[Sequence[Any]], weight: Callable[[Any], int] = _light) -> Iterator[bytes]:
    """Encode a MessagePack array of ``count`` records in pieces, taking the records from ``found`` piece by piece.

    Args:
        weight: returns the additional cost of encoding a record; 1 is the cost of a small record.
    """
    yield _array_head(count)
    batch: list[Any] = []
    load = 0
    for records in found:
        batch += records
        count -= len(records)
        load += 1 + len(records) + sum(map(weight, records))
        if load >= SLICE_WEIGHT:
            yield _encoded_records(batch)
            batch, load = [], 0
    assert count == 0, "records were counted when they were few"
    yield _encoded_records(batch)


def _encoded_records(records: list[Any]) -> bytes:
    """Encode records one after another, without the array header before them."""
    return _ENCODER.encode(records)[len(_array_head(len(records))) :]


def _array_head(count: int) -> bytes:
    if count < 1 << 4:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
