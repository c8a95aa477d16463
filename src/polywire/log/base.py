"""The interfaces between the log, its callers and its environment (decisions 0102, 0107).

The broker calls the log through them, and the log calls the broker, the event loop and the clock. The log stores the
broker's changes of state as bytes, without decoding them. Everything added between two commits becomes one atomic
journal write.

The methods of the log, the broker and the protocols return results by the same rules:

* A method that takes time reports to a ``Completion``: a callback with one argument, the result or a BrokerError.
* A completion is called on the event loop, exactly once unless cancelled, and never inside the call that began the
  work.
* A method that raises calls no completion.
* A method whose result is available returns it at once, and does not call the completion.
* A method whose work can be cancelled returns a ``Handle``. After ``cancel`` the completion is not called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, TypeVar

from polywire.clock import ElapsedClock
from polywire.errors import BrokerError
from polywire.records.columns import BatchHeader
from polywire.records.compression import Compression
from polywire.store.data_directory import BlobRoot
from polywire.types import Buffer, Level

_Result = TypeVar("_Result")

Completion = Callable[[_Result | BrokerError], None]
"""Callback for the end of an operation, with its result or its error."""

Ranges = Sequence[tuple[int, int, int]]
"""(incarnation, first offset, next offset) of each partition that a publish has appended to."""

NEVER_US: Final = 2**63 - 1
"""Expiry time of a staged batch that never expires: it stays until it is published or abandoned."""

NO_OFFSET: Final = -1
"""Result of ``offset_of_address`` if there is no record, and of additions without an offset (change, staged batch,
barrier).
"""


class Need(IntEnum):
    """How urgent the space for an addition is.

    When space is short, CHANGE may use space that DATA may not, and REMOVAL may use even more, because a removal frees
    space.
    """

    DATA = 0
    CHANGE = 1
    REMOVAL = 2


class Handle(Protocol):
    """An operation in progress that can be cancelled: a wait, a read or a timer."""

    def cancel(self) -> object:
        """Stop the operation and release its resources. Its completion is not called.

        A call after the operation has ended has no effect.
        """


class Loop(Protocol):
    """The methods of an asyncio or uvloop event loop that the log uses."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle: ...


class Pin(Protocol):
    """Keeps the bytes of a read in memory. The reader releases the pin after it has copied or sent the bytes."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a read.

    Attributes:
        chunks: each holds whole stored batches of this partition back to back, in offset order. The first batch may
            begin below the requested offset. Valid until ``pin.release()``.
        next_offset: offset after the last record in ``chunks``. If there are none, the requested offset.
        readable_offset: ``readable_offset`` of the partition at the time of the read.
    """

    chunks: Sequence[memoryview]
    next_offset: int
    readable_offset: int
    pin: Pin


@dataclass(frozen=True, slots=True)
class SealedRange:
    """Location of sealed records [first_offset, next_offset): bytes [start, stop) of a blob.

    The bytes are whole stored batches, back to back. The first batch may begin below ``first_offset``, the last may end
    above ``next_offset``.
    """

    blob: str
    start: int
    stop: int
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Located:
    """Locations of sealed records.

    Attributes:
        root: directory or bucket of the blobs. None if only the broker can read them.
        runs: ranges in offset order. The first one contains the requested offset.
        more: whether the requested range has more sealed records after the last of ``runs``.
    """

    root: BlobRoot | None
    runs: Sequence[SealedRange]
    more: bool


