"""The interfaces between the log, its callers and its environment (decisions 0102, 0107).

The broker calls the log through these interfaces, and the log calls the broker, the event loop and the clock through
them. The log stores the broker's changes of state as bytes, without decoding them. Everything added between two commits
becomes one atomic journal write.

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
from enum import IntEnum
from typing import Any, Final, Protocol, TypeVar

import msgspec

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
    """Priority of an addition when disk space is short.

    CHANGE may use space that DATA may not. REMOVAL may use even more, because a removal frees space.
    """

    DATA = 0
    CHANGE = 1
    REMOVAL = 2


class Handle(Protocol):
    """A wait, read or timer in progress that can be cancelled."""

    def cancel(self) -> object:
        """Stop the operation and release its resources. Its callback is not called.

        A call after the operation has ended has no effect.
        """


class Loop(Protocol):
    """The methods of an asyncio or uvloop event loop that the log uses."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle: ...


class Pin(Protocol):
    """Keeps the bytes of a read in memory. The reader calls ``release`` after it has copied or sent them."""

    def release(self) -> None: ...


class Read(msgspec.Struct, frozen=True):  # made in a third of the time of a dataclass
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


class SealedRange(msgspec.Struct, frozen=True):
    """Location of records [first_offset, next_offset) in a segment file or object: its bytes [start, stop).

    The bytes are whole stored batches, back to back. The first batch may begin below ``first_offset``, the last may end
    above ``next_offset``.
    """

    blob: str
    start: int
    stop: int
    first_offset: int
    next_offset: int


class Located(msgspec.Struct, frozen=True):
    """Locations of records in segment files.

    Attributes:
        root: directory or bucket of the files. None if only the broker can read them.
        runs: ranges in offset order. The first one contains the requested offset.
        more: whether segment files have more of the requested records, after the last of ``runs``.
    """

    root: BlobRoot | None
    runs: Sequence[SealedRange]
    more: bool


class PartitionView(Protocol):
    """Readable state of one partition, in any process of the broker. The end of every offset range is exclusive."""

    @property
    def incarnation(self) -> int:
        """Number of this partition, unique among all partitions that ever existed."""

    compression: Compression | None
    """Compression for batches that are sealed from now on. The log does not persist it."""

    @property
    def first_offset(self) -> int:
        """Lowest readable offset."""

    @property
    def next_offset(self) -> int:
        """Offset of the next record. Appends that are not written yet are included."""

    @property
    def readable_offset(self) -> int:
        """End of the offsets that consumers may read.

        With ``durability=synced`` this is the end of the synced records, otherwise ``next_offset``.
        """

    @property
    def next_address(self) -> int:
        """Byte position at which the next record will begin, its offset in Kafka 0.7."""

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
        """Find the first offset whose append time is at or after ``time_us``, or next_offset if there is none.

        The offset is returned if no disk access is needed. Otherwise a handle that cancels the search is returned, and
        ``then`` is called later.
        """

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int | Handle:
        """Find the offset of the record that begins at a byte position of the partition.

        In Kafka 0.7 the position is the offset. For ``next_address`` the result is ``next_offset``. It is NO_OFFSET if
        no record begins at the position. As in ``offset_at``, it is returned or passed to ``then``.

        Args:
            covering: also accept a byte position inside a record. If compaction removed the record, the result is the
                offset of the next one.
        """

    def address_of_offset(self, offset: int, then: Completion[int]) -> int | Handle:
        """Find the byte position of the record at ``offset``, or of the next record if compaction removed the record.

        The byte position is the record's offset in Kafka 0.7. For ``next_offset`` the result is ``next_address``. As in
        ``offset_at``, it is returned or passed to ``then``.

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
        """Find the segment files with the readable records from ``offset`` up to ``offset_end``, exclusive.

        If no disk access is needed, the result is returned. Otherwise a handle is returned, and ``then`` is called
        later. A file may be deleted at any time, because its records are trimmed, compacted or rewritten.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: ``offset`` is below first_offset or above next_offset.
        """

    def epoch_end(self, epoch: int) -> int:
        """Return the end offset of a leader epoch.

        That is the first offset of the next epoch, or the readable end for the current epoch.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: the epoch is unknown.
        """

    def epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the record at this offset. For next_offset, return the current epoch."""

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """Return the first offset to retain under these limits. It is the first offset of a batch."""


