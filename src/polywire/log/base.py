"""The ports of the log (decisions 0102, 0107).

The broker calls the log through them, and the log calls broker, event loop and clock. To the log, the broker's state
consists of partitions, batches and opaque changes. All additions between two commits are one atomic group.

Log, broker and protocols return results by the same rules. The calls of a port are named verbs.

* A verb that takes time reports to a ``Completion``: a callback with one argument, the result or a BrokerError.
* A completion is called on the event loop, exactly once unless cancelled, and never inside the verb that began the
  work.
* A verb that raises calls no completion.
* A verb whose result is available returns it at once, and does not call the completion.
* Work that can be cancelled returns a ``Handle``. After ``cancel`` the completion is not called.
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
"""Expiry of a staged batch that waits until it is published or abandoned."""

NO_OFFSET: Final = -1
"""``offset_of_address`` found no record; also the result of a change, a staged batch and a barrier."""


class Need(IntEnum):
    """Purpose of an addition. When space is short, later members may use space that earlier ones may not: deletions
    free space.
    """

    DATA = 0
    CHANGE = 1
    REMOVAL = 2


class Handle(Protocol):
    """Operation that can be cancelled: a wait, a read, a timer, work in slices or in a thread."""

    def cancel(self) -> object:
        """Release what the operation holds and call nothing. No effect if it has ended or was cancelled."""


class Loop(Protocol):
    """The three functions needed of an event loop; asyncio's and uvloop's loops have them."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle: ...


class Pin(Protocol):
    """Keeps the bytes of a read in place; release it once they are copied or sent."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Read:
    """Result of a read.

    Attributes:
        chunks: each holds whole stored batches of this partition back to back, in offset order. The first batch may
            begin below the requested offset. Valid until ``pin.release()``.
        next_offset: offset after the last record in ``chunks``; the requested offset if there are none.
        readable_offset: exclusive end of what readers may see, at the time of the read.
    """

    chunks: Sequence[memoryview]
    next_offset: int
    readable_offset: int
    pin: Pin


@dataclass(frozen=True, slots=True)
class SealedRange:
    """Location of sealed records [first_offset, next_offset): bytes [start, stop) of a blob, whole stored batches back
    to back.

    The first batch may begin below ``first_offset``, the last may end above ``next_offset``.
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
        root: where the blobs are; None if only the broker can read them.
        runs: ranges in offset order, starting at the requested offset.
        more: whether further sealed records of the request follow the last run.
    """

    root: BlobRoot | None
    runs: Sequence[SealedRange]
    more: bool


class PartitionLog(Protocol):
    """State of one partition. The end of every offset range is exclusive."""

    @property
    def incarnation(self) -> int:
        """Unique number of this partition; never reused."""

    compression: Compression | None
    """Compression of batches that are sealed from now on; not persisted by the log."""

    @property
    def first_offset(self) -> int:
        """Lowest readable offset."""

    @property
    def next_offset(self) -> int:
        """Offset of the next record, counting those of the open write batch as committed."""

    @property
    def readable_offset(self) -> int:
        """Exclusive end of what readers may see: next_offset, or its synced part with ``durability=synced``."""

    @property
    def next_address(self) -> int:
        """Kafka 0.7 address after the last record."""

    @property
    def last_append_time_us(self) -> int:
        """Append time of the last batch, 0 without one."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of readable batches."""

    def read(
        self, offset: int, *, bytes_max: int, then: Completion[Read], offset_end: int | None = None
    ) -> Read | Handle:
        """Read batches from the one that contains ``offset``.

        Returns the read if its bytes are in memory; otherwise ``then`` is called later, unless the handle is cancelled.

        Args:
            offset: first offset.
            bytes_max: most bytes, but at least one batch if there is any.
            then: completion.
            offset_end: stop with the batch that reaches this offset.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: below first_offset or above next_offset.
        """

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located | Handle:
        """Locate the sealed, readable records from ``offset`` on and below ``offset_end``.

        A blob may be deleted at any time after the answer: when its records are trimmed, compacted or rewritten.
        Returns the answer if it is in memory; otherwise ``then`` is called later, unless the handle is cancelled.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: below first_offset or above next_offset.
        """

    def offset_at(self, time_us: int, then: Completion[int]) -> int | Handle:
        """Return the first offset whose append time is at or after ``time_us``; next_offset if there is none.

        This and the two verbs below return the answer if it is in memory; otherwise ``then`` is called later, unless
        the handle is cancelled.
        """

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int | Handle:
        """Return the offset of the record that begins at this Kafka 0.7 address; next_offset for next_address, else
        NO_OFFSET.

        covering: accept any address within a record, and for one within a hole return the record after it.
        """

    def address_of_offset(self, offset: int, then: Completion[int]) -> int | Handle:
        """Return the Kafka 0.7 address of the record at ``offset``, or of the next one if it was compacted away.

        next_address for next_offset. Raises Missing(OFFSET_OUT_OF_RANGE).
        """

    def epoch_end(self, epoch: int) -> int:
        """Return the offset at which this epoch's records end: the next epoch's first, or the readable end of the
        current one.

        Raises:
            Missing: OFFSET_OUT_OF_RANGE: the epoch is unknown.
        """

    def epoch_at(self, offset: int) -> int:
        """Return the epoch of the record at this offset; the current epoch at next_offset."""

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """Return the first offset to retain under these limits; never inside a batch."""