class PartitionView(Protocol):
    """State of one partition. All processes of the broker can read it. The end of every offset range is exclusive."""

    @property
    def incarnation(self) -> int:
        """Unique number of this partition. It is never reused."""

    compression: Compression | None
    """Compression for batches that are sealed from now on. The log does not persist it."""

    @property
    def first_offset(self) -> int:
        """Lowest readable offset."""

    @property
    def next_offset(self) -> int:
        """Offset of the next record. Records in the open write batch are included."""

    @property
    def readable_offset(self) -> int:
        """End of the offsets that consumers may read.

        With ``durability=synced`` this is the end of the synced records, otherwise ``next_offset``.
        """

    @property
    def next_address(self) -> int:
        """Kafka 0.7 address of the next record."""

    def read(
        self, offset: int, *, bytes_max: int, then: Completion[Read], offset_end: int | None = None
    ) -> Read | Handle:
        """Read batches, beginning with the one that contains ``offset``.

        Returns the read if its bytes are in memory. Otherwise ``then`` is called later, unless the handle is cancelled.

        Args:
            offset: first offset to read.
            bytes_max: size limit of the result. A first batch that is larger is returned nevertheless.
            then: called with the result if it is not returned.
            offset_end: stop with the batch that reaches this offset.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: ``offset`` is below first_offset or above next_offset.
        """

    def offset_at(self, time_us: int, then: Completion[int]) -> int | Handle:
        """Find the first offset whose append time is at or after ``time_us``.

        The result is next_offset if there is none.

        If no disk access is needed, the result is returned. Otherwise ``then`` is called later with the result.
        """

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int | Handle:
        """Find the offset of the record that begins at a Kafka 0.7 address. The result is NO_OFFSET if none does.

        For ``next_address`` the result is ``next_offset``. The result is returned or passed to ``then``, as in
        ``offset_at``.

        Args:
            covering: also accept an address inside a record. If compaction removed the record at this address, the
                result is the offset of the next one.
        """

    def address_of_offset(self, offset: int, then: Completion[int]) -> int | Handle:
        """Find the Kafka 0.7 address of the record at ``offset``, or of the next record if that one was compacted away.

        For ``next_offset`` the result is ``next_address``. The result is returned or passed to ``then``, as in
        ``offset_at``.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE.
        """


class PartitionLog(PartitionView, Protocol):
    """One partition, in the process that stores it."""

    @property
    def last_append_time_us(self) -> int:
        """Append time of the last batch, or 0 if there is none."""

    @property
    def stored_bytes(self) -> int:
        """Total size of the readable batches, in bytes."""

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located | Handle:
        """Locate the sealed, readable records from ``offset`` up to ``offset_end``, exclusive.

        If no disk access is needed, the result is returned. Otherwise ``then`` is called later with the result. A
        located blob may be deleted at any time, because its records are trimmed, compacted or rewritten.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: ``offset`` is below first_offset or above next_offset.
        """

    def epoch_end(self, epoch: int) -> int:
        """Return the offset at which the records of this epoch end.

        That is the first offset of the next epoch. For the current epoch it is the readable end.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: the epoch is unknown.
        """

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the record at this offset. For next_offset, return the current epoch."""

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """Return the first offset to retain under these limits. It is the first offset of a batch."""


class Encoding:
    """Encodes a state in pieces. Changes to the state during the encoding do not affect the result.

    Attributes:
        pieces: encoded pieces so far.
    """

    __slots__ = ("_left", "pieces")

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces: Final[list[bytes]] = []
        self._left: Final = pieces

    def encode_rest(self) -> Iterator[None]:
        """Encode the remaining pieces. Yields after each piece, so that other work can run on the event loop."""
        for piece in self._left:
            self.pieces.append(piece)
            yield


class Replay(Protocol):
    """The methods by which recovery and snapshots access the broker's state."""

    def restore(self, snapshot: bytes) -> None:
        """Load a snapshot. Called at most once, before any other method."""

    def apply(self, change: bytes) -> None:
        """Apply one change, in commit order."""

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Record the producer of a batch that was appended to a partition. Called in commit order."""

    def snapshot(self) -> bytes:
        """Return the whole state, which includes everything committed so far."""

    def encoding(self) -> Encoding:
        """Return an encoding of the current state. The caller must exhaust ``encode_rest``."""


class Publication(Protocol):
    """A publish in preparation, which reserves tokens until it is written or cancelled.

    No other publish can use a reserved token, nothing can be staged under it, and it cannot be abandoned.
    """

    @property
    def incarnations(self) -> Collection[int]:
        """Partitions that have batches staged under the tokens added so far."""

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        """Reserve tokens. Yields after every few tokens, so that other work can run on the event loop.

        Raises:
            Missing: STAGE_MISSING: a token is unknown, expired or used by another publish.
        """

    def cancel(self) -> None:
        """Release all tokens. This is not allowed after publishing."""


class Partitions(Protocol):
    """Partitions of one shard: open, drop, trim, compact, wait."""

    def partition(self, incarnation: int) -> PartitionLog:
        """Return an open partition. Raises Missing(PARTITION_MISSING)."""

    def incarnations(self) -> Sequence[int]:
        """Return all open partitions."""

    def open_partition(self, incarnation: int) -> PartitionLog:
        """Open a new, empty partition at offset 0."""

    def drop_partition(self, incarnation: int) -> None:
        """Drop a partition and free its bytes."""

    def trim(self, incarnation: int, first_offset: int) -> None:
        """Make offsets below ``first_offset`` unreadable. Their disk space is freed later."""

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        """Schedule a compaction of the sealed records if enough of them were never compacted.

        For each key only the newest record remains. If that record is a null older than ``null_age_us``, it is removed
        too. Remaining records keep their offsets and addresses. Raises Missing(PARTITION_MISSING).
        """

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once when readable_offset > offset or the partition is dropped."""


