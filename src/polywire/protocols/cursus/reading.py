"""CONSUME: one batch for one request, waited for when asked to (dossier §5.1).

Promises: a given offset is where reading begins; nothing of a read is used after its pin was released. Must not know: sockets, streams.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from polywire.broker.topics import Partition
from polywire.errors import BrokerError
from polywire.log.base import Read
from polywire.protocols.cursus.answers import Answer
from polywire.protocols.cursus.filling import Filling
from polywire.protocols.cursus.messages import Dialect, Refused, Request, integer
from polywire.protocols.cursus.places import (
    batch_size,
    check_isolation,
    failed,
    given_offset,
    out_of_range,
    partition_number,
    readable_partition,
    readable_topic,
    start_offset,
)
from polywire.protocols.cursus.session import Command, CursusSession, Reply
from polywire.protocols.cursus.streaming import ValuePush

WAIT_MS_MAX: Final = 30_000  # half of the time after which a silent connection is closed
TOPICS_MAX: Final = 1_000  # read by one pattern
READ_BYTES_MAX: Final = 2 * 1024 * 1024  # asked of the log at a time


@dataclass(slots=True)
class Place:
    """A partition to be read, and where from."""

    partition: Partition
    offset: int

    @property
    def is_done(self) -> bool:
        """Whether nothing can be read now."""
        return self.offset >= self.partition.log.readable_offset


def consume(session: CursusSession, request: Request, /) -> Reply | None:
    """CONSUME in each of its dialects."""
    if request.dialect is Dialect.LEGACY:
        return _consume_legacy(session, request)
    options = request.options
    needed = ("topic", "partition", "member") if request.dialect is Dialect.MODERN else ("topic", "partition", "offset")
    if not all(options.get(key) for key in needed):
        raise Refused("invalid_consume_syntax")
    offset = given_offset(request)
    if offset is None and not (options.get("group") or options.get("autoOffsetReset")):
        raise Refused("invalid_consume_syntax")
    check_isolation(request)
    places = _places(session, request, offset)
    for place in places:
        if place.offset < place.partition.log.first_offset:
            raise Refused("OFFSET_OUT_OF_RANGE", out_of_range(place.partition, place.offset))
    wait_ms = integer(options.get("wait_ms", "0"))
    if wait_ms is None:
        raise failed(f"invalid wait_ms value: {options['wait_ms']}")
    number = partition_number(options["partition"])
    wait_ms = min(max(wait_ms, 0), WAIT_MS_MAX)
    consuming = Consuming(session, request, places, number, batch_size(request), waits=wait_ms > 0)
    consuming.begin(wait_ms)
    return None


def _places(session: CursusSession, request: Request, offset: int | None) -> Sequence[Place]:
    """What is read: a partition of the topic, or of every topic that a pattern matches."""
    name = request.options["topic"]
    names = [name]
    if "*" in name or "?" in name:
        pattern = re.compile(re.escape(name).replace(r"\*", ".*").replace(r"\?", "."))
        topics = session.state.broker.topics()
        names = [topic.name.full for topic in topics if pattern.fullmatch(topic.name.full) is not None]
        if not names:
            raise failed(f"no topics match pattern '{name}'")
        if len(names) > TOPICS_MAX:
            raise failed(f"more than {TOPICS_MAX} topics match pattern '{name}'")
    places = []
    for found in names:
        topic = readable_topic(session, found)
        partition = readable_partition(topic, partition_number(request.options["partition"]))
        places.append(Place(partition, start_offset(session, request, partition, offset)))
    return places


class Consuming:
    """One CONSUME under way.

    Invariant: answered once: with records, with an error, or with an empty batch when its time is over.
    """

    __slots__ = (
        "_answer",
        "_filling",
        "_number",
        "_open",
        "_places",
        "_records_max",
        "_session",
        "_timer",
        "_topic",
        "_waits",
    )

    def __init__(
        self,
        session: CursusSession,
        request: Request,
        places: Sequence[Place],
        number: int,
        records_max: int,
        *,
        waits: bool,
    ) -> None:
        """waits: whether it may take long; then it holds up neither batches behind it nor the end of the broker."""
        self._session = session
        self._topic = request.options["topic"]
        self._places = places
        self._number = number
        self._records_max = records_max
        self._answer: Answer = session.later(request.dialect, blocking=not waits)
        self._answer.cancel = self._stop
        self._open: deque[Place] = deque()
        self._filling: Filling | None = None
        self._waits: list[Callable[[], None]] = []
        self._timer: Any = None

    def begin(self, wait_ms: int) -> None:
        """Read what there is, or wait for it."""
        if wait_ms and all(place.is_done for place in self._places):
            self._timer = self._session.state.broker.loop.call_later(wait_ms / 1000, self._give_up)
            self._wait()
        else:
            self._read()

    def _wait(self) -> None:
        broker = self._session.state.broker
        try:
            self._waits = [broker.wait(place.partition, place.offset, self._woken) for place in self._places]
        except BrokerError as error:
            self._fail(error)

    def _woken(self) -> None:
        self._stop()
        self._session.state.broker.loop.call_soon(self._read)

    def _give_up(self) -> None:
        self._timer = None
        self._stop()
        self._read()

    def _stop(self) -> None:
        """Wait no longer."""
        for cancel in self._waits:
            cancel()
        self._waits = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read(self) -> None:
        """Fill a batch from every place in turn."""
        if self._session.closed:
            return
        self._filling = Filling(self._session.state.scratch, self._topic, self._records_max)
        self._open = deque(place for place in self._places if not place.is_done)
        self._go_on()

    def _go_on(self) -> None:
        """Read from the places that are left, until the batch is full or the bytes must be fetched."""
        broker = self._session.state.broker
        while self._open:
            place = self._open[0]
            end = place.partition.log.readable_offset
            try:
                read = broker.fetch(
                    place.partition, place.offset, bytes_max=READ_BYTES_MAX, then=self._read_later, offset_end=end
                )
                if read is None:
                    return
                self._take(read, place, end)
            except BrokerError as error:
                self._fail(error)
                return
        filling, self._filling = self._filling, None
        assert filling is not None, "a batch is filled once"
        filling.answer(self._answer, self._number)

    def _read_later(self, read: Read | BrokerError) -> None:
        """The bytes had to be fetched."""
        if isinstance(read, BrokerError):
            self._fail(read)
            return
        if self._session.closed or self._filling is None:
            read.pin.release()
            self._drop()
            return
        place = self._open[0]
        try:
            self._take(read, place, read.readable_offset)
        except BrokerError as error:
            self._fail(error)
            return
        self._go_on()

    def _take(self, read: Read, place: Place, end: int) -> None:
        filling = self._filling
        assert filling is not None, "a batch is being filled"
        try:
            wanted = filling.take(read, place.offset, end)
        finally:
            read.pin.release()
        place.offset = read.next_offset
        if not wanted:
            self._open.clear()
        elif place.offset >= end:
            self._open.popleft()

    def _drop(self) -> None:
        if self._filling is not None:
            self._filling.drop()
            self._filling = None

    def _fail(self, error: BrokerError) -> None:
        self._stop()
        self._drop()
        self._answer.fail(error)


def _consume_legacy(session: CursusSession, request: Request) -> Reply | None:
    """One frame per value, then the connection closes; whatever is wrong closes it, too (dossier §8.3)."""
    if len(request.words) != 3:
        raise Refused(
            "invalid_consume_syntax",
            legacy="invalid CONSUME syntax. Expected: CONSUME <topic> <partition> <offset>",
        )
    try:
        number = partition_number(request.options["partition"])
        offset = given_offset(request)
        topic = readable_topic(session, request.options["topic"])
        partition = readable_partition(topic, number)
    except Refused as error:
        session.later(request.dialect).refuse(error)
        session.end()
        return None
    ValuePush(session, partition, offset or 0).begin()
    return None


COMMANDS: Final[Mapping[str, Command]] = {
    "CONSUME": Command(consume, permissions=("topic.read", "group")),
}
