"""CONSUME of the legacy dialect, which returns each value in a frame (spec: cursus#consume-of-the-legacy-dialect).

A request names a byte offset: the total size of the frames of all earlier values of the partition. A frame consists of
a length of four bytes and the value. To find the record, the broker converts the byte offset to a Kafka 0.7 address, in
which a record counts as ten bytes and its value. A byte offset at which no record begins is rejected.
"""

from __future__ import annotations

from typing import Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import NO_OFFSET, Read
from polywire.protocols.cursus.context import ReadLocation
from polywire.protocols.cursus.messages import Dialect, Refused, Request, bodies_of
from polywire.protocols.cursus.read_arguments import (
    failed,
    given_offset,
    partition_number,
    readable_partition,
    readable_topic,
)
from polywire.protocols.cursus.reply_batch import ReplyBatch
from polywire.protocols.cursus.session import CursusSession, Reply

READ_BYTES_MAX: Final = 64 * 1024  # bytes read from the log at a time
HEAD_BYTES: Final = 6  # for each record, the address grows by this many bytes more than the byte offset
LOOKUPS_MAX: Final = 64  # limit for the lookups of one byte offset; each lookup reduces the distance by 40 % or more
BYTE_POSITIONS_MAX: Final = 1_024  # partitions for which the end of the last read is remembered


def consume_values(session: CursusSession, request: Request) -> Reply | None:
    """CONSUME of the oldest clients: send each value in a frame of its own.

    The client recognises the end of the response by the end of the connection. So the connection is closed, unless
    another request follows soon.
    """
    if len(request.words) != 3:
        raise Refused(
            "invalid_consume_syntax",
            legacy="invalid CONSUME syntax. Expected: CONSUME <topic> <partition> <offset>",
        )
    number = partition_number(request.options["partition"])
    start = given_offset(request)
    assert start is not None, "a positional CONSUME has three words"
    topic = readable_topic(session, request.options["topic"])
    partition = readable_partition(topic, number)
    session.broker.require_current([partition])
    ValueRead(session, partition, start).begin()
    return None


