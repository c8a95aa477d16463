"""Check a topic or a table for gaps and duplicates, by partition and producer, and write a page with charts.

Spark counts all rows, not a sample. ``sound`` means that nothing is missing and nothing is duplicated. The page is one
HTML file without scripts. Charts are SVG, in light and dark mode. Text from records is escaped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from polywire.errors import ErrorCode, Invalid
from polywire.spark.functions import CORRUPT, VALUE, parser
from polywire.spark.pipelines.queries import Parser, parsed, topic_rows

COLOURS: Final = ("#3b6ea5", "#e08e3c", "#4f9d69", "#a05195", "#c8553d", "#6c8ebf", "#8a8d3f", "#58a4b0")
WIDTH, HEIGHT, LEFT, BOTTOM = 860, 220, 64, 26
TICKS: Final = 4
SLOTS_MIN: Final = 12  # so that a single bar does not fill the chart
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #66707f; --line: #d9dee6; --paper: #ffffff; --card: #f6f8fb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b4; --line: #343c48; --paper: #151a21; --card: #1d242e; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 920px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; } p { margin: .2rem 0; }
.soft { color: var(--soft); }
.verdict { display: inline-block; margin: 1rem 0; padding: .45rem .9rem; border-radius: .5rem; font-weight: 600; color: #fff; }
.good { background: #2e7d4f; } .bad { background: #b3392f; }
.facts { display: flex; flex-wrap: wrap; gap: .8rem; }
.fact { background: var(--card); border-radius: .5rem; padding: .6rem 1rem; flex: 1 1 6rem; }
.fact b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
td.wrong { color: #c8553d; font-weight: 700; }
svg { width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); } svg .grid { stroke: var(--line); }
.key span { display: inline-block; margin-right: 1rem; }
.key i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
"""
TIME_BARS: Final = 60
SIZE_BARS: Final = 24


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Counts of one partition's rows.

    Attributes:
        topic: full name; empty if the rows do not contain it.
        missing: offsets between the first and the last row that no row has.
        repeated: rows with the offset of an earlier row.
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

    Attributes:
        missing: numbers that no row has, from the lowest or the given first number to the highest.
    """

    producer: str
    records: int
    first: int
    last: int
    missing: int
    repeated: int


@dataclass(frozen=True, slots=True)
class Quality:
    """Result of the checks of a topic or table.

    Attributes:
        rate: number of records by interval: start in seconds since 1970, index in ``partitions``, number of records.
        sizes: number of records by size: upper limit in bytes, number of records.
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
        """Always 1, as the counterpart of ``Ran.batches``."""
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


