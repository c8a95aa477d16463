"""A FETCH request in progress (spec: polywire#bounds-and-fetch).

Stored bytes are sent without a copy. At most one read is in flight. When the fetch ends, it has released all memory and
cancelled all timers. This module is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import cython

from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid
from polywire.log.base import Handle, Read
from polywire.protocols.polywire.codec import ANSWER_BYTES_MAX, MORE, encode_head
from polywire.protocols.polywire.messages import ANY_EPOCH, ANY_INCARNATION, Fetch, Fetched, OffsetRange, Verb
from polywire.protocols.runtime.session import Output
from polywire.records.batch import headers_of
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.broker.topics import Partition
    from polywire.protocols.polywire.context import PolywireBroker

WAIT_MS_MAX: Final = 60_000  # limit, so that vanished clients are noticed; repeating the request costs a client little


class FetchOwner(Protocol):
    def ready(self, fetch: RangeFetch) -> None:
        """Continue ``fetch``, which has data or can read some."""

    def woken(self, fetch: RangeFetch) -> None:
        """Continue ``fetch``, for which records may have arrived."""

    def failed(self, fetch: RangeFetch, error: BrokerError) -> None:
        """End ``fetch`` with this error."""

    def ended(self, fetch: RangeFetch) -> None:
        """Remove ``fetch``, whose last frame was written."""


@cython.cclass
class RangeFetch:
    """A FETCH request for a range of offsets. Its response frames are sent in offset order."""

    if not cython.compiled:  # when compiled, fetch.pxd declares the fields
        __slots__ = (
            "_bodies",
            "_bytes_left",
            "_epoch",
            "_offset",
            "_offset_end",
            "_owner",
            "_partition",
            "_read",
            "_started",
            "_waits",
            "correlation",
            "over",
        )

    def __init__(self, owner: FetchOwner, correlation: int, head: Fetch, partition: Partition) -> None:
        """Create the fetch.

        Raises Conflict if the partition was deleted and created again, and Invalid for an invalid range.
        """
        check_range(partition, head)
        self.correlation: Final = correlation
        self.over = False
        self._owner: Final = owner
        self._partition: Final = partition
        self._offset = head.offset
        self._offset_end = head.offset_end
        self._epoch: Final = head.epoch
        self._bytes_left = head.bytes_max if head.bytes_max >= 0 else None
        self._bodies: Final = head.bodies
        self._started = False
        self._read: Read | None = None
        self._waits: list[Handle] = []
        """Pending registrations: for a read from disk, or for new records and a timeout."""

    def start(self, broker: PolywireBroker, wait_ms: int) -> None:
        """Check the leader epoch, then read.

        If there is no data, wait for it up to ``wait_ms``. Errors are reported to the owner.
        """
        if self._epoch == ANY_EPOCH:
            self._begin(broker, wait_ms)
            return
        check = partial(self._check_epoch, broker, wait_ms)
        try:
            end = broker.epoch_end(self._partition, self._epoch, check)
        except BrokerError as error:
            self._owner.failed(self, error)
            return
        if isinstance(end, int):
            check(end)
        else:
            self._waits.append(end)

    def _check_epoch(self, broker: PolywireBroker, wait_ms: int, end: int | BrokerError) -> None:
        self._waits.clear()
        last_offset = max(self._offset, self._offset_end)
        if isinstance(end, BrokerError):
            self._owner.failed(self, end)
        elif last_offset > end:
            self._owner.failed(self, _epoch_ended(self._partition, self._epoch, end, last_offset))
        else:
            self._begin(broker, wait_ms)

    @cython.cfunc
    def _begin(self, broker: PolywireBroker, wait_ms: cython.longlong) -> None:
        try:
            if wait_ms <= 0 or self._offset_end == self._offset:
                self._owner.ready(self)
                return
            pending = broker.when_current(self._partition, partial(self._wait_or_read, broker, wait_ms))
        except BrokerError as error:
            self._owner.failed(self, error)
            return
        if pending is None:
            self._wait_or_read(broker, wait_ms, None)
        else:
            self._waits.append(pending)

    def _wait_or_read(self, broker: PolywireBroker, wait_ms: int, error: BrokerError | None) -> None:
        """Wait for data if there is none. Called when the partition's offsets are up to date."""
        self._waits.clear()
        log = self._partition.log
        if error is None and log.readable_offset <= self._offset <= log.next_offset:
            try:
                self._wait(broker, min(wait_ms, WAIT_MS_MAX))
            except BrokerError as missing:
                error = missing
        elif error is None:
            self._owner.ready(self)
        if error is not None:
            self._owner.failed(self, error)

    @property
    def holds_bytes(self) -> bool:
        """Whether data for the next frame was read and is kept in memory."""
        return self._read is not None

    @cython.ccall
    @cython.exceptval(-1, check=False)
    def prepare(self, broker: PolywireBroker) -> cython.bint:
        """Read the data of the next frame.

        Return whether it is available; if not, the owner's ``ready`` is called later. Raises BrokerError.
        """
        if self.over or self._read is not None:
            return True
        if not self._waits:
            bytes_max = ANSWER_BYTES_MAX if self._bytes_left is None else min(ANSWER_BYTES_MAX, self._bytes_left)
            end = self._offset_end if self._offset_end >= 0 else None
            read = broker.fetch(self._partition, self._offset, bytes_max=bytes_max, then=self._arrived, offset_end=end)
            if isinstance(read, Read):
                self._read = read
            else:
                self._waits.append(read)
        return self._read is not None

    @cython.ccall
    def advance(self, broker: PolywireBroker, output: Output) -> None:
        """Write the next frame if its data is available.

        If not, the owner's ``ready`` is called later. Raises BrokerError.
        """
        if not self.over and self.prepare(broker) and self._read is not None:
            read, self._read = self._read, None
            self._write(read, output)

    def cancel(self, output: Output) -> None:
        """End the fetch with an empty last frame."""
        if not self.over:
            self.drop()
            output.write(self._last_frame(self._partition.log.readable_offset))
            self._owner.ended(self)

    def drop(self) -> None:
        """End the fetch without another frame."""
        self.over = True
        self._stop_waiting()
        if self._read is not None:
            self._read.pin.release()
            self._read = None

    @cython.cfunc
    def _wait(self, broker: PolywireBroker, wait_ms: cython.longlong) -> None:
        self._waits.append(broker.wait(self._partition, self._offset, self._woken))
        self._waits.append(broker.loop.call_later(wait_ms / 1000, self._woken))

    @cython.cfunc
    def _stop_waiting(self) -> None:
        for wait in self._waits:
            wait.cancel()
        self._waits.clear()

    def _woken(self) -> None:
        self._stop_waiting()
        self._owner.woken(self)

    def _arrived(self, result: Read | BrokerError) -> None:
        self._waits.clear()
        if isinstance(result, BrokerError):
            self._owner.failed(self, result)
        else:
            self._read = result
            self._owner.ready(self)

    @cython.cfunc
    def _write(self, read: Read, output: Output) -> None:
        size = sum([len(chunk) for chunk in read.chunks])
        exceeds = self._started and self._bytes_left is not None and size > self._bytes_left
        if size == 0 or exceeds:
            read.pin.release()
            self.over = True
            output.write(self._last_frame(read.readable_offset))
            self._owner.ended(self)
            return
        if self._offset_end < 0:
            # Without ``offset_end``, the range ends at the readable offset of the first read. Otherwise a busy producer
            # would keep the fetch open forever.
            self._offset_end = read.readable_offset
        self._started = True
        self._offset = read.next_offset
        if self._bytes_left is not None:
            self._bytes_left -= size
        more = self._offset < min(self._offset_end, read.readable_offset) and (
            self._bytes_left is None or self._bytes_left > 0
        )
        chunks: Sequence[Buffer] = read.chunks
        if not self._bodies:
            chunks = [headers_of(chunk) for chunk in chunks]
            size = sum([len(chunk) for chunk in chunks])
        head = encode_head(
            Verb.FETCH,
            self.correlation,
            Fetched(self._offset, read.readable_offset),
            payload_bytes=size,
            flags=MORE if more else 0,
        )
        output.write_many([head, *chunks], read.pin.release)
        if more:
            self._owner.ready(self)
        else:
            self.over = True
            self._owner.ended(self)

    def _last_frame(self, readable_offset: int) -> bytes:
        return encode_head(Verb.FETCH, self.correlation, Fetched(self._offset, readable_offset))


