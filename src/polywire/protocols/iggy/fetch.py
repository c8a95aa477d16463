"""POLL_MESSAGES (spec: iggy#polling, iggy#d0-poll-reply, iggy#d2-poll-reply, iggy#d3-poll-reply).

Promises: a poll never waits for messages and never gives more than was asked for; what it commits is what it tells. Must not know: frames,
how messages are laid out.
"""

from __future__ import annotations

from functools import lru_cache, partial
from hashlib import blake2b
from struct import Struct
from typing import Final

from polywire.broker.actions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.iggy import encoder, errors
from polywire.protocols.iggy.histories import NO_CONTEXT, check_history, context_bytes
from polywire.protocols.iggy.lookup import consumer_name, consumers_partition, partition_at, topic_of
from polywire.protocols.iggy.messages import NO_PARTITION, Reader, Refused
from polywire.protocols.iggy.offsets import store
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.types import PositionKind

COUNT_MAX: Final = 1_000_000  # messages of one poll; what its bytes allow is less
SMALL_REPLY_BYTES: Final = 64 * 1024  # below this a copy is cheaper than keeping a buffer busy
MESSAGE_BYTES_MIN: Final = 128  # bytes a message's head and headers take beyond what is stored of it, mostly
_POLLED: Final = Struct("<IQI")
_length: Final = header_fields("length")
_sizes: Final = header_fields("length", "record_count")
_SEEDS: Final = Struct("<qq")


