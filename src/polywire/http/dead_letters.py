"""Dead letters: records that a pipeline could not use, with headers that say why and where they were; and their redrive, back to there.

Promises:

* A redrive sends letters and moves the position behind them in one transaction, so none is sent twice and none is skipped, whatever ends in
  between.
* It sends to no topic that the request does not name: the headers of a letter are its writer's word.
* It reads and holds a limited number of bytes, headers included. One letter is always taken.

Must not know: how requests arrive, what letters hold, how they are sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.broker.topics import Topic
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.endpoints import Asked, Endpoint, numbered
from polywire.http.records import READERS_MAX, ReadLimit, RecordReader, Taken
from polywire.http.redrive import GROUP, Letter, Redrive
from polywire.http.slices import Slices
from polywire.records.header_values import text_of
from polywire.records.rows import Rows
from polywire.types import PositionKind

LETTERS_MAX: Final = 1_000  # records of one redrive
LETTERS_BYTES_MAX: Final = 2 * 1024 * 1024  # records of one redrive, headers included; one is always sent
TARGETS_MAX: Final = 100  # topics named in one request
TARGET_BYTES_MAX: Final = 511  # name of a topic; a longer header is ignored
_PREFIX: Final = b"dead."
_DIGITS_MAX: Final = 9


@dataclass(slots=True)
class Letters:
    """The letters in front of a redrive.

    found: filled if ``collects``. count: letters. targets: letters by the topic they were meant for. others: records that are no letters.
    begins, ends: the position of each partition that was read, and where it would be behind these letters. waiting: records behind the
    present positions. more: whether some of them were not read.
    """

    collects: bool
    found: list[Letter] = field(default_factory=list)
    count: int = 0
    targets: Counter[str] = field(default_factory=Counter)
    others: int = 0
    begins: dict[int, int | None] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    waiting: int = 0
    more: bool = False
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more are taken."""
        return self.count + self.others >= LETTERS_MAX or self.size >= LETTERS_BYTES_MAX

    def take(self, rows: Rows, index: int) -> Taken:
        """Take the next record. See ``records.Take``."""
        size = rows.size(index)
        if self.size and self.size + size > LETTERS_BYTES_MAX:
            self.size = LETTERS_BYTES_MAX
            return Taken.LEFT
        self.size += size
        target = said(rows, index, b"topic")
        if not target or len(target.encode()) > TARGET_BYTES_MAX:
            self.others += 1
        else:
            self.count += 1
            self.targets[target] += 1
            if self.collects:
                batch = rows.copy(index, without=_PREFIX, has_origin_time=True)
                self.found.append(Letter(target, _number(said(rows, index, b"partition")), bytes(batch)))
        return Taken.LAST if self.is_full else Taken.MORE


class DeadLetters:
    """The endpoints of one broker."""

    def __init__(self, broker: Broker, reader: RecordReader, redrive: Redrive) -> None:
        self._broker: Final = broker
        self._reader: Final = reader
        self._redrives: Final = asyncio.Semaphore(READERS_MAX)  # each holds as much as one of the largest batches
        self._redrive: Final = redrive

    def table(self) -> Sequence[Endpoint]:
        """Every endpoint."""
        fields = {
            "topics": "list of topics that records may return to",
            "partition": "with offset: redrive only this record; no offset is committed",
            "offset": "offset of that record",
        }
        one = "/topics/{topic}"
        return [
            Endpoint("GET", f"{one}/dead-letters", Action.FETCH, "Preview a redrive", self._look),
            Endpoint(
                "POST",
                f"{one}/redrive",
                Action.FETCH,
                f"Redrive at most {LETTERS_MAX} dead letters; also needs produce for their topics",
                self._send,
                fields,
                also=Action.OFFSET_COMMIT,
            ),
        ]

    async def _look(self, asked: Asked) -> Any:
        topic = self._broker.topic(asked.path["topic"])
        return _shown(topic, await self._waiting(topic, Letters(collects=False)))

    async def _send(self, asked: Asked) -> Any:
        topic, targets = self._broker.topic(asked.path["topic"]), _targets(asked)
        async with self._redrives:
            if "offset" in asked.body:
                letters = await self._one(topic, asked.body.get("partition", 0), asked.body["offset"])
            else:
                letters = await self._waiting(topic, Letters(collects=True))
            others = sorted(letters.targets.keys() - targets)
            if others:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"dead letters belong to topics that the request does not name topics={others[:10]}",
                )
            if letters.ends or letters.found:
                await self._redrive.send(topic, letters.found, begins=letters.begins, ends=letters.ends, asked=asked)
        return _shown(topic, letters)

    async def _waiting(self, topic: Topic, letters: Letters) -> Letters:
        """The letters behind the positions, in the order of partitions."""
        slices, limit = Slices(), ReadLimit()
        committed = self._broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP)
        for partition in list(topic.partitions):
            log = partition.log
            begin, end = max(committed.get(partition.number, 0), log.first_offset), log.readable_offset
            letters.waiting += max(0, end - begin)
            if begin < end and not letters.is_full and limit.left > 0:
                letters.begins[partition.number] = committed.get(partition.number)
                begin = letters.ends[partition.number] = await self._reader.each(
                    partition, begin, letters.take, limit=limit
                )
            letters.more |= begin < end
            if slices.is_over:
                await slices.rest()
        return letters

    async def _one(self, topic: Topic, number: Any, offset: Any) -> Letters:
        """One letter, which moves no position. Raises Invalid(INVALID_REQUEST), Missing."""
        letters = Letters(collects=True)
        await self._reader.one(numbered(topic, number), offset, letters.take)
        if not letters.count:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"the record is not a dead letter partition={number} offset={offset}"
            )
        return letters


def said(rows: Rows, index: int, name: bytes) -> str | None:
    """What the headers of a letter say of where it was; the last word counts: a letter may have died twice."""
    header = rows.last_header(index, _PREFIX + name)
    return None if header is None else text_of(header.value, header.value_kind)


def _number(text: str | None) -> int | None:
    """Return a partition's number; None if the text is not one."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None


def _targets(asked: Asked) -> set[str]:
    """Raises Invalid(INVALID_REQUEST)."""
    names = asked.body.get("topics", [])
    if not isinstance(names, list) or len(names) > TARGETS_MAX or not all(isinstance(name, str) for name in names):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topics must be a list of at most {TARGETS_MAX} names")
    return set(names)


def _shown(topic: Topic, letters: Letters) -> Mapping[str, Any]:
    return {
        "topic": topic.name.full,
        "waiting": letters.waiting,
        "letters": letters.count,
        "others": letters.others,
        "more": letters.more,
        "targets": [{"topic": name, "letters": count} for name, count in sorted(letters.targets.items())],
    }
