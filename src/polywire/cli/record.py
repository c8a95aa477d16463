"""``polywire record``: produce records from standard input, print them to standard output, copy and compare topics.

* ``produce`` accepts the output of ``consume``.
* An interrupted command never ends with a partial line.
* ``copy`` reports every part of a record that the target's protocol cannot store. Passwords are neither printed nor
  stored.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number

from polywire.cli.connection import ADDRESS_DEFAULT, Address, run_with_client
from polywire.cli.output import format_time, note, parse_time_us
from polywire.cli.progress import counted
from polywire.cli.start_position import FromOffset, FromTime, Span, nothing_to_read, parse_start, spans
from polywire.cli.usage import Count, OnlyPartition, Topic, examples
from polywire.client.base import WireClient, fetch_wait_ms
from polywire.client.consume import POLL_INTERVAL_S, Bound
from polywire.errors import BrokerError, ErrorCode, Invalid
from polywire.escaping import escaped, escaped_json
from polywire.records.columns import Event, Header, HeaderKind, Record

if TYPE_CHECKING:
    from polywire.client.copying import Copy, End
    from polywire.client.copying import Span as CopyRange

LINE_BYTES_MAX: Final = 16 * 1024 * 1024  # fits a record of 10 MB as base64; a longer line indicates a wrong file
READ_BYTES_MAX: Final = 1024 * 1024  # all whole lines from one read are sent in one produce request
_ASSIGNED_BY_BROKER: Final = frozenset({"topic", "partition", "offset", "timestamp"})
_RECORD_FIELDS: Final = frozenset(
    {"key", "key_base64", "value", "value_base64", "headers", "id", "origin_timestamp", "event"}
)
_HEADER_FIELDS: Final = frozenset({"key", "key_base64", "key_kind", "value", "value_base64", "value_kind"})
_EVENT_FIELDS: Final = frozenset({"type", "schema_version", "aggregate_version", "metadata", "metadata_base64"})
FETCH_RECORDS_MAX: Final = 10_000
PARTITIONS_S: Final = 30.0  # how often ``--follow`` looks for partitions that were added
FOLLOW_WAIT_MS: Final = 30_000  # longest wait of one request for new records; the next request follows at once
Endpoint = Annotated[str, Parameter(help="scheme://host:port/topic, or a topic of the broker at --address.")]


class LineReader:
    """Reads lines from a descriptor and numbers them from 1, including blank ones."""

    __slots__ = ("_descriptor", "_ended", "_number", "_rest")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._number = 1
        self._rest = b""
        self._ended = False

    async def next_lines(self) -> list[tuple[int, bytes]] | None:
        """Wait for input, and return complete lines with their numbers, without line feeds.

        Returns an empty list if no line is complete yet, and None after the last line. Raises Invalid(RECORD_TOO_LARGE)
        for a line that is too long for a record.
        """
        if len(self._rest) > LINE_BYTES_MAX:
            message = f"line is too long line={self._number} bytes_max={LINE_BYTES_MAX}"
            raise Invalid(ErrorCode.RECORD_TOO_LARGE, message)
        if self._ended:
            return None
        await _readable(self._descriptor)
        data = os.read(self._descriptor, READ_BYTES_MAX)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if not data:
            self._ended = True
            lines, self._rest = [self._rest] if self._rest else [], b""
        numbered = list(enumerate(lines, self._number))
        self._number += len(lines)
        return numbered


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        return  # a regular file: selectors do not support it, and reading it never waits for a writer
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class LineFormat(Enum):
    """Format of a record on a line."""

    JSONL = "jsonl"
    RAW = "raw"


def record_of_line(line: bytes, *, form: LineFormat, key: bytes | None) -> Record:
    """Parse one line without its line end. ``key`` is the key of lines that have none.

    In JSON format, raises Invalid(INVALID_REQUEST) unless the line is an object with known fields only.
    """
    if form is LineFormat.RAW:
        return Record(value=line, key=key)
    try:
        return _record(_json_object(line), key)
    except UnicodeEncodeError as error:
        raise _invalid("line contains half a surrogate pair, which UTF-8 cannot encode") from error
    except RecursionError as error:
        raise _invalid("line is nested too deeply") from error


def line_of_record(
    record: Record, *, topic: str, partition: int, form: LineFormat, for_terminal: bool = False
) -> bytes:
    """Return one record as a line, with its line end. Raw values are unchanged unless ``for_terminal``."""
    if form is LineFormat.RAW:
        value = record.value or b""
        return (escaped(value.decode("utf-8", "backslashreplace")).encode() if for_terminal else value) + b"\n"
    fields: dict[str, object] = {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": format_time(record.append_time_us),
    }
    fields |= _bytes_member("key", record.key)
    fields |= _bytes_member("value", record.value)
    if record.headers:
        fields["headers"] = [_header_members(header) for header in record.headers]
    if record.id is not None:
        fields["id"] = record.id.hex()
    if record.origin_time_us is not None:
        fields["origin_timestamp"] = format_time(record.origin_time_us)
    if record.event is not None:
        fields["event"] = _event_members(record.event)
    return escaped_json(json.dumps(fields, ensure_ascii=False)).encode() + b"\n"


def _json_object(line: bytes) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise _invalid(f"line is not JSON (use --format raw for plain lines) reason={str(error)!r}") from error
    if not isinstance(fields, dict):
        raise _invalid("line is not a JSON object (use --format raw for plain lines)")
    return fields


def _check_fields(fields: Mapping[str, object], known: frozenset[str], *, of: str) -> None:
    for name in fields:
        if name not in known:
            raise _invalid(f"{of} has an unknown field field={name!r} known={','.join(sorted(known))}")


def _record(fields: dict[str, object], default_key: bytes | None) -> Record:
    _check_fields(fields, _RECORD_FIELDS | _ASSIGNED_BY_BROKER, of="line")
    key = _bytes_field(fields, "key")
    return Record(
        value=_bytes_field(fields, "value"),
        key=default_key if key is None else key,
        headers=_headers_field(fields.get("headers")),
        id=_id_field(fields.get("id")),
        origin_time_us=_time_field(fields.get("origin_timestamp")),
        event=_event_field(fields.get("event")),
    )


def _bytes_member(name: str, data: bytes | None) -> dict[str, object]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _bytes_field(fields: Mapping[str, object], name: str) -> bytes | None:
    """Return a field as bytes, or the decoded field ``{name}_base64``.

    A string is encoded as UTF-8, and any other JSON value as JSON text.
    """
    plain, encoded = fields.get(name), fields.get(f"{name}_base64")
    if encoded is None:
        if plain is None or isinstance(plain, str):
            return None if plain is None else plain.encode()
        return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()
    if plain is not None:
        raise _invalid(f"line has a field twice, plain and as base64 field={name}")
    try:
        return base64.b64decode(str(encoded), validate=True)
    except ValueError as error:
        raise _invalid(f"field is not valid base64 field={name}_base64") from error


def _id_field(text: object) -> bytes | None:
    if text is None:
        return None
    try:
        id_ = bytes.fromhex(str(text).replace("-", ""))
    except ValueError:
        id_ = b""
    if len(id_) != 16:
        raise _invalid(f"record id is not 32 hexadecimal digits id={text!r}")
    return id_


def _time_field(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        return parse_time_us(str(value))
    except ValueError as error:
        raise _invalid(
            f"time is invalid (use ISO 8601 or microseconds since 1970) origin_timestamp={value!r}"
        ) from error


def _header_members(header: Header) -> dict[str, object]:
    """Return key and value of a header, and their kinds unless parsing infers the same kinds."""
    members = _bytes_member("key", header.key)
    if header.key_kind is not HeaderKind.STRING:
        members["key_kind"] = header.key_kind.name.lower()
    members |= _bytes_member("value", header.value)
    if header.value_kind is not _inferred_kind(members):
        members["value_kind"] = header.value_kind.name.lower()
    return members


def _inferred_kind(members: Mapping[str, object]) -> HeaderKind:
    if "value_base64" in members:
        return HeaderKind.RAW
    return HeaderKind.NULL if members.get("value") is None else HeaderKind.STRING


def _headers_field(headers: object) -> tuple[Header, ...]:
    if headers is None:
        return ()
    if isinstance(headers, dict):
        return tuple(_header({"key": key, "value": value}) for key, value in headers.items())
    if not isinstance(headers, list) or not all(isinstance(members, dict) for members in headers):
        raise _invalid("headers are invalid (use an object, or a list of objects with key and value)")
    return tuple(_header(members) for members in headers)


def _header(members: Mapping[str, object]) -> Header:
    _check_fields(members, _HEADER_FIELDS, of="header")
    key = _bytes_field(members, "key")
    if key is None:
        raise _invalid("header has no key")
    return Header(
        key=key,
        value=_bytes_field(members, "value"),
        key_kind=_kind(members.get("key_kind"), HeaderKind.STRING),
        value_kind=_kind(members.get("value_kind"), _inferred_kind(members)),
    )


def _kind(name: object, default: HeaderKind) -> HeaderKind:
    if name is None:
        return default
    kinds = {kind.name.lower(): kind for kind in HeaderKind}
    if not isinstance(name, str) or name not in kinds:
        raise _invalid(f"header has an unknown kind kind={name!r} known={','.join(kinds)}")
    return kinds[name]


def _event_members(event: Event) -> dict[str, object]:
    members: dict[str, object] = {
        "type": event.type,
        "schema_version": event.schema_version,
        "aggregate_version": event.aggregate_version,
    }
    return members if event.metadata is None else members | _bytes_member("metadata", event.metadata)


def _event_field(members: object) -> Event | None:
    if members is None:
        return None
    if not isinstance(members, dict):
        raise _invalid("event is not an object with type, schema_version and aggregate_version")
    _check_fields(members, _EVENT_FIELDS, of="event")
    versions = [members.get(name, 0) for name in ("schema_version", "aggregate_version")]
    if not isinstance(members.get("type"), str) or not all(type(version) is int for version in versions):
        raise _invalid("event needs a string type, and versions that are numbers")
    return Event(members["type"], versions[0], versions[1], _bytes_field(members, "metadata"))


def _invalid(message: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_REQUEST, message)


app = App(
    name="record",
    help_epilogue=examples(
        "echo hello | polywire record produce greetings --format raw", "polywire record consume greetings"
    ),
)


app.command(
    "polywire.cli.compare:app",
    name="compare",
    help="Compare topics record by record, between any two protocols or brokers, and show the first difference.",
)

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
        with counted("producing") as show:
            while (lines := await reader.next_lines()) is not None:
                records, error = _read_records(lines, format, default_key)
                if records:
                    await client.produce(topic, records, partition=partition)
                    count += len(records)
                    show(count)
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
            await _follow_all(client, printer, found, partition)
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


@app.command(
    help="Copy the records of a topic to another topic, between any two protocols or brokers.\n\n"
    "Records keep their order within a partition. They keep their partition if the target's protocol can choose partitions and the target "
    "has at least as many. The copy waits for a broker that restarts, and each record arrives once if no other producer writes to the "
    "target. A missing target topic is created.",
    help_epilogue=examples(
        "polywire record copy orders orders-copy",
        "polywire record copy kafka://old:9092/orders orders --state orders.copy",
        "polywire record copy cursus://old:9000/orders orders --group billing",
        "polywire record copy orders recent --from 2026-01-31T08:00:00Z",
        "polywire record copy kafka://old:9092/orders orders --state s --follow",
    ),
)
def copy(
    source: Endpoint,
    target: Endpoint,
    *,
    from_: Annotated[str, Parameter(name="--from")] = "earliest",
    until: str = "latest",
    partition: Annotated[int | None, Parameter(name=("--partition", "-p"))] = None,
    state: Path | None = None,
    group: Annotated[tuple[str, ...], Parameter(name=("--group", "-g"))] = (),
    skip: Annotated[bool, Parameter(negative="")] = False,
    follow: Annotated[bool, Parameter(negative="")] = False,
    patience: Annotated[float, Parameter(validator=Number(gte=0))] = 60.0,
    address: Address = ADDRESS_DEFAULT,
) -> None:
    """Copy the records of a topic to another topic, between any two protocols or brokers.

    Parameters
    ----------
    from_
        Start position: earliest, an offset (a byte address with Kafka 0.7), or an ISO 8601 time.
    until
        End position: latest (as of the start of the copy), an offset (exclusive), or an ISO 8601 time.
    partition
        Copy only this partition.
    state
        File that stores the progress of the copy. Run the same command again to resume, or to copy records that arrived since.
    group
        Group whose committed offsets are translated to the target once all records are copied, or at the end of --follow; can be
        repeated.
    skip
        Skip records that the target's protocol cannot store, instead of stopping with an error.
    follow
        Continue with new records until Ctrl-C or SIGTERM, which end the copy after the current write with exit code 0.
    patience
        Seconds to retry connecting to a broker that went away.
    """
    from polywire.client.copying import Copy, CopyState  # it imports the clients of all protocols

    ends = endpoint_of(source, address), endpoint_of(target, address)
    if str(ends[0]) == str(ends[1]):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"source and target are the same topic topic={ends[0].topic!r}")
    if follow and until != "latest":
        raise Invalid(
            ErrorCode.INVALID_REQUEST, f"--follow has no end, so it cannot be used with --until until={until!r}"
        )
    with counted("copying") as show:
        work = Copy(
            *ends,
            CopyState.load(state, *map(str, ends)),
            span=_range(partition, from_, until),
            skip=skip,
            follow=follow,
            patience_s=patience,
            on_progress=lambda outcome: show(outcome.written, f", lag {outcome.lag:,}" if follow else ""),
        )
        lines = [*_run_copy(work, group), *(f"note: {remark}" for remark in work.outcome.remarks)]
    for text in lines:
        note(text)
    note(f"copied {_summary(work)}")


def _range(partition: int | None, from_: str, until: str) -> CopyRange:
    """Return the records that the options select. Raises Invalid(INVALID_REQUEST) for an invalid option."""
    from polywire.client.copying import Span as CopyRange

    begin, end = parse_start(from_), parse_start(until, option="--until")
    if begin is Bound.LATEST or end is Bound.EARLIEST:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"no records to copy from={from_!r} until={until!r}")
    return CopyRange(
        partition,
        begin=begin.offset if isinstance(begin, FromOffset) else None,
        begin_time_us=begin.time_us if isinstance(begin, FromTime) else None,
        until=end.offset if isinstance(end, FromOffset) else None,
        until_time_us=end.time_us if isinstance(end, FromTime) else None,
    )


def _run_copy(work: Copy, groups: tuple[str, ...]) -> list[str]:
    """Copy, and return lines about the offsets of groups. If the copy fails, print how far it came."""
    is_complete = False
    try:
        commits = asyncio.run(_copy(work, groups))
        is_complete = True
    finally:
        if not is_complete:
            note(f"stopped {_summary(work)}")
    return [
        f"translated group={name} partition={number} position={position} new_position={offset}"
        for name, number, position, offset in commits
    ]


async def _copy(work: Copy, groups: tuple[str, ...]) -> list[tuple[str, int, int, int]]:
    if work.follow:
        _stop_on_signals(work)
    await work.check_groups(groups)
    await work.run()
    return await work.commit_positions(groups) if groups else []


def _stop_on_signals(work: Copy) -> None:
    """Let the first Ctrl-C or SIGTERM end the copy after the current write, and the second one interrupt it."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        work.stop()

    if os.name != "nt":  # Windows has no such handlers, so Ctrl-C interrupts the copy
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)


