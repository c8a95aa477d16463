"""Messages in and out, and stored offsets (spec: iggy#sending, iggy#polling, iggy#stored-offsets, iggy#d2-send, iggy#d3-send).

Promises: a request's messages are one batch of one partition; a poll never waits for messages and never gives more than was asked for; a
stored offset is the last one consumed on this wire, the next one to read inside. Must not know: frames, who is allowed what beyond asking.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import blake2b
from struct import Struct
from typing import Final, TypeVar

from polywire.broker.actions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.iggy import decoder, encoder, errors
from polywire.protocols.iggy.dialect import D0, Dialect
from polywire.protocols.iggy.directory import Stream, shortened, space_of
from polywire.protocols.iggy.messages import NO_PARTITION, Consumer, Reader, Refused
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.records.compression import expand_body
from polywire.types import KeyHash, Level, PositionKind, TopicName

COUNT_MAX: Final = 1_000_000  # messages of one poll; what its bytes allow is less
SMALL_REPLY_BYTES: Final = 64 * 1024  # below this a copy is cheaper than keeping a buffer busy
MESSAGE_ROOM: Final = 128  # bytes a message's head and headers take beyond what is stored of it, mostly
_OFFSET: Final = Struct("<IQQ")
_POLLED: Final = Struct("<IQI")
_SENT: Final = Struct("<IIIIQ")
_LENGTH: Final = Struct("<4xI")  # decision 0001: u32 length at 4
_SIZES: Final = Struct("<4xI20xI")  # and u32 records at 28
_SEEDS: Final = Struct("<qq")
_XXH32: Final = KeyHash.XXH32
_UNREADABLE: Final = frozenset({3, 4018, 4019, 4024})  # a payload's bytes taken for headers, or for a length of none
Found = TypeVar("Found", Stream, Topic)


def who(reader: Reader) -> int | str:
    """A stream, topic or group as we count, or its name."""
    found = reader.ident()
    return found - reader.dialect.base if isinstance(found, int) else found


def stream_of(session: IggySession, reader: Reader, action: Action) -> Stream:
    """The stream a request begins with, for who may do this to it; to others one that is there and one that is not look alike.

    Raises Denied, Refused.
    """
    named = who(reader)
    found = _find(session.shared.directory.find_stream, named, reader.dialect)
    session.authorize(action, found.kept.space if found is not None else _space(named))
    if found is None:
        raise Refused(errors.NO_STREAM_ID if isinstance(named, int) else errors.NO_STREAM_NAME)
    return found


def _space(named: int | str) -> str | None:
    """What a stream that does not exist would be to the broker; None for a number, which may be anything."""
    return space_of(named) if isinstance(named, str) else None


def _find(find: Callable[[int | str], Found | None], named: int | str, dialect: Dialect) -> Found | None:
    """What has this number or name; without one, what has the name that a create request would have made of it."""
    found = find(named)
    if found is None and dialect.normalises and isinstance(named, str):
        found = find(shortened(named))
    return found


def topic_of(session: IggySession, reader: Reader, action: Action) -> Topic:
    """The topic a request begins with, for who may do this to it; to others one that is there and one that is not look alike.

    Raises Denied, Refused.
    """
    directory = session.shared.directory
    stream_named, named = who(reader), who(reader)
    stream = _find(directory.find_stream, stream_named, reader.dialect)
    topic = None if stream is None else _find(partial(directory.find_topic, stream), named, reader.dialect)
    if topic is not None:
        session.authorize(action, topic)
        return topic
    space = stream.kept.space if stream is not None else _space(stream_named)
    session.authorize(action, TopicName(space, named) if isinstance(named, str) and space is not None else space)
    if stream is None:
        raise Refused(errors.NO_STREAM_ID if isinstance(stream_named, int) else errors.NO_STREAM_NAME)
    raise Refused(errors.NO_TOPIC_ID if isinstance(named, int) else errors.NO_TOPIC_NAME)


def partition_at(topic: Topic, number: int) -> Partition:
    """A partition as we count. Raises Refused 3007."""
    if not 0 <= number < len(topic.partitions):
        raise Refused(errors.NO_PARTITION)
    return topic.partitions[number]


# Sending


def send(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """SEND_MESSAGES."""
    dialect = reader.dialect
    if dialect.batched:
        end = reader.u32() + reader.at
    topic = topic_of(session, reader, Action.PRODUCE)
    partition, key = _destination(session, topic, reader)
    if not dialect.batched:
        batch = decoder.from_flat(reader.data, reader.at, reader.stop, key)
        if (
            dialect is D0 and isinstance(batch, int) and batch in _UNREADABLE
        ):  # then it may be written from the page's byte list
            listed = decoder.from_flat(reader.data, reader.at, reader.stop, key, decoder.LISTED)
            batch = batch if isinstance(listed, int) else listed
    else:
        count = reader.u32()
        if reader.at != end:
            raise Refused(errors.UNKNOWN_COMMAND)
        if dialect.framed:
            batch = decoder.from_frames(reader.data, reader.at, reader.stop, key)
        else:
            head = decoder.message_head(reader.data, reader.at, reader.stop, count)
            if head:
                session.recognition.see_message_head(head)
            batch = decoder.from_indexed(reader.data, reader.at, reader.stop, count, head or dialect.message_head, key)
    if isinstance(batch, int):
        raise Refused(batch)
    if dialect.framed:
        session.append_queue.produce(partition, batch, Level.WRITTEN, partial(_sent, session, answer, topic, partition))
    else:
        session.append_queue.produce(partition, batch, Level.WRITTEN, answer.done)


def _destination(session: IggySession, topic: Topic, reader: Reader) -> tuple[Partition, bytes | None]:
    """Where the messages go, and their key."""
    kind, size = reader.u8(), reader.u8()
    if not topic.partitions:
        raise Refused(errors.NO_PARTITIONS)
    if kind == 1:
        reader.take(size)  # it means nothing; the page of 2023 has one, and the reference passes over it
        return topic.partitions[session.shared.directory.next_balanced(topic)], None
    if kind == 2:
        if size != 4:
            raise Refused(errors.UNKNOWN_COMMAND)
        return partition_at(topic, reader.u32() - reader.dialect.base), None
    if kind != 3:
        raise Refused(errors.UNKNOWN_COMMAND)
    if size == 0:
        raise Refused(errors.NO_KEY_VALUE)
    key = bytes(reader.take(size))
    return session.broker.partition_of_key(topic, key, _XXH32), key


def _sent(
    session: IggySession, answer: Answer, topic: Topic, partition: Partition, offset: int, error: BrokerError | None
) -> None:
    """D3 tells where the messages went."""
    if error is not None:
        answer.refuse(error)
        return
    directory = session.shared.directory
    try:
        place = directory.stream_of(topic).number, directory.kept(topic).number
    except (KeyError, BrokerError):  # the topic is gone already
        answer.ok()
        return
    answer.ok(_SENT.pack(1, *place, partition.number, offset))


# Polling


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
            return _POLLED.pack(NO_PARTITION if reader.dialect.framed else 0, 0, 0)
    else:
        partition = partition_at(topic, _chosen(reader, number))
    owner = PositionKind.GROUP if consumer.group else PositionKind.CONSUMER
    count = min(count, COUNT_MAX)
    polling = Polling(session, answer, partition, count, (owner, name) if commit else None)
    if kind == 2:
        start = partition.log.offset_at(min(value, 2**62), polling.found)
        return None if start is None else polling.begin(start)
    return polling.begin(_start(session, partition, kind, value, count, (owner, name)))


def _chosen(reader: Reader, number: int | None) -> int:
    """The partition of a single consumer: the first one when it names none, but not in the dialect of 2023 (spec: iggy#polling)."""
    if number is not None:
        return number
    if not reader.dialect.has_login:
        raise Refused(errors.NO_PARTITION)
    return 0


def consumer_name(session: IggySession, topic: Topic, consumer: Consumer, reader: Reader) -> str:
    """What an owner of positions is called inside. Raises Refused 5000 or 5003."""
    found = consumer.who
    if not consumer.group:
        return str(found)
    group = found - reader.dialect.base if isinstance(found, int) else found
    return session.shared.directory.group(topic, group)[1]


def _members_partition(
    session: IggySession, topic: Topic, group: str, number: int | None, reader: Reader
) -> Partition | None:
    """The partition a member reads next: the one it names in D3, else its own in turn; None when it has none."""
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
        turn = session.turns.get(key, 0)
        session.turns[key] = turn + 1
        chosen = owned[turn % len(owned)]
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


class Polling:
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
        if read is not None:
            self._read(read)
        return None

    def _front(self, count: int) -> bytes:
        number = self._partition.number + self._answer.dialect.base
        return _POLLED.pack(number, max(self._partition.log.readable_offset - 1, 0), count)

    def _read(self, read: Read | BrokerError) -> None:
        if isinstance(read, BrokerError):
            self._answer.refuse(read)
            return
        shared = self._session.shared
        room = min(self._room(read), shared.settings.reply_bytes_max)
        buffer = shared.take_buffer(room)
        try:
            buffer = self._write(read, buffer)
        except BrokerError as error:
            shared.give_buffer(buffer)
            self._answer.refuse(error)
            return
        finally:
            read.pin.release()
        self._finish(buffer)

    def _room(self, read: Read) -> int:
        """Bytes the reply will take, if all its messages are like those of the first batch."""
        if not read.chunks:
            return 0
        length, records = _SIZES.unpack_from(read.chunks[0])
        count = min(self._count, read.next_offset - self._state[encoder.NEXT])
        return int(count * (length // max(records, 1) + MESSAGE_ROOM)) + MESSAGE_ROOM

    def _write(self, read: Read, buffer: bytearray) -> bytearray:
        """Write the messages; a larger buffer is returned when they need one."""
        state = self._state
        state[encoder.CAP] = len(buffer)
        for chunk in read.chunks:
            ended = self._write_chunk(chunk, buffer)
            while ended == encoder.FULL and state[encoder.LEFT] > 0:
                size = self._larger(len(buffer))
                if size == 0:
                    return buffer
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
            size = _LENGTH.unpack_from(chunk, at)[0]
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
                shared.give_buffer(buffer)
                self._answer.refuse(error)
                return
        size = state[encoder.AT]
        front = self._front(self._count - state[encoder.LEFT])
        if size <= SMALL_REPLY_BYTES:
            self._answer.fill([front, bytes(memoryview(buffer)[:size])])
            shared.give_buffer(buffer)
        else:
            self._answer.fill([front, memoryview(buffer)[:size]], partial(shared.give_buffer, buffer))


@lru_cache(maxsize=4096)
def _seeds(topic_id: bytes, number: int) -> tuple[int, int]:
    """What the ids of a partition's records without one are made from."""
    seed = blake2b(topic_id + number.to_bytes(4, "little"), digest_size=16).digest()
    low, high = _SEEDS.unpack(seed)
    return low, high


# Stored offsets


def store(
    session: IggySession, partition: Partition, owner: tuple[PositionKind, str], offset: int, answer: Answer | None
) -> None:
    """Keep the last offset consumed."""
    kind, name = owner
    done = None if answer is None else answer.done
    full_name, by = partition.topic.name.full, session.caller
    session.broker.commit_position(full_name, partition.number, kind, name, offset + 1, by=by, done=done)


def _owner(
    session: IggySession, reader: Reader, *, group: Action, consumer: Action
) -> tuple[Partition, tuple[PositionKind, str]]:
    """Partition and owner of a stored offset, for who may do this with a group's or a single consumer's."""
    named = reader.consumer()
    topic = topic_of(session, reader, group if named.group else consumer)
    number = reader.partition()
    name = consumer_name(session, topic, named, reader)
    if not named.group:
        return partition_at(topic, _chosen(reader, number)), (PositionKind.CONSUMER, name)
    if number is None:
        number = session.members.get((topic.id, name), (topic, -1))[1]
    return partition_at(topic, number), (PositionKind.GROUP, name)


def get_offset(session: IggySession, answer: Answer, reader: Reader, /) -> bytes:
    """GET_CONSUMER_OFFSET."""
    del answer
    try:
        partition, owner = _owner(session, reader, group=Action.OFFSET_FETCH, consumer=Action.POSITION_FETCH)
    except Refused as error:
        if reader.dialect.empty_when_missing and error.number != errors.UNKNOWN_COMMAND:
            return b""
        raise
    position = session.broker.position(partition.topic.name.full, partition.number, *owner)
    if position is None and reader.dialect.empty_when_missing:
        return b""
    newest = max(partition.log.readable_offset - 1, 0)
    return _OFFSET.pack(partition.number + reader.dialect.base, newest, max((position or 0) - 1, 0))


def store_offset(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """STORE_CONSUMER_OFFSET. Raises Refused 4100 above the newest offset."""
    partition, owner = _owner(session, reader, group=Action.OFFSET_COMMIT, consumer=Action.POSITION_COMMIT)
    offset = reader.u64()
    if reader.dialect.framed:
        reader.u8()
    if offset >= max(partition.log.readable_offset, 1):
        raise Refused(errors.BAD_OFFSET)
    store(session, partition, owner, offset, answer)


def delete_offset(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """DELETE_CONSUMER_OFFSET."""
    partition, (kind, name) = _owner(session, reader, group=Action.OFFSET_COMMIT, consumer=Action.POSITION_COMMIT)
    full_name = partition.topic.name.full
    if session.broker.position(full_name, partition.number, kind, name) is None:
        raise Refused(errors.NO_STORED_OFFSET)
    session.broker.delete_positions(
        kind, name, full_name=full_name, partition_number=partition.number, by=session.caller, done=answer.done
    )


def flush(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """FLUSH_UNSAVED_BUFFER: answered once everything sent before is on the disk."""
    if reader.dialect.framed:
        raise Refused(errors.UNAVAILABLE)  # always, spec: iggy#d3-operations
    topic = topic_of(session, reader, Action.PRODUCE)
    partition_at(topic, reader.number())
    session.broker.bounds(topic.partitions[0], then=lambda *_: answer.ok())


def messages_of(topic: Topic) -> int:
    """Messages that can be read."""
    return sum(partition.log.readable_offset - partition.log.first_offset for partition in topic.partitions)


def bytes_of(topic: Topic) -> int:
    """Bytes that are stored."""
    return sum(partition.log.stored_bytes for partition in topic.partitions)
