"""FLUX replies that hold records: CONSUME and BROKER_FETCH, read and written a piece at a time.

What they hold: spec: flux#consume, flux#broker_fetch, flux#values-in-replies. Promises: a reply without a limit is written as the peer
takes it and is never in memory as a whole; of a peer that does not read, the connection's backlog and a piece are kept, and nothing of the
log; other connections have their turn between two pieces; a reply always ends as a whole line, and tells as hw how far it went.
Must not know: sockets, commands.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from struct import Struct
from typing import Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.flux import encoder
from polywire.protocols.flux.errors import refused
from polywire.protocols.flux.messages import Request
from polywire.protocols.flux.reply_slots import Answer, Parts
from polywire.protocols.flux.session import FluxSession
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.records.compression import expand_body

FETCH_BYTES_MIN: Final = 4096
FETCH_BYTES_MAX: Final = 512 * 1024  # read and written before others may have a turn: some milliseconds
PIECE_BYTES_MAX: Final = (
    2 * 1024 * 1024
)  # what a read may become in text: small records and escapes grow, compressed ones much
SMALL_REPLY_BYTES: Final = 64 * 1024  # below this a copy is cheaper than keeping a buffer busy
EXPANDED_BYTES_MAX: Final = 256 * 1024 * 1024

_LENGTH: Final = Struct("<4xI")  # decision 0001: u32 length at 4


class Reply:
    """One reply with records in the making (decision 0034).

    bytes_max: ends it after so many bytes of records, and at least one record; such a reply is written at once. Without it pieces are
    written as the peer takes them. hw: told behind the records, or where they end early, the last offset before that; None tells none.

    Invariant: nothing of a read is used after its pin was released; ``_next`` is the offset after what was put into ``_buffer`` or written.
    ``_begun``: records were written. ``_clogged``: the peer must read before more is.
    """

    __slots__ = (
        "_answer",
        "_begun",
        "_buffer",
        "_clogged",
        "_end",
        "_head",
        "_hw",
        "_limited",
        "_next",
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
        most = session.state.settings.reply_bytes_max
        self._session = session
        self._head = head
        self._hw = hw
        self._partition = partition
        self._end = end
        self._next = 0
        self._limited = bytes_max is not None
        self._buffer: bytearray | None = None
        self._state = new_state(0, end, PIECE_BYTES_MAX if bytes_max is None else min(bytes_max, most))
        self._begun = False
        self._clogged = False
        self._answer = Answer(session, request.id, blocking=True)

    def begin(self, start: int) -> bytes | None:
        """The payload when there is nothing to read; otherwise the answer comes at once, or when the bytes are at hand."""
        if start >= self._end:
            return self._head + self._tail()
        self._next = start
        self._state[encoder.START] = start
        self._session.append(self._answer)
        self._answer.cancel = self._drop
        if self._read_on(self._session.broker.clock.monotonic() + QUANTUM_S):
            self._session.broker.sliced.put(self._read_on)
        return None

    def drained(self) -> None:
        """The peer reads again."""
        if self._clogged:
            self._clogged = False
            self._session.broker.sliced.put(self._read_on)

    def _read_on(self, end: float) -> bool:
        """Read and write until all is there, the bytes must be fetched or the peer must read first; whether time was up before."""
        session = self._session
        limit = max(min(self._state[encoder.CAP], FETCH_BYTES_MAX), FETCH_BYTES_MIN)
        while not session.closed:
            if self._begun and session.output.backlog >= session.output.backlog_max:
                self._clogged = True
                return False
            try:
                read = session.broker.fetch(
                    self._partition, self._next, bytes_max=limit, then=self._fetched, offset_end=self._end
                )
                if read is None:
                    return False
                if not self._take(read):
                    self._finish()
                    return False
            except BrokerError as error:
                self._stop(error)
                return False
            if session.broker.clock.monotonic() >= end:
                return True
        return False

    def _fetched(self, read: Read | BrokerError) -> None:
        """The bytes had to be fetched."""
        if self._session.closed:
            if not isinstance(read, BrokerError):
                read.pin.release()
            return
        if isinstance(read, BrokerError):
            self._stop(read)
            return
        try:
            more = self._take(read)
        except BrokerError as error:
            self._stop(error)
            return
        if more:
            self._session.broker.sliced.put(self._read_on)
        else:
            self._finish()

    def _take(self, read: Read) -> bool:
        """Put what was read into the buffer, and write it when it is a piece; whether there is more to read. Raises BrokerError."""
        state, before = self._state, self._next
        if self._buffer is None:
            self._buffer = self._session.scratch.take_reply()
        size = state[encoder.AT]
        try:
            self._buffer, ended = put_more(read.chunks, state, self._buffer)
        except BrokerError:
            state[encoder.START], state[encoder.AT] = before, size
            raise
        finally:
            read.pin.release()
        if not ended:
            state[encoder.START] = max(read.next_offset, state[encoder.START])
        self._next = state[encoder.START]
        if self._next >= self._end or self._next <= before or (ended and self._limited):
            return False
        if not self._limited and (ended or state[encoder.AT] > SMALL_REPLY_BYTES):
            self._write_piece()
        return True

    def _write_piece(self) -> None:
        """Write what the buffer holds; another one is taken for what follows."""
        parts, buffer = self._parts(), self._buffer
        assert buffer is not None
        self._buffer = None
        self._begun = True
        self._state[encoder.AT] = 0
        self._session.drain = self.drained
        self._session.output.write_many(parts, partial(self._session.scratch.give_reply, buffer))

    def _parts(self) -> Parts:
        """What the buffer holds, with what belongs before it."""
        size = self._state[encoder.AT]
        before = b"" if self._begun and not size else b"," if self._begun else self._opening()
        return [before, memoryview(self._buffer or b"")[:size]]

    def _opening(self) -> bytes:
        return b"V1|%b|OK|%b" % (self._answer.request_id, self._head)

    def _tail(self) -> bytes:
        return b"" if self._hw is None else b" hw=%d" % self._hw

    def _stop(self, error: BrokerError) -> None:
        """What comes next cannot be read: what was put together is answered, whoever goes on behind it meets the error itself."""
        if not self._begun and not self._state[encoder.AT]:
            answer = self._answer
            self._drop()
            answer.refuse(refused(error))
            return
        if self._hw is not None:
            self._hw = self._next - 1
        self._finish()

    def _finish(self) -> None:
        scratch, buffer = self._session.scratch, self._buffer
        self._session.state.escaped_values += self._state[encoder.ESCAPED]
        parts = [*self._parts(), self._tail() + b"\n"]
        self._session.drain = None
        self._buffer = None
        if self._state[encoder.AT] > SMALL_REPLY_BYTES and buffer is not None:
            self._answer.fill(parts, partial(scratch.give_reply, buffer))
            return
        whole = b"".join(parts)
        parts.clear()
        if buffer is not None:
            scratch.give_reply(buffer)
        self._answer.fill([whole])

    def _drop(self) -> None:
        """Nobody waits for the rest; a read that is under way is let go when it comes."""
        buffer, self._buffer = self._buffer, None
        self._session.drain = None
        if buffer is not None:
            self._session.scratch.give_reply(buffer)


def new_state(start: int, end: int, limit: int) -> array[int]:
    """The state of writing the records of ``start <= offset < end``, in at most so many bytes."""
    state = array("q", bytes(8 * encoder.STATE_WORDS))
    state[encoder.START], state[encoder.END], state[encoder.CAP] = start, end, limit
    return state


def put_chunks(
    chunks: Sequence[memoryview], start: int, end: int, limit: int, out: bytearray
) -> tuple[bytearray, int, int]:
    """Write the records of ``start <= offset < end`` as ``offset:value``; returns the buffer, the bytes used, the escaped values.

    The buffer returned is another one when the one given was too small. Raises Corrupt.
    """
    state = new_state(start, end, limit)
    out, _ = put_more(chunks, state, out)
    return out, state[encoder.AT], state[encoder.ESCAPED]


def put_more(chunks: Sequence[memoryview], state: array[int], out: bytearray) -> tuple[bytearray, bool]:
    """Write records as ``offset:value`` behind those that ``state`` tells of; returns the buffer, and whether no further one is wanted.

    The buffer returned is another one when the one given was too small. Raises Corrupt.
    """
    for chunk in chunks:
        state[encoder.POSITION] = state[encoder.ROW] = 0
        code, out = _put_chunk(chunk, state, out)
        if code == encoder.STOPPED:
            return out, True
    return out, False


def _put_chunk(chunk: memoryview, state: array[int], out: bytearray) -> tuple[int, bytearray]:
    """Write one chunk: a larger ``out`` when a record needs it, compressed batches expanded on the way."""
    while (code := encoder.put_chunk(chunk, state, out)) not in (encoder.DONE, encoder.STOPPED):
        if code == encoder.COMPRESSED:
            position = state[encoder.POSITION]
            (length,) = _LENGTH.unpack_from(chunk, position)
            expanded = expand_body(chunk[position : position + length], EXPANDED_BYTES_MAX)
            state[encoder.POSITION] = 0
            code, out = _put_chunk(memoryview(expanded), state, out)
            if code == encoder.STOPPED:
                break
            state[encoder.POSITION], state[encoder.ROW] = position + length, 0
        else:
            grown = bytearray(max(2 * len(out), state[encoder.AT] + code))
            grown[: state[encoder.AT]] = memoryview(out)[: state[encoder.AT]]
            out = grown
    return code, out