def page(quality: Quality) -> str:
    """Return the report as an HTML page."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(quality.title)}: quality</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(quality.title)}</h1>",
        f"<p class='soft'>made {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}</p>",
        *_verdict(quality),
        *_facts(quality),
        *_rate_chart(quality),
        "<h2>Partitions</h2>",
        *_partition_table(quality),
        *_producer_table(quality),
        *_size_chart(quality),
        "</body></html>",
    ]
    return "\n".join(parts)


def _verdict(quality: Quality) -> Iterable[str]:
    if quality.sound:
        yield "<p class='verdict good'>each record exists exactly once</p>"
        return
    yield "<p class='verdict bad'>problems were found</p>"
    yield "<ul>" + "".join(f"<li>{escape(problem)}</li>" for problem in quality.problems) + "</ul>"


def _facts(quality: Quality) -> Iterable[str]:
    size = sum(part.bytes for part in quality.partitions)
    sizes = [("bytes of values", _bytes(size)), ("mean size", _bytes(round(size / quality.records)))] if size else []
    facts = [
        ("records", f"{quality.records:,}"),
        ("partitions", f"{len(quality.partitions):,}"),
        *sizes,
        (
            "missing",
            f"{sum(part.missing for part in quality.partitions) + sum(p.missing for p in quality.producers):,}",
        ),
        (
            "repeated",
            f"{sum(part.repeated for part in quality.partitions) + sum(p.repeated for p in quality.producers):,}",
        ),
    ]
    yield "<div class='facts'>"
    yield from (f"<div class='fact'><b>{value}</b><span class='soft'>{name}</span></div>" for name, value in facts)
    yield "</div>"


def _partition_table(quality: Quality) -> Iterable[str]:
    head = ("partition", "records", "first offset", "last offset", "missing", "repeated", "corrupt", "bytes")
    rows = [
        (escape(name), f"{p.records:,}", f"{p.first_offset:,}", f"{p.last_offset:,}", _count(p.missing), _count(p.repeated),
         _count(p.corrupt), _bytes(p.bytes))
        for name, p in zip(_names(quality.partitions), quality.partitions, strict=True)
    ]  # fmt: skip
    yield from _table(head, rows)


def _names(partitions: Sequence[PartitionFacts]) -> list[str]:
    several = len({part.topic for part in partitions}) > 1
    return [f"{part.topic}/{part.partition}" if several else str(part.partition) for part in partitions]


def _producer_table(quality: Quality) -> Iterable[str]:
    if not quality.producers:
        return
    yield "<h2>Producers</h2>"
    head = ("producer", "records", "first number", "last number", "missing", "repeated")
    rows = [
        (
            escape(p.producer or "all"),
            f"{p.records:,}",
            f"{p.first:,}",
            f"{p.last:,}",
            _count(p.missing),
            _count(p.repeated),
        )
        for p in quality.producers
    ]
    yield from _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Return an HTML table. A cell that begins with ``!`` is marked as an error."""
    yield "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"
    for row in rows:
        cells = (f"<td class='wrong'>{cell[1:]}</td>" if cell.startswith("!") else f"<td>{cell}</td>" for cell in row)
        yield "<tr>" + "".join(cells) + "</tr>"
    yield "</table>"


def _rate_chart(quality: Quality) -> Iterable[str]:
    if not quality.rate:
        return
    yield f"<h2>Records over time <span class='soft'>(each bar {quality.interval_s:.3g} s of append time)</span></h2>"
    first = min(start for start, _, _ in quality.rate)
    columns: dict[int, dict[int, int]] = {}
    for start, index, count in quality.rate:
        columns.setdefault(round((start - first) / quality.interval_s), {})[index] = count
    stacks = [columns.get(number, {}) for number in range(max(columns) + 1)]
    labels = {0: _clock(first), len(stacks) - 1: _clock(first + quality.interval_s * (len(stacks) - 1))}
    yield _bars(stacks, labels)
    names = _names(quality.partitions)
    indexes = sorted({index for _, index, _ in quality.rate})
    key = (f"<span><i style='background:{_colour(at)}'></i>{escape(names[at])}</span>" for at in indexes)
    yield f"<p class='key soft'>partition {''.join(key)}</p>"


def _size_chart(quality: Quality) -> Iterable[str]:
    if not any(part.bytes for part in quality.partitions):
        return  # a parsed table has values only of rows that could not be parsed
    yield "<h2>Sizes of values <span class='soft'>(upper limit in bytes)</span></h2>"
    yield _bars(
        [{0: count} for _, count in quality.sizes], {at: _bytes(size) for at, (size, _) in enumerate(quality.sizes)}
    )


