"""The log's ports: what the broker asks of the log, and what the log asks of broker, loop and clock (decisions 0002, 0003).

What takes time ends in a ``Completion``, in log, broker and wires alike: a callback with one argument, the result or a BrokerError. It is
called on the loop, exactly once unless it is cancelled, and never from inside the call that began. A verb that raises calls none. What is at
hand is returned at once, and then the completion is never called. What can be cancelled returns a ``Handle``: after ``cancel`` nothing is
called.

Promises: the broker sees partitions, batches and opaque changes; everything added between two commits is one atomic group.
Must not know: topics, groups, wires.
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
"""What is called when something that was begun has ended: with its result, or with the error it ended with."""

Ranges = Sequence[tuple[int, int, int]]
"""(incarnation, first offset, next offset) of each partition that a publish has added to."""

NEVER_US: Final = 2**63 - 1
"""When a staged batch expires that waits until somebody publishes or abandons it."""

NO_OFFSET: Final = -1
"""What ``offset_of_address`` finds where no record begins; what a change, a staged batch and a barrier are completed with."""


class Need(IntEnum):
    """What an addition takes space for. Where space is short, those further down find some for longer: what is deleted brings it back."""

    DATA = 0
    CHANGE = 1
    REMOVAL = 2


class Handle(Protocol):
    """What was begun and can be taken back: a wait, a read that was not at hand, a timer, work in slices or off the loop."""

    def cancel(self) -> object:
        """Call nothing any more, and let go of what was held for it. Changes nothing once it was called, or cancelled before."""


class Loop(Protocol):
    """The three things needed of an event loop; asyncio's and uvloop's loops have them."""

    def call_soon(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> Handle: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Handle: ...


class Pin(Protocol):
    """Keeps the bytes behind a read in place; release it as soon as they were copied or sent."""

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Read:
    """What a read found.

    chunks: each holds one or more whole stored batches of this partition back to back, in offset order; the first batch may begin below
        the offset asked for. Valid until ``pin.release()``.
    next_offset: offset after the last record in ``chunks`` (the offset asked for when there are none).
    readable_offset: exclusive end of what readers may see, at the time of the read.
    """

    chunks: Sequence[memoryview]
    next_offset: int
    readable_offset: int
    pin: Pin


@dataclass(frozen=True, slots=True)
class SealedRange:
    """Where records [first_offset, next_offset) of a partition are sealed: bytes [start, stop) of a blob, whole stored batches back to
    back. The first may begin below ``first_offset``, the last end above ``next_offset``."""

    blob: str
    start: int
    stop: int
    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Located:
    """Where sealed records lie.

    root: where the blobs lie, None where nobody else can read them.
    runs: neighbours, in offset order, from the offset asked for on.
    more: whether sealed records that were asked for follow behind the last run.
    """

    root: BlobRoot | None
    runs: Sequence[SealedRange]
    more: bool


class PartitionLog(Protocol):
    """One partition's state. All offsets are exclusive at their end."""

    @property
    def incarnation(self) -> int:
        """Number of this partition's life; never used again."""

    compression: Compression | None
    """How bodies of this partition are compressed when they are sealed from now on; the log does not remember it."""

    @property
    def first_offset(self) -> int:
        """Lowest offset that can be read."""

    @property
    def next_offset(self) -> int:
        """Offset the next record gets, counting records of the open write batch once committed."""

    @property
    def readable_offset(self) -> int:
        """Exclusive end of what readers may see: next_offset, or the synced part of it under ``durability=synced``."""

    @property
    def next_address(self) -> int:
        """Kafka 0.7 address after the last record."""

    @property
    def last_append_time_us(self) -> int:
        """Append time of the last batch, 0 when there is none."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of readable batches."""

    def read(
        self, offset: int, *, bytes_max: int, then: Completion[Read], offset_end: int | None = None
    ) -> Read | Handle:
        """Batches from the one holding ``offset`` on, at least one if there is any, else at most ``bytes_max`` bytes, ending with the
        batch that reaches ``offset_end``.

        Returns the read when its bytes are at hand; otherwise ``then`` is called later on the loop, unless the handle is cancelled.
        Raises Missing(OFFSET_OUT_OF_RANGE) below first_offset or above next_offset.
        """

    def locate(self, offset: int, then: Completion[Located], *, offset_end: int | None = None) -> Located | Handle:
        """Where the records from ``offset`` on lie, as far as they are sealed, can be read, and are below ``offset_end``. A blob may be
        deleted, when its records were trimmed, compacted or written elsewhere, at any time after the answer.

        Returns the answer when it is at hand; otherwise ``then`` is called later on the loop, unless the handle is cancelled.
        Raises Missing(OFFSET_OUT_OF_RANGE) below first_offset or above next_offset.
        """

    def offset_at(self, time_us: int, then: Completion[int]) -> int | Handle:
        """First offset whose append time is at or after ``time_us``; next_offset when there is none.

        This and the other two look-ups return the answer when it is at hand; otherwise ``then`` is called later on the loop, unless the
        handle is cancelled.
        """

    def offset_of_address(self, address: int, then: Completion[int], *, covering: bool = False) -> int | Handle:
        """Offset of the record that starts at this Kafka 0.7 address; next_offset for next_address; NO_OFFSET inside a record, in a hole
        or below what is kept. covering: the record that the address lies in will do, or the one behind the hole it lies in."""

    def address_of_offset(self, offset: int, then: Completion[int]) -> int | Handle:
        """Kafka 0.7 address of the record at ``offset``, or of the next one when it was compacted away; next_address for next_offset.
        Raises Missing(OFFSET_OUT_OF_RANGE)."""

    def epoch_end(self, epoch: int) -> int:
        """Offset where this epoch's records end (its successor's first); readable end for the current one.

        Raises Missing(OFFSET_OUT_OF_RANGE) for an epoch never seen.
        """

    def epoch_at(self, offset: int) -> int:
        """Epoch of the record at this offset; the current one at next_offset."""

    def retention_offset(self, *, age_us_max: int | None, bytes_max: int | None, now_us: int) -> int:
        """First offset to keep under these limits (never inside a batch)."""