class WriteBatch(Protocol):
    """Additions to one shard. Everything added between two commits becomes one journal group, in call order.

    The first addition to an empty write batch schedules ``commit`` on the loop.
    """

    @property
    def epoch(self) -> int:
        """Number of this broker start."""

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers because sealing or syncing is behind. False if the disk is full."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once when the log is no longer congested."""

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        """Ensure that the next ``size`` bytes of additions become part of one journal group.

        If necessary, this writes the write batch first. Neither this method nor an addition calls completions, so state
        that the caller has read stays valid.

        Args:
            size: total size of the additions.
            need: purpose of the additions. When space is short, CHANGE and REMOVAL may use reserved space.

        Raises:
            Invalid: RECORD_TOO_LARGE: above the limit of a group.
            Busy: DISK_FULL: space is short.
        """

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        """Append a validated batch. The log assigns its offsets.

        If the buffer is writable, offsets are written into it, and the caller must not change it until the commit.
        Small batches of one partition are merged.

        Args:
            done: called with the offset of the batch's first record once ``level`` is reached.

        Raises:
            Busy: DISK_FULL, or BUSY: too many bytes are not yet sealed or synced.
        """

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        """Add an opaque state change. Recovery passes it to ``Replay.apply``."""

    def barrier(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything committed so far has reached ``level``. Sync now if that is necessary."""

    @property
    def uncommitted(self) -> bool:
        """Whether something was added since the last commit."""

    def hold(self) -> None:
        """Do not schedule commits for further additions. The caller must call ``commit`` soon."""

    def write(self) -> None:
        """Write the write batch as one journal group now. Completions are called later."""

    def commit(self) -> None:
        """Write the write batch as one journal group now, and call the completions that need no sync."""


class Staging(WriteBatch, Protocol):
    """Batches that are staged under tokens and published later."""

    def stage(
        self,
        token: bytes,
        partition: PartitionLog,
        batch: Buffer,
        *,
        expires_at_us: int,
        level: Level,
        done: Completion[int] | None,
    ) -> None:
        """Store a batch under a 16-byte token. It stays invisible and has no offsets until it is published.

        The token expires when the last of its batches expires. A token with a ``NEVER_US`` batch never expires.
        """

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        """Set the clock that determines the expiry of staged batches. Before this call nothing expires.

        Args:
            age_us_max: limit for batches staged before this start, because the clock may have been ahead at that time.
        """

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        """Return the incarnations that have batches staged under these tokens. Raises Missing(STAGE_MISSING)."""

    def prepare(self) -> Publication:
        """Begin a publish of many batches."""

    def publish(
        self,
        tokens: Sequence[bytes] | Publication,
        change: bytes,
        *,
        level: Level,
        done: Completion[Ranges],
    ) -> None:
        """Assign offsets to all batches staged under these tokens, in token order, and add ``change``.

        All of it becomes one journal group.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired. Nothing is added, and a publication is cancelled.
            Busy: as in ``WriteBatch.append``.
        """

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop staged batches. Unknown tokens are ignored."""


class Log(Partitions, Staging, Protocol):
    """All interfaces of one shard's log. Callers should depend on the narrower base classes."""

    def close(self) -> None:
        """Commit, sync, call the pending completions, and then stop all threads."""
