"""Download records of a topic as one file: JSON, CSV or Parquet, with limits in records and bytes.

A file is built in memory, so only a few downloads run at the same time. Parquet is written by a process of its own
(``tables.download_process``), because pyarrow takes more memory than a broker.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

import msgspec
from starlette.responses import Response

from polywire.broker.broker import Broker
from polywire.broker.permissions import Action
from polywire.broker.topics import Partition, Topic
from polywire.choices import choice
from polywire.errors import Busy, ErrorCode, Invalid
from polywire.http.endpoints import NO_STORE, ApiCall, Endpoint, partition_of
from polywire.http.records import ReadLimit, RecordReader, Taken
from polywire.http.search import Filter, filter_of
from polywire.records.columns import HeaderKind, text_of
from polywire.records.rows import Rows
from polywire.table_orders import DownloadedRow

DOWNLOAD_RECORDS_MAX: Final = 50_000  # records of one download
DOWNLOAD_BYTES_MAX: Final = 16 * 1024 * 1024  # bytes of the records of one download, as JSON or CSV
DOWNLOAD_READ_BYTES_MAX: Final = 256 * 1024 * 1024  # bytes of batches that one download reads
DOWNLOADS_MAX: Final = 2  # concurrent downloads
DOWNLOAD_SECONDS_MAX: Final = 60  # duration of writing a Parquet file
DOWNLOAD_HEADERS_BYTES_MAX: Final = 256 * 1024  # keys and values of the headers of one record; further ones are dropped
RANGES_MAX: Final = 1_000  # ranges of offsets that one request names
COMMAND: Final = ("-m", "polywire.tables.download_process")
NO_PYARROW: Final = 3  # exit code of this process
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_MAX_US: Final = 253_402_300_799_999_999  # the last microsecond of the year 9999
_FORMULA: Final = re.compile("'*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # by the list of OWASP, "CSV Injection"
_NUMBER: Final = re.compile("[+-][0-9]+([.][0-9]+)?([eE][+-]?[0-9]+)?")
_CSV_HEAD: Final = b"partition,offset,timestamp,key,value,headers\r\n"
_SECRET: Final = "POLYWIRE_PASSWORD"  # clients read it; the process does not need it

OffsetOf = Callable[[Partition, str], Awaitable[int]]
"""Converts a text, which is an offset or a time, to an offset of a partition."""


class Format(Enum):
    """Formats of a file."""

    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets of one partition: from ``begin`` to before ``end``."""

    partition: Partition
    begin: int
    end: int


@dataclass(slots=True)
class _Collected:
    """The encoded records of a download.

    Attributes:
        more: whether a limit ended the download.
    """

    encode: Callable[[Rows, int, int], bytes]
    wanted: Filter
    parts: list[bytes] = field(default_factory=list)
    bytes: int = 0
    more: bool = False

    def take(self, rows: Rows, index: int, chosen: Range) -> Taken:
        if rows.offset(index) >= chosen.end:
            return Taken.LEFT
        if self.wanted.matches(rows, index):
            record = self.encode(rows, index, chosen.partition.number)
            if len(self.parts) >= DOWNLOAD_RECORDS_MAX or (
                self.parts and self.bytes + len(record) > DOWNLOAD_BYTES_MAX
            ):
                self.more = True
                return Taken.LEFT
            self.parts.append(record)
            self.bytes += len(record)
        return Taken.LAST if rows.offset(index) + 1 >= chosen.end else Taken.MORE


