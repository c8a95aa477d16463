"""FLUX commands on records: PRODUCE as single lines, CONSUME, and the replicas' reports (dossier §5, §7, §9).

Promises: a reply holds at least one record and at most ``consume_bytes_max`` bytes of them; values a line cannot carry are escaped,
never torn.
Must not know: sockets, how bulk PRODUCE works.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from struct import Struct
from typing import Final

from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, Corrupt
from polywire.log.base import Read
from polywire.protocols.base import PASS_S
from polywire.protocols.flux import spelling
from polywire.protocols.flux.answers import Answer, Produced
from polywire.protocols.flux.errors import not_leader, refused, replication_timeout
from polywire.protocols.flux.messages import Acks, Request, acks, bad, flag, integer, is_plain, listed, topic_name
from polywire.protocols.flux.metadata import Replication
from polywire.protocols.flux.session import FluxSession
from polywire.records.batch import from_spans
from polywire.records.columns import RecordFlags
from polywire.records.compression import expand_body
from polywire.types import KeyHash, Level

FETCH_BYTES_MIN: Final = 4096
PIECE_BYTES: Final = 512 * 1024  # read and written before others may have a turn: some milliseconds
SMALL_REPLY_BYTES: Final = 64 * 1024  # below this a copy is cheaper than keeping a buffer busy
BROKER_FETCH_RECORDS: Final = 100
EXPANDED_BYTES_MAX: Final = 256 * 1024 * 1024

_LENGTH: Final = Struct("<4xI")  # decision 0001: u32 length at 4


def usage(request: Request, text: str, *counts: int) -> None:
    """Refuse another number of arguments."""
    if len(request.args) not in counts:
        raise bad(f"{request.command} requires: {text}")


def find_partition(topic: Topic | None, number: int) -> Partition:
    """A partition that exists. Raises Refused ``invalid partition``."""
    if topic is None or not 0 <= number < len(topic.partitions):
        raise bad("invalid partition")
    return topic.partitions[number]


def produce(session: FluxSession, request: Request, /) -> None:
    """PRODUCE of a line that the bulk path left alone."""
    usage(request, "<topic> <key>:<value> [acks=0|1|all]", 2, 3)
    key, colon, value = request.args[1].partition(b":")
    if not colon:
        raise bad("message must be key:value")
    topic = session.topic_to_write(topic_name(request.args[0]))
    mode = acks(request.args[2]) if len(request.args) == 3 else Acks.LEADER
    partition = session.broker.partition_of_key(topic, key, KeyHash.FNV32)
    if not session.state.is_writable(partition):
        raise not_leader()
    flags = None if is_plain(value) else bytes((RecordFlags.LINE_VALUE,))
    batch = from_spans(key + value, array("q", (0, len(key), len(key), len(value))), None, flags)
    if mode is Acks.ALL:
        answer = session.later(request, blocking=True)
        timeout_s = session.state.settings.ack_all_timeout_ms / 1000
        waiting = AcksAll(session, answer, partition)
        waiting.timer = session.broker.loop.call_later(timeout_s, waiting.expire)
        answer.cancel = waiting.cancel
        session.entrance.produce(partition, batch, Level.SYNCED, waiting.stored)
        return
    produced = Produced(session, request.id)
    produced.partition = partition
    session.append(produced)
    session.entrance.produce(partition, batch, Level.WRITTEN, produced.done)


class AcksAll:
    """A record that waits to be synced and held by enough replicas.

    Invariant: the answer is filled once: by success, by an error, or by the timer.
    """

    __slots__ = ("_answer", "_forget", "_offset", "_partition", "_session", "timer")

    def __init__(self, session: FluxSession, answer: Answer, partition: Partition) -> None:
        self._session = session
        self._answer = answer
        self._partition = partition
        self._offset = -1
        self._forget: Callable[[], None] | None = None
        self.timer: object = None

    def stored(self, offset: int, error: BrokerError | None) -> None:
        """The record is synced, or failed."""
        if self._answer.parts is not None:
            return
        if error is not None:
            self.cancel()
            self._answer.refuse(refused(error))
            return
        self._offset = offset
        if self._session.state.is_replicated(self._partition, offset):
            self._succeed()
        else:
            self._forget = self._session.state.wait_replicated(self._partition, offset, self._succeed)

    def _succeed(self) -> None:
        self.cancel()
        hw = self._session.state.hw(self._partition)
        self._answer.ok(b"partition=%d offset=%d hw=%d" % (self._partition.number, self._offset, hw))

    def expire(self) -> None:
        """Too late; the record stays (dossier §9)."""
        if self._answer.parts is None:
            self.cancel()
            self._answer.refuse(replication_timeout())

    def cancel(self) -> None:
        """Stop waiting."""
        if self.timer is not None:
            self.timer.cancel()  # type: ignore[attr-defined]
            self.timer = None
        if self._forget is not None:
            self._forget()
            self._forget = None


def consume(session: FluxSession, request: Request, /) -> bytes | None:
    """CONSUME: every record from an offset up to hw, as far as one reply goes."""
    usage(request, "<topic> <partition> <offset>", 3)
    number, offset = integer(request.args[1], "partition"), integer(request.args[2], "offset")
    partition = find_partition(session.ensure_topic(topic_name(request.args[0])), number)
    if offset < 0:
        raise bad("invalid offset")  # Q2
    hw = session.state.hw(partition)
    reply = Reply(session, request, b"messages=", b" hw=%d" % hw, partition, hw + 1)
    return reply.begin(max(offset, partition.log.first_offset))  # Q19


def broker_fetch(session: FluxSession, request: Request, /) -> bytes | None:
    """BROKER_FETCH: a follower reads up to the log's end."""
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
    reply = Reply(session, request, head % (request.args[0], number, follower, hw), b"", partition, end)
    return reply.begin(start)


