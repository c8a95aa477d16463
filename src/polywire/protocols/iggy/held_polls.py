"""The commands of Iggy 0.12 that wait for messages: poll one partition, wait for several, or fetch from several.

Each attempt checks permissions, names and memberships again. No reply exceeds the size that its client accepts (spec:
iggy#d4-held-polls).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.errors import BrokerError
from polywire.protocols.iggy import encoder, errors
from polywire.protocols.iggy.fetch import (
    BY_TIME,
    COUNT_MAX,
    NEXT,
    PollReply,
    authorize_poll,
    begin_poll,
    nothing_owned,
    read_poll,
    start_of,
)
from polywire.protocols.iggy.held import Attempt, HeldRequests, Holding, Offset, check_wait
from polywire.protocols.iggy.histories import NO_CONTEXT, context_bytes, incarnation_of
from polywire.protocols.iggy.lookup import partition_at, topic_of
from polywire.protocols.iggy.messages import U32, Code, Consumer, Refused
from polywire.protocols.iggy.reader import Reader
from polywire.protocols.iggy.reply_slots import Answer
from polywire.protocols.iggy.session import IggySession
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.types import Buffer, PositionKind

POLL_FRONT_BYTES: Final = 40  # bytes of a poll's reply before its records
REPLY_BYTES_MIN: Final = POLL_FRONT_BYTES + 256 + 48  # enough for the heads of one batch and one message
TARGETS_MAX: Final = 1000  # partitions of one request; the protocol's limit
_BY_OFFSET: Final = 1
_WAIT: Final = Struct("<QQ")
_HELD: Final = Struct("<QIIQ")
_LIMITS: Final = Struct("<IIIB")
_AWAITED: Final = Struct("<IBQ")
_TARGET: Final = Struct("<IBQIQQ")
_SECTION: Final = Struct("<IIQI24sQI")


def _hold(answer: Answer, payload: bytes, wait_us: int, attempt: Attempt) -> None:
    """Call ``attempt`` repeatedly, until its reply is sent or ``wait_us`` microseconds have passed."""
    owner = answer.session
    assert isinstance(owner, HeldRequests), "the reply of a held request is out of order"
    Holding(answer, owner, payload, wait_us, attempt).run()


def wait_us_of(code: int, reader: Reader) -> int:
    if code == Code.POLL_HELD:
        if reader.stop < _HELD.size:
            raise Refused(errors.UNKNOWN_COMMAND)
        wait_us, _, _, timeout_us = _HELD.unpack_from(reader.data, reader.stop - _HELD.size)
    else:
        reader.consumer()
        reader.ident()
        reader.ident()
        wait_us, timeout_us = _WAIT.unpack(reader.take(_WAIT.size))
    check_wait(wait_us, timeout_us)
    return int(wait_us)


# POLL_MESSAGES_DEFERRED


def poll_held(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    _hold(answer, bytes(reader.data), wait_us_of(Code.POLL_HELD, reader), partial(_attempt_poll, session))


def _attempt_poll(session: IggySession, answer: Answer, reader: Reader, last: bool, /) -> list[Offset] | None:
    """Poll, and reply if there are enough messages. Otherwise, return the offsets to wait for.

    The last attempt replies even if there are too few.
    """
    consumer = reader.consumer()
    topic = topic_of(session, reader, Action.FETCH)
    arguments = read_poll(session, answer, reader, consumer, topic)
    _, count_min, bytes_max, _ = _HELD.unpack(reader.take(_HELD.size))
    if reader.left or not 1 <= count_min <= arguments.count_max or bytes_max < REPLY_BYTES_MIN:
        raise Refused(errors.UNKNOWN_COMMAND)
    partition = arguments.partition
    if partition is None:
        answer.ok(nothing_owned(reader.dialect))
        return None
    session.broker.require_current([partition])
    if not last and arguments.starts[0] != BY_TIME:
        start = start_of(session, partition, arguments.starts, arguments.count_max, arguments.owner)
        if partition.log.readable_offset - start < count_min:
            return [(partition, start + count_min - 1)]
    owner = arguments.owner if arguments.commits else None
    polling = PollReply(session, answer, partition, arguments.count_max, owner, bytes_max - POLL_FRONT_BYTES)
    reply = begin_poll(session, polling, partition, arguments)
    if reply is not None:
        answer.ok(reply)
    return None


# Several partitions


class Target(NamedTuple):
    """A partition to read, and the polling strategy that selects the first offset."""

    number: int
    starts: tuple[int, int]
    bytes_max: int = 0
    incarnation: int = 0


class Found(NamedTuple):
    """A partition to read with its start offset, or an error number."""

    target: Target
    partition: Partition | None
    start: int
    error: int = 0

    @property
    def available(self) -> int:
        return 0 if self.partition is None else max(self.partition.log.readable_offset - self.start, 0)


def _targets(targets: list[Target]) -> list[Target]:
    """Return a request's partitions. Raises Refused if there are none, duplicates, or unsupported strategies."""
    numbers = {target.number for target in targets}
    if not targets or len(numbers) < len(targets) or any(of.starts[0] not in (_BY_OFFSET, NEXT) for of in targets):
        raise Refused(errors.UNKNOWN_COMMAND)
    return targets


