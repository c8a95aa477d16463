"""Acquire records of a share group from several partitions, for the protocols that have share groups.

* A request reads one partition at a time.
* Records are sent only after the broker has stored that they were delivered.
* Available records are returned immediately. If there are none, the request waits until there is one.
* Acknowledgements of a request take effect before it acquires records. If one of them waits for a dead letter, which may
  take long, the request acquires no records, because their locks would expire meanwhile.

This module is compiled.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol

import cython

from polywire.broker.api import Records
from polywire.broker.groups.share_groups import ShareGroups
from polywire.broker.owners import Caller
from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Handle, Read
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.protocols.runtime.slices import Slices, rest_in_slices
from polywire.records.columns import BatchHeader
from polywire.records.compression import expand_body
from polywire.records.reshape import keep
from polywire.records.rows import Rows
from polywire.types import Buffer

READ_BYTES_MIN: Final = 4096  # smallest useful read, because a batch has a header in addition to its records
PARTITION_BYTES_MAX: Final = 1024 * 1024  # records of one partition in a response; a single record may be larger


def chosen(header: BatchHeader, batch: memoryview, runs: Sequence[tuple[int, int, int]]) -> Buffer | None:
    """Return a batch with those records of a stored batch that are in the runs, or None if there are none.

    A run is (first offset, last offset, delivery count).
    """
    base: cython.longlong = header.base_offset
    end: cython.longlong = header.next_offset
    rows = array("i")
    plain: Buffer = batch
    for first, last, _ in runs:
        start: cython.longlong = max(first, base)
        stop: cython.longlong = min(last + 1, end)
        if start >= stop:
            continue
        if stop - start == end - base:
            return batch
        if not rows:
            plain = expand_body(batch)
        if header.record_count == end - base:
            rows.extend(range(start - base, stop - base))
        else:
            found = Rows(plain)
            rows.extend([i for i in range(found.count) if start <= found.offset(i) < stop])
    return keep(plain, rows, base_offset=base, base_address=header.base_address) if rows else None


class SharingBroker(Records, WireBroker, Protocol):
    """The methods of the broker that acquiring records needs."""

    @property
    def shares(self) -> ShareGroups: ...

    @property
    def uncommitted(self) -> bool: ...


@cython.cclass
class Acquiring:
    """A request for records of a share group in progress.

    Attributes:
        group, member: the share group and its member that acquires the records.
        bytes, records: what the response has so far.
        must_respond: whether the request must not wait for records, because it has another result.
        acquires: whether the request acquires records. Set it before ``read``.
    """

    if not cython.compiled:  # when compiled, acquiring.pxd declares the fields
        __slots__ = (
            "_broker",
            "_by",
            "_bytes_max",
            "_deadline",
            "_finds",
            "_has_committed",
            "_is_finished",
            "_number",
            "_pending",
            "_places",
            "_read_handle",
            "_records_max",
            "_slices",
            "_stops",
            "_ticket",
            "acquires",
            "bytes",
            "group",
            "member",
            "must_respond",
            "records",
        )

    def __init__(
        self,
        broker: SharingBroker,
        *,
        group: str,
        member: str,
        by: Caller,
        records_max: int,
        bytes_max: int,
        wait_s: float,
    ) -> None:
        self.group: Final = group
        self.member: Final = member
        self._broker: Final = broker
        self._by: Final = by
        self._records_max: Final = records_max
        self._bytes_max: Final = bytes_max
        self._deadline: Final = broker.clock.monotonic() + wait_s
        self._stops: list[Handle] = []
        self._slices: Slices[None] | None = None
        self._read_handle: Handle | None = None
        self._places: Sequence[Any] = ()
        self._number = 0  # partitions before this one were read
        self._finds: dict[Any, Partition] = {}
        self._pending = 0  # writes to the journal that the response waits for
        self._is_finished = False
        self._has_committed = False
        self._ticket = 0  # incremented when an operation must be ignored that was begun with an earlier ticket
        self.bytes = self.records = 0
        self.must_respond = False
        self.acquires = True

    # Overridden by protocols, which identify a partition by a place

    @cython.ccall
    def find(self, place: Any) -> Any:
        """Return a partition. Raises BrokerError if it does not exist or the client may not read it in a group."""
        return place

    def encode(
        self, read: Read, partition: Partition, offset: int, offset_end: int, *, bytes_max: int
    ) -> tuple[object, int]:
        """Encode the records of [offset, offset_end). Return them, and the offset after the last one.

        They have at most ``bytes_max`` bytes, unless the first record is larger. Raises BrokerError.
        """
        return (), offset

    @cython.ccall
    @cython.exceptval(-1, check=True)
    def add(self, place: Any, records: Any, runs: Any) -> cython.longlong:
        """Add acquired records to the response. Return their size in bytes.

        Args:
            place: their partition.
            records: the result of ``encode``.
            runs: (first offset, last offset, delivery count) of the records that were acquired.
        """
        return 0

    @cython.ccall
    def refuse(self, place: Any, error: Any) -> Any:
        """Report that a partition cannot be read, or that its records could not be acquired."""

    @cython.ccall
    def respond(self) -> Any:
        """Send the response."""

    # Progress

    @cython.ccall
    def expect(self) -> Any:
        """Delay the response until ``count`` is called once more."""
        self._pending += 1

    @cython.ccall
    def count(self) -> Any:
        self._pending -= 1
        if self._is_finished and not self._pending:
            self.respond()

    def with_pauses(self, steps: Iterator[None], then: Callable[[], None]) -> None:
        """Run the steps, then call ``then``. A few steps run immediately, many in slices."""
        slices = rest_in_slices(self._broker, steps, then)
        if slices is None:
            then()
        else:
            self._slices = slices

    @property
    def is_over(self) -> bool:
        """Whether the request has ended and only writes are pending."""
        return self._is_finished

    @cython.ccall
    def read(self, places: Any) -> Any:
        """Read these partitions, then respond."""
        if self.acquires:
            self._places = places
            self._run()
        else:
            self.finish()

    @cython.ccall
    def finish(self) -> Any:
        """Respond as soon as all writes have ended."""
        self._ticket += 1
        self._is_finished = True
        if not self._pending:
            self.respond()

    def stop(self) -> None:
        """Respond soon with what there is: the client has closed its side, and its records must not stay locked."""
        if not self._is_finished:
            self.must_respond = True
            if self._stops:
                self._woken(self._ticket)

    def cancel(self) -> None:
        """Stop without a response: the connection was closed."""
        self._ticket += 1
        self._stop_waiting()
        if self._read_handle is not None:
            self._read_handle.cancel()

    @cython.cfunc
    def _run(self) -> Any:
        self._ticket += 1
        if self._read_until(self._broker.clock.monotonic() + QUANTUM_S):
            self._broker.sliced.put(partial(self._read_on, self._ticket))

    def _read_on(self, ticket: int, end: float) -> bool:
        return ticket == self._ticket and self._read_until(end)

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _read_until(self, end: cython.double) -> cython.bint:
        """Acquire and read records until time ``end``.

        Return True if only the time is over, and False if the request waits or has ended.
        """
        now = self._broker.clock.monotonic
        while self._number < len(self._places) and not self._is_full():
            if not self._read(self._places[self._number]):
                return False
            self._number += 1
            if self._number < len(self._places) and now() >= end:
                return True
        if not self.records and not self._has_committed and self._broker.uncommitted:
            self._has_committed = True
            ticket = self._ticket
            self._broker.commit()  # earlier records of the connection must be readable
            self._number = 0
            return ticket == self._ticket and self._read_until(end)
        if self.records or self.must_respond or now() >= self._deadline:
            self.finish()
        else:
            self._wait()
        return False

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _is_full(self) -> cython.bint:
        return self.records >= self._records_max or (self.records > 0 and self.bytes >= self._bytes_max)

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _read(self, place: Any) -> cython.bint:
        """Acquire records of a partition and add them to the response. Return False if this must wait for the disk."""
        shares = self._broker.shares
        try:
            partition = self._finds[place] = self.find(place)
            begun = partial(self._arrived, self._ticket, place, partition, 0)
            handle = shares.begin(self.group, partition, begun, by=self._by)
            if handle is None:
                offset = shares.next_offset(self.group, partition)
                if offset is None:
                    return True
                read = self._broker.fetch(
                    partition,
                    offset,
                    bytes_max=max(self._space(), READ_BYTES_MIN),
                    then=partial(self._arrived, self._ticket, place, partition, offset),
                    offset_end=self._end(offset),
                )
                if isinstance(read, Read):
                    self._take(place, partition, read, offset)
                    return True
                handle = read
        except BrokerError as error:
            self._refuse(place, error)
            return True
        self._read_handle = handle
        return False

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _end(self, offset: cython.longlong) -> cython.longlong:
        """Return the offset below which records are read from ``offset`` on, so that a small request reads few."""
        return offset + self._records_max - self.records

    @cython.cfunc
    @cython.exceptval(-1, check=True)
    def _space(self) -> cython.longlong:
        return min(self._bytes_max - self.bytes, PARTITION_BYTES_MAX)

    @cython.cfunc
    def _refuse(self, place: Any, error: BrokerError) -> Any:
        self.must_respond = True
        self.refuse(place, error)

    def _arrived(
        self, ticket: int, place: Any, partition: Partition, first: int, read: Read | int | BrokerError
    ) -> None:
        """Continue after a read from disk, or after a search for the offset at which a new group begins.

        Args:
            first: offset from which the records were read. Lower ones may be available by now, which were not read.
        """
        if ticket != self._ticket:
            if isinstance(read, Read):
                read.pin.release()
            return
        self._read_handle = None
        if isinstance(read, BrokerError):
            self._refuse(place, read)
            self._number += 1
        elif isinstance(read, Read):
            offset = self._broker.shares.next_offset(self.group, partition)
            offset = None if offset is None else max(offset, first)
            if offset is None or not read.next_offset > offset >= partition.log.first_offset:
                read.pin.release()
            else:
                self._take(place, partition, read, offset)
            self._number += 1
        self._run()

    @cython.cfunc
    def _take(self, place: Any, partition: Partition, read: Read, offset: cython.longlong) -> Any:
        """Encode the records of a read, and acquire those of them that are available."""
        try:
            records, end = self.encode(read, partition, offset, self._end(offset), bytes_max=self._space())
            runs = self._broker.shares.acquire(
                self.group,
                partition,
                self.member,
                offset,
                end,
                count_max=self._records_max - self.records,
                done=partial(self._acquired, place),
                chunks=read.chunks,
            )
        except BrokerError as error:
            self._refuse(place, error)
            return
        finally:
            read.pin.release()
        if runs:
            self._pending += 1
            self.bytes += self.add(place, records, runs)
            for first, last, _ in runs:
                self.records += last - first + 1

    def _acquired(self, place: Any, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self._refuse(place, result)
        self.count()

    # Waiting

    def _wait(self) -> None:
        broker = self._broker
        wake: Callable[[], None] = partial(self._woken, self._ticket)
        self._stops.append(broker.loop.call_later(max(self._deadline - broker.clock.monotonic(), 0.0), wake))
        self.with_pauses(self._wait_for_each(self._ticket, wake), _nothing)

    def _wait_for_each(self, ticket: int, wake: Callable[[], None]) -> Iterator[None]:
        for place in self._places:
            if ticket != self._ticket:  # it was notified meanwhile
                return
            partition = self._finds.get(place)
            if partition is None:
                continue
            try:
                self._stops.append(self._broker.shares.wait(self.group, partition, self.member, wake))
            except BrokerError:  # the topic was deleted in the meantime
                self._stops.append(self._broker.loop.call_soon(wake))
                return
            yield None

    def _woken(self, ticket: int) -> None:
        if ticket == self._ticket:
            self._stop_waiting()
            self._number = 0
            self._run()

    def _stop_waiting(self) -> None:
        stops, self._stops = self._stops, []
        for stop in stops:
            stop.cancel()
        if self._slices is not None:
            self._slices.cancel()


def _nothing() -> None:
    pass
