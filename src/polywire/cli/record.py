"""``polywire record``: produce records from standard input, and print records to standard output.

* ``produce`` reads the output of ``consume``.
* A command that is interrupted has written whole lines only.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Annotated, Final

from cyclopts import App, Parameter

from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import note
from polywire.cli.record_input import LineReader
from polywire.cli.record_lines import LineFormat, line_of_record, record_of_line
from polywire.cli.speed import Speed
from polywire.cli.start_position import Span, nothing_to_read, parse_start, spans
from polywire.cli.usage import Count, OnlyPartition, Topic, examples
from polywire.client.base import WireClient
from polywire.errors import BrokerError, Invalid
from polywire.records.columns import Record

app = App(
    name="record",
    help_epilogue=examples(
        "echo hello | polywire record produce greetings --format raw", "polywire record consume greetings"
    ),
)

FETCH_RECORDS_MAX: Final = 10_000
FOLLOW_WAIT_MS: Final = 30_000  # longest wait of one request for new records; the next request follows at once

Form = Annotated[
    LineFormat,
    Parameter(name=("--format", "-f"), help="Line format: jsonl is one JSON object per line, raw is just the value."),
]


@app.command(
    help_epilogue=examples(
        """echo '{"key": "a", "value": "hello"}' | polywire record produce orders""",
        "tail -F access.log | polywire record produce access --format raw",
        "polywire record consume orders | polywire record produce copy",
    )
)
def produce(
    topic: Topic,
    *,
    format: Form = LineFormat.JSONL,
    key: str | None = None,
    partition: Annotated[int | None, Parameter(name=("--partition", "-p"))] = None,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Produce one record per line of standard input.

    The topic is created if it does not exist. An invalid line ends the command; the error message counts the records produced before it.

    Parameters
    ----------
    key
        Key for records that have none.
    partition
        Partition for all records, instead of partitioning by key.
    """
    reader = LineReader(sys.stdin.fileno())
    default_key = None if key is None else key.encode()
    count = 0

    async def work(client: WireClient) -> None:
        nonlocal count
        with Speed("produced") as speed:
            while (lines := await reader.next_lines()) is not None:
                records, error = _read_records(lines, format, default_key)
                if records:
                    await client.produce(topic, records, partition=partition)
                    count += len(records)
                    speed.show(count)
                if error is not None:
                    raise error

    try:
        run_with_client(address, work)
    except BrokerError:
        note(f"stopped after an error topic={topic} records_produced={count}")
        raise
    note(f"produced topic={topic} records={count}")


@app.command(
    help_epilogue=examples(
        "polywire record consume orders",
        "polywire record consume orders --partition 0 --from 120 --count 10",
        "polywire record consume orders --from 2026-01-31T08:00:00Z --follow",
    )
)
def consume(
    topic: Topic,
    *,
    from_: Annotated[str, Parameter(name="--from")] = "earliest",
    partition: OnlyPartition = None,
    count: Count = None,
    follow: Annotated[bool, Parameter(negative="")] = False,
    format: Form = LineFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print the records of a topic, one partition after the other, up to its current end.

    Parameters
    ----------
    from_
        Start position: earliest, latest, an offset, or an ISO 8601 time (UTC unless it has a zone).
    follow
        Print new records as they arrive, until interrupted.
    """
    start = parse_start(from_)
    printer = _Printer(topic, format, count)

    async def work(client: WireClient) -> None:
        found = await spans(client, topic, partition=partition, start=start)
        if follow:
            await _follow_all(client, printer, found)
            return
        if (reason := nothing_to_read(topic, start, found)) is not None:
            note(reason)
        for span in found:
            await _print_span(client, printer, span)

    run_with_client(address, work, topic=topic)


@app.command(help_epilogue=examples("polywire record tail orders --format raw"))
def tail(
    topic: Topic,
    *,
    partition: OnlyPartition = None,
    count: Count = None,
    format: Form = LineFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print new records as they arrive, until interrupted."""
    consume(topic, from_="latest", partition=partition, count=count, follow=True, format=format, address=address)


app.command(  # given as a string, so that the clients of all protocols are imported only for this command
    "polywire.cli.record_copy:app",
    name="copy",
    help="Copy the records of a topic to another topic, between any two protocols or brokers.\n\n"
    "Records keep their order within a partition. They keep their partition if the target's protocol can choose partitions and the target "
    "has at least as many. The copy waits for a broker that restarts, and each record arrives once if no other producer writes to the "
    "target. A missing target topic is created.",
)


def _read_records(
    lines: Sequence[tuple[int, bytes]], form: LineFormat, key: bytes | None
) -> tuple[list[Record], Invalid | None]:
    """Return the records of the lines before the first invalid line, and that line's error. For JSON, blank lines are
    skipped.
    """
    records: list[Record] = []
    for number, line in lines:
        if form is LineFormat.JSONL and not line.strip():
            continue
        try:
            records.append(record_of_line(line, form=form, key=key))
        except Invalid as error:
            return records, Invalid(error.code, f"{error.message} line={number}")
    return records, None


class _Printer:
    """Writes at most ``count`` records to standard output, each as a line."""

    def __init__(self, topic: str, form: LineFormat, count: int | None) -> None:
        self.topic = topic
        self._form = form
        self._left = count

    @property
    def is_full(self) -> bool:
        """Whether ``count`` records were written."""
        return self._left == 0

    @property
    def fetch_max(self) -> int:
        """The largest number of records that the next fetch can use."""
        return FETCH_RECORDS_MAX if self._left is None else min(self._left, FETCH_RECORDS_MAX)

    def print(self, partition: int, records: Sequence[Record]) -> None:
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        on_terminal = sys.stdout.isatty()
        lines = (
            line_of_record(record, topic=self.topic, partition=partition, form=self._form, for_terminal=on_terminal)
            for record in records
        )
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()


async def _print_span(client: WireClient, printer: _Printer, span: Span) -> None:
    offset = span.offset
    while offset < span.next_offset and not printer.is_full:
        records_max = min(printer.fetch_max, span.next_offset - offset)
        records = await client.fetch(printer.topic, span.partition, offset, records_max=records_max)
        if not records:
            return
        printer.print(span.partition, records)
        offset = records[-1].offset + 1


async def _follow_all(client: WireClient, printer: _Printer, found: Sequence[Span]) -> None:
    """Follow all partitions concurrently until the printer is full or a partition fails; raise that partition's error."""
    followers = [asyncio.ensure_future(_follow(client, printer, span)) for span in found]
    try:
        ended, _ = await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED)
        for follower in ended:
            follower.result()
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


async def _follow(client: WireClient, printer: _Printer, span: Span) -> None:
    offset = span.offset
    while not printer.is_full:
        records = await client.fetch(
            printer.topic, span.partition, offset, records_max=printer.fetch_max, wait_ms=FOLLOW_WAIT_MS
        )
        if records:
            printer.print(span.partition, records)
            offset = records[-1].offset + 1