def _count(reader: Reader, size: int) -> int:
    """Decode the number of partitions in a request.

    Raises Refused if it is too high, or the request does not have that many.
    """
    count = reader.u32()
    if count > TARGETS_MAX or reader.left != count * size:
        raise Refused(errors.UNKNOWN_COMMAND)
    return count


class Finder(NamedTuple):
    """Looks up the start offsets of partitions in one topic for one consumer.

    Attributes:
        owned: the partitions of a group member; None for a single consumer.
    """

    session: IggySession
    topic: Topic
    owner: tuple[PositionKind, str]
    owned: frozenset[int] | None

    def find_all(self, targets: Sequence[Target]) -> list[Found]:
        broker, partitions = self.session.broker, self.topic.partitions
        numbers = [target.number for target in targets if target.number < len(partitions)]
        broker.require_current(partitions[number] for number in numbers)
        stored: Mapping[int, int] = {}
        if any(target.starts[0] == NEXT for target in targets):
            stored = broker.positions_in(self.topic.name.full, *self.owner, frozenset(numbers), latest=True)
        return [self._find(target, stored) for target in targets]

    def _find(self, target: Target, stored: Mapping[int, int]) -> Found:
        try:
            partition = partition_at(self.topic, target.number)
            if self.owned is not None and target.number not in self.owned:
                raise Refused(errors.NOT_OWNED)
            if target.incarnation not in (0, incarnation_of(partition)):
                raise Refused(errors.HISTORY_GONE)
        except Refused as error:
            return Found(target, None, 0, error.number)
        kind, value = target.starts
        start = value if kind == _BY_OFFSET else stored.get(target.number, 0)
        return Found(target, partition, max(start, partition.log.first_offset))


def _finder(session: IggySession, topic: Topic, consumer: Consumer, reader: Reader, *, commits: bool) -> Finder:
    """Return a ``Finder`` for this consumer.

    Raises Denied if the client may not read the topic, and Refused if it is not a member of the group.
    """
    owner = authorize_poll(session, topic, consumer, reader, commits=commits)
    owned = None
    if consumer.group:
        if (topic.id, owner[1]) not in session.members:
            raise Refused(errors.NO_MEMBER)
        owned = frozenset(session.shared.membership(session, topic, owner[1]).partitions)
    return Finder(session, topic, owner, owned)


# WAIT_FOR_MESSAGES


