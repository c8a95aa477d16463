"""CONSUME and BROKER_FETCH: read and send records in pieces.

* CONSUME returns every record up to the high watermark (hw) that it reports.
* A response without a limit is written as fast as the client reads, and is never completely in memory.
* While a client does not read, only one piece and the connection's unsent bytes are in memory.
* Other connections are served between two pieces.
* A response always ends with a complete line.

(spec: flux#consume, flux#broker_fetch, flux#values-in-replies)
"""

from __future__ import annotations

from functools import partial
from typing import Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.flux import encoder
from polywire.protocols.flux.errors import not_leader, refused
from polywire.protocols.flux.messages import Request, bad, integer, topic_name, usage
from polywire.protocols.flux.reply_slots import Answer, Parts
from polywire.protocols.flux.session import FluxSession
from polywire.protocols.flux.topics import find_partition
from polywire.protocols.runtime.session import QUANTUM_S

BROKER_FETCH_RECORDS: Final = 100
FETCH_BYTES_MIN: Final = 4096
# bytes read and written before other connections are served, which takes some milliseconds
FETCH_BYTES_MAX: Final = 512 * 1024
PIECE_BYTES_MAX: Final = (
    2 * 1024 * 1024
)  # size of the text for one read: small records and escapes make it larger, decompression much larger
SMALL_REPLY_BYTES: Final = 64 * 1024  # copying this much costs less than keeping a buffer until it was sent


def consume(session: FluxSession, request: Request, /) -> bytes | None:
    """CONSUME: send the records from an offset to the high watermark, or about ``max=`` bytes of them."""
    usage(request, "<topic> <partition> <offset>", 3, 4)
    number, offset = integer(request.args[1], "partition"), integer(request.args[2], "offset")
    bytes_max = _bytes_max(request) if len(request.args) == 4 else None
    partition = find_partition(session.ensure_topic(topic_name(request.args[0])), number)
    if offset < 0:
        raise bad("invalid offset")  # the original broker rejects offsets from here on (spec: flux#our-choices)
    hw = session.state.hw(partition)
    reply = RecordsReply(session, request, b"messages=", partition, hw + 1, bytes_max=bytes_max, hw=hw)
    return reply.begin(max(offset, partition.log.first_offset))  # removed records are skipped (spec: flux#our-choices)


def _bytes_max(request: Request) -> int:
    """Return the value of the extension ``max=…`` (spec: flux#consume).

    Raises Refused for any other additional argument.
    """
    name, _, value = request.args[3].partition(b"=")
    if name != b"max":
        usage(request, "<topic> <partition> <offset>", 3)
    return integer(value, "max")


def broker_fetch(session: FluxSession, request: Request, /) -> bytes | None:
    """BROKER_FETCH: send a follower a limited number of records, up to the end of the log."""
    usage(request, "<topic> <partition> <follower_id> <offset> [max_messages]", 4, 5)
    number = integer(request.args[1], "partition")
    follower = integer(request.args[2], "follower_id")
    offset = integer(request.args[3], "offset")
    most = integer(request.args[4], "max_messages") if len(request.args) == 5 else BROKER_FETCH_RECORDS
    if most <= 0:
        raise bad("max_messages must be > 0")
    name = topic_name(request.args[0])
    partition = find_partition(session.broker.find_topic(name), number)
    if not session.state.is_leader(partition):
        raise not_leader()
    if offset < 0:
        raise bad("invalid offset")
    start = max(offset, partition.log.first_offset)
    head = b"topic=%b partition=%d follower=%d hw=%d records="
    hw = session.state.hw(partition)
    end = min(partition.log.readable_offset, start + most)
    bytes_max = session.state.settings.reply_bytes_max
    reply = RecordsReply(
        session, request, head % (request.args[0], number, follower, hw), partition, end, bytes_max=bytes_max
    )
    return reply.begin(start)