class Downloads:
    """The HTTP API's endpoint for downloads."""

    def __init__(self, broker: Broker, reader: RecordReader, offset_of: OffsetOf) -> None:
        self._broker: Final = broker
        self._reader: Final = reader
        self._offset_of: Final = offset_of
        self._turns: Final = asyncio.Semaphore(DOWNLOADS_MAX)

    def table(self) -> Sequence[Endpoint]:
        parameters = {
            "format": "json (default), csv or parquet",
            "partition": "only this partition",
            "from": "first offset, or a time (ISO 8601); by default the earliest",
            "until": "offset or time at which the download ends; by default the end",
            "offsets": "instead of partition, from and until: list of partition:first-end, such as 0:100-200,1:0-50",
            "key": "only records with this key",
            "search": "as for records",
            "json": "as for records",
        }
        summary = f"Download up to {DOWNLOAD_RECORDS_MAX:,} records as a file; the header X-Polywire-More is 1 if there are more"
        return [Endpoint("GET", "/topics/{topic}/download", Action.FETCH, summary, self._download, parameters)]

    async def _download(self, call: ApiCall) -> Any:
        form = choice(Format, call.query.get("format", Format.JSON.value), "format")
        topic, wanted = self._broker.topic(call.path["topic"]), filter_of(call.query)
        ranges = await self._ranges(topic, call.query)
        async with self._turns:
            found = await self._collect(ranges, _Collected(ENCODERS[form], wanted))
            content = await _FILES[form](found.parts)
        headers = {"X-Polywire-Records": str(len(found.parts)), "X-Polywire-More": str(int(found.more))}
        return Response(content, media_type=MEDIA_TYPES[form], headers={**NO_STORE, **headers, **_ATTACHMENT})

    async def _collect(self, ranges: Sequence[Range], found: _Collected) -> _Collected:
        limit = ReadLimit(DOWNLOAD_READ_BYTES_MAX)
        for chosen in ranges:
            if found.more:
                break
            end = min(chosen.end, chosen.partition.log.readable_offset)

            def take(rows: Rows, index: int, chosen: Range = chosen) -> Taken:
                return found.take(rows, index, chosen)

            reached = await self._reader.each(chosen.partition, chosen.begin, take, limit=limit)
            if limit.left <= 0 and reached < end:
                found.more = True
        return found

    async def _ranges(self, topic: Topic, query: Mapping[str, str]) -> Sequence[Range]:
        if "offsets" in query:
            words = [word for word in query["offsets"].split(",") if word][: RANGES_MAX + 1]
            if len(words) > RANGES_MAX:
                raise Invalid(ErrorCode.INVALID_REQUEST, f"too many ranges of offsets limit={RANGES_MAX}")
            return [_range(topic, word) for word in words]
        number = query.get("partition")
        partitions = list(topic.partitions)
        if number is not None:
            partitions = [partition_of(topic, int(number) if _is_number(number) else number)]
        return [
            Range(
                partition,
                max(partition.log.first_offset, await self._offset(partition, query.get("from"), 0)),
                await self._offset(partition, query.get("until"), partition.log.readable_offset),
            )
            for partition in partitions
        ]

    async def _offset(self, partition: Partition, given: str | None, default: int) -> int:
        return await self._offset_of(partition, given) if given else default


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _range(topic: Topic, word: str) -> Range:
    number, _, offsets = word.partition(":")
    begin, _, end = offsets.partition("-")
    if not all(map(_is_number, (number, begin, end))):
        raise Invalid(ErrorCode.INVALID_REQUEST, f"offsets is invalid (use partition:first-end) got={word[:80]!r}")
    partition = partition_of(topic, int(number))
    return Range(partition, max(partition.log.first_offset, int(begin)), int(end))


# Records


def _row(rows: Rows, index: int, partition: int) -> DownloadedRow:
    created = rows.origin_time_us(index)
    key, value = rows.key(index), rows.value(index)
    return DownloadedRow(
        partition,
        rows.offset(index),
        rows.header.append_time_us if created is None else created,
        int(created is None),
        None if key is None else bytes(key),
        None if value is None else bytes(value),
        list(_headers(rows, index)),
    )


def _headers(rows: Rows, index: int) -> Iterator[tuple[str, bytes | None]]:
    """Yield keys and values of headers, numbers as digits, until the limit in bytes."""
    left = DOWNLOAD_HEADERS_BYTES_MAX
    for header in rows.headers(index):
        value = header.value
        if value is not None and header.value_kind not in (HeaderKind.RAW, HeaderKind.STRING):
            value = text_of(value, header.value_kind).encode()
        key = text_of(header.key, header.key_kind)
        left -= len(key) + len(value or b"") + 16
        if left < 0:
            return
        yield key, value


