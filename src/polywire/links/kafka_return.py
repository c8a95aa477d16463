"""Copy what clients write here, after a reversed cut-over, to a topic of Apache Kafka: each record once.

* All records are sent with one producer id, and their sequence numbers count from the cut-over. Kafka appends a batch
  only if its numbers follow the last ones, so a late request of a process that was killed cannot append it twice.
* The end of a partition at the source says where to continue, because offsets are the same up to a constant.
* Before the first write over a connection, the newest records at the source are compared with those here. Records of
  other clients are an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from polywire.client.copying import StoredFields, reduced
from polywire.client.kafka import SEQUENCES, KafkaClient
from polywire.client.polywire import PolywireClient
from polywire.errors import Conflict, ErrorCode
from polywire.link_orders import CutOver, LinkReport
from polywire.links.progress import Progress, is_complete
from polywire.records.columns import Record

RECORDS_AT_ONCE: Final = 2_000
COMPARED_MAX: Final = 1_000  # records of each partition that are compared when a connection begins


class KafkaReturn:
    """One topic that is copied to Kafka, over one connection. It has the interface of ``LinkedTopic``."""

    def __init__(self, link: str, cut_over: CutOver, here: PolywireClient, there: KafkaClient) -> None:
        self._link: Final = link
        self._cut_over: Final = cut_over
        self._here: Final = here
        self._there: Final = there
        self._fields: Final = StoredFields.by(there)
        self._positions = list(cut_over.here)
        self._is_open = False  # whether the positions were found at the source
        self._ends: list[int] = []
        self._progress: Final = Progress()

    @property
    def topic(self) -> str:
        return self._cut_over.topic

    @property
    def copy(self) -> KafkaClient:
        """The connection to the source."""
        return self._there

    @property
    def carried(self) -> tuple[int | None, ...]:
        """The end of the copy by partition; None where offsets differ."""
        pairs = zip(self._positions, self._cut_over.here, self._cut_over.ends, strict=False)
        return tuple([position if here == end else None for position, here, end in pairs])

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends of the partitions here, as last seen."""
        return tuple(self._ends)

    @property
    def is_complete(self) -> bool:
        """Whether the source has everything, as far as known."""
        return self._is_open and is_complete(self._ends, self._positions)

    @property
    def is_shifted(self) -> bool:
        """Return False: offsets cannot differ, because other records at the source are an error."""
        return False

    def forget(self) -> None:
        """Find the positions again before the next step, because an attempt has failed."""
        self._is_open = False

    async def step(self) -> bool:
        """Copy some records of each partition. Return whether there were any. Raises BrokerError."""
        bounds = await self._here.bounds(self.topic)
        self._ends = [part.next_offset for part in bounds[: len(self._cut_over.here)]]
        if not self._is_open:
            self._positions = await self._open()
            self._is_open = True
        moved = False
        for number, end in enumerate(self._ends):
            if self._positions[number] < end:
                await self._copy(number)
                moved = True
        return moved

    async def _open(self) -> list[int]:
        """Return the positions here. Raises Conflict if other clients have written to the source."""
        there = await self._there.bounds(self.topic)
        positions = []
        for number, (end, here) in enumerate(zip(self._cut_over.ends, self._cut_over.here, strict=True)):
            position = there[number].next_offset - end + here
            if not here <= position <= self._ends[number]:
                raise self._changed(number)
            await self._compare(number, max(here, position - COMPARED_MAX), position)
            positions.append(position)
        return positions

    async def _compare(self, number: int, first: int, end: int) -> None:
        """Raise Conflict unless the source has the same records from ``first`` to ``end`` as this broker."""
        if first == end:
            return
        shift = self._cut_over.ends[number] - self._cut_over.here[number]
        ours = {record.offset: record for record in await self._here.fetch(self.topic, number, first)}
        for record in await self._there.fetch(self.topic, number, first + shift):
            known = ours.get(record.offset - shift)
            if known is not None and (known.key, known.value) != (record.key, record.value):
                raise self._changed(number)

    async def _copy(self, number: int) -> None:
        at = self._positions[number]
        found = await self._here.fetch(self.topic, number, at, records_max=RECORDS_AT_ONCE)
        if not found or [record.offset for record in found] != list(range(at, at + len(found))):
            raise Conflict(
                ErrorCode.TOPIC_REPLACED,
                "compaction or retention has removed records here that the source does not have yet"
                f" topic={self.topic!r} partition={number} offset={at}",
            )
        await self._append(number, at, found)
        self._positions[number] = at + len(found)
        self._progress.add(len(found), found[-1].append_time_us)

    async def _append(self, number: int, at: int, records: Sequence[Record]) -> None:
        lost: Counter[str] = Counter()
        prepared = [reduced(record, self._fields, lost) for record in records]
        counted = at - self._cut_over.here[number]
        produced = await self._there.append_next(
            self.topic, number, prepared, producer=self._cut_over.producer, sequence=counted % SEQUENCES
        )
        if produced and produced[0].offset != counted + self._cut_over.ends[number]:
            raise self._changed(number)

    def _changed(self, number: int) -> Conflict:
        return Conflict(
            ErrorCode.TOPIC_REPLACED,
            "other clients have written to the source since the cut-over, so it cannot get the same records as here"
            f" (end this with: polywire link cut-over {self._link} --topics {self.topic})"
            f" topic={self.topic!r} partition={number}",
        )

    def report(self) -> LinkReport:
        """Return the state of the copy."""
        found = self._progress.report(self._link, self.topic, self._ends, self._positions)
        return replace(found, partitions=len(self._cut_over.here))