def _bars(stacks: Sequence[dict[int, int]], labels: dict[int, str]) -> str:
    highest = max((sum(stack.values()) for stack in stacks), default=1) or 1
    room, step = HEIGHT - BOTTOM - 10, (WIDTH - LEFT) / max(len(stacks), SLOTS_MIN)
    parts = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'>"]
    for tick in range(TICKS + 1):
        y = HEIGHT - BOTTOM - room * tick / TICKS
        parts.append(f"<line class='grid' x1='{LEFT}' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{_short(highest * tick / TICKS)}</text>")
    for at, stack in enumerate(stacks):
        y = float(HEIGHT - BOTTOM)
        for number, count in sorted(stack.items()):
            tall = room * count / highest
            y -= tall
            parts.append(
                f"<rect x='{LEFT + at * step + step * 0.08:.1f}' y='{y:.1f}' width='{max(step * 0.84, 0.5):.1f}' height='{tall:.1f}' "
                f"fill='{_colour(number)}'><title>{count:,}</title></rect>"
            )
        if at in labels:
            anchor = "middle" if len(labels) > 2 or len(stacks) == 1 else ("start" if at == 0 else "end")
            x = LEFT + (at + {"start": 0, "middle": 0.5, "end": 1}[anchor]) * step
            parts.append(f"<text x='{x:.1f}' y='{HEIGHT - 8}' text-anchor='{anchor}'>{escape(labels[at])}</text>")
    return "".join([*parts, "</svg>"])


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _count(number: int) -> str:
    return f"!{number:,}" if number else "0"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _bytes(number: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} B"


def _unparsed(records: DataFrame) -> DataFrame:
    """Return records whose values are not checked, because nothing says what they should be."""
    return parser("text")(records).withColumn(CORRUPT, f.lit(None).cast("string"))


def quality(
    spark: SparkSession,
    *,
    address: Annotated[str | None, "host:port of the broker's polywire protocol, for a topic"] = None,
    topic: Annotated[str | None, "topic to read"] = None,
    path: Annotated[str | Path | None, "folder of a landed table, instead of a topic"] = None,
    parse: Parser = None,
    sequence: Annotated[str | None, "SQL expression of the producer's sequence number of a record, from 0"] = None,
    producer: Annotated[str, "SQL expression that identifies a record's producer"] = "''",
    expected: Annotated[int | None, "expected number of records"] = None,
    offsets: Annotated[bool, "check for gaps and duplicates of offsets (not for a table of derived records)"] = True,
    report: Annotated[str | Path | None, "file for the report, a single HTML page"] = None,
) -> Quality:
    """Count the records of a topic or the rows of a table and report problems.

    Raises Invalid unless a topic (with an address) or a path is given.
    """
    if (topic is None) == (path is None) or (topic is not None and address is None):
        raise Invalid(ErrorCode.INVALID_REQUEST, "quality needs the settings address and topic, or path")
    if topic is not None and address is not None:
        rows = parsed(topic_rows(spark, address, topic, headers=True), parse or _unparsed)
    else:
        rows = _of_table(spark.read.parquet(str(path)))
    rows = _measured(rows, sequence, producer).persist()
    try:
        partitions = tuple(_partitions(rows, offsets=offsets))
        rate, interval_s = _rate(rows, partitions)
        found = Quality(
            title=topic or str(path),
            partitions=partitions,
            producers=tuple(_producers(rows)) if sequence is not None else (),
            rate=rate,
            interval_s=interval_s,
            sizes=_sizes(rows),
            expected=expected,
        )
    finally:
        rows.unpersist()
    if report is not None:
        Path(report).write_text(page(found), encoding="utf-8")
    return found


def _of_table(table: DataFrame) -> DataFrame:
    """Return a landed table with the columns that parsers return, even if its records were not parsed."""
    names = table.columns
    source = ("topic", "partition", "offset", "timestamp", "value")
    renamed = [f.col(name).alias(f"_{name}") for name in source if name in names]
    table = table.select("*", *[column for column in renamed if f"_{column}" not in names])
    absent = {
        "_topic": "string", "_partition": "int", "_offset": "long", "_timestamp": "timestamp", VALUE: "binary", CORRUPT: "string",
    }  # fmt: skip
    return table.withColumns(
        {name: f.lit(None).cast(kind) for name, kind in absent.items() if name not in table.columns}
    )