def poll(session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None:
    """POLL_MESSAGES."""
    consumer = reader.consumer()
    topic = topic_of(session, reader, Action.FETCH)
    number = reader.partition()
    kind, value, count = reader.u8(), reader.u64(), reader.u32()
    commit = reader.u8() == 1
    if consumer.group:
        session.authorize(Action.GROUP_JOIN, topic)
    if commit:
        session.authorize(Action.OFFSET_COMMIT if consumer.group else Action.POSITION_COMMIT, topic)
    if count == 0:
        raise Refused(errors.BAD_MESSAGE_COUNT)
    if not 1 <= kind <= 5:
        raise Refused(errors.UNKNOWN_COMMAND)
    name = consumer_name(session, topic, consumer, reader)
    if consumer.group:
        partition = _members_partition(session, topic, name, number, reader)
        if partition is None:
            front = _POLLED.pack(NO_PARTITION if reader.dialect.framed else 0, 0, 0)
            return front + (NO_CONTEXT if reader.dialect.contexts else b"")
    else:
        partition = partition_at(topic, consumers_partition(reader, number))
    check_history(session, answer, partition)
    owner = PositionKind.GROUP if consumer.group else PositionKind.CONSUMER
    count = min(count, COUNT_MAX)
    polling = PollReply(session, answer, partition, count, (owner, name) if commit else None)
    if kind == 2:
        start = partition.log.offset_at(min(value, 2**62), polling.found)
        return polling.begin(start) if isinstance(start, int) else None
    return polling.begin(_start(session, partition, kind, value, count, (owner, name)))


def _members_partition(
    session: IggySession, topic: Topic, group: str, number: int | None, reader: Reader
) -> Partition | None:
    """The partition a member reads next: the one it names in D3, else its own round-robin; None when it has none."""
    key = (topic.id, group)
    if key not in session.members:
        raise Refused(errors.NO_MEMBER)
    owned = session.shared.membership(session, topic, group).partitions
    if not owned:
        return None
    if reader.dialect.framed and number is not None:
        if number not in owned:
            raise Refused(errors.NOT_OWNED)
        chosen = number
    else:
        polls = session.poll_counts.get(key, 0)
        session.poll_counts[key] = polls + 1
        chosen = owned[polls % len(owned)]
    session.members[key] = (topic, chosen)
    return topic.partitions[chosen]


def _start(
    session: IggySession, partition: Partition, kind: int, value: int, count: int, owner: tuple[PositionKind, str]
) -> int:
    """The offset a polling strategy, but that by time, begins at; never below the oldest one kept."""
    log = partition.log
    match kind:
        case 1:
            start = value
        case 3:
            start = 0
        case 4:
            start = log.readable_offset - count
        case _:
            start = session.broker.position(partition.topic.name.full, partition.number, *owner) or 0
    return max(start, log.first_offset)


class PollReply:
    """One poll's reply in the making.

    Invariant: nothing of a read is used after its pin was released; the buffer goes back once the reply has left.
    """

    __slots__ = ("_answer", "_commit", "_count", "_head", "_partition", "_session", "_state")

    def __init__(
        self,
        session: IggySession,
        answer: Answer,
        partition: Partition,
        count: int,
        commit: tuple[PositionKind, str] | None,
    ) -> None:
        self._session = session
        self._answer = answer
        self._partition = partition
        self._count = count
        self._commit = commit
        self._state = encoder.new_state()

    def found(self, start: int | BrokerError) -> None:
        """The offset to begin at had to be looked for."""
        if isinstance(start, BrokerError):
            self._answer.refuse(start)
            return
        try:
            reply = self.begin(start)
        except BrokerError as error:
            self._answer.refuse(error)
            return
        if reply is not None:
            self._answer.ok(reply)

    def begin(self, start: int) -> bytes | None:
        """The reply when there is nothing to read; otherwise it comes at once, or when the bytes are at hand. Raises BrokerError."""
        log = self._partition.log
        if start >= log.readable_offset:
            return self._front(0)
        most = self._session.shared.settings.reply_bytes_max
        end = min(start + self._count, log.readable_offset)
        state = self._state
        state[encoder.NEXT] = start
        state[encoder.LEFT] = self._count
        state[encoder.LAST] = -1
        state[encoder.PARTITION] = self._partition.number
        state[encoder.SEED_LOW], state[encoder.SEED_HIGH] = _seeds(self._partition.topic.id, self._partition.number)
        read = self._session.broker.fetch(self._partition, start, bytes_max=most, then=self._read, offset_end=end)
        if isinstance(read, Read):
            self._read(read)
        return None

    def _front(self, count: int) -> bytes:
        number = self._partition.number + self._answer.dialect.base
        front = _POLLED.pack(number, max(self._partition.log.readable_offset - 1, 0), count)
        return front + context_bytes(self._partition) if self._answer.dialect.contexts else front

    def _read(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            self._answer.refuse(read)
            return
        shared = self._session.shared
        room = min(self._room(read), shared.settings.reply_bytes_max)
        buffer = shared.reply_buffers.take(room)
        try:
            buffer = self._write(read, buffer)
        except BrokerError as error:
            shared.reply_buffers.give(buffer)
            self._answer.refuse(error)
            return
        finally:
            read.pin.release()
        self._finish(buffer)

    def _room(self, read: Read) -> int:
        """Bytes the reply will take, if all its messages are like those of the first batch."""
        if not read.chunks:
            return 0
        length, records = _sizes(read.chunks[0])
        count = min(self._count, read.next_offset - self._state[encoder.NEXT])
        return int(count * (length // max(records, 1) + MESSAGE_BYTES_MIN)) + MESSAGE_BYTES_MIN

    def _write(self, read: Read, buffer: bytearray) -> bytearray:
        """Write the messages; a larger buffer is returned when they need one."""
        state = self._state
        state[encoder.CAP] = min(len(buffer), self._session.shared.settings.reply_bytes_max)
        for chunk in read.chunks:
            ended = self._write_chunk(chunk, buffer)
            while ended == encoder.FULL and state[encoder.LEFT] > 0:
                size = self._larger(state[encoder.CAP])
                if size == 0:
                    return buffer
                if size > len(buffer):
                    buffer = buffer + bytes(size - len(buffer))
                state[encoder.CAP] = size
                ended = self._write_chunk(chunk, buffer)
            if ended == encoder.FULL:
                break
        return buffer

    def _larger(self, size: int) -> int:
        """Size of the next larger buffer; 0 when the reply is long enough, but its first message always goes in."""
        state = self._state
        needed = state[encoder.AT] + state[encoder.NEEDED]
        limit = self._session.shared.settings.reply_bytes_max
        if state[encoder.AT] == 0:
            return needed
        return min(max(2 * size, needed), limit) if needed <= limit else 0

    def _write_chunk(self, chunk: memoryview, buffer: bytearray) -> int:
        state, form = self._state, self._answer.dialect.form
        ended = encoder.put_chunk(chunk, 0, buffer, state, form)
        while ended == encoder.COMPRESSED:
            at = state[encoder.POSITION]
            size = _length(chunk, at)[0]
            ended = encoder.put_chunk(expand_body(chunk[at : at + size]), 0, buffer, state, form)
            if ended == encoder.DONE:
                ended = encoder.put_chunk(chunk, at + size, buffer, state, form)
        return ended

    def _finish(self, buffer: bytearray) -> None:
        state, shared = self._state, self._session.shared
        if self._commit is not None and state[encoder.LAST] >= 0:
            try:
                store(self._session, self._partition, self._commit, state[encoder.LAST], None)
            except BrokerError as error:  # what was read is not told without being stored: it is polled again
                shared.reply_buffers.give(buffer)
                self._answer.refuse(error)
                return
        size = state[encoder.AT]
        front = self._front(self._count - state[encoder.LEFT])
        if size <= SMALL_REPLY_BYTES:
            self._answer.fill([front, bytes(memoryview(buffer)[:size])])
            shared.reply_buffers.give(buffer)
        else:
            self._answer.fill([front, memoryview(buffer)[:size]], partial(shared.reply_buffers.give, buffer))


@lru_cache(maxsize=4096)
def _seeds(topic_id: bytes, number: int) -> tuple[int, int]:
    """What the ids of a partition's records without one are made from."""
    seed = blake2b(topic_id + number.to_bytes(4, "little"), digest_size=16).digest()
    low, high = _SEEDS.unpack(seed)
    return low, high
