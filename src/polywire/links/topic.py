"""Copy one topic of another broker, each record once.

* The position of a partition is the sequence number of the last publish of a writer, and a publish makes the records
  and the number readable in one atomic write. So records and position always agree.
* A partition without a position must be empty here: the link continues only what it has begun.
* Each publish covers exactly the offsets from the position to the next one, including offsets without a record. A
  partition begins here at the first offset of the source. So records have the offsets that they have at the source.
* After any error, the position is read again. Before that, unpublished records of the failed attempt are deleted, so
  that a late publish cannot succeed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from msgspec.structs import replace

from polywire.client.base import WireClient
from polywire.client.partition_reader import PartitionReader, reader_of, uses_offsets
from polywire.client.polywire import PolywireClient
from polywire.errors import BrokerError, Busy, Conflict, ErrorCode, Invalid, Missing, Unavailable
from polywire.link_orders import LinkDefinition, LinkReport, LinkStart, PlannedTopic
from polywire.links.progress import Progress, is_complete
from polywire.links.settings import differences, source_settings
from polywire.records.pieces import Piece, covering, merged
from polywire.types import Buffer, Level

CHUNKS_AT_ONCE: Final = 2  # reads of one partition before the next partition is read
REST_MAX: Final = 1_000  # so few remaining offsets are read, too: if they have no records, the last write covers them
NUMBER_STEP: Final = 1 << 31  # the broker rejects a sequence number that is 2^32 above the last one
JUMP_MAX: Final = 1 << 40  # longest gap in the offsets; if it is longer, the source's response is wrong
STAGED_BYTES: Final = 4 << 20  # bytes of one request
READ_S: Final = 60.0  # time for a response of the source
COUNT_S: Final = 10.0  # interval of checks for more partitions
SETTINGS_S: Final = 60.0  # interval of checks for changed settings
TOKEN_BYTES: Final = 16
_T = TypeVar("_T")


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
            tokens: tokens of the link's publishes whose outcome is unknown.
            claims: make the topic read-only for all other clients of the target. Only the broker's own process may do
                so.
            begins_at: by partition, the location to begin at in a topic that both ends have already.
        """
        self._begins_at: Final = begins_at
        self._claims: Final = claims
        self._link: Final = link
        self.topic: Final = topic
        self._source: Final = source
        self._target: Final = target
        self._reader: Final[PartitionReader] = reader_of(source, topic)
        self._has_offsets: Final = uses_offsets(source)
        self._writers: list[str] = []
        self._positions: list[int] = []  # published
        self._locations: list[int] = []  # read
        self._ends: list[int] = []
        self._shifted: set[int] = set()
        self._tokens: Final = {} if tokens is None else tokens
        self._topic_id = self._source_id = b""
        self._counted_at = 0.0
        self._settings = ""
        self._settings_at = float("-inf")
        self._skipped = 0
        self._progress: Final = Progress()

    async def plan(self) -> PlannedTopic:
        """Return what the link would do with the topic. Nothing is changed."""
        try:
            count = await self._within(READ_S, self._reader.partition_count())
            self._source_id = await self._within(READ_S, self._reader.topic_id())
            extents = await self._extents(count)
            latest = self._link.start is LinkStart.LATEST
            records = 0 if latest else sum([end - first for first, end in extents])
            same = self._has_offsets
            creates = True
            with suppress(Missing):
                known = await self._known_positions(count)
                nexts = await self._check(count, known)
                begins = [end if latest else first for first, end in extents]
                wanted = [begin if at is None else at for at, begin in zip(known.values(), begins, strict=True)]
                same &= all(is_empty or at == want for (at, is_empty), want in zip(nexts, wanted, strict=True))
                creates = False
            settings = await source_settings(self._source, self.topic)
        except BrokerError as error:
            return PlannedTopic(self.topic, error=error.message)
        offsets = "same" if same else "differ"
        carried = settings.carried if creates else {}
        return PlannedTopic(
            self.topic, count, records, creates, offsets, settings=carried, other_settings=settings.others
        )

    async def step(self) -> bool:
        """Copy some records of each partition. Return whether there were any. Raises BrokerError."""
        if not self._writers or time.monotonic() - self._counted_at >= COUNT_S:
            await self._open()
        moved = False
        extents = await self._extents(len(self._writers))
        self._ends = [end for _, end in extents]
        for number, (first, end) in enumerate(extents):
            self._skip_to(number, first)
            if end < self._locations[number] and (end or self._reader.reports_empty_ends):
                raise self._replaced(
                    "the source has fewer records than were copied: it was created again, or lost records",
                    f"partition={number} end={end} position={self._locations[number]}",
                )
            if self._locations[number] < end:
                moved |= await self._copy(number, end)
        return moved

    async def _within(self, seconds: float, reading: Coroutine[None, None, _T]) -> _T:
        """Return the response of the source. Raises Unavailable if it takes longer than ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                return await reading
        except TimeoutError:
            raise Unavailable(
                ErrorCode.UNREACHABLE, f"the source does not respond topic={self.topic!r} limit_s={seconds:g}"
            ) from None

    async def _extents(self, count: int) -> list[tuple[int, int]]:
        return await self._within(READ_S * (1 + count), self._reader.extents(count))

    def _skip_to(self, number: int, first: int) -> None:
        """Count the records that retention has removed below the first one."""
        if self._locations[number] < first:
            self._skipped += first - self._locations[number]
            self._locations[number] = first

    def _replaced(self, reason: str, facts: str) -> Conflict:
        return Conflict(
            ErrorCode.TOPIC_REPLACED,
            f"{reason} (delete the topic here to copy it again) topic={self.topic!r} {facts}",
        )

    async def _copy(self, number: int, end: int) -> bool:
        """Copy some records of a partition.

        The next records are read while the last ones are written. Records are published only when the next ones were
        read, so that the publish also covers the offsets without a record between them.
        """
        writing: asyncio.Task[None] | None = None
        waiting: list[Piece] = []
        begun, chunks = self._locations[number], 0
        try:
            while (rest := end - self._locations[number]) > 0 and (chunks < CHUNKS_AT_ONCE or rest <= REST_MAX):
                location = self._locations[number]
                pieces = await self._read(number)
                chunks += 1
                if writing is not None:
                    await writing
                    writing = None
                if pieces and waiting:
                    writing = asyncio.create_task(self._write(number, waiting, location))
                waiting = pieces or waiting
        finally:
            if writing is not None:
                await writing
        if waiting:
            await self._write(number, waiting, self._locations[number])
        return self._locations[number] > begun

    async def _read(self, number: int) -> list[Piece]:
        """Read at the location of a partition, and set the next location. Raises BrokerError if there is no progress."""
        location = self._locations[number]
        facts = f"topic={self.topic!r} partition={number} offset={location}"
        try:
            pieces, following = await self._within(READ_S, self._reader.read_pieces(number, location))
        except Missing as error:
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            pieces, following = [], location
        if pieces:  # the id after a read is also that of the topic before it
            await self._check_source()
        if not location <= following <= self._positions[number] + JUMP_MAX:
            raise Invalid(
                ErrorCode.INVALID_BATCH, f"the source returned offsets far apart next_offset={following} {facts}"
            )
        if following == location:  # retention may have removed the remaining records
            first = await self._within(READ_S, self._reader.first(number))
            if first <= location:
                raise Busy(ErrorCode.BUSY, f"the source returns no records below its end {facts}")
            self._skip_to(number, first)
            return []
        self._locations[number] = following
        return pieces

    async def _write(self, number: int, pieces: Sequence[Piece], following: int) -> None:
        """Store records, and make them readable together with the position after them."""
        token = os.urandom(TOKEN_BYTES)
        self._tokens[token] = None
        position = self._positions[number]
        parts = list(merged(pieces))
        batches = list(covering(parts, position, following)) if self._has_offsets else [part.batch for part in parts]
        for group in _groups(batches):
            await self._target.stage(token, self.topic, number, group, level=Level.MEMORY)
        for step in _steps(position, following):
            await self._target.publish(self._writers[number], step, [])
        published = await self._target.publish(self._writers[number], following, [token])
        if published.duplicate:
            raise Conflict(
                ErrorCode.TOPIC_REPLACED, f"another process runs this link topic={self.topic!r} partition={number}"
            )
        del self._tokens[token]
        self._positions[number] = following
        for written in published.ranges:
            if (written.first_offset, written.next_offset) != (position, following):
                self._shifted.add(number)
        self._progress.add(sum([piece.record_count for piece in pieces]), pieces[-1].newest_us)

    async def _open(self) -> None:
        """Create the topic if it is missing, and find the positions. Raises Conflict."""
        count = await self._within(READ_S, self._reader.partition_count())
        await self._check_source()
        self._counted_at = time.monotonic()
        if len(self._writers) == count and (await self._target.describe(self.topic)).id == self._topic_id:
            await self._compare_settings()
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
            with suppress(Conflict):  # another client has created it
                settings = (await source_settings(self._source, self.topic)).carried
                await self._target.create_topic(self.topic, count, settings=settings)
            known = await self._known_positions(count)
        if self._begins_at is not None:
            known = await self.skip_to(self._begins_at)
        if self._claims:
            await self._claim(count, known)
            known = await self._known_positions(count)
        nexts = [at for at, _ in await self._check(count, known)]
        extents = await self._extents(count)
        positions = await self._begin(known, nexts, extents)
        self._positions, self._locations = positions, list(positions)
        self._shifted = {number for number, at in enumerate(nexts) if at != positions[number] and at}
        self._ends = [end for _, end in extents]
        self._writers = list(known)

    async def _check_source(self) -> None:
        """Raise Conflict if the topic was created again at the source since the positions were found."""
        source_id = await self._within(READ_S, self._reader.topic_id())
        previous_id, self._source_id = self._source_id, source_id
        if self._writers and source_id != previous_id:
            self._writers = []  # so that the next step finds the same
            raise self._replaced("the topic was created again at the source", f"id={source_id.hex()}")

    async def _compare_settings(self) -> None:
        """Find settings that differ from those of the source, so that they can be reported."""
        if time.monotonic() - self._settings_at < SETTINGS_S:
            return
        self._settings_at = time.monotonic()
        ours = (await self._target.describe(self.topic)).settings
        self._settings = differences((await source_settings(self._source, self.topic)).carried, ours)

    async def _begin(
        self, known: Mapping[str, int | None], nexts: list[int], extents: Sequence[tuple[int, int]]
    ) -> list[int]:
        """Return the position of each partition. Partitions without a position begin here, at the offset of the source.

        With ``--start latest``, positions are stored from the last partition to the first. A partition without
        a position, before one with a position, was not reached by a failed attempt. Partitions after the last one with a
        position were added at the source later, and are copied from their first record.
        """
        positions = [-1 if position is None else position for position in known.values()]
        newer = 1 + max((number for number, at in enumerate(positions) if at >= 0), default=len(positions))
        for number, writer in reversed(list(enumerate(known))):
            if positions[number] >= 0:
                continue
            first, end = extents[number]
            latest = self._link.start is LinkStart.LATEST and number < newer
            position = positions[number] = end if latest else first
            if self._has_offsets and nexts[number] < position:
                await self._target.begin_partition(self.topic, number, position)
                nexts[number] = position
            if latest:
                await self._target.publish(writer, position, [])
        return positions

    async def _known_positions(self, count: int) -> dict[str, int | None]:
        """Return the position of each partition by its writer, None before the first record.

        The name of a writer ends with the id of the topic at the source. Raises Missing if the topic does not exist
        here, and Conflict if it is the copy of a topic that was deleted at the source.
        """
        self._topic_id = (await self._target.describe(self.topic)).id
        prefix = f"{self._link.writer_prefix}{self._topic_id.hex()}/"
        suffix = f"/{self._source_id.hex()}" if self._source_id else ""
        found: dict[str, int] = {}
        for writer in await self._target.writers(prefix):
            if not writer.writer.endswith(suffix):
                raise self._replaced("the topic was created again at the source", f"writer={writer.writer!r}")
            found[writer.writer] = max(writer.number, found.get(writer.writer, 0))
        return {(name := f"{prefix}{number}{suffix}"): found.get(name) for number in range(count)}

    async def skip_to(self, locations: Sequence[int]) -> dict[str, int | None]:
        """Move positions forward to these locations.

        Positions after them remain. Return the position of each partition by its writer.
        """
        self._source_id = await self._within(READ_S, self._reader.topic_id())
        known = await self._known_positions(len(locations))
        for (writer, position), location in zip(known.items(), locations, strict=True):
            if position is None or position < location:
                for step in _steps(location if position is None else position, location):
                    await self._target.publish(writer, step, [])
                await self._target.publish(writer, location, [])
                known[writer] = location
        return known

    async def _claim(self, count: int, known: dict[str, int | None]) -> None:
        """Make the topic read-only for all other clients. Raises Conflict if it is not a copy of the source."""
        here = await self._target.describe(self.topic)
        is_claimed = here.link == self._link.name
        if is_claimed and len(here.incarnations) < count:
            await self._target.grow_topic(self.topic, count)
        if is_claimed:
            return
        await self._check(count, known)
        await self._check_untouched(known)
        await self._target.link_topic(self.topic, self._link.name)
        try:  # check again, because other clients could write until now
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

    async def _check(self, count: int, known: dict[str, int | None]) -> list[tuple[int, bool]]:
        """Return the next offset of each partition here, and whether the partition is empty.

        Raises Conflict if the topic here is not the copy of the source.
        """
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
        return [(part.next_offset, part.next_offset == part.first_offset) for part in bounds]

    def report(self) -> LinkReport:
        found = self._progress.report(self._link.name, self.topic, self._ends, self._locations)
        return replace(
            found,
            partitions=len(self._writers),
            skipped=self._skipped,
            shifted=len(self._shifted),
            settings=self._settings,
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
        return tuple(
            [
                position if self._has_offsets and number not in self._shifted else None
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
        return bool(self._writers) and is_complete(self._ends, self._locations)

    @property
    def is_shifted(self) -> bool:
        """Whether records have other offsets than at the source."""
        return bool(self._shifted)

    def forget(self) -> None:
        """Read positions again before the next step, because an attempt has failed."""
        self._writers = []


def _steps(position: int, following: int) -> Iterator[int]:
    """Yield numbers between two positions that are too far apart for one publish."""
    while following - position > NUMBER_STEP:
        position += NUMBER_STEP
        yield position


def _groups(batches: Sequence[Buffer]) -> Iterator[bytes]:
    """Yield the batches in groups, each as the content of one request."""
    group: list[Buffer] = []
    size = 0
    for batch in batches:
        if group and size + len(batch) > STAGED_BYTES:
            yield b"".join(group)
            group, size = [], 0
        group.append(batch)
        size += len(batch)
    if group:
        yield b"".join(group)