def _measured(rows: DataFrame, sequence: str | None, producer: str) -> DataFrame:
    own = f.expr(sequence).cast("long") if sequence is not None else f.lit(None).cast("long")
    return rows.select(
        f.coalesce("_topic", f.lit("")).alias("topic"),
        f.coalesce("_partition", f.lit(0)).alias("partition"),
        f.col("_offset").alias("offset"),
        f.col("_timestamp").alias("time"),
        f.coalesce(f.length(VALUE), f.lit(0)).cast("long").alias("bytes"),
        f.col(CORRUPT).isNotNull().alias("corrupt"),
        f.expr(producer).cast("string").alias("producer"),
        own.alias("sequence"),
    )


def _partitions(rows: DataFrame, *, offsets: bool) -> list[PartitionFacts]:
    grouped = rows.groupBy("topic", "partition").agg(
        f.count("*").alias("records"),
        f.min("offset").alias("first"),
        f.max("offset").alias("last"),
        # Exact, in constant memory per row: Spark counts distinct values with a second shuffle.
        f.countDistinct("offset").alias("distinct"),
        f.count_if("corrupt").alias("corrupt"),
        f.sum("bytes").alias("bytes"),
    )
    return [_partition(row, offsets=offsets) for row in grouped.orderBy("topic", "partition").collect()]


def _partition(row: Any, *, offsets: bool) -> PartitionFacts:
    known = row["first"] is not None
    first, last = (row["first"], row["last"]) if known else (0, -1)
    counted = known and offsets
    return PartitionFacts(
        row["topic"], row["partition"], row["records"], first, last,
        missing=last - first + 1 - row["distinct"] if counted else 0,
        repeated=row["records"] - row["distinct"] if counted else 0,
        corrupt=row["corrupt"], bytes=row["bytes"],
    )  # fmt: skip


def _producers(rows: DataFrame) -> list[ProducerFacts]:
    """Count gaps and duplicates by producer. Sequence numbers begin at 0."""
    numbered = rows.where("sequence is not null").groupBy("producer")
    counted = numbered.agg(
        f.count("*").alias("records"),
        f.min("sequence").alias("first"),
        f.max("sequence").alias("last"),
        f.countDistinct("sequence").alias("distinct"),
    )
    return [
        ProducerFacts(
            row["producer"], row["records"], row["first"], row["last"],
            missing=row["last"] + 1 - row["distinct"], repeated=row["records"] - row["distinct"],
        )
        for row in counted.orderBy("producer").collect()
    ]  # fmt: skip


def _rate(rows: DataFrame, partitions: Sequence[PartitionFacts]) -> tuple[tuple[tuple[float, int, int], ...], float]:
    """Count records by interval of append time and partition, in at most ``TIME_BARS`` intervals."""
    seconds = f.unix_micros("time") / 1e6
    ends = rows.agg(f.min(seconds).alias("first"), f.max(seconds).alias("last")).first()
    if ends is None or ends["first"] is None:
        return (), 0.0
    first = float(ends["first"])
    interval_s = max((float(ends["last"]) - first) / (TIME_BARS - 1), 0.001)
    number = f.floor((seconds - first) / interval_s).alias("number")
    counted = rows.where("time is not null").groupBy(number, "topic", "partition").count().collect()
    indexes = {(part.topic, part.partition): index for index, part in enumerate(partitions)}
    bars = [
        (first + row["number"] * interval_s, indexes[row["topic"], row["partition"]], row["count"]) for row in counted
    ]
    return tuple(sorted(bars)), interval_s


def _sizes(rows: DataFrame) -> tuple[tuple[int, int], ...]:
    power = f.ceil(f.log2(f.greatest("bytes", f.lit(1)))).cast("int").alias("power")
    counted = rows.groupBy(power).count().collect()
    return tuple(sorted((1 << min(row["power"], SIZE_BARS), row["count"]) for row in counted))