class Reply:
    """One reply with records in the making: read and written a piece at a time.

    Invariant: nothing of a read is used after its pin was released; ``_next`` is the offset after what ``_buffer`` holds.
    """

    __slots__ = (
        "_answer",
        "_buffer",
        "_end",
        "_head",
        "_next",
        "_partition",
        "_request",
        "_session",
        "_state",
        "_tail",
    )

    def __init__(
        self, session: FluxSession, request: Request, head: bytes, tail: bytes, partition: Partition, end: int
    ) -> None:
        self._session = session
        self._request = request
        self._head = head
        self._tail = tail
        self._partition = partition
        self._end = end
        self._next = 0
        self._buffer = bytearray()
        self._state = array("q")
        self._answer: Answer | None = None

    def begin(self, start: int) -> bytes | None:
        """The payload when there is nothing to read; otherwise the answer comes at once, or when the bytes are at hand."""
        if start >= self._end:
            return self._head + self._tail
        self._next = start
        self._buffer = self._session.scratch.take_reply()
        self._state = new_state(start, self._end, self._session.state.settings.consume_bytes_max)
        self._answer = self._session.later(self._request, blocking=True)
        if self._read_on(self._session.broker.clock.monotonic() + PASS_S):
            self._session.broker.sliced.put(self._read_on)
        return None

    def _read_on(self, end: float) -> bool:
        """Read and write until all is there or the bytes must be fetched; whether time was up before."""
        answer, session = self._answer, self._session
        assert answer is not None
        limit = max(min(session.state.settings.consume_bytes_max, PIECE_BYTES), FETCH_BYTES_MIN)
        while not session.closed:
            try:
                read = session.broker.fetch(
                    self._partition, self._next, bytes_max=limit, then=self._fetched, offset_end=self._end
                )
                if read is None:
                    return False
                if not self._take(read):
                    self._finish(answer)
                    return False
            except BrokerError as error:
                self._fail(answer, error)
                return False
            if session.broker.clock.monotonic() >= end:
                return True
        self._session.scratch.give_reply(self._buffer)
        return False

    def _fetched(self, read: Read | BrokerError) -> None:
        """The bytes had to be fetched."""
        answer = self._answer
        assert answer is not None
        if isinstance(read, BrokerError):
            self._fail(answer, read)
            return
        if self._session.closed:
            read.pin.release()
            self._session.scratch.give_reply(self._buffer)
            return
        try:
            more = self._take(read)
        except BrokerError as error:
            self._fail(answer, error)
            return
        if more:
            self._session.broker.sliced.put(self._read_on)
        else:
            self._finish(answer)

    def _take(self, read: Read) -> bool:
        """Write what was read; whether there is more to read. Raises Corrupt."""
        try:
            self._buffer, ended = put_more(read.chunks, self._state, self._buffer)
        finally:
            read.pin.release()
        stalled = read.next_offset <= self._next
        self._next = self._state[spelling.START] = max(read.next_offset, self._next)
        return not ended and not stalled and self._next < self._end

    def _fail(self, answer: Answer, error: BrokerError) -> None:
        if isinstance(error, Corrupt) and self._state[spelling.AT]:  # what lies before the damage is sound
            self._finish(answer)
            return
        self._session.scratch.give_reply(self._buffer)
        answer.refuse(refused(error))

    def _finish(self, answer: Answer) -> None:
        scratch, buffer, size = self._session.scratch, self._buffer, self._state[spelling.AT]
        self._session.state.escaped_values += self._state[spelling.ESCAPED]
        head = b"V1|%b|OK|%b" % (self._request.id, self._head)
        if size <= SMALL_REPLY_BYTES:
            body = bytes(memoryview(buffer)[:size])
            scratch.give_reply(buffer)
            answer.fill([b"".join((head, body, self._tail, b"\n"))])
            return
        answer.fill([head, memoryview(buffer)[:size], self._tail + b"\n"], partial(scratch.give_reply, buffer))


