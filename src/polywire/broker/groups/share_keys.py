"""Read the keys of unfinished records from the log, for a share group whose records are ordered by key.

Keys are not stored with a group's progress. After a restart, and for records that are due now, they are read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from polywire.broker.api import Records
from polywire.broker.groups.key_order import Key
from polywire.broker.groups.share import SharePartition
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Handle, Loop, Read
from polywire.records.columns import Column
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.records.header import walk
from polywire.records.rows import Rows

READ_BYTES: Final = 64 * 1024
RETRY_S: Final = 1.0
_KEYS: Final = 1 << Column.KEY_OFFSETS
_facts: Final = header_fields("length", "columns", "base_offset", "offset_span")


def read_keys(chunks: Sequence[memoryview], first: int, end: int) -> dict[int, Key]:
    """Return the hash of the key of each record of [first, end) that has one, by offset."""
    keys: dict[int, Key] = {}
    for chunk in chunks:
        for at in walk(chunk):
            length, columns, base, span = _facts(chunk, at)
            if base < end and base + span > first and columns & _KEYS:
                _add_keys(keys, Rows(expand_body(chunk[at : at + length])), first, end)
    return keys


def _add_keys(keys: dict[int, Key], rows: Rows, first: int, end: int) -> None:
    for row in range(rows.count):
        offset = rows.offset(row)
        if offset >= end:
            return
        if offset >= first and (key := rows.key(row)) is not None:
            keys[offset] = hash(bytes(key))


class KeyReader:
    """Reads the keys that a group's state in a partition does not know."""

    __slots__ = ("_broker", "_handle", "_is_reading", "_is_stopped", "_loop", "_partition", "_read_all", "_share")

    def __init__(
        self, partition: Partition, share: SharePartition, *, broker: Records, loop: Loop, read_all: Callable[[], None]
    ) -> None:
        """Create a reader. ``read_all`` is called when all keys are known."""
        self._partition: Final = partition
        self._share: Final = share
        self._broker: Final = broker
        self._loop: Final = loop
        self._read_all: Final = read_all
        self._is_reading = False
        self._is_stopped = False
        self._handle: Handle | None = None

    def stop(self) -> None:
        self._is_stopped = True
        if self._handle is not None:
            self._handle.cancel()

    def read(self) -> None:
        """Begin to read the unknown keys, unless this is in progress."""
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._read_next)

    def _read_next(self) -> None:
        if self._is_stopped or self._partition.ended:
            return
        if not self._share.unknown:
            self._is_reading = False
            self._read_all()
            return
        first, last = min(self._share.unknown), max(self._share.unknown)
        try:
            read = self._broker.fetch(
                self._partition, first, bytes_max=READ_BYTES, then=partial(self._arrived, first), offset_end=last + 1
            )
        except BrokerError as error:
            self._arrived(first, error)
            return
        if isinstance(read, Read):
            self._arrived(first, read)
        else:
            self._handle = read

    def _arrived(self, first: int, read: Read | BrokerError) -> None:
        self._handle = None
        if isinstance(read, Read):
            try:
                end, keys = read.next_offset, read_keys(read.chunks, first, read.next_offset)
            finally:
                read.pin.release()
        elif read.code is ErrorCode.OFFSET_OUT_OF_RANGE:  # retention has removed these records
            end, keys = self._partition.log.first_offset, {}
        else:
            self._loop.call_later(RETRY_S, self._read_next)
            return
        read_to = max(end, first + 1)
        self._share.learn([(at, keys.get(at)) for at in list(self._share.unknown) if first <= at < read_to])
        self._loop.call_soon(self._read_next)
