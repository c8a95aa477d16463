"""CONSUME of the legacy dialect: values from a byte offset on, each in a frame of its own (spec: cursus#consume-of-the-legacy-dialect).

A byte offset counts the frames of the values before: four bytes and the value, from the partition's first record on. It is made of the log's
Kafka 0.7 addresses, which count ten bytes and the value.

Promises: reading begins at a record or is refused; one answer has few bytes, one value always; nothing of a read is used after its pin was
released. Must not know: sockets.
"""

from __future__ import annotations

from typing import Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import NO_OFFSET, Read
from polywire.protocols.cursus.messages import PREFIX_BYTES, Dialect, Refused, Request
from polywire.protocols.cursus.read_arguments import (
    failed,
    given_offset,
    partition_number,
    readable_partition,
    readable_topic,
)
from polywire.protocols.cursus.reply_batch import ReplyBatch
from polywire.protocols.cursus.session import CursusSession, Reply
from polywire.types import Buffer

READ_BYTES_MAX: Final = 64 * 1024  # asked of the log at a time
HEAD_BYTES: Final = 6  # that a message has in the log's addresses beyond the length of its frame
LOOKUPS_MAX: Final = 64  # for one byte offset: each gets nearer by four tenths of the way, or more
BYTE_POSITIONS_MAX: Final = 1_024  # partitions of which it is remembered where the latest reader stopped


def consume_values(session: CursusSession, request: Request) -> Reply | None:
    """CONSUME: an answer of several frames, and the connection closes when nothing further is asked."""
    if len(request.words) != 3:
        raise Refused(
            "invalid_consume_syntax",
            legacy="invalid CONSUME syntax. Expected: CONSUME <topic> <partition> <offset>",
        )
    number = partition_number(request.options["partition"])
    start = given_offset(request)
    assert start is not None, "there are three words"
    topic = readable_topic(session, request.options["topic"])
    ValueRead(session, readable_partition(topic, number), start).begin()
    return None


class ValueRead:
    """One CONSUME under way.

    Invariant: answered once; ``_offset`` is a record's once reading has begun, and at or before the wanted one's until then.
    """

    __slots__ = ("_answer", "_lookups", "_offset", "_partition", "_reply_batch", "_session", "_start")

    def __init__(self, session: CursusSession, partition: Partition, start: int) -> None:
        """start: the byte offset to begin at; 0 means the first record that is kept."""
        self._session = session
        self._partition = partition
        self._start = start
        self._offset = partition.log.first_offset
        self._lookups = 0
        self._reply_batch: ReplyBatch | None = None
        self._answer = session.later(Dialect.LEGACY, blocking=True)

    def begin(self) -> None:
        """Find the record that begins at the byte offset, and read."""
        log = self._partition.log
        if self._start >= log.next_address - HEAD_BYTES * log.next_offset:
            self._offset = log.next_offset
        elif self._start:
            byte, offset = self._session.state.byte_positions.get(self._partition.incarnation, (0, 0))
            if byte <= self._start:
                self._offset = max(self._offset, offset)
            self._look_up()
            return
        self._read()

    def _look_up(self) -> None:
        """Go nearer.

        The wanted record has the address ``start + HEAD_BYTES * offset``. With an offset before its own that is an address before its own,
        but not before that offset's, so the record there is no further from it.
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
        """The record had to be fetched."""
        if isinstance(found, BrokerError):
            self._fail(found)
        elif self._is_nearer(found):
            self._look_up()

    def _is_nearer(self, found: int) -> bool:
        """Take up what was found; False when there is nothing further to look for."""
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
        """This is where the record begins that has the address looked for."""
        if isinstance(address, BrokerError):
            self._fail(address)
        elif address == self._start + HEAD_BYTES * self._offset:
            self._read()
        else:  # it is less than ten bytes before the wanted one, and may be followed by records of four
            self._offset += 1
            self._look_up()

    def _read(self) -> None:
        """Fill an answer."""
        if self._session.closed:
            return
        self._reply_batch = ReplyBatch(self._session.state.reply_buffers, None, 0)
        self._go_on()

    def _go_on(self) -> None:
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
        """The bytes had to be fetched."""
        if isinstance(read, BrokerError):
            self._fail(read)
            return
        try:
            wanted = self._take(read, read.readable_offset)
        except BrokerError as error:
            self._fail(error)
            return
        if wanted:
            self._go_on()
        else:
            self._finish()

    def _take(self, read: Read, end: int) -> bool:
        """Add what was read; False when the answer is full."""
        reply_batch = self._reply_batch
        assert reply_batch is not None, "an answer is being filled"
        try:
            wanted = reply_batch.take(read, self._offset, end)
        finally:
            read.pin.release()
        self._offset = reply_batch.next_offset if reply_batch.written and not wanted else read.next_offset
        return wanted

    def _finish(self) -> None:
        """Answer; nothing but the end of the connection, or the answer to what is asked next, tells a peer that there is no more."""
        reply_batch, self._reply_batch = self._reply_batch, None
        assert reply_batch is not None, "an answer is filled once"
        parts, released = reply_batch.finish()
        self._remember()
        self._session.close_unused()
        if self._answer.packing is None:
            self._answer.fill(parts, released)
            return
        self._answer.ok(*_bodies(b"".join(parts)))
        if released is not None:
            released()

    def _remember(self) -> None:
        """Keep where this reader stopped: the next one mostly begins there."""
        try:
            address = self._partition.log.address_of_offset(self._offset, self._remembered)
        except BrokerError:
            return  # what is there was removed meanwhile
        if isinstance(address, int):
            self._remembered(address)

    def _remembered(self, address: int | BrokerError) -> None:
        if isinstance(address, BrokerError):
            return
        places, incarnation = self._session.state.byte_positions, self._partition.incarnation
        places.pop(incarnation, None)
        if len(places) >= BYTE_POSITIONS_MAX:
            del places[next(iter(places))]
        places[incarnation] = address - HEAD_BYTES * self._offset, self._offset

    def _refuse(self) -> None:
        self._answer.refuse(failed("no message begins there", legacy="invalid offset: no message begins there"))

    def _fail(self, error: BrokerError) -> None:
        """The log cannot go on; what lies before is sound."""
        if self._reply_batch is not None and self._reply_batch.written:
            self._finish()
            return
        if self._reply_batch is not None:
            self._reply_batch.drop()
            self._reply_batch = None
        self._answer.refuse(failed(error.message, legacy=f"failed to read messages from disk: {error.message}"))


def _bodies(frames: Buffer) -> list[bytes]:
    """The bodies of frames in a row."""
    view, at, found = memoryview(frames), 0, []
    while at < len(view):
        end = at + PREFIX_BYTES + int.from_bytes(view[at : at + PREFIX_BYTES], "big")
        found.append(bytes(view[at + PREFIX_BYTES : end]))
        at = end
    return found
