"""Copy one topic of another broker, each record once.

* The position of a partition is the sequence number of the last publish of a writer, and a publish makes the records
  and the number readable in one atomic write. So the position is always that of the records.
* A partition without a position must be empty here: the link continues only what it has begun.
* After any error, the position is read again. Before that, unpublished records of the failed attempt are deleted, so
  that a late publish cannot succeed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from polywire.client.base import WireClient
from polywire.client.copying import StoredFields, reduced
from polywire.client.failures import beyond
from polywire.client.partition_reader import PartitionReader, reader_of, uses_offsets
from polywire.client.polywire import PolywireClient, split_records
from polywire.errors import BrokerError, Conflict, ErrorCode, Missing
from polywire.link_orders import LinkDefinition, LinkReport, LinkStart, PlannedTopic
from polywire.records.columns import Record
from polywire.records.rows import from_records
from polywire.types import Level

CHUNKS_AT_ONCE: Final = 2  # reads of one partition before it is the turn of the next one
NUMBER_STEP: Final = 1 << 31  # the broker rejects a sequence number that is 2^32 above the last one
RATE_S: Final = 5.0  # time over which the rate is averaged
COUNT_S: Final = 10.0  # interval of checks for more partitions
TOKEN_BYTES: Final = 16


class LinkedTopic:
    """One topic that a link follows, over one connection to the source."""

    def __init__(
        self,
        link: LinkDefinition,
        topic: str,
        source: WireClient,
        target: PolywireClient,
        tokens: dict[bytes, None] | None = None,
        *,
        claims: bool = False,
        begins_at: Sequence[int] | None = None,
    ) -> None:
        """Prepare to follow a topic.

        Args:
            tokens: those of the link's publishes whose outcome is unknown.
            claims: make the topic read-only for all other clients of the target. Only the broker's own process may.
            begins_at: by partition, the location to begin at in a topic that both ends have already.
        """
        self._begins_at: Final = begins_at
        self._claims: Final = claims
        self._link: Final = link
        self.topic: Final = topic
        self._source: Final = source
        self._target: Final = target
        self._reader: Final[PartitionReader] = reader_of(source, topic)
        self._fields: Final = StoredFields.by(target)
        self._writers: list[str] = []
        self._positions: list[int] = []  # published
        self._locations: list[int] = []  # read
        self._ends: list[int] = []
        self._shifted: set[int] = set()
        self._tokens: Final = {} if tokens is None else tokens
        self._topic_id = b""
        self._counted_at = 0.0
        self._copied = self._skipped = 0
        self._newest_us = 0
        self._rates: Final[list[tuple[float, int]]] = []

    async def plan(self) -> PlannedTopic:
        """Return what the link would do with the topic. Nothing is changed."""
        try:
            count = await self._reader.partition_count()
            extents = await self._reader.extents(count)
            latest = self._link.start is LinkStart.LATEST
            records = 0 if latest else sum([end - first for first, end in extents])
            same = uses_offsets(self._source) and all((end if latest else first) == 0 for first, end in extents)
            creates = True
            with suppress(Missing):
                await self._check(count, await self._known_positions(count))
                creates = False
        except BrokerError as error:
            return PlannedTopic(self.topic, error=error.message)
        return PlannedTopic(self.topic, count, records, creates, "same" if same else "differ")

    async def step(self) -> bool:
        """Copy some records of each partition. Return whether there were any. Raises BrokerError."""
        if not self._writers or time.monotonic() - self._counted_at >= COUNT_S:
            await self._open()
        moved = False
        extents = await self._reader.extents(len(self._writers))
        self._ends = [end for _, end in extents]
        for number, (first, end) in enumerate(extents):
            if self._locations[number] < first:
                self._skipped += first - self._locations[number]
                self._locations[number] = first
            if end < self._locations[number] and end:  # Iggy reports 0 for the end of an empty partition
                raise Conflict(
                    ErrorCode.TOPIC_REPLACED,
                    "the source has fewer records than were copied: it was created again, or lost records (delete the "
                    f"topic here to copy it again) topic={self.topic!r} partition={number} end={end}"
                    f" position={self._locations[number]}",
                )
            if self._locations[number] < end:
                moved |= await self._copy(number, end)
        return moved

    async def _copy(self, number: int, end: int) -> bool:
        """Copy some records of a partition: the next ones are read while the last ones are written."""
        writing: asyncio.Task[None] | None = None
        begun = self._locations[number]
        try:
            for _ in range(CHUNKS_AT_ONCE):
                location = self._locations[number]
                if location >= end:
                    break
                records, following = await self._reader.read(number, location)
                if following > location:
                    self._locations[number] = following
                else:  # retention may have removed the remaining records
                    self._locations[number] = beyond(location, await self._reader.first(number), "offset")
                    self._skipped += self._locations[number] - location
                if writing is not None:
                    await writing
                    writing = None
                if records:
                    writing = asyncio.create_task(self._write(number, records, following))
        finally:
            if writing is not None:
                await writing
        return self._locations[number] > begun

    async def _write(self, number: int, records: Sequence[Record], following: int) -> None:
        """Store records, and make them readable together with the position after them."""
        lost: Counter[str] = Counter()  # `polywire` stores all fields
        prepared = [reduced(record, self._fields, lost) for record in records]
        token = os.urandom(TOKEN_BYTES)
        self._tokens[token] = None
        for group in split_records(prepared):
            await self._target.stage(token, self.topic, number, from_records(group), level=Level.MEMORY)
        for step in _steps(self._positions[number], following):
            await self._target.publish(self._writers[number], step, [])
        published = await self._target.publish(self._writers[number], following, [token])
        if published.duplicate:
            raise Conflict(
                ErrorCode.TOPIC_REPLACED, f"another process runs this link topic={self.topic!r} partition={number}"
            )
        del self._tokens[token]
        self._positions[number] = following
        if published.ranges and published.ranges[0].first_offset != records[0].offset:
            self._shifted.add(number)
        self._copied += len(records)
        self._newest_us = max(self._newest_us, records[-1].append_time_us or records[-1].origin_time_us or 0)

    async def _open(self) -> None:
        """Create the topic if it is missing, and find the positions. Raises Conflict."""
        count = await self._reader.partition_count()
        self._counted_at = time.monotonic()
        if len(self._writers) == count and (await self._target.describe(self.topic)).id == self._topic_id:
            return
        self._writers = []
        if self._tokens:
            await self._target.abandon(list(self._tokens))
            self._tokens.clear()
        try:
            known = await self._known_positions(count)
        except Missing:
            if self._begins_at is not None:
                raise
            with suppress(Conflict):  # another client created it
                await self._target.create_topic(self.topic, count)
            known = await self._known_positions(count)
        if self._begins_at is not None:
            known = await self.skip_to(self._begins_at)
        if self._claims:
            await self._claim(count, known)
            known = await self._known_positions(count)
        await self._check(count, known)
        extents = await self._reader.extents(count)
        begins = self._link.start is LinkStart.LATEST and not any(position is not None for position in known.values())
        positions = []
        for (writer, position), (first, end) in zip(known.items(), extents, strict=True):
            if position is None and begins:
                await self._target.publish(writer, end, [])
            positions.append(position if position is not None else end if begins else first)
        self._positions, self._locations = positions, list(positions)
        bounds = await self._target.bounds(self.topic)
        for part, position in zip(bounds, known.values(), strict=True):
            if position is not None and part.next_offset != position:
                self._shifted.add(part.partition)
        self._ends = [end for _, end in extents]
        self._writers = list(known)

    async def _known_positions(self, count: int) -> dict[str, int | None]:
        """Return the position of each partition by its writer, None before the first record.

        Raises Missing if the topic does not exist here.
        """
        self._topic_id = (await self._target.describe(self.topic)).id
        prefix = f"{self._link.writer_prefix}{self._topic_id.hex()}/"
        found: dict[str, int] = {}
        for writer in await self._target.writers(prefix):
            found[writer.writer] = max(writer.number, found.get(writer.writer, 0))
        return {(name := f"{prefix}{number}"): found.get(name) for number in range(count)}

    async def skip_to(self, locations: Sequence[int]) -> dict[str, int | None]:
        """Store positions at these locations or after them. Return the position of each partition by its writer."""
        known = await self._known_positions(len(locations))
        for (writer, position), location in zip(known.items(), locations, strict=True):
            if position is None or position < location:
                for step in _steps(location if position is None else position, location):
                    await self._target.publish(writer, step, [])
                await self._target.publish(writer, location, [])
                known[writer] = location
        return known

    async def _claim(self, count: int, known: dict[str, int | None]) -> None:
        """Make the topic read-only for all other clients. Raises Conflict if it is no copy of the source."""
        here = await self._target.describe(self.topic)
        is_claimed = here.link == self._link.name
        if is_claimed and len(here.incarnations) < count:
            await self._target.grow_topic(self.topic, count)
        if is_claimed:
            return
        await self._check(count, known)
        await self._check_untouched(known)
        await self._target.link_topic(self.topic, self._link.name)
        try:  # again, because others could write until now
            await self._check(count, await self._known_positions(count))
            await self._check_untouched(known)
        except Conflict:
            await self._target.link_topic(self.topic, "")
            raise

    async def _check_untouched(self, known: dict[str, int | None]) -> None:
        """Raise Conflict if others wrote to the topic since a link with this name ended."""
        bounds = await self._target.bounds(self.topic)
        for part, position in zip(bounds, known.values(), strict=True):
            if position is not None and part.next_offset > part.first_offset and part.next_offset != position:
                raise Conflict(
                    ErrorCode.TOPIC_EXISTS,
                    "the topic was written since a link with this name ended (delete it to copy it again)"
                    f" topic={self.topic!r} partition={part.partition} position={position}"
                    f" next_offset={part.next_offset}",
                )

    async def _check(self, count: int, known: dict[str, int | None]) -> None:
        """Raise Conflict if the topic here is not the copy of the source."""
        bounds = await self._target.bounds(self.topic)
        if len(bounds) != count:
            raise Conflict(
                ErrorCode.TOPIC_EXISTS,
                "the topic exists here with another number of partitions (add partitions to it, or delete it)"
                f" topic={self.topic!r} partitions={len(bounds)} source_partitions={count}",
            )
        for part, position in zip(bounds, known.values(), strict=True):
            if position is None and part.next_offset > part.first_offset:
                raise Conflict(
                    ErrorCode.TOPIC_EXISTS,
                    "the topic exists here and has records that this link did not write (delete it to copy it)"
                    f" topic={self.topic!r} partition={part.partition}",
                )

    def report(self) -> LinkReport:
        now = time.monotonic()
        self._rates.append((now, self._copied))
        while self._rates[0][0] < now - RATE_S and len(self._rates) > 2:
            del self._rates[0]
        (since, before), (until, after) = self._rates[0], self._rates[-1]
        lag = sum([max(0, end - location) for end, location in zip(self._ends, self._locations, strict=False)])
        return LinkReport(
            link=self._link.name,
            topic=self.topic,
            partitions=len(self._writers),
            copied=self._copied,
            lag=lag,
            lag_s=max(0.0, time.time() - self._newest_us / 1e6) if lag and self._newest_us else 0.0,
            rate=(after - before) / (until - since) if until > since else 0.0,
            skipped=self._skipped,
            shifted=len(self._shifted),
        )

    @property
    def copy(self) -> PolywireClient:
        """The connection to the end that the link writes."""
        return self._target

    @property
    def locations(self) -> tuple[int, ...]:
        """The locations after the records that were read, by partition."""
        return tuple(self._locations)

    @property
    def carried(self) -> tuple[int | None, ...]:
        """The end of the copy by partition, up to which groups have the same offsets here; None where offsets differ."""
        is_same = uses_offsets(self._source)
        return tuple(
            [
                position if is_same and number not in self._shifted else None
                for number, position in enumerate(self._positions if self._writers else ())
            ]
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends of the source's partitions, as last seen."""
        return tuple(self._ends)

    @property
    def is_complete(self) -> bool:
        """Whether everything that the source has was copied, as far as known."""
        return bool(self._writers) and all(
            location >= end for location, end in zip(self._locations, self._ends, strict=True)
        )

    def forget(self) -> None:
        """Read positions again before the next step, because an attempt has failed."""
        self._writers = []


def _steps(position: int, following: int) -> Iterator[int]:
    """Yield numbers between two positions that are too far apart for one publish."""
    while following - position > NUMBER_STEP:
        position += NUMBER_STEP
        yield position
