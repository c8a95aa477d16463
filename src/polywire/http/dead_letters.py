"""Dead letters and their redrive.

A dead letter is a record that a pipeline could not process. Its headers contain the reason, and the original topic and
partition. A redrive sends the record back to these.

* A redrive sends the letters and commits the offset in one transaction, so no letter is lost or sent twice, even after
  a crash.
* It sends only to topics named in the request, because any producer can write the headers of a letter.
* It reads a limited number of bytes, including headers, but always at least one letter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.broker.topics import Topic
from polywire.errors import ErrorCode, Invalid, Missing
from polywire.http.endpoints import ApiCall, Endpoint, partition_of
from polywire.http.records import READERS_MAX, ReadLimit, RecordReader, Taken
from polywire.http.redrive import GROUP, Letter, Redrive
from polywire.http.slices import Slices
from polywire.records.header_values import text_of
from polywire.records.rows import Rows
from polywire.types import PositionKind

LETTERS_MAX: Final = 1_000  # records of one redrive
LETTERS_BYTES_MAX: Final = 2 * 1024 * 1024  # bytes of one redrive, headers included; at least one letter is always sent
TARGETS_MAX: Final = 100  # topics named in one request
TARGET_BYTES_MAX: Final = 511  # length of a topic's name; a longer header is ignored
_PREFIX: Final = b"dead."
_DIGITS_MAX: Final = 9


@dataclass(slots=True)
class Letters:
    """The letters that a redrive reads.

    found: the letters, only if ``collects``. count: number of letters. targets: number of letters by original topic.
    others: number of records that are not dead letters. begins: the committed offset of each partition that was read.
    ends: the offset after the letters that were read. waiting: number of records after the committed offsets. more:
    whether some of these were not read.
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
        """Whether a limit is reached."""
        return self.count + self.others >= LETTERS_MAX or self.size >= LETTERS_BYTES_MAX

    def take(self, rows: Rows, index: int) -> Taken:
        """Add the next record; see ``records.Take``."""
        size = rows.size(index)
        if self.size and self.size + size > LETTERS_BYTES_MAX:
            self.size = LETTERS_BYTES_MAX
            return Taken.LEFT
        self.size += size
        target = letter_header(rows, index, b"topic")
        if not target or len(target.encode()) > TARGET_BYTES_MAX:
            self.others += 1
        else:
            self.count += 1
            self.targets[target] += 1
            if self.collects:
                batch = rows.copy(index, without=_PREFIX, has_origin_time=True)
                self.found.append(Letter(target, _number(letter_header(rows, index, b"partition")), bytes(batch)))
        return Taken.LAST if self.is_full else Taken.MORE


class DeadLetters:
    """The endpoints of one broker."""

    def __init__(self, broker: Broker, reader: RecordReader, redrive: Redrive) -> None:
        self._broker: Final = broker
        self._reader: Final = reader
        # each redrive holds up to the size of the largest batch in memory
        self._redrives: Final = asyncio.Semaphore(READERS_MAX)
        self._redrive: Final = redrive

    def table(self) -> Sequence[Endpoint]:
        """Return every endpoint."""
        fields = {
            "topics": "list of topics that records may return to",
            "partition": "with offset: redrive only this record; no offset is committed",
            "offset": "offset of that record",
        }
        one = "/topics/{topic}"
        return [
            Endpoint("GET", f"{one}/dead-letters", Action.FETCH, "Preview a redrive", self._preview),
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

    async def _preview(self, call: ApiCall) -> Any:
        topic = self._broker.topic(call.path["topic"])
        return _redrive_json(topic, await self._waiting(topic, Letters(collects=False)))

    async def _send(self, call: ApiCall) -> Any:
        topic, targets = self._broker.topic(call.path["topic"]), _targets(call)
        async with self._redrives:
            if "offset" in call.body:
                letters = await self._one(topic, call.body.get("partition", 0), call.body["offset"])
            else:
                letters = await self._waiting(topic, Letters(collects=True))
            others = sorted(letters.targets.keys() - targets)
            if others:
                raise Invalid(
                    ErrorCode.INVALID_REQUEST,
                    f"dead letters belong to topics that the request does not name (add them to its topics) topics={others[:10]}",
                )
            if letters.ends or letters.found:
                await self._redrive.send(topic, letters.found, begins=letters.begins, ends=letters.ends, call=call)
        return _redrive_json(topic, letters)

    async def _waiting(self, topic: Topic, letters: Letters) -> Letters:
        """Read the letters after the committed offsets, partition by partition."""
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
        """Read one letter, without an offset to commit. Raises Invalid(INVALID_REQUEST), Missing."""
        letters = Letters(collects=True)
        await self._reader.one(partition_of(topic, number), offset, letters.take)
        if not letters.count:
            raise Missing(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"the record is not a dead letter partition={number} offset={offset}"
            )
        return letters


def letter_header(rows: Rows, index: int, name: bytes) -> str | None:
    """Return the last header ``dead.NAME`` of a letter. A letter that failed twice has two of them."""
    header = rows.last_header(index, _PREFIX + name)
    return None if header is None else text_of(header.value, header.value_kind)


def _number(text: str | None) -> int | None:
    """Return the partition number; None if the text is not a number."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None


def _targets(call: ApiCall) -> set[str]:
    """Return the topics that the request names. Raises Invalid(INVALID_REQUEST)."""
    names = call.body.get("topics", [])
    if not isinstance(names, list) or len(names) > TARGETS_MAX or not all(isinstance(name, str) for name in names):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topics must be a list of at most {TARGETS_MAX} names")
    return set(names)


def _redrive_json(topic: Topic, letters: Letters) -> Mapping[str, Any]:
    return {
        "topic": topic.name.full,
        "waiting": letters.waiting,
        "letters": letters.count,
        "others": letters.others,
        "more": letters.more,
        "targets": [{"topic": name, "letters": count} for name, count in sorted(letters.targets.items())],
    }
