"""A FETCH or MULTIFETCH request in progress: read from addresses and build the response.

Reads never block the event loop. One call per read copies the records into the buffer of the response. The response has
a size limit, whatever was requested, which the partitions of the request share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from polywire.broker.api import Pending
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Corrupt, ErrorCode, Missing
from polywire.log.base import NO_OFFSET, Handle, Read
from polywire.protocols.kafka07 import encoder, holes
from polywire.protocols.kafka07.context import Kafka07Broker
from polywire.protocols.kafka07.errors import wire_error
from polywire.protocols.kafka07.messages import Fetch, FetchEntry, WireError, answer_head
from polywire.protocols.kafka07.produce import Authorize, topic_name
from polywire.protocols.runtime.reply_buffers import ReplyBuffers
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.batch import longest_payload
from polywire.records.columns import BATCH_BYTES_MAX
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields

BLOCK_BYTES: Final = 1024 * 1024 + 4096  # size of a buffer for responses; fits a requested megabyte and its head
# size limit of a MULTIFETCH response, which its entries share; later entries get less
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
SHARE_BYTES_MIN: Final = 64 * 1024  # minimum size of an entry's share
# entries beyond this size get no data, because long first records may exceed their share
ANSWER_BYTES_HARD_MAX: Final = 64 * 1024 * 1024
# how much more is read than requested, because stored batches have headers and may begin before the address
READ_OVERHEAD_BYTES: Final = 64 * 1024
# an entry waits for data that must be read from disk only if it has fewer bytes than this
SMALL_ENTRY_BYTES: Final = 64 * 1024
READS_MAX: Final = 8  # reads for one entry
BRIDGES_MAX: Final = 32  # filled holes per entry; a wrapper takes about 0.1 ms
READ_CURSORS_MAX: Final = 256  # partitions whose read position is remembered per connection
HEAD_BYTES: Final = 6
ENTRY_HEAD_BYTES: Final = 10

NOT_BEGUN: Final = -1

Parts = Sequence[memoryview]
Release = Callable[[], None]

_place: Final = header_fields("length", "base_offset")


class ReadCursor(NamedTuple):
    """The position at which a client will probably continue to read.

    Attributes:
        address: Kafka 0.7 offset (a byte position) of the next record.
        offset: Polywire's offset of the batch that contains it.
    """

    address: int
    offset: int

    def serves(self, address: int, first_offset: int) -> bool:
        """Return whether a fetch from this Kafka 0.7 offset can begin to read at ``offset``."""
        return self.address == address and self.offset >= first_offset


class FetchReply:
    """Builds the response to a FETCH or MULTIFETCH request.

    Stored data is copied, so no memory of the log stays in use.
    """

    __slots__ = (
        "_at",
        "_authorize",
        "_begun",
        "_blocks",
        "_bridges",
        "_broker",
        "_capacity",
        "_done",
        "_entry_at",
        "_fetch",
        "_number",
        "_parts",
        "_read_cursors",
        "_reads",
        "_refreshed_entry",
        "_reply_buffers",
        "_share",
        "_size",
        "_waits_for",
        "_written",
    )

    def __init__(
        self,
        broker: Kafka07Broker,
        reply_buffers: ReplyBuffers,
        read_cursors: dict[Partition, ReadCursor],
        fetch: Fetch,
        done: Callable[[Parts, Release], None],
        *,
        authorize: Authorize,
    ) -> None:
        """Prepare the response.

        Args:
            read_cursors: the connection's cursors, by partition.
            done: called with the response, and a function that returns the response's buffers to the pool.
            authorize: raises Denied if the client may not read a topic.
        """
        self._authorize = authorize
        self._broker = broker
        self._reply_buffers = reply_buffers
        self._read_cursors = read_cursors
        self._fetch = fetch
        self._done = done
        self._share = max(ANSWER_BYTES_MAX // max(len(fetch.entries), 1), SHARE_BYTES_MIN)
        self._blocks: list[bytearray] = []  # buffers of the response; only the last one is written
        self._capacity = 0  # bytes of the last block that may be used
        self._parts: list[memoryview] = []  # the response so far, without ``_blocks[-1][_begun:_at]``
        self._begun = self._at = 0
        self._entry_at = NOT_BEGUN  # position of the current entry in the last block
        self._size = 0  # bytes of complete entries
        self._number = 0  # of the current entry
        self._refreshed_entry = NOT_BEGUN  # the entry for which the offsets of its partition were requested last
        self._written = 0  # bytes of records in the current entry
        self._reads = 0  # for the current entry
        self._bridges = 0  # holes filled in the current entry
        self._waits_for: Handle | None = None  # look-up, read or time slice for which the response waits

    def run(self) -> None:
        """Write the response for each requested partition, until one must wait for data.

        After the last one, call ``done``.
        """
        self._waits_for = None  # the handle is obsolete; it refers to this response and its blocks
        if not self._blocks:
            self._open_block(BLOCK_BYTES)
            self._at += HEAD_BYTES if self._fetch.is_multiple else 0
        now = self._broker.clock.monotonic
        end = now() + QUANTUM_S
        while self._number < len(self._fetch.entries):
            if self._number and now() >= end:
                self._waits_for = self._broker.loop.call_soon(self.run)
                return
            if not self._write_entry(self._fetch.entries[self._number]):
                return
        self._finish()

    def cancel(self) -> None:
        if self._waits_for is not None:
            self._waits_for.cancel()
            self._waits_for = None

    # One entry

    def _write_entry(self, entry: FetchEntry) -> bool:
        """Write the response for one partition. Return False if it must wait for data; ``run`` is then called later."""
        try:
            partition = self._partition(entry)
            if partition is not None and self._refreshed_entry != self._number:
                self._waits_for = self._broker.when_current(partition, self._refreshed)
                if self._waits_for is not None:
                    return False
            if partition is None or not self._has_bytes(partition, entry):
                self._put_code(WireError.NONE)
                return True
            return self._seek(partition, entry)
        except Pending as pending:
            self._waits_for = pending.then(self.run)
            return False
        except BrokerError as error:
            self._refuse(error)
            return True

    def _refreshed(self, result: BrokerError | None) -> None:
        self._refreshed_entry = self._number
        if result is not None:
            self._refuse(result)
        self.run()

    def _partition(self, entry: FetchEntry) -> Partition | None:
        """Return the partition; None if the topic does not exist.

        Raises Missing(PARTITION_MISSING), Invalid(INVALID_TOPIC) or Denied.
        """
        name = topic_name(entry.topic)
        self._authorize(Action.FETCH, name)
        if not 0 <= entry.partition < self._broker.partition_count(name):
            raise Missing(ErrorCode.PARTITION_MISSING, f"no such partition topic={name!r} partition={entry.partition}")
        topic = self._broker.find_topic(name)
        return None if topic is None else topic.partitions[entry.partition]

    def _has_bytes(self, partition: Partition, entry: FetchEntry) -> bool:
        """Return whether the response has space, and the log has data from the requested offset on.

        Raises Missing(OFFSET_OUT_OF_RANGE) for an offset outside the log.
        """
        log = partition.log
        if log.next_offset == 0:
            return False  # an empty topic accepts any address (spec: kafka-0.7#reactions)
        if not 0 <= entry.address <= log.next_address:
            raise _out_of_range(entry.address)
        return entry.address < log.next_address and self._size < ANSWER_BYTES_HARD_MAX

    def _seek(self, partition: Partition, entry: FetchEntry) -> bool:
        cursor = self._read_cursors.get(partition)
        if cursor is not None and cursor.serves(entry.address, partition.log.first_offset):
            return self._read_from(partition, entry, cursor.offset)
        found = partition.log.offset_of_address(entry.address, partial(self._found, partition, entry), covering=True)
        if isinstance(found, int):
            return self._read_from(partition, entry, found)
        self._waits_for = found
        return False

    def _found(self, partition: Partition, entry: FetchEntry, found: int | BrokerError) -> None:
        try:
            if isinstance(found, BrokerError):
                raise found
            is_complete = self._read_from(partition, entry, found)
        except BrokerError as error:
            self._refuse(error)
            is_complete = True
        if is_complete:
            self.run()

    def _read_from(self, partition: Partition, entry: FetchEntry, offset: int) -> bool:
        if offset == NO_OFFSET:
            raise _out_of_range(entry.address)
        if entry.bytes_max == 0 or offset >= partition.log.readable_offset:
            self._put_code(WireError.NONE)
            return True
        wanted = HEAD_BYTES + min(entry.bytes_max, self._share)
        if self._capacity - self._at < min(wanted, SHARE_BYTES_MIN):
            self._open_block(BLOCK_BYTES)
        self._begin_entry()
        self._written = self._reads = self._bridges = 0
        return self._read_on(partition, entry, offset)

    def _bytes_wanted(self, entry: FetchEntry) -> int:
        return min(entry.bytes_max, self._share, BLOCK_BYTES) + READ_OVERHEAD_BYTES

    def _space(self, entry: FetchEntry) -> int:
        return min(min(entry.bytes_max, self._share) - self._written, self._capacity - self._at)

    def _read_on(self, partition: Partition, entry: FetchEntry, offset: int) -> bool:
        """Read and write until the partition's response is complete.

        Return False if data must be read from disk first.
        """
        while True:
            then = partial(self._arrived, partition, entry, offset)
            try:
                read = self._broker.fetch(partition, offset, bytes_max=self._bytes_wanted(entry), then=then)
            except Corrupt:
                if not self._written:
                    raise
                break  # the records before the damage are intact
            if not isinstance(read, Read):
                self._waits_for = read
                if self._written < min(entry.bytes_max, SMALL_ENTRY_BYTES):
                    return False
                read.cancel()  # send what is available; the rest will be in memory when the client reads again
                break
            if not self._write(partition, entry, offset, read):
                break
            offset = read.next_offset
        self._end_entry()
        return True

    def _arrived(self, partition: Partition, entry: FetchEntry, offset: int, read: Read | BrokerError) -> None:
        try:
            if isinstance(read, BrokerError) and not (isinstance(read, Corrupt) and self._written):
                raise read
            if isinstance(read, Read) and self._write(partition, entry, offset, read):
                is_complete = self._read_on(partition, entry, read.next_offset)
            else:
                self._end_entry()
                is_complete = True
        except BrokerError as error:
            self._refuse(error)
            is_complete = True
        if is_complete:
            self.run()

    def _write(self, partition: Partition, entry: FetchEntry, offset: int, read: Read) -> bool:
        """Write the records of a read. Return whether to read more for this partition.

        Raises Missing if compaction removed the record at the requested offset, and Corrupt for a damaged batch.
        """
        try:
            reason, stopped_at = self._put(list(read.chunks), entry)
        finally:
            read.pin.release()
        self._reads += 1
        if reason == encoder.HOLE and self._written == 0:
            raise _out_of_range(entry.address)
        done = reason == encoder.DONE
        if done:
            stopped_at = read.next_offset
        self._remember(partition, ReadCursor(entry.address + self._written, stopped_at))
        if not done or read.next_offset >= read.readable_offset:
            return False
        return self._written == 0 or (self._space(entry) > 0 and self._reads < READS_MAX)

    def _put(self, chunks: list[memoryview], entry: FetchEntry) -> tuple[int, int]:
        """Write records until the partition's size limit.

        Return the reason for the end, and Polywire's offset of the batch at which it stopped. The first record is sent
        even if it is larger than the limit.
        """
        while True:
            limit = self._space(entry)
            address = entry.address + self._written
            reason, size, number, position = encoder.put_entries(
                chunks, address, limit, self._blocks[-1], self._at, written=self._written
            )
            if reason == encoder.CUT and limit < entry.bytes_max:
                self._move_to_larger_block(entry, chunks[number][position:])
                continue
            self._at += size
            self._written += size
            if reason == encoder.DONE:
                return reason, NO_OFFSET
            chunk = chunks[number]
            length, offset = _place(chunk, position)
            if reason == encoder.HOLE and self._bridge([chunk[position:], *chunks[number + 1 :]], entry):
                continue
            if reason != encoder.PACKED:
                return reason, offset
            plain = memoryview(expand_body(chunk[position : position + length], BATCH_BYTES_MAX))
            chunks = [plain, chunk[position + length :], *chunks[number + 1 :]]

    def _bridge(self, chunks: list[memoryview], entry: FetchEntry) -> bool:
        """Write messages that replace the gap left by compaction before the first of these records.

        Returns False if the response must end before the gap. The next response then begins with the gap.
        """
        address, limit = entry.address + self._written, self._space(entry)
        found = holes.hole_at(chunks[0], address)
        if found is None or self._bridges == BRIDGES_MAX:
            return False
        self._bridges += 1
        hole, record_bytes = found
        if not self._written and hole < limit < min(entry.bytes_max, hole + record_bytes):
            self._move_to_larger_block(entry, chunks[0], hole)
            limit = self._space(entry)
        begun = self._written > 0
        bridge = holes.bridge(chunks, address, limit, hole=hole, record_bytes=record_bytes, begun=begun)
        if bridge is None:
            return False
        self._blocks[-1][self._at : self._at + len(bridge)] = bridge
        self._at += len(bridge)
        self._written += len(bridge)
        return True

    def _move_to_larger_block(self, entry: FetchEntry, batch: memoryview, hole: int = 0) -> None:
        """Begin the partition's response again in a larger buffer.

        The buffer has space for the first record, and for the gap before it. The record is sent completely if the
        client requested that many bytes (spec: kafka-0.7#what-breaks).
        """
        self._at = self._entry_at
        size = min(entry.bytes_max, hole + longest_payload(batch) + ENTRY_HEAD_BYTES)
        self._share = max(self._share, size)
        self._open_block(HEAD_BYTES + size)
        self._begin_entry()

    def _remember(self, partition: Partition, cursor: ReadCursor) -> None:
        if len(self._read_cursors) >= READ_CURSORS_MAX and partition not in self._read_cursors:
            self._read_cursors.clear()
        self._read_cursors[partition] = cursor

    # Bytes of the response

    def _open_block(self, size: int) -> None:
        if self._at > self._begun:
            self._parts.append(memoryview(self._blocks[-1])[self._begun : self._at])
        self._capacity = max(size, BLOCK_BYTES)
        self._blocks.append(self._reply_buffers.take(self._capacity))
        self._begun = self._at = 0

    def _begin_entry(self) -> None:
        self._entry_at = self._at
        self._at += HEAD_BYTES

    def _end_entry(self) -> None:
        self._blocks[-1][self._entry_at : self._entry_at + HEAD_BYTES] = answer_head(self._written)
        self._entry_at = NOT_BEGUN
        self._size += HEAD_BYTES + self._written
        self._number += 1

    def _put_code(self, error: WireError) -> None:
        if self._entry_at != NOT_BEGUN:
            self._at, self._entry_at = self._entry_at, NOT_BEGUN
        if self._capacity - self._at < HEAD_BYTES:
            self._open_block(BLOCK_BYTES)
        self._blocks[-1][self._at : self._at + HEAD_BYTES] = answer_head(0, error)
        self._at += HEAD_BYTES
        self._size += HEAD_BYTES
        self._number += 1

    def _refuse(self, error: BrokerError) -> None:
        """End the partition's response with an error.

        If it already has records, the error follows in the next response.
        """
        if self._entry_at != NOT_BEGUN and self._written:
            self._end_entry()
        else:
            self._put_code(wire_error(error))

    def _finish(self) -> None:
        if self._at > self._begun:
            self._parts.append(memoryview(self._blocks[-1])[self._begun : self._at])
        if self._fetch.is_multiple:
            self._blocks[0][:HEAD_BYTES] = answer_head(self._size)
        self._done(self._parts, self._give_back)

    def _give_back(self) -> None:
        blocks, self._blocks, self._parts = self._blocks, [], []
        for block in blocks:
            self._reply_buffers.give(block)


def _out_of_range(address: int) -> Missing:
    return Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"no record at this address address={address}")
