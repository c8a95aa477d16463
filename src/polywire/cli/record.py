"""``polywire record``: produce from standard input, consume and tail to standard output.

Promises: what one prints the other reads; an interrupted command has written whole lines only. Must not know: wires.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import notes
from polywire.cli.record_lines import LineFormat, line_of_record, parse_time_us, record_of_line
from polywire.client.base import Client
from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Record

app = App(name="record", help="Produce, consume and tail records.", help_epilogue="")

LINE_BYTES_MAX: Final = 8 * 1024 * 1024  # a line longer than any record is a wrong file
READ_BYTES_MAX: Final = 1024 * 1024  # of standard input at once; its whole lines make one request
FETCH_RECORDS_MAX: Final = 10_000
FOLLOW_WAIT_MS: Final = 30_000  # one long poll; the next follows at once

Form = Annotated[
    LineFormat, Parameter(name=("--format", "-f"), help="jsonl: an object a line; raw: the value alone on its line.")
]
Partition = Annotated[int | None, Parameter(name=("--partition", "-p"))]


@app.command
def produce(
    topic: str,
    *,
    format: Form = LineFormat.JSONL,
    key: str | None = None,
    partition: Partition = None,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Produce a record for each line of standard input.

    Examples:
    ``echo '{"key": "a", "value": "hello"}' | polywire record produce orders``,
    ``tail -F access.log | polywire record produce access --format raw``

    Parameters
    ----------
    topic
        Full name of the topic; it is created when missing.
    key
        Key of records that bring none.
    partition
        Put all records here instead of where their keys belong.
    """

    async def work(client: Client) -> int:
        count = 0
        with _progress() as progress:
            task = progress.add_task("produced", total=None, rate="")
            begun = time.monotonic()
            while (lines := await asyncio.to_thread(reader.next_lines)) is not None:
                if not lines:
                    continue
                records = [record_of_line(line, form=format, key=None if key is None else key.encode()) for line in lines]
                await client.produce(topic, records, partition=partition)
                count += len(records)
                rate = count / max(time.monotonic() - begun, 1e-9)
                progress.update(task, completed=count, rate=f"{count:,} records, {rate:,.0f}/s")
        return count

    reader = _LineReader(sys.stdin.fileno())
    count = run_with_client(address, work)
    notes.print(f"produced topic={topic} records={count}")


@app.command
def consume(
    topic: str,
    *,
    from_: Annotated[str, Parameter(name="--from")] = "earliest",
    partition: Partition = None,
    count: Annotated[int | None, Parameter(name=("--count", "-n"))] = None,
    follow: bool = False,
    format: Form = LineFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print the records of a topic, partition by partition, up to where it ends now.

    Examples:
    ``polywire record consume orders --from 2026-01-31T08:00:00Z``,
    ``polywire record consume orders --partition 0 --from 120 --count 10``

    Parameters
    ----------
    topic
        Full name of the topic.
    from_
        earliest, latest, an offset, or an ISO 8601 time (UTC unless it names a zone).
    partition
        Only this partition.
    count
        Stop after so many records.
    follow
        Go on with records as they arrive.
    """
    printer = _Printer(topic, format, count)

    async def work(client: Client) -> None:
        starts = await _starts(client, topic, partition, from_)
        if follow:
            async with asyncio.TaskGroup() as group:
                followers = [group.create_task(_follow(client, printer, number, start)) for number, start, _ in starts]
                await printer.full.wait()
                for follower in followers:
                    follower.cancel()
        else:
            for number, start, end in starts:
                await _print_range(client, printer, number, start, end)

    run_with_client(address, work)


@app.command
def tail(
    topic: str,
    *,
    partition: Partition = None,
    format: Form = LineFormat.JSONL,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Print records as they arrive, from now on, until interrupted.

    Example: ``polywire record tail orders --format raw``

    Parameters
    ----------
    topic
        Full name of the topic.
    partition
        Only this partition.
    """
    consume(topic, from_="latest", partition=partition, follow=True, format=format, address=address)


class _Printer:
    """Writes records as lines and counts them; ``full`` is set once as many as asked for were written."""

    def __init__(self, topic: str, form: LineFormat, count: int | None) -> None:
        self.topic = topic
        self.full = asyncio.Event()
        self._form = form
        self._left = count

    def print(self, partition: int, records: Sequence[Record]) -> None:
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
            if self._left == 0:
                self.full.set()
        lines = (line_of_record(one, topic=self.topic, partition=partition, form=self._form) for one in records)
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()


async def _starts(client: Client, topic: str, partition: int | None, start: str) -> list[tuple[int, int, int]]:
    """(partition, first offset to print, end now) of the partitions asked for."""
    bounds = [part for part in await client.bounds(topic) if partition is None or part.partition == partition]
    if not bounds:
        raise Invalid(ErrorCode.PARTITION_MISSING, f"no such partition topic={topic} partition={partition}")
    if start == "earliest":
        return [(part.partition, part.first_offset, part.next_offset) for part in bounds]
    if start == "latest":
        return [(part.partition, part.next_offset, part.next_offset) for part in bounds]
    if start.isdecimal():
        return [(part.partition, max(int(start), part.first_offset), part.next_offset) for part in bounds]
    try:
        time_us = parse_time_us(start)
    except ValueError as error:
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"--from takes earliest, latest, an offset or an ISO 8601 time from={start!r}"
        ) from error
    offsets = [await client.offset_at(topic, part.partition, time_us) for part in bounds]
    return [(part.partition, offset, part.next_offset) for part, offset in zip(bounds, offsets, strict=True)]


async def _print_range(client: Client, printer: _Printer, partition: int, start: int, end: int) -> None:
    offset = start
    while offset < end and not printer.full.is_set():
        records = await client.fetch(
            printer.topic, partition, offset, records_max=min(FETCH_RECORDS_MAX, end - offset)
        )
        if not records:
            return
        printer.print(partition, records)
        offset = records[-1].offset + 1


async def _follow(client: Client, printer: _Printer, partition: int, start: int) -> None:
    offset = start
    while not printer.full.is_set():
        records = await client.fetch(
            printer.topic, partition, offset, records_max=FETCH_RECORDS_MAX, wait_ms=FOLLOW_WAIT_MS
        )
        if records and not printer.full.is_set():
            printer.print(partition, records)
            offset = records[-1].offset + 1


class _LineReader:
    """Reads standard input as it comes: a slow writer's lines are produced at once, a file in large pieces."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False

    def next_lines(self) -> list[bytes] | None:
        """Whole lines without their ends, blank ones skipped (maybe none this time); None after the last.

        Raises Invalid(RECORD_TOO_LARGE) for a line that is no record.
        """
        if self._ended:
            return None
        data = os.read(self._descriptor, READ_BYTES_MAX)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data:
            self._ended = True
            lines, self._rest = [*lines, self._rest], b""
        if len(self._rest) > LINE_BYTES_MAX:
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, f"a line is too long bytes_max={LINE_BYTES_MAX}")
        return [line for line in (line.removesuffix(b"\r") for line in lines) if line]


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(pulse_style="cyan"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )
