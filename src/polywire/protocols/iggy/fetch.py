"""POLL_MESSAGES: return messages (spec: iggy#polling, iggy#d0-poll-reply, iggy#d2-poll-reply, iggy#d3-poll-reply).

A poll never waits for messages, and never returns more than requested. With auto-commit, the broker commits the offset
of the last message in the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import blake2b
from struct import Struct
from typing import Final, NamedTuple

from polywire.broker.access import Where
from polywire.broker.owners import Caller
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError, ErrorCode, PeerError
from polywire.log.base import Completion, Read
from polywire.protocols.iggy import encoder, errors, vsr
from polywire.protocols.iggy.context import Poller, Shared
from polywire.protocols.iggy.dialect import DIALECTS, Dialect
from polywire.protocols.iggy.histories import NO_CONTEXT, check_history, context_bytes
from polywire.protocols.iggy.lookup import consumer_name, consumers_partition, partition_at, topic_of
from polywire.protocols.iggy.messages import HEAD, NO_PARTITION, WIRE, Consumer, Refused
from polywire.protocols.iggy.offsets import store
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.records.compression import expand_body
from polywire.records.fields import header_fields
from polywire.types import PositionKind

NEXT: Final = 5  # the polling strategy that begins at the stored offset
BY_TIME: Final = 2  # the polling strategy that may have to read a batch to find its start
COUNT_MAX: Final = 1_000_000  # messages of one poll; the limit in bytes usually allows fewer
# a reply below this size is copied, so that its large buffer can be reused at once
SMALL_REPLY_BYTES: Final = 64 * 1024
MESSAGE_BYTES_MIN: Final = 128  # bytes by which an encoded message is typically longer than the stored record
_POLLED: Final = Struct("<IQI")
_length: Final = header_fields("length")
_sizes: Final = header_fields("length", "record_count")
_SEEDS: Final = Struct("<qq")


class PollArguments(NamedTuple):
    """The arguments of a poll.

    Attributes:
        partition: None for a group member without partitions.
        starts: number of the polling strategy, and its argument.
        owner: the consumer or group whose stored offset is used.
        commits: whether the offset of the last message in the reply is stored.
    """

    topic: Topic
    partition: Partition | None
    starts: tuple[int, int]
    count_max: int
    owner: tuple[PositionKind, str]
    commits: bool


def poll(session: IggySession, answer: Answer, reader: Reader, /) -> bytes | None:
    consumer = reader.consumer()
    topic = topic_of(session, reader, Action.FETCH)
    if session.shared.parts is None or session.shared.owns(topic):
        return _poll(session, answer, reader, consumer, topic)
    return _poll_remote(session, answer, reader, consumer, topic)


def _poll(session: Poller, answer: Answer, reader: Reader, consumer: Consumer, topic: Topic) -> bytes | None:
    arguments = read_poll(session, answer, reader, consumer, topic)
    if arguments.partition is None:
        return nothing_owned(reader.dialect)
    polling = PollReply(
        session, answer, arguments.partition, arguments.count_max, arguments.owner if arguments.commits else None
    )
    return begin_poll(session, polling, arguments.partition, arguments)


def begin_poll(session: Poller, polling: PollReply, partition: Partition, arguments: PollArguments) -> bytes | None:
    """Begin to read at the offset that the polling strategy selects. Return the reply if there is nothing to read.

    Raises BrokerError if that offset cannot be read.
    """
    kind, value = arguments.starts
    if kind == BY_TIME:
        start = partition.log.offset_at(min(value, 2**62), polling.found)
        return polling.begin(start) if isinstance(start, int) else None
    return polling.begin(start_of(session, partition, arguments.starts, arguments.count_max, arguments.owner))


def nothing_owned(dialect: Dialect) -> bytes:
    front = _POLLED.pack(NO_PARTITION if dialect.framed else 0, 0, 0)
    return front + (NO_CONTEXT if dialect.contexts else b"")


def read_poll(session: Poller, answer: Answer, reader: Reader, consumer: Consumer, topic: Topic) -> PollArguments:
    """Decode the arguments of a poll after its topic, and check permissions.

    Raises Refused for an invalid poll, and Denied without permission.
    """
    number = reader.partition()
    kind, value, count = reader.u8(), reader.u64(), reader.u32()
    commits = reader.u8() == 1
    owner = authorize_poll(session, topic, consumer, reader, commits=commits)
    if count == 0:
        raise Refused(errors.BAD_MESSAGE_COUNT)
    if not 1 <= kind <= 5:
        raise Refused(errors.UNKNOWN_COMMAND)
    if consumer.group:
        partition = _members_partition(session, topic, owner[1], number, reader)
    else:
        partition = partition_at(topic, consumers_partition(reader, number))
    if partition is not None and reader.dialect.contexts:
        check_history(session, answer, partition)
    return PollArguments(topic, partition, (kind, value), min(count, COUNT_MAX), owner, commits)


def authorize_poll(
    session: Poller, topic: Topic, consumer: Consumer, reader: Reader, *, commits: bool
) -> tuple[PositionKind, str]:
    """Return the consumer or group whose stored offset a poll uses.

    Raises Denied if the client may not use it, and Refused if it does not exist.
    """
    _authorize(session, topic, is_group=consumer.group, commits=commits)
    kind = PositionKind.GROUP if consumer.group else PositionKind.CONSUMER
    return kind, consumer_name(session, topic, consumer, reader)


def _authorize(session: Poller, topic: Topic, *, is_group: bool, commits: bool) -> None:
    if is_group:
        session.authorize(Action.GROUP_JOIN, topic)
    if commits:
        session.authorize(Action.OFFSET_COMMIT if is_group else Action.POSITION_COMMIT, topic)


def _members_partition(
    session: Poller, topic: Topic, group: str, number: int | None, reader: Reader
) -> Partition | None:
    """Return the partition from which a group member reads; None if it has none.

    In Iggy's newest protocol (D3), the request may name it. Otherwise, each poll reads the next of the member's
    partitions.
    """
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


def start_of(
    session: Poller, partition: Partition, starts: tuple[int, int], count: int, owner: tuple[PositionKind, str]
) -> int:
    """Return the start offset of a polling strategy other than BY_TIME. It is at least the oldest retained offset."""
    log = partition.log
    kind, value = starts
    match kind:
        case 1:
            start = value
        case 3:
            start = 0
        case 4:
            session.broker.require_current([partition])
            start = log.readable_offset - count
        case _:
            start = session.broker.position(partition.topic.name.full, partition.number, *owner, latest=True) or 0
    return max(start, log.first_offset)


class PollReply:
    """Builds the reply to one poll."""

    __slots__ = ("_answer", "_bytes_max", "_commit", "_count", "_is_limited", "_partition", "_session", "_state")

    def __init__(
        self,
        session: Poller,
        answer: Answer,
        partition: Partition,
        count: int,
        commit: tuple[PositionKind, str] | None,
        bytes_max: int | None = None,
    ) -> None:
        """``bytes_max`` is the client's limit for the size of all messages; None if it has set none."""
        most = session.shared.settings.reply_bytes_max
        self._is_limited = bytes_max is not None
        self._bytes_max = most if bytes_max is None else min(most, bytes_max)
        self._session = session
        self._answer = answer
        self._partition = partition
        self._count = count
        self._commit = commit
        self._state = encoder.new_state()

    def refuse(self, error: BrokerError) -> None:
        self._answer.refuse(error)

    def found(self, start: int | BrokerError) -> None:
        """Continue with the start offset that was looked up, or with the error of the look-up."""
        if isinstance(start, BrokerError):
            self.refuse(start)
            return
        try:
            reply = self.begin(start)
        except BrokerError as error:
            self.refuse(error)
            return
        if reply is not None:
            self._answer.ok(reply)

    def begin(self, start: int) -> bytes | None:
        """Read from ``start`` on. Return the reply if there is nothing to read.

        Otherwise, return None and reply now or later. Raises BrokerError.
        """
        if start < self._partition.log.readable_offset:
            self._fetch(start)
        elif self._session.broker.when_current(self._partition, partial(self._refreshed, start)) is None:
            return self._front(0)
        return None

    def _refreshed(self, start: int, error: BrokerError | None) -> None:
        """Continue when the partition's offsets are up to date."""
        log = self._partition.log
        start = max(start, log.first_offset)
        try:
            if error is not None:
                raise error
            if start < log.readable_offset:
                self._fetch(start)
            else:
                self._nothing_found()
        except BrokerError as failure:
            self.refuse(failure)

    def _nothing_found(self) -> None:
        self._answer.ok(self._front(0))

    def _fetch(self, start: int) -> None:
        state = self._state
        state[encoder.NEXT] = start
        state[encoder.LEFT] = self._count
        state[encoder.LAST] = -1
        state[encoder.PARTITION] = self._partition.number
        state[encoder.SEED_LOW], state[encoder.SEED_HIGH] = _seeds(self._partition.topic.id, self._partition.number)
        read = self._session.broker.fetch(
            self._partition, start, bytes_max=self._bytes_max, then=self._read, offset_end=start + self._count
        )
        if isinstance(read, Read):
            self._read(read)

    def _front(self, count: int) -> bytes:
        number = self._partition.number + self._answer.dialect.base
        front = _POLLED.pack(number, max(self._partition.log.readable_offset - 1, 0), count)
        return front + context_bytes(self._partition) if self._answer.dialect.contexts else front

    def _read(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            again = partial(self._refreshed, self._state[encoder.NEXT])
            is_outside = read.code is ErrorCode.OFFSET_OUT_OF_RANGE
            if not is_outside or self._session.broker.when_current(self._partition, again) is None:
                self.refuse(read)
            return
        shared = self._session.shared
        room = min(self._space(read), self._bytes_max)
        buffer = shared.reply_buffers.take(room)
        try:
            buffer = self._write(read, buffer)
        except BrokerError as error:
            shared.reply_buffers.give(buffer)
            self.refuse(error)
            return
        finally:
            read.pin.release()
        if self._is_limited and self._state[encoder.AT] == 0 and self._state[encoder.NEEDED] > 0:
            shared.reply_buffers.give(buffer)
            self.refuse(Refused(errors.BAD_SIZE))
            return
        self._finish(buffer)

    def _space(self, read: Read) -> int:
        """Return the estimated size of the reply, assuming that all messages are as large as in the first batch."""
        if not read.chunks:
            return 0
        length, records = _sizes(read.chunks[0])
        count = min(self._count, read.next_offset - self._state[encoder.NEXT])
        return int(count * (length // max(records, 1) + MESSAGE_BYTES_MIN)) + MESSAGE_BYTES_MIN

    def _write(self, read: Read, buffer: bytearray) -> bytearray:
        """Write the messages. Return the buffer, which is replaced by a larger one if it has not enough space."""
        state = self._state
        state[encoder.CAP] = min(len(buffer), self._bytes_max)
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
        """Return the size that the buffer needs for one more message; 0 if the reply must not grow."""
        state = self._state
        needed = state[encoder.AT] + state[encoder.NEEDED]
        limit = self._bytes_max
        if state[encoder.AT] == 0 and not self._is_limited:
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
        """Store the offset of the last message if requested, then reply. If that fails, reply with the error."""
        last, session, partition = self._state[encoder.LAST], self._session, self._partition
        if self._commit is None or last < 0:
            self._deliver(buffer)
            return
        done = None if session.broker.owns(partition) else partial(self._committed, buffer)
        try:
            store(session, partition, self._commit, last, done)
        except BrokerError as error:
            self._committed(buffer, error)
        else:
            if done is None:
                self._deliver(buffer)

    def _committed(self, buffer: bytearray, result: int | BrokerError) -> None:
        if isinstance(result, BrokerError):
            self._session.shared.reply_buffers.give(buffer)
            self.refuse(result)
        else:
            self._deliver(buffer)

    def _deliver(self, buffer: bytearray) -> None:
        state, shared = self._state, self._session.shared
        size = state[encoder.AT]
        front = self._front(self._count - state[encoder.LEFT])
        if size <= SMALL_REPLY_BYTES:
            self._answer.fill([front, bytes(memoryview(buffer)[:size])])
            shared.reply_buffers.give(buffer)
        else:
            self._answer.fill([front, memoryview(buffer)[:size]], partial(shared.reply_buffers.give, buffer))


# Polls of topics of other processes


class RemotePoller:
    """A client of another process, which has forwarded its poll.

    Implements ``Poller`` and ``ReplyOwner`` for the poll, which that process has authorized.
    """

    closed: Final = False

    def __init__(
        self, shared: Shared, by: Caller, member_id: str, incarnation: int, slot_filled: Callable[[], None]
    ) -> None:
        self.shared: Final = shared
        self.broker: Final = shared.broker
        self.caller: Final = by
        self.member_id: Final = member_id
        self.members: Final[dict[tuple[bytes, str], tuple[Topic, int]]] = {}
        self.poll_counts: Final[dict[tuple[bytes, str], int]] = {}
        self.slot_filled: Final = slot_filled
        self._incarnation: Final = incarnation

    def authorize(self, action: Action, where: Where = None) -> None: ...

    def named_incarnation(self, _: Answer) -> int:
        return self._incarnation

    def end(self) -> None: ...

    def fail(self, _: PeerError) -> None: ...

    def store_reply(self, head: vsr.Head, reply: bytes) -> None: ...


def _poll_remote(
    session: IggySession, answer: Answer, reader: Reader, consumer: Consumer, topic: Topic
) -> bytes | None:
    """Poll a topic of another process.

    If the poll also uses a group or a stored offset, that process executes the whole poll. Otherwise, only the records
    are read from it.
    """
    begin, dialect = reader.at, reader.dialect
    reader.partition()
    kind, _, _, commits = reader.u8(), reader.u64(), reader.u32(), reader.u8() == 1
    payload, reader.at = bytes(reader.data[begin:]), begin
    if not (consumer.group or commits or kind == NEXT):
        return _poll(session, answer, reader, consumer, topic)
    _authorize(session, topic, is_group=consumer.group, commits=commits)
    owner_id = consumer.identifier
    if isinstance(owner_id, int):
        owner_id = session.shared.directory.stored(topic).groups.get(owner_id - dialect.base, "")
    key = topic.id, owner_id
    is_member = consumer.group and key in session.members

    def polled(result: tuple[bytes, int] | BrokerError) -> None:
        if isinstance(result, BrokerError):
            answer.refuse(result)
            return
        reply, chosen = result
        if chosen >= 0 and key in session.members:
            session.members[key] = topic, chosen
            session.poll_counts[key] = session.poll_counts.get(key, 0) + 1
        status, _ = HEAD.unpack_from(reply)
        if status:
            answer.status(status)
        else:
            answer.fill([memoryview(reply)[HEAD.size :]])

    session.shared.call_for(
        topic,
        execute_poll,
        session.caller,
        DIALECTS.index(dialect),
        payload,
        consumer,
        incarnation=session.named_incarnation(answer),
        group=owner_id,
        topic=topic.name.full,
        member=session.member_id,
        wire=WIRE,
        connected=is_member,
        polls=session.poll_counts.get(key, 0),
        then=polled,
    )
    return None


def execute_poll(
    shared: Shared,
    by: Caller,
    dialect: int,
    payload: bytes,
    consumer: Consumer,
    *,
    incarnation: int,
    group: str,
    topic: str,
    member: str,
    wire: str,
    connected: bool,
    polls: int,
    then: Completion[tuple[bytes, int]],
) -> None:
    """Execute a poll for a client of another process.

    Args:
        payload: the request after the name of the topic.
        incarnation: the partition's incarnation number in the request, or 0.
        connected: whether the client is a member of the group.
        polls: how often the client has polled the group.
        then: called with the reply and the partition of the group that was polled, or -1.
    """
    del wire
    inside = shared.inside
    found = inside.broker.topic(topic)
    key = found.id, group

    def slot_filled() -> None:
        assert answer.parts is not None, "the slot was filled"
        reply, released = b"".join(answer.parts), answer.released
        if released is not None:
            released()
        then((reply, visitor.members.get(key, (found, -1))[1]))

    visitor = RemotePoller(inside, by, member, incarnation, slot_filled)
    answer = Answer(visitor, DIALECTS[dialect])
    if connected:
        visitor.members[key] = found, -1
        visitor.poll_counts[key] = polls
    try:
        reply = _poll(visitor, answer, Reader(memoryview(payload), answer.dialect), consumer, found)
    except BrokerError as error:
        answer.refuse(error)
    else:
        if reply is not None:
            answer.ok(reply)


@lru_cache(maxsize=4096)
def _seeds(topic_id: bytes, number: int) -> tuple[int, int]:
    """Return two numbers from which the ids of a partition's records without an id are computed."""
    seed = blake2b(topic_id + number.to_bytes(4, "little"), digest_size=16).digest()
    low, high = _SEEDS.unpack(seed)
    return low, high