class ValueRead:
    """A CONSUME request of the oldest clients. ``start`` is a byte offset; 0 means the first retained record."""

    __slots__ = ("_answer", "_lookups", "_offset", "_partition", "_reply_batch", "_session", "_start")

    def __init__(self, session: CursusSession, partition: Partition, start: int) -> None:
        self._session = session
        self._partition = partition
        self._start = start
        # the next record to read; before reading begins, a record at or before the requested one
        self._offset = partition.log.first_offset
        self._lookups = 0
        self._reply_batch: ReplyBatch | None = None
        self._answer = session.later(Dialect.LEGACY, blocking=True)

    @property
    def _location(self) -> ReadLocation:
        return self._partition.topic.id, self._partition.number, self._partition.incarnation

    def begin(self) -> None:
        log = self._partition.log
        if self._start >= log.next_address - HEAD_BYTES * log.next_offset:
            self._offset = log.next_offset
        elif self._start:
            byte, offset = self._session.state.byte_positions.get(self._location, (0, 0))
            if byte <= self._start:
                self._offset = max(self._offset, offset)
            self._look_up()
            return
        self._read()

    def _look_up(self) -> None:
        """Look up a record that is nearer to the requested byte offset than the last one that was found.

        If that record has offset n, look up the Kafka 0.7 offset that is the requested byte offset plus ``HEAD_BYTES *
        n``. The record found there is at or before the requested one, because the requested record's own offset is at
        least n.
        """
        while self._lookups < LOOKUPS_MAX:
            self._lookups += 1
            address = self._start + HEAD_BYTES * self._offset
            found = self._partition.log.offset_of_address(address, self._found, covering=True)
            if not isinstance(found, int):
                return
            if not self._is_nearer(found):
                return
        self._refuse()

    def _found(self, found: int | BrokerError) -> None:
        if isinstance(found, BrokerError):
            self._fail(found)
        elif self._is_nearer(found):
            self._look_up()

    def _is_nearer(self, found: int) -> bool:
        """Return whether a lookup found a record nearer to the requested one.

        If not, read from the found record if it is the requested one, look up the next record, or end the search.
        """
        if found > self._offset:
            self._offset = found
            return True
        if found == NO_OFFSET or found < self._offset:
            self._refuse()
            return False
        try:
            address = self._partition.log.address_of_offset(found, self._reached)
        except BrokerError as error:
            self._fail(error)
            return False
        if isinstance(address, int):
            self._reached(address)
        return False

    def _reached(self, address: int | BrokerError) -> None:
        if isinstance(address, BrokerError):
            self._fail(address)
        elif address == self._start + HEAD_BYTES * self._offset:
            self._read()
        else:  # less than ten bytes before the requested record, which may be one of the next if values are empty
            self._offset += 1
            self._look_up()

    def _read(self) -> None:
        if self._session.closed:
            return
        self._reply_batch = ReplyBatch(self._session.state.reply_buffers, None, 0)
        self._continue()

    def _continue(self) -> None:
        broker, end = self._session.broker, self._partition.log.readable_offset
        try:
            while self._offset < end:
                read = broker.fetch(
                    self._partition, self._offset, bytes_max=READ_BYTES_MAX, then=self._read_later, offset_end=end
                )
                if not isinstance(read, Read):
                    return
                if not self._take(read, end):
                    break
        except BrokerError as error:
            self._fail(error)
            return
        self._finish()

    def _read_later(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            self._fail(read)
            return
        try:
            wanted = self._take(read, read.readable_offset)
        except BrokerError as error:
            self._fail(error)
            return
        if wanted:
            self._continue()
        else:
            self._finish()

    def _take(self, read: Read, end: int) -> bool:
        """Add values of a read. Return False if the response is full."""
        reply_batch = self._reply_batch
        assert reply_batch is not None, "an answer is being filled"
        try:
            wanted = reply_batch.take(read, self._offset, end)
        finally:
            read.pin.release()
        self._offset = reply_batch.next_offset if reply_batch.written and not wanted else read.next_offset
        return wanted

    def _finish(self) -> None:
        """Send the response. The client recognises its end by the end of the connection, or by the next response."""
        reply_batch, self._reply_batch = self._reply_batch, None
        assert reply_batch is not None, "an answer is filled once"
        parts, released = reply_batch.finish()
        self._remember()
        self._session.close_unused()
        if self._answer.packing is None:
            self._answer.fill(parts, released)
            return
        self._answer.ok(*bodies_of(b"".join(parts)))
        if released is not None:
            released()

    def _remember(self) -> None:
        """Store where this read ended, because the next one usually begins there."""
        try:
            address = self._partition.log.address_of_offset(self._offset, self._remembered)
        except BrokerError:
            return  # the records there were removed in the meantime
        if isinstance(address, int):
            self._remembered(address)

    def _remembered(self, address: int | BrokerError) -> None:
        if isinstance(address, BrokerError):
            return
        places, place = self._session.state.byte_positions, self._location
        places.pop(place, None)
        if len(places) >= BYTE_POSITIONS_MAX:
            del places[next(iter(places))]
        places[place] = address - HEAD_BYTES * self._offset, self._offset

    def _refuse(self) -> None:
        self._answer.refuse(failed("no message begins there", legacy="invalid offset: no message begins there"))

    def _fail(self, error: BrokerError) -> None:
        """Send the values that were read before the log failed. If there are none, send the error."""
        if self._reply_batch is not None and self._reply_batch.written:
            self._finish()
            return
        if self._reply_batch is not None:
            self._reply_batch.drop()
            self._reply_batch = None
        self._answer.refuse(failed(error.message, legacy=f"failed to read messages from disk: {error.message}"))