class Encoding:
    """A state that is encoded piece by piece, as of one moment, while it keeps changing. ``pieces`` are the finished
    ones.
    """

    __slots__ = ("_left", "pieces")

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces: Final[list[bytes]] = []
        self._left: Final = pieces

    def go_on(self) -> Iterator[None]:
        """Encode the rest, yielding after each piece so that others can use the loop."""
        for piece in self._left:
            self.pieces.append(piece)
            yield


class Replay(Protocol):
    """The broker's state, as recovery and snapshots need it."""

    def restore(self, snapshot: bytes) -> None:
        """Load a snapshot; called at most once, first."""

    def apply(self, change: bytes) -> None:
        """Apply one change, in commit order."""

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """Record a producer's batch that became part of a partition, in commit order."""

    def snapshot(self) -> bytes:
        """Return the whole state after everything committed so far."""

    def encoding(self) -> Encoding:
        """Return an encoding of the current state; the caller runs it to its end."""


class Publication(Protocol):
    """A publish in preparation.

    Until it is published or cancelled, no other publish takes its tokens, nothing is staged under them and they are not
    abandoned.
    """

    @property
    def incarnations(self) -> Collection[int]:
        """Partitions with batches staged under the tokens taken so far."""

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        """Take tokens, a few per step; raise Missing(STAGE_MISSING) for one that is unknown, expired or taken."""

    def cancel(self) -> None:
        """Return all tokens; not allowed after publishing."""


class Partitions(Protocol):
    """Partitions of one shard: open, drop, trim, compact, wait."""

    def partition(self, incarnation: int) -> PartitionLog:
        """Return an open partition; raise Missing(PARTITION_MISSING)."""

    def incarnations(self) -> Sequence[int]:
        """Return all open partitions."""

    def open_partition(self, incarnation: int) -> PartitionLog:
        """Open a new, empty partition at offset 0."""

    def drop_partition(self, incarnation: int) -> None:
        """Drop a partition and free its bytes."""

    def trim(self, incarnation: int, first_offset: int) -> None:
        """Make offsets below ``first_offset`` unreadable; their space is freed eventually."""

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        """Schedule a compaction of sealed records, if it is worthwhile: keep only the newest record of each key.

        Nulls older than ``null_age_us`` that are the newest of their key are removed too. Remaining records retain
        offsets and addresses. Raises Missing(PARTITION_MISSING).
        """

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once when readable_offset > offset or the partition ends, unless the handle is cancelled."""


class WriteBatch(Protocol):
    """Additions to one shard. Everything added between two commits becomes one group, in call order.

    The first addition to an empty write batch schedules ``commit`` on the loop.
    """

    @property
    def epoch(self) -> int:
        """Number of this broker start."""

    @property
    def congested(self) -> bool:
        """Whether to pause reading from producers: sealing or syncing is behind. A full disk is no reason."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once when the log is no longer congested."""

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        """Ensure that the next additions, ``size`` bytes in all, become part of one group; commit the write batch first
        if necessary.

        No addition, this one included, calls completions, so what the caller has looked up stays valid.

        Args:
            size: bytes of the additions.
            need: their purpose. Changes may use space that is reserved for them when space is short, removals even
                more.

        Raises:
            Invalid: RECORD_TOO_LARGE: above the limit of a group.
            Busy: DISK_FULL: space is short.
        """

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        """Append a validated, unnumbered batch.

        ``done`` gets the offset of the batch's first record once ``level`` is reached. A writable batch is numbered in
        place and must not be changed until the commit; small batches of one partition are merged.

        Raises:
            Busy: DISK_FULL, or BUSY: too many bytes are not yet sealed or synced.
        """

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        """Add an opaque state change, replayed through ``Replay.apply``."""

    def barrier(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything committed so far has reached ``level``; sync now if necessary."""

    @property
    def uncommitted(self) -> bool:
        """Whether something was added since the last commit; only otherwise does ``next_offset`` count everything."""

    def hold(self) -> None:
        """Schedule no commit for further additions: the caller commits soon."""

    def write(self) -> None:
        """Write the write batch as one group now; completions are called later, not from in here."""

    def commit(self) -> None:
        """Write the write batch as one group now, and call the completions of additions that asked for ``written`` or
        less.
        """


class Staging(WriteBatch, Protocol):
    """Batches staged under tokens, and their publication."""

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
        """Store a batch under a 16-byte token, invisible and without offsets.

        The token expires with the last of its batches; with ``NEVER_US`` it never does.
        """

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        """Set the clock for expiry; without one nothing expires.

        Batches of earlier starts expire within ``age_us_max``, because their clock may have been ahead.
        """

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        """Return the incarnations that have batches staged under these tokens; raise Missing(STAGE_MISSING)."""

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
        """Number all staged batches of these tokens, in token order, and add ``change``, as one group.

        Raises:
            Missing: STAGE_MISSING: a token is unknown or expired. Nothing is added, and a publication is cancelled.
            Busy: as above.
        """

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop staged batches; unknown tokens are ignored."""


class Log(Partitions, Staging, Protocol):
    """All ports of one shard. Callers use the narrower ports above."""

    def close(self) -> None:
        """Commit, sync and stop all threads; pending completions are called first."""
