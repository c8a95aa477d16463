"""Dead letters: records that a pipeline could not use, with headers that say why and where they were; and their redrive, back to there.

Promises: a redrive sends letters and moves the position behind them in one atomic step, so that none is sent twice and none is left out,
whatever ends in between; it sends to no topic that was not named by who asked: what a letter's headers say is its writer's word.
Must not know: how requests arrive, what letters hold.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from polywire.broker.actions import Action
from polywire.broker.broker import Broker
from polywire.broker.topics import Partition, Topic
from polywire.broker.transaction_state import Scope
from polywire.errors import BrokerError, Conflict, ErrorCode, Invalid, Missing
from polywire.http.endpoints import Asked, Endpoint, numbered
from polywire.http.guard import completing
from polywire.http.records import read_each, read_one
from polywire.http.slices import Slices
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import PositionKind

GROUP: Final = "redrive"  # its positions in a topic of dead letters are how far they were redriven
LETTERS_MAX: Final = 1_000  # of one redrive
LETTERS_BYTES_MAX: Final = 2 * 1024 * 1024  # of keys and values; one letter is always taken
TARGETS_MAX: Final = 100  # topics named in one request
_PREFIX: Final = b"dead."
_DIGITS_MAX: Final = 9


@dataclass(slots=True)
class Letters:
    """What lies in front of a redrive. targets: letters by the topic they were meant for. others: records that are no letters. begins, ends:
    the position of each partition that was looked at, and where it would be behind them. waiting: records behind the present positions."""

    found: list[Record] = field(default_factory=list)
    targets: Counter[str] = field(default_factory=Counter)
    others: int = 0
    begins: dict[int, int | None] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    waiting: int = 0
    size: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no more are taken."""
        return len(self.found) + self.others >= LETTERS_MAX or self.size >= LETTERS_BYTES_MAX

    def take(self, record: Record) -> bool:
        """Look at the next record; whether more are taken."""
        target = said(record, b"topic")
        if target is None:
            self.others += 1
        else:
            self.found.append(record)
            self.targets[target] += 1
            self.size += len(record.value or b"") + len(record.key or b"")
        return not self.is_full