def _summary(work: Copy) -> str:
    outcome = work.outcome
    facts = {"records": outcome.written, "found": outcome.found, "skipped": outcome.skipped}
    facts |= {f"lost_{name}": count for name, count in sorted(outcome.lost.items())}
    lag = f" lag={outcome.lag}" if work.follow else ""
    return " ".join(f"{name}={count}" for name, count in facts.items() if count or name == "records") + lag


def endpoint_of(text: str, address: str) -> End:
    """Parse ``scheme://host:port/topic``, or the name of a topic of the broker at ``address``.

    Raises Invalid(INVALID_REQUEST) if the topic is missing.
    """
    from polywire.client.copying import End

    scheme, separator, rest = text.partition("://")
    if not separator:
        return End(address, text)
    broker, slash, topic = rest.partition("/")
    if not slash or not topic:
        raise Invalid(ErrorCode.INVALID_REQUEST, f"topic is missing (use scheme://host:port/topic) got={scheme}://…")
    return End(f"{scheme}://{broker}", topic)


def _read_records(
    lines: Sequence[tuple[int, bytes]], form: LineFormat, key: bytes | None
) -> tuple[list[Record], Invalid | None]:
    """Parse lines up to the first invalid one. Return the records, and the error of that line, if any.

    For JSON, blank lines are skipped.
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
    def __init__(self, topic: str, form: LineFormat, count: int | None) -> None:
        self.topic = topic
        self._form = form
        self._left = count

    @property
    def is_full(self) -> bool:
        return self._left == 0

    @property
    def fetch_max(self) -> int:
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


async def _follow_all(client: WireClient, printer: _Printer, found: Sequence[Span], partition: int | None) -> None:
    """Print new records of all partitions, or of one, until enough were printed, or a partition fails.

    Partitions that are added later are printed from their beginning. Raises the error of the partition that fails.
    """
    known = {span.partition for span in found}
    followers = [asyncio.ensure_future(_follow(client, printer, span, len(known))) for span in found]
    try:
        ended: set[asyncio.Future[None]] = set()
        while not ended:
            ended, _ = await asyncio.wait(followers, timeout=PARTITIONS_S, return_when=asyncio.FIRST_COMPLETED)
            new = [] if partition is not None or ended else await client.bounds(printer.topic)
            added = [
                Span(one.partition, one.first_offset, one.next_offset) for one in new if one.partition not in known
            ]
            known |= {span.partition for span in added}
            followers += [asyncio.ensure_future(_follow(client, printer, span, len(known))) for span in added]
        for follower in ended:
            follower.result()
    finally:
        for follower in followers:
            follower.cancel()
        await asyncio.gather(*followers, return_exceptions=True)


async def _follow(client: WireClient, printer: _Printer, span: Span, partition_count: int) -> None:
    offset = span.offset
    wait_ms = fetch_wait_ms(client.abilities, partition_count, FOLLOW_WAIT_MS)
    while not printer.is_full:
        records = await client.fetch(
            printer.topic, span.partition, offset, records_max=printer.fetch_max, wait_ms=wait_ms
        )
        if records:
            printer.print(span.partition, records)
            offset = records[-1].offset + 1
        elif not wait_ms:
            await asyncio.sleep(POLL_INTERVAL_S)
