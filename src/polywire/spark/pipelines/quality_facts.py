"""Result of a quality check: counts, gaps and duplicates by partition and producer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Counts of one partition.

    ``topic`` is empty if the rows do not contain it.

    Attributes:
        missing: offsets between the first and the last one without a row.
        repeated: rows with an offset that an earlier row has.
    """

    topic: str
    partition: int
    records: int
    first_offset: int
    last_offset: int
    missing: int
    repeated: int
    corrupt: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ProducerFacts:
    """Counts of one producer's sequence numbers.

    ``missing`` counts gaps from the lowest (or the given first) number to the highest.
    """

    producer: str
    records: int
    first: int
    last: int
    missing: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Quality:
    """The whole report.

    ``rate`` has (start of the interval in seconds since 1970, index in ``partitions``, number of records). ``sizes``
    has (upper limit in bytes, number of records).
    """

    title: str
    partitions: tuple[PartitionFacts, ...]
    producers: tuple[ProducerFacts, ...]
    rate: tuple[tuple[float, int, int], ...]
    interval_s: float
    sizes: tuple[tuple[int, int], ...]
    expected: int | None

    def __str__(self) -> str:
        verdict = f"wrong: {'; '.join(self.problems)}" if self.problems else "sound"
        return f"{verdict} title={self.title!r} records={self.records} partitions={len(self.partitions)}"

    @property
    def records(self) -> int:
        """Number of rows."""
        return sum(part.records for part in self.partitions)

    @property
    def batches(self) -> int:
        """Always 1: the report is one batch."""
        return 1

    @property
    def corrupt(self) -> int:
        """Number of rows that could not be parsed."""
        return sum(part.corrupt for part in self.partitions)

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems, as sentences. There are none if each record exists exactly once."""
        found = []
        for what, count in (
            ("offsets are missing", sum(part.missing for part in self.partitions)),
            ("rows repeat an offset", sum(part.repeated for part in self.partitions)),
            ("sequence numbers are missing", sum(one.missing for one in self.producers)),
            ("rows repeat a sequence number", sum(one.repeated for one in self.producers)),
            ("rows could not be read", self.corrupt),
        ):
            if count:
                found.append(f"{count:,} {what}")
        if self.expected is not None and self.records != self.expected:
            found.append(f"{self.expected:,} records were expected, {self.records:,} exist")
        return tuple(found)

    @property
    def sound(self) -> bool:
        """Whether each record exists exactly once."""
        return not self.problems