def _json_record(rows: Rows, index: int, partition: int) -> bytes:
    row = _row(rows, index, partition)
    return msgspec.json.encode(
        {
            "partition": row.partition,
            "offset": row.offset,
            "timestamp": _time(row.timestamp_us),
            "key": _plain(row.key),
            "value": _plain(row.value),
            "headers": [{"key": key, "value": _plain(value)} for key, value in row.headers],
        }
    )


def _plain(data: bytes | None) -> object:
    """Return text if the bytes are UTF-8, otherwise an object with base64."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": b64encode(data).decode()}


def _time(time_us: int) -> str:
    if not 0 <= time_us <= _TIME_MAX_US:
        return str(time_us)
    at = _EPOCH + timedelta(microseconds=time_us)
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _csv_record(rows: Rows, index: int, partition: int) -> bytes:
    row = _row(rows, index, partition)
    headers = [{"key": key, "value": _plain(value)} for key, value in row.headers]
    cells = (
        str(row.partition),
        str(row.offset),
        _time(row.timestamp_us),
        _cell(row.key),
        _cell(row.value),
        _quoted(msgspec.json.encode(headers).decode()) if headers else "",
    )
    return (",".join(cells) + "\r\n").encode()


def _cell(data: bytes | None) -> str:
    r"""Return a cell: empty for null, text, or ``\x`` and hexadecimal digits, as SQL shows bytes."""
    if data is None:
        return ""
    try:
        return _quoted(harmless(data.decode()))
    except UnicodeDecodeError:
        return "\\x" + data.hex()


def harmless(text: str) -> str:
    """Return a text that spreadsheets do not evaluate.

    If it begins like a formula and is not a number, it gets ``'`` before it. A text that begins with ``'`` and then
    like a formula gets another ``'``, so a reader can always remove the first one.
    """
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


# Files


async def _json_file(parts: Sequence[bytes]) -> bytes:
    return b"[" + b",\n".join(parts) + b"]\n"


async def _csv_file(parts: Sequence[bytes]) -> bytes:
    return _CSV_HEAD + b"".join(parts)


async def _parquet_file(parts: Sequence[bytes]) -> bytes:
    """Return records as a Parquet file. Raises Invalid, Busy."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *COMMAND,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={name: value for name, value in os.environ.items() if name != _SECRET},
        )
    except OSError as error:
        raise Busy(ErrorCode.BUSY, f"cannot start a process: {error.strerror}") from error
    try:
        content, _ = await asyncio.wait_for(process.communicate(packed_array(parts)), DOWNLOAD_SECONDS_MAX)
    except TimeoutError:
        raise Busy(ErrorCode.BUSY, f"the file took too long: try again limit_s={DOWNLOAD_SECONDS_MAX}") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode == NO_PYARROW:
        raise Invalid(ErrorCode.INVALID_REQUEST, "Parquet files need pyarrow (pip install 'polywire[arrow]')")
    if process.returncode:
        raise Busy(
            ErrorCode.BUSY, f"the process of the download ended unexpectedly: try again exit_code={process.returncode}"
        )
    return content


def packed_array(parts: Sequence[bytes]) -> bytes:
    """Return encoded values as an array in MessagePack."""
    return b"".join([b"\xdd", len(parts).to_bytes(4, "big"), *parts])


def _packed_record(rows: Rows, index: int, partition: int) -> bytes:
    return msgspec.msgpack.encode(_row(rows, index, partition))


ENCODERS: Final[Mapping[Format, Callable[[Rows, int, int], bytes]]] = {
    Format.JSON: _json_record,
    Format.CSV: _csv_record,
    Format.PARQUET: _packed_record,
}
_FILES: Final[Mapping[Format, Callable[[Sequence[bytes]], Awaitable[bytes]]]] = {
    Format.JSON: _json_file,
    Format.CSV: _csv_file,
    Format.PARQUET: _parquet_file,
}
MEDIA_TYPES: Final[Mapping[Format, str]] = {
    Format.JSON: "application/json",
    Format.CSV: "text/csv; charset=utf-8",
    Format.PARQUET: "application/vnd.apache.parquet",
}
_ATTACHMENT: Final = {"Content-Disposition": "attachment"}