class Encoding:
    """A state that is encoded piece by piece, as it was at one moment, while it changes. ``pieces`` are those there are so far."""

    __slots__ = ("_left", "pieces")

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self.pieces: Final[list[bytes]] = []
        self._left: Final = pieces

    def go_on(self) -> Iterator[None]:
        """Encode what is left, and rest after each piece, when others may have the loop."""
        for piece in self._left:
            self.pieces.append(piece)
            yield


class Replay(Protocol):
    """What the log asks of the broker's state during recovery and when it makes a snapshot."""

    def restore(self, snapshot: bytes) -> None:
        """Take over the state as it was; called at most once, first."""

    def apply(self, change: bytes) -> None:
        """Apply one change, in commit order."""

    def replayed(self, header: BatchHeader, producer_id: bytes) -> None:
        """A batch of a producer became part of a partition, in commit order."""

    def snapshot(self) -> bytes:
        """The whole state after everything committed so far."""

    def encoding(self) -> Encoding:
        """The same, as it is now, encoded piece by piece; whoever asks goes on with it to its end."""


class Publication(Protocol):
    """A publish in the making. What it has taken nobody else publishes or abandons, and nothing is staged under it, until it is published or
    cancelled."""

    @property
    def incarnations(self) -> Collection[int]:
        """Partitions that something is staged for under the tokens taken so far."""

    def add(self, tokens: Sequence[bytes]) -> Iterator[None]:
        """Take tokens, a little in each step. Raises Missing(STAGE_MISSING) for one that is unknown, expired or taken by somebody else."""

    def cancel(self) -> None:
        """Give back everything taken; not to be called once it is published."""