def new_state(start: int, end: int, limit: int) -> array[int]:
    """The state of writing the records of ``start <= offset < end``, in at most so many bytes."""
    state = array("q", bytes(8 * spelling.STATE_WORDS))
    state[spelling.START], state[spelling.END], state[spelling.CAP] = start, end, limit
    return state


def put_chunks(
    chunks: Sequence[memoryview], start: int, end: int, limit: int, out: bytearray
) -> tuple[bytearray, int, int]:
    """Write the records of ``start <= offset < end`` as ``offset:value``; returns the buffer, the bytes used, the escaped values.

    The buffer returned is another one when the one given was too small. Raises Corrupt.
    """
    state = new_state(start, end, limit)
    out, _ = put_more(chunks, state, out)
    return out, state[spelling.AT], state[spelling.ESCAPED]


def put_more(chunks: Sequence[memoryview], state: array[int], out: bytearray) -> tuple[bytearray, bool]:
    """Write records as ``offset:value`` behind those that ``state`` tells of; returns the buffer, and whether no further one is wanted.

    The buffer returned is another one when the one given was too small. Raises Corrupt.
    """
    for chunk in chunks:
        state[spelling.POSITION] = state[spelling.ROW] = 0
        code, out = _put_chunk(chunk, state, out)
        if code == spelling.STOPPED:
            return out, True
    return out, False


def _put_chunk(chunk: memoryview, state: array[int], out: bytearray) -> tuple[int, bytearray]:
    """Write one chunk: a larger ``out`` when a record needs it, compressed batches expanded on the way."""
    while (code := spelling.put_chunk(chunk, state, out)) not in (spelling.DONE, spelling.STOPPED):
        if code == spelling.COMPRESSED:
            position = state[spelling.POSITION]
            (length,) = _LENGTH.unpack_from(chunk, position)
            expanded = expand_body(chunk[position : position + length], EXPANDED_BYTES_MAX)
            state[spelling.POSITION] = 0
            code, out = _put_chunk(memoryview(expanded), state, out)
            if code == spelling.STOPPED:
                break
            state[spelling.POSITION], state[spelling.ROW] = position + length, 0
        else:
            grown = bytearray(max(2 * len(out), state[spelling.AT] + code))
            grown[: state[spelling.AT]] = memoryview(out)[: state[spelling.AT]]
            out = grown
    return code, out


def _report(session: FluxSession, request: Request, field: str, offset_field: str) -> tuple[int, int, int, Replication]:
    """A follower tells what it holds."""
    number = integer(request.args[1], "partition")
    follower = integer(request.args[2], field)
    offset = integer(request.args[3], offset_field)
    if not 1 <= follower < session.state.settings.replication_factor:
        raise bad("invalid replica id")
    partition = find_partition(session.broker.find_topic(topic_name(request.args[0])), number)
    if not session.state.is_leader(partition):
        raise bad("partition is not leader")
    return number, follower, offset, session.state.acknowledge(partition, follower, offset)


def _replicated(offset: int, now: Replication) -> str:
    return f"acked_offset={offset} hw={now.hw} isr={listed(now.isr)} under_replicated={flag(now.under_replicated)}"


def replica_fetch(session: FluxSession, request: Request, /) -> bytes:
    """REPLICA_FETCH: reports, fetches nothing."""
    usage(request, "<topic> <partition> <replica_id> <offset>", 4)
    _, follower, offset, now = _report(session, request, "replica_id", "offset")
    return f"replica={follower} {_replicated(offset, now)}".encode()


def broker_replica_ack(session: FluxSession, request: Request, /) -> bytes:
    """BROKER_REPLICA_ACK: the same between brokers."""
    usage(request, "<topic> <partition> <follower_id> <acked_offset>", 4)
    number, follower, offset, now = _report(session, request, "follower_id", "acked_offset")
    head = b"topic=%b partition=%d follower=%d " % (request.args[0], number, follower)
    return head + _replicated(offset, now).encode()
