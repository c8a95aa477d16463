"""Records as lines of text: the JSON form that produce reads and consume writes, and the raw form.

Promises: what ``record consume`` prints as JSON lines, ``record produce`` reads back as the same records. Bytes that are not UTF-8
travel as ``key_base64`` and ``value_base64``. Must not know: the broker, files, the terminal.
"""

from __future__ import annotations

import base64
import binascii
import json
from datetime import UTC, datetime, timedelta
from enum import Enum

from polywire.errors import ErrorCode, Invalid
from polywire.records.columns import Header, HeaderKind, Record


class LineFormat(Enum):
    """Form of a record on a line."""

    JSONL = "jsonl"
    RAW = "raw"


def record_of_line(line: bytes, *, form: LineFormat, key: bytes | None) -> Record:
    """Read one line (without its line end); ``key`` is for lines that bring none.

    Raises Invalid(INVALID_REQUEST) for a line that is not a JSON object of known fields.
    """
    if form is LineFormat.RAW:
        return Record(value=line, key=key)
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise _invalid(f"a line is not JSON (use --format raw for plain lines): {error}") from error
    if not isinstance(fields, dict):
        raise _invalid("a line is not a JSON object (use --format raw for plain lines)")
    known = {"key", "key_base64", "value", "value_base64", "headers", "partition", "offset", "timestamp", "topic"}
    for name in fields:
        if name not in known:
            raise _invalid(f"a line has an unknown field field={name!r} known={' '.join(sorted(known))}")
    own_key = _bytes_field(fields, "key")
    return Record(
        value=_bytes_field(fields, "value"),
        key=key if own_key is None else own_key,
        headers=_headers_field(fields.get("headers")),
    )


def line_of_record(record: Record, *, topic: str, partition: int, form: LineFormat) -> bytes:
    """One record as a line, line end included."""
    if form is LineFormat.RAW:
        return (record.value or b"") + b"\n"
    fields: dict[str, object] = {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": format_time(record.append_time_us),
    }
    fields |= _bytes_member("key", record.key)
    fields |= _bytes_member("value", record.value)
    if record.headers:
        fields["headers"] = [
            _bytes_member("key", header.key) | _bytes_member("value", header.value) for header in record.headers
        ]
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def format_time(time_us: int) -> str:
    """An instant as RFC 3339 in UTC with microseconds."""
    moment = datetime.fromtimestamp(time_us // 1_000_000, tz=UTC) + timedelta(microseconds=time_us % 1_000_000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def parse_time_us(text: str) -> int:
    """Microseconds since 1970 of an ISO 8601 instant; without a zone it is UTC. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    span = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def _bytes_member(name: str, data: bytes | None) -> dict[str, object]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _bytes_field(fields: dict[str, object], name: str) -> bytes | None:
    encoded = fields.get(f"{name}_base64")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise _invalid(f"a line has invalid base64 field={name}_base64") from error
    plain = fields.get(name)
    if plain is None:
        return None
    if isinstance(plain, str):
        return plain.encode()
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode()


def _headers_field(headers: object) -> tuple[Header, ...]:
    if headers is None:
        return ()
    if isinstance(headers, dict):
        pairs = [{"key": key, "value": value} for key, value in headers.items()]
    elif isinstance(headers, list) and all(isinstance(pair, dict) for pair in headers):
        pairs = headers
    else:
        raise _invalid("headers are neither an object nor a list of objects with key and value")
    return tuple(_header(pair) for pair in pairs)


def _header(pair: dict[str, object]) -> Header:
    key = _bytes_field(pair, "key")
    value = _bytes_field(pair, "value")
    if key is None:
        raise _invalid("a header has no key")
    kind = HeaderKind.NULL if value is None else HeaderKind.STRING if "value" in pair else HeaderKind.RAW
    return Header(key=key, value=value, value_kind=kind)


def _invalid(message: str) -> Invalid:
    return Invalid(ErrorCode.INVALID_REQUEST, message)