class Partitions(Protocol):
    """The partitions of one shard: they begin and end, and what they hold is removed or waited for."""

    def partition(self, incarnation: int) -> PartitionLog:
        """An open partition. Raises Missing(PARTITION_MISSING)."""

    def incarnations(self) -> Sequence[int]:
        """All open partitions."""

    def open_partition(self, incarnation: int) -> PartitionLog:
        """Begin a partition, empty, at offset 0."""

    def drop_partition(self, incarnation: int) -> None:
        """End a partition; its bytes are freed."""

    def trim(self, incarnation: int, first_offset: int) -> None:
        """Make offsets below ``first_offset`` unreadable and their space free in time."""

    def compact(self, incarnation: int, *, null_age_us: int) -> None:
        """Keep of each key the newest record only, some time soon and of what is sealed, if that is worth it by now; and no null that
        is the newest of its key for longer than this. Offsets and addresses of what stays do not change. Raises
        Missing(PARTITION_MISSING)."""

    def wait(self, partition: PartitionLog, offset: int, wake: Callable[[], None]) -> Handle:
        """Call ``wake`` once, on the loop, when readable_offset > offset or the partition ends, unless the handle is cancelled."""


class WriteBatch(Protocol):
    """What is added to one shard. Everything called between two commits becomes one group, in call order.

    The first addition to an empty write batch schedules ``commit`` on the loop.
    """

    @property
    def epoch(self) -> int:
        """Number of this start."""

    @property
    def congested(self) -> bool:
        """Whether producers should be read no further for now: sealing or syncing is behind. Never because the disk is full."""

    def on_relief(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop, when the log is not congested (any more)."""

    def reserve(self, size: int, *, need: Need = Need.DATA) -> None:
        """Make sure that the additions of the next calls, ``size`` bytes in all, land in one group: writes the write batch first if
        they would not fit. Nobody is notified in here, nor in any other addition: what the caller has looked up before stays true.

        need: what for; changes, and beyond them removals, may use what is kept free for them where space is short. What was reserved is
            there for these additions, whatever they are.
        Raises Invalid(RECORD_TOO_LARGE) above the group limit, Busy(DISK_FULL) when space is short.
        """

    def append(self, partition: PartitionLog, batch: Buffer, *, level: Level, done: Completion[int] | None) -> None:
        """Add a batch (validated, unnumbered). A writable batch is numbered in place and must stay untouched until commit; small ones
        of one partition are merged. ``done`` gets the offset of this batch's first record once ``level`` is reached.

        Raises Busy(DISK_FULL), Busy(BUSY) when too many bytes are not yet sealed or synced.
        """

    def change(self, change: bytes, *, level: Level, done: Completion[int] | None) -> None:
        """Add an opaque state change, replayed through ``Replay.apply``."""

    def barrier(self, level: Level, done: Completion[int]) -> None:
        """Call ``done`` once everything committed so far has reached ``level`` (syncing now if need be)."""

    @property
    def uncommitted(self) -> bool:
        """Whether something was added since the last commit: only without it does ``next_offset`` count everything."""

    def hold(self) -> None:
        """Whoever calls this commits soon: until then no commit is scheduled for what is added."""

    def write(self) -> None:
        """Write the write batch as one group now; whoever waits for it is notified later, not from in here."""

    def commit(self) -> None:
        """Write the write batch as one group now and call the ``done`` of everything that asked for ``written`` or less."""


class Staging(WriteBatch, Protocol):
    """Batches that wait under tokens, and what is added with them when they are published."""

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
        """Store a batch under a 16-byte token, invisible and without offsets; the token expires with the last of its batches, at ``NEVER_US``
        not at all."""

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        """The clock that what is staged expires by; without one nothing does. What earlier starts have left has ``age_us_max`` at most: their
        clock may have been ahead."""

    def staged_partitions(self, tokens: Sequence[bytes]) -> Collection[int]:
        """Incarnations for which batches are staged under these tokens. Raises Missing(STAGE_MISSING)."""

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
        """Number every staged batch of these tokens, in token order, and add ``change``, as one group.

        Raises Missing(STAGE_MISSING) when a token is unknown or expired, Busy; then nothing is added, and a publication is cancelled.
        """

    def abandon(self, tokens: Sequence[bytes]) -> None:
        """Drop staged batches; unknown tokens are ignored."""


class Log(Partitions, Staging, Protocol):
    """All of one shard. What a caller needs of it is a port of its own above."""

    def close(self) -> None:
        """Commit, sync and stop all threads; every pending ``done`` is called first."""