class DeadLetters:
    """The endpoints of one broker. ``_round_robin`` counts letters that say no partition."""

    def __init__(self, broker: Broker) -> None:
        self._broker: Final = broker
        self._round_robin = 0

    def table(self) -> Sequence[Endpoint]:
        """Every endpoint."""
        fields = {
            "topics": "list of those that letters may be sent to",
            "partition": "with offset: this letter only; positions stay where they are",
            "offset": "of that letter",
        }
        one = "/topics/{topic}"
        return [
            Endpoint("GET", f"{one}/dead-letters", Action.FETCH, "What a redrive would send, and where", self._look),
            Endpoint(
                "POST",
                f"{one}/redrive",
                Action.FETCH,
                f"Send dead letters back to where they were, {LETTERS_MAX} at most; takes the right to produce there, too",
                self._redrive,
                fields,
                also=Action.OFFSET_COMMIT,
            ),
        ]

    async def _look(self, asked: Asked) -> Any:
        topic = self._broker.topic(asked.path["topic"])
        return _shown(topic, await self._waiting(topic))

    async def _redrive(self, asked: Asked) -> Any:
        topic, targets = self._broker.topic(asked.path["topic"]), _targets(asked)
        if "offset" in asked.body:
            letters = await self._one(topic, asked.body.get("partition", 0), asked.body["offset"])
        else:
            letters = await self._waiting(topic)
        others = sorted(letters.targets.keys() - targets)
        if others:
            raise Invalid(
                ErrorCode.INVALID_REQUEST, f"letters were meant for topics that were not named topics={others[:10]}"
            )
        if letters.ends or letters.found:
            await self._send(topic, letters, asked)
        return _shown(topic, letters)

    # Reading

    async def _waiting(self, topic: Topic) -> Letters:
        """The letters behind the positions, in the order of partitions."""
        letters, slices = Letters(), Slices()
        committed = self._broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP)
        for partition in list(topic.partitions):
            log = partition.log
            begin, end = max(committed.get(partition.number, 0), log.first_offset), log.readable_offset
            letters.waiting += max(0, end - begin)
            if begin < end and not letters.is_full:
                letters.begins[partition.number] = committed.get(partition.number)
                letters.ends[partition.number] = await read_each(self._broker, partition, begin, letters.take)
            if slices.is_over:
                await slices.rest()
        return letters

    async def _one(self, topic: Topic, number: Any, offset: Any) -> Letters:
        """One letter, which moves no position. Raises Invalid(INVALID_REQUEST), Missing."""
        letters = Letters()
        letters.take(await read_one(self._broker, numbered(topic, number), offset))
        if not letters.found:
            raise Missing(ErrorCode.OFFSET_OUT_OF_RANGE, f"this is no dead letter partition={number} offset={offset}")
        return letters

    # Sending

    async def _send(self, topic: Topic, letters: Letters, asked: Asked) -> None:
        """All of them and the positions, or nothing. Raises BrokerError."""
        by_target: dict[Partition, list[Record]] = {}
        for record in letters.found:
            by_target.setdefault(self._target(record, asked), []).append(_sent_back(record))
        batches = [(partition, from_records(records), len(records)) for partition, records in by_target.items()]
        broker = self._broker
        before = broker.positions_in(topic.name.full, PositionKind.GROUP, GROUP)
        if any(before.get(number) != begin for number, begin in letters.begins.items()):
            raise Conflict(ErrorCode.VERSION_CONFLICT, "somebody else has redriven these letters meanwhile")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        transactions, by, id_ = broker.transactions, asked.caller, f"redrive-{secrets.token_hex(8)}"
        transaction = transactions.begin(transactions.begin_epoch(id_, by=by, done=None), done=None)
        try:
            for partition, batch, count in batches:
                transactions.stage(transaction, partition, batch, first=1, last=count, done=None)
            if letters.ends:
                transactions.put_offsets(transaction, Scope(topic.name.full, GROUP), letters.ends, by=by, done=None)
            transactions.commit(transaction, by=by, done=completing(done))
            await done
        finally:
            with suppress(BrokerError):  # what cannot be forgotten now is when it has been idle for long
                transactions.delete(id_, by=by)

    def _target(self, record: Record, asked: Asked) -> Partition:
        """Where a letter was. Raises Missing(TOPIC_MISSING), Denied."""
        broker, name = self._broker, said(record, b"topic")
        assert name is not None, "it is a letter"
        broker.access.authorize(asked.principal, Action.PRODUCE, broker.resource(name))
        topic = broker.topic(name)
        number, partitions = said(record, b"partition") or "", topic.written_to()
        if number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX and int(number) < len(partitions):
            return partitions[int(number)]
        self._round_robin += 1
        return partitions[self._round_robin % len(partitions)]


def said(record: Record, name: bytes) -> str | None:
    """What the headers of a letter say of where it was; the last word counts: a letter may have died twice."""
    for header in reversed(record.headers):
        if header.key == _PREFIX + name and header.value is not None:
            return header.value.decode("utf-8", "replace")
    return None


def _sent_back(record: Record) -> Record:
    """The record that a letter was."""
    headers = tuple(header for header in record.headers if not header.key.startswith(_PREFIX))
    return Record(record.value, record.key, headers, origin_time_us=record.origin_time_us)


def _targets(asked: Asked) -> set[str]:
    """Raises Invalid(INVALID_REQUEST)."""
    names = asked.body.get("topics", [])
    if not isinstance(names, list) or len(names) > TARGETS_MAX or not all(isinstance(name, str) for name in names):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topics is a list of names, at most {TARGETS_MAX}")
    return set(names)


def _shown(topic: Topic, letters: Letters) -> Mapping[str, Any]:
    return {
        "topic": topic.name.full,
        "waiting": letters.waiting,
        "letters": len(letters.found),
        "others": letters.others,
        "more": letters.waiting > 0 and letters.is_full,
        "targets": [{"topic": name, "letters": count} for name, count in sorted(letters.targets.items())],
    }