def check_range(partition: Partition, head: OffsetRange) -> None:
    """Raise Conflict if the partition was deleted and created again, and Invalid for an invalid range."""
    if head.offset < 0 or (0 <= head.offset_end < head.offset):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"range is empty offset={head.offset} offset_end={head.offset_end}")
    if head.incarnation not in (ANY_INCARNATION, partition.incarnation):
        raise Conflict(
            ErrorCode.TOPIC_REPLACED,
            f"the partition was deleted and created again topic={head.name} partition={head.partition} "
            f"incarnation={partition.incarnation} asked={head.incarnation}",
        )


def check_identity(partition: Partition, head: OffsetRange) -> None:
    """Raise like ``check_range``, and raise Conflict if records of the range were lost when a new leader epoch began."""
    check_range(partition, head)
    if head.epoch == ANY_EPOCH:
        return
    end = partition.log.epoch_end(head.epoch)
    last_offset = max(head.offset, head.offset_end)
    if last_offset > end:
        raise _epoch_ended(partition, head.epoch, end, last_offset)


def _epoch_ended(partition: Partition, epoch: int, end: int, last_offset: int) -> Conflict:
    return Conflict(
        ErrorCode.EPOCH_ENDED,
        f"records after the end of an epoch were lost topic={partition.topic.name.full} partition={partition.number} "
        f"epoch={epoch} end={end} asked={last_offset}",
    )