def await_messages(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """WAIT_FOR_MESSAGES: return which of several partitions have messages."""
    _hold(answer, bytes(reader.data), wait_us_of(Code.AWAIT, reader), partial(_attempt_wait, session))


def _attempt_wait(session: IggySession, answer: Answer, reader: Reader, last: bool, /) -> list[Offset] | None:
    """Reply if some partitions have messages. Otherwise, return the offsets to wait for.

    The last attempt replies even if no partition has messages.
    """
    consumer = reader.consumer()
    topic = topic_of(session, reader, Action.FETCH)
    reader.take(_WAIT.size)
    finder = _finder(session, topic, consumer, reader, commits=False)
    rows = _AWAITED.iter_unpack(reader.take(_count(reader, _AWAITED.size) * _AWAITED.size))
    places = finder.find_all(_targets([Target(row[0], (row[1], row[2])) for row in rows]))
    for found in places:
        if found.error:
            raise Refused(found.error)
    ready = [found.target.number for found in places if found.available]
    if not ready and not last:
        return [(found.partition, found.start) for found in places if found.partition is not None]
    answer.ok(U32.pack(len(ready)) + b"".join(map(U32.pack, ready)))
    return None


# FETCH_MESSAGES


def fetch_messages(session: IggySession, answer: Answer, reader: Reader, /) -> None:
    """FETCH_MESSAGES: return messages of several partitions."""
    _hold(answer, bytes(reader.data), wait_us_of(Code.FETCH, reader), partial(_attempt_fetch, session))


def _attempt_fetch(session: IggySession, answer: Answer, reader: Reader, last: bool, /) -> list[Offset] | None:
    """Reply if there are enough messages. Otherwise, return the offsets to wait for.

    The last attempt replies even if there are too few.
    """
    consumer = reader.consumer()
    topic = topic_of(session, reader, Action.FETCH)
    reader.take(_WAIT.size)
    count_min, count_max, bytes_max, commits = _LIMITS.unpack(reader.take(_LIMITS.size))
    finder = _finder(session, topic, consumer, reader, commits=commits == 1)
    rows = _TARGET.iter_unpack(reader.take(_count(reader, _TARGET.size) * _TARGET.size))
    targets = _targets([Target(row[0], (row[1], row[2]), row[3], row[4]) for row in rows])
    if not 1 <= count_min <= count_max or bytes_max < REPLY_BYTES_MIN:
        raise Refused(errors.UNKNOWN_COMMAND)
    if any(not REPLY_BYTES_MIN <= target.bytes_max <= bytes_max for target in targets):
        raise Refused(errors.UNKNOWN_COMMAND)
    places = finder.find_all(targets)
    waits = not last and not any(found.error for found in places)
    if waits and sum(found.available for found in places) < count_min:
        partitions = [found.partition for found in places if found.partition is not None]
        return [(partition, partition.log.readable_offset) for partition in partitions]
    owner = finder.owner if commits == 1 else None
    FetchReply(session, answer, places, (min(count_max, COUNT_MAX), bytes_max), owner).run()
    return None


class FetchReply:
    """Builds the reply to FETCH_MESSAGES.

    It reads the partitions one after the other, with pauses for other connections. When the limit of messages or bytes
    is reached, the remaining partitions are skipped. The next request reads them.
    """

    __slots__ = (
        "_answer",
        "_bytes",
        "_count",
        "_found",
        "_is_reading",
        "_is_running",
        "_owner",
        "_records",
        "_sections",
        "_session",
    )

    def __init__(
        self,
        session: IggySession,
        answer: Answer,
        found: list[Found],
        limits: tuple[int, int],
        owner: tuple[PositionKind, str] | None,
    ) -> None:
        """Prepare the reply.

        Args:
            limits: largest number of messages and bytes in the reply.
            owner: the consumer or group whose offsets are stored; None to store none.
        """
        self._session: Final = session
        self._answer: Final = answer
        self._found: Final[Iterator[Found]] = iter(found)
        self._count, self._bytes = limits
        self._owner: Final = owner
        self._sections: Final[list[bytes]] = []
        self._records: Final[list[Buffer]] = []
        self._is_reading = False
        self._is_running = False

    def run(self) -> None:
        """Read partitions, until a read must wait for the disk or the time for this connection is over."""
        broker = self._session.broker
        until = broker.clock.monotonic() + QUANTUM_S
        self._is_running = True
        while not self._is_reading:
            found = next(self._found, None)
            if found is None or self._count <= 0 or self._bytes < REPLY_BYTES_MIN:
                self._answer.fill([U32.pack(len(self._sections)), *self._sections, *self._records])
                break
            self._begin(found)
            if broker.clock.monotonic() >= until and not self._is_reading:
                broker.loop.call_soon(self.run)
                break
        self._is_running = False

    def _begin(self, found: Found) -> None:
        if found.partition is None:
            self.add(found, found.error)
            return
        self._is_reading = True
        bytes_max = min(found.target.bytes_max, self._bytes)
        section = Section(self, self._session, self._answer, found, self._count, self._owner, bytes_max)
        try:
            if section.begin(found.start) is not None:
                self.ended(found)
        except BrokerError as error:
            section.refuse(error)

    def ended(self, found: Found, error: int = 0, read: tuple[int, int, bytes] | None = None) -> None:
        """Add a partition's result to the reply, and continue with the next partition.

        ``read`` has the number of messages, the offset after the last one, and the encoded messages.
        """
        self._is_reading = False
        count, next_offset, records = read or (0, found.start, b"")
        self.add(found, error, count, next_offset, records)
        if not self._is_running:
            self.run()

    def add(self, found: Found, error: int, count: int = 0, next_offset: int = 0, records: bytes = b"") -> None:
        partition = found.partition
        newest = 0 if partition is None else max(partition.log.readable_offset - 1, 0)
        context = NO_CONTEXT if partition is None else context_bytes(partition)
        self._count -= count
        self._bytes -= len(records)
        self._records.append(records)
        self._sections.append(
            _SECTION.pack(found.target.number, error, newest, count, context, next_offset, len(records))
        )


class Section(PollReply):
    __slots__ = ("_found", "_reply")

    def __init__(
        self,
        reply: FetchReply,
        session: IggySession,
        answer: Answer,
        found: Found,
        count: int,
        owner: tuple[PositionKind, str] | None,
        bytes_max: int,
    ) -> None:
        assert found.partition is not None, "the target was found"
        super().__init__(session, answer, found.partition, count, owner, bytes_max)
        self._reply: Final = reply
        self._found: Final = found

    def refuse(self, error: BrokerError) -> None:
        """Add the error for this partition only."""
        self._reply.ended(self._found, errors.number_of(error, self._answer.dialect))

    def _nothing_found(self) -> None:
        self._reply.ended(self._found)

    def _deliver(self, buffer: bytearray) -> None:
        state = self._state
        records = bytes(memoryview(buffer)[: state[encoder.AT]])
        self._session.shared.reply_buffers.give(buffer)
        self._reply.ended(self._found, read=(self._count - state[encoder.LEFT], state[encoder.NEXT], records))