class RecordsReply:
    """A response with records, sent in pieces (decision 0119)."""

    __slots__ = (
        "_answer",
        "_buffer",
        "_end",
        "_has_written",
        "_head",
        "_hw",
        "_is_paused",
        "_limited",
        "_next_offset",
        "_partition",
        "_session",
        "_state",
    )

    def __init__(
        self,
        session: FluxSession,
        request: Request,
        head: bytes,
        partition: Partition,
        end: int,
        *,
        bytes_max: int | None,
        hw: int | None = None,
    ) -> None:
        """Prepare the response.

        Args:
            head: its text before the records.
            end: the offset after the last record.
            bytes_max: the response ends after this many bytes of records, but has at least one. None means no limit:
                then it is written in pieces, as fast as the client reads.
            hw: high watermark to report after the records, or None. If records cannot be read, the offset of the last
                one is reported instead.
        """
        most = session.state.settings.reply_bytes_max
        self._session = session
        self._head = head
        self._hw = hw
        self._partition = partition
        self._end = end
        self._next_offset = 0  # after the records that were written or are in the buffer
        self._limited = bytes_max is not None
        self._buffer: bytearray | None = None
        self._state = encoder.new_state(0, end, PIECE_BYTES_MAX if bytes_max is None else min(bytes_max, most))
        self._has_written = False  # whether records were written
        self._is_paused = False  # whether the client must read before more is written
        self._answer = Answer(session, request.id, blocking=True)

    def begin(self, start: int) -> bytes | None:
        """Return the payload if there is nothing to read. Otherwise, return None and respond now or later."""
        if start >= self._end:
            return self._head + self._tail()
        self._next_offset = start
        self._state[encoder.START] = start
        self._session.append(self._answer)
        self._answer.cancel = self._drop
        if self._read_more(self._session.broker.clock.monotonic() + QUANTUM_S):
            self._session.broker.sliced.put(self._read_more)
        return None

    def drained(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._session.broker.sliced.put(self._read_more)

    def _read_more(self, end: float) -> bool:
        """Read and write until everything is written, data must be read from disk, or the client must read.

        Returns True if reading stopped only because the connection has used up its time slice.
        """
        session = self._session
        limit = max(min(self._state[encoder.CAP], FETCH_BYTES_MAX), FETCH_BYTES_MIN)
        while not session.closed:
            if self._has_written and session.output.backlog >= session.output.backlog_max:
                self._is_paused = True
                return False
            try:
                read = session.broker.fetch(
                    self._partition, self._next_offset, bytes_max=limit, then=self._fetched, offset_end=self._end
                )
                if not isinstance(read, Read):
                    return False
                if not self._encode(read):
                    self._finish()
                    return False
            except BrokerError as error:
                self._stop(error)
                return False
            if session.broker.clock.monotonic() >= end:
                return True
        return False

    def _fetched(self, read: Read | BrokerError) -> None:
        if self._session.closed:
            if not isinstance(read, BrokerError):
                read.pin.release()
            return
        if isinstance(read, BrokerError):
            self._stop(read)
            return
        try:
            more = self._encode(read)
        except BrokerError as error:
            self._stop(error)
            return
        if more:
            self._session.broker.sliced.put(self._read_more)
        else:
            self._finish()

    def _encode(self, read: Read) -> bool:
        """Append the records of a read to the output buffer, and send the buffer if it is full.

        Return whether to read more. Raises BrokerError for damaged batches.
        """
        state, before = self._state, self._next_offset
        if self._buffer is None:
            self._buffer = self._session.state.reply_buffers.take()
        size = state[encoder.AT]
        try:
            self._buffer, ended = encoder.put_more(read.chunks, state, self._buffer)
        except BrokerError:
            state[encoder.START], state[encoder.AT] = before, size
            raise
        finally:
            read.pin.release()
        if not ended:
            state[encoder.START] = max(read.next_offset, state[encoder.START])
        self._next_offset = state[encoder.START]
        if self._next_offset >= self._end or self._next_offset <= before or (ended and self._limited):
            return False
        if not self._limited and (ended or state[encoder.AT] > SMALL_REPLY_BYTES):
            self._write_piece()
        return True

    def _write_piece(self) -> None:
        parts, buffer = self._parts(), self._buffer
        assert buffer is not None
        self._buffer = None
        self._has_written = True
        self._state[encoder.AT] = 0
        self._session.drain = self.drained
        self._session.output.write_many(parts, partial(self._session.state.reply_buffers.give, buffer))

    def _parts(self) -> Parts:
        size = self._state[encoder.AT]
        before = b"" if self._has_written and not size else b"," if self._has_written else self._opening()
        return [before, memoryview(self._buffer or b"")[:size]]

    def _opening(self) -> bytes:
        return b"V1|%b|OK|%b" % (self._answer.request_id, self._head)

    def _tail(self) -> bytes:
        return b"" if self._hw is None else b" hw=%d" % self._hw

    def _stop(self, error: BrokerError) -> None:
        """End the response after the records that were read. If there are none, respond with the error.

        Otherwise, the client's next request gets the error.
        """
        if not self._has_written and not self._state[encoder.AT]:
            answer = self._answer
            self._drop()
            answer.refuse(refused(error))
            return
        if self._hw is not None:
            self._hw = self._next_offset - 1
        self._finish()

    def _finish(self) -> None:
        reply_buffers, buffer = self._session.state.reply_buffers, self._buffer
        parts = [*self._parts(), self._tail() + b"\n"]
        self._session.drain = None
        self._buffer = None
        if self._state[encoder.AT] > SMALL_REPLY_BYTES and buffer is not None:
            self._answer.fill(parts, partial(reply_buffers.give, buffer))
            return
        whole = b"".join(parts)
        parts.clear()
        if buffer is not None:
            reply_buffers.give(buffer)
        self._answer.fill([whole])

    def _drop(self) -> None:
        """Drop the rest of the response. A read in flight is released when it completes."""
        buffer, self._buffer = self._buffer, None
        self._session.drain = None
        if buffer is not None:
            self._session.state.reply_buffers.give(buffer)
