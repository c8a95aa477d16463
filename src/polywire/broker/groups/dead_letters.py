"""Copy rejected records of a share group to its dead-letter topic.

* One journal write stores the copy and finishes the original, so a record is neither lost nor copied twice.
* The copy has the headers ``dead.*`` of all dead letters: reason, original topic, partition and offset, and also the
  group and the number of deliveries.
* The times of a record become ``dead.deliver.at`` and ``dead.expires.at``, so that the copy does not expire in turn.
* A record that cannot be copied now, for example because the disk is full, is retried. No member can acquire it meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol

from polywire.broker.api import Records, Topics
from polywire.broker.events import CHANGE_BYTES, ENTRY_BYTES
from polywire.broker.owners import ITSELF
from polywire.broker.topics import Partition, Topic
from polywire.delivery_times import DELIVER_AT, EXPIRES_AT
from polywire.errors import BrokerError, ErrorCode
from polywire.log.base import Loop, Read
from polywire.records.columns import Header
from polywire.records.compression import expand_body
from polywire.records.header import read_header, walk
from polywire.records.rows import Rows
from polywire.types import Level

RETRY_S: Final = 1.0  # seconds until a record is copied again that could not be copied
READ_BYTES: Final = 4096  # the read has at least the batch with the record, however large it is
REASON_BYTES_MAX: Final = 1024
REJECTED: Final = "rejected by the consumer"
EXHAUSTED: Final = "delivered too often"
LAPSED: Final = "expired before it was delivered"
_TIMES: Final = frozenset({DELIVER_AT.encode(), EXPIRES_AT.encode()})


class LetterBroker(Topics, Records, Protocol):
    """The methods of the broker that copying needs."""

    def reserve(self, size: int) -> None:
        """Ensure that the next ``size`` bytes of appends and changes get into one atomic journal write."""


class Letter(NamedTuple):
    """A record to copy.

    Attributes:
        topic: full name of the dead-letter topic.
        is_wanted: returns False if the group was deleted, or set to other offsets. The record is not copied then.
        stored: called in the same journal write as the copy, to end the record.
    """

    partition: Partition
    offset: int
    deliveries: int
    reason: str
    group: str
    topic: str
    is_wanted: Callable[[], bool]
    stored: Callable[[], None]


class DeadLetters:
    """Copies rejected records to dead-letter topics. A topic gets its records one after another."""

    __slots__ = ("_broker", "_copiers", "_loop")

    def __init__(self, broker: LetterBroker, loop: Loop) -> None:
        self._broker: Final = broker
        self._loop: Final = loop
        self._copiers: dict[str, _Copier] = {}

    def put(self, letter: Letter) -> None:
        copier = self._copiers.get(letter.topic)
        if copier is None:
            done = partial(self._copiers.pop, letter.topic)
            copier = self._copiers[letter.topic] = _Copier(self._broker, self._loop, done)
        copier.put(letter)


class _Copier:
    """Copies the records for one dead-letter topic. A topic that cannot be written does not delay the others."""

    __slots__ = ("_broker", "_done", "_is_busy", "_loop", "_waiting")

    def __init__(self, broker: LetterBroker, loop: Loop, done: Callable[[], object]) -> None:
        self._broker: Final = broker
        self._loop: Final = loop
        self._done: Final = done
        self._waiting: deque[Letter] = deque()
        self._is_busy = False

    def put(self, letter: Letter) -> None:
        self._waiting.append(letter)
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._copy_next)

    def _copy_next(self) -> None:
        while self._waiting:
            letter = self._waiting[0]
            try:
                read = self._broker.fetch(
                    letter.partition,
                    letter.offset,
                    bytes_max=READ_BYTES,
                    then=partial(self._arrived, letter),
                    offset_end=letter.offset + 1,
                )
                if not isinstance(read, Read):
                    return
                self._copy(letter, read)
            except BrokerError as error:
                if not self._is_gone(letter, error):
                    return
        self._done()

    def _arrived(self, letter: Letter, read: Read | BrokerError) -> None:
        try:
            if isinstance(read, BrokerError):
                raise read
            self._copy(letter, read)
        except BrokerError as error:
            if not self._is_gone(letter, error):
                return
        self._copy_next()

    def _is_gone(self, letter: Letter, error: BrokerError) -> bool:
        """Return whether to continue with the next record, because this one was deleted. Otherwise retry later."""
        if letter.partition.ended or error.code is ErrorCode.OFFSET_OUT_OF_RANGE:
            with suppress(BrokerError):
                letter.stored()
                self._waiting.popleft()
                return True
        if error.code is ErrorCode.RECORD_TOO_LARGE:  # the headers of a copy need space, too
            self._waiting.rotate(-1)  # it must not hold up the others
        self._loop.call_later(RETRY_S, self._copy_next)
        return False

    def _copy(self, letter: Letter, read: Read) -> None:
        """Copy a record and finish it. Raises BrokerError if that must be tried again."""
        try:
            batch = _single(read, letter)
        finally:
            read.pin.release()
        if batch is not None and letter.is_wanted():
            topic = self._broker.ensure_topic(letter.topic, by=ITSELF)
            self._broker.reserve(len(batch) + len(letter.group) + CHANGE_BYTES + 2 * ENTRY_BYTES)
            self._broker.produce(_target(topic, letter), batch, by=ITSELF, level=Level.WRITTEN, done=None)
        letter.stored()
        self._waiting.popleft()


def _target(topic: Topic, letter: Letter) -> Partition:
    partitions = topic.written_to()
    return partitions[letter.partition.number % len(partitions)]


def _single(read: Read, letter: Letter) -> bytearray | None:
    """Return a batch with the copy of a record, or None if the record does not exist."""
    batches = (chunk[at:] for chunk in read.chunks for at in walk(chunk))
    for batch in batches:
        rows = Rows(expand_body(batch[: read_header(batch).length]))
        for index in range(rows.count):
            if rows.offset(index) == letter.offset:
                added = [*_headers(letter), *_times(rows, index)]
                return rows.copy(index, omitted=_TIMES, has_origin_time=True, added=added)
    return None


def _times(rows: Rows, index: int) -> list[Header]:
    return [replace(header, key=b"dead." + header.key) for header in rows.headers(index) if header.key in _TIMES]


def _headers(letter: Letter) -> list[Header]:
    values = {
        "reason": letter.reason.encode()[:REASON_BYTES_MAX].decode(errors="ignore"),
        "topic": letter.partition.topic.name.full,
        "partition": str(letter.partition.number),
        "offset": str(letter.offset),
        "group": letter.group,
        "deliveries": str(letter.deliveries),
    }
    return [Header(f"dead.{name}".encode(), value.encode()) for name, value in values.items()]