class Encoding:
    """Encodes the broker's state in pieces. Changes to the state during the encoding do not affect the result.

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
    """The methods by which the log's recovery and snapshots access the broker's state."""

    def restore(self, snapshot: bytes) -> None:
        """Load a snapshot. Called at most once, before any other method."""

    def apply(self, change: bytes) -> None:
        """Apply one encoded state change. Called in the order of the journal."""

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Record the producer's sequence numbers in an appended batch. Called in the order of the journal."""

    def snapshot(self) -> bytes:
        """Return the whole encoded state."""

    def encoding(self) -> Encoding:
        """Return an encoding of the current state. The caller must iterate ``encode_rest`` to the end."""


class Publication(Protocol):
    """A publish in preparation: batches that will become readable together.

    Until it is written or cancelled, no other publish can use its tokens, and batches can neither be added to them nor
    deleted.
    """

    @property
    def incarnations(self) -> Collection[int]:
        """Partitions that have batches under the tokens added so far."""

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        """Add tokens to the publish. Yields after every few tokens, so that other work can run on the event loop.

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

    def begin(self, incarnation: int, offset: int) -> None:
        """Set the offset of the next record of an empty partition. Do nothing if ``next_offset`` is already as high."""

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        """Schedule a compaction of the records in segment files, if enough of them were never compacted.

        For each key only the newest record remains. If that record is a null older than ``null_age_us``, it is removed
        too. Remaining records keep their offsets. Raises Missing(PARTITION_MISSING).
        """

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once when readable_offset > offset or the partition is dropped."""


class Pressure(Protocol):
    """How busy a log is. Every request reads it, so it is an attribute of an object and no method.

    Attributes:
        congested: whether to pause reading from producers. See ``WriteBatch.congested``.
    """

    @property
    def congested(self) -> bool: ...


class WriteBatch(Protocol):
    """Collects appends and state changes for the journal. ``commit`` writes all of them in one atomic disk write.

    The first call after a commit schedules the next ``commit`` on the loop.
    """

    @property
    def epoch(self) -> int:
        """Leader epoch, which increases by one at each start of the broker."""

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers, because too many bytes are not yet synced or not yet in segment
        files.

        False if the disk is full.
        """

    @property
    def pressure(self) -> Pressure:
        """Return an object with the current value of ``congested``."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when ``congested`` becomes False."""

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        """Ensure that the next ``size`` bytes of appends and changes get into the same atomic journal write.

        If necessary, earlier appends and changes are written first. Their completions are called later, so that state
        that the caller has read stays valid.

        Args:
            size: total size of the appends and changes.
            need: their purpose. When disk space is short, CHANGE and REMOVAL may use reserved space.

        Raises:
            Invalid: RECORD_TOO_LARGE: above the limit of a journal write.
            Busy: DISK_FULL: space is short.
        """

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        """Append a validated batch. The log assigns its offsets.

        If the buffer is writable, offsets are written into it, and the caller must not change it until the commit.
        Small batches of one partition are merged.

        Args:
            done: called with the offset of the batch's first record once the batch has reached the durability
                ``level``.

        Raises:
            Busy: DISK_FULL, or BUSY: too many bytes are not yet synced or not yet in segment files.
        """

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        """Add an encoded change of the broker's state. Recovery passes it to ``Replay.apply``."""

    def barrier(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything committed so far has reached the durability ``level``.

        Sync now if that is necessary.
        """

    @property
    def uncommitted(self) -> bool:
        """Whether something was added since the last commit."""

    def hold(self, holding: bool, /) -> None:
        """While ``holding``, do not schedule commits for further appends and changes. The caller must call ``hold``
        with False and then ``commit`` soon.
        """

    def write(self) -> None:
        """Write all collected appends and changes to the journal now. Their completions are called later."""

    def commit(self) -> None:
        """Write all collected appends and changes to the journal now, and call the completions that need no sync."""


class Staging(WriteBatch, Protocol):
    """Stores batches that are invisible until they are published together."""

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
        """Store a batch under a 16-byte token. It is invisible and has no offsets until it is published.

        The token expires when the last of its batches expires. A token with a ``NEVER_US`` batch never expires.
        """

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        """Set the clock that determines the expiry of unpublished batches. Before this call nothing expires.

        Args:
            age_us_max: longest remaining time of batches that were stored before this start, because the clock may have
                been ahead then.
        """

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        """Return the incarnations that have batches under these tokens. Raises Missing(STAGE_MISSING)."""

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
        """Assign offsets to all batches under these tokens, in token order, and add a state change.

        All of it gets into one atomic journal write.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired. Nothing is added, and a publication is cancelled.
            Busy: as in ``WriteBatch.append``.
        """

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Delete the unpublished batches under these tokens. Unknown tokens are ignored."""


class Log(Partitions, Staging, Protocol):
    """All interfaces of one shard's log. Callers should depend on the narrower base classes."""

    def close(self) -> None:
        """Write and sync everything, call the pending completions, and then stop all threads."""
