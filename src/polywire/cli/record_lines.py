"""Records as lines of text: the JSON format that produce reads and consume writes, and the raw format.

``record produce`` restores key, value, headers, id, origin time and event from the JSON lines of ``record consume``. It
ignores the fields that the broker assigns: topic, partition, offset and timestamp. Bytes that are not UTF-8 are written
as ``key_base64`` and ``value_base64``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final

from polywire.errors import ErrorCode, Invalid
from polywire.escaping import escaped, escaped_json
from polywire.records.columns import Event, Header, HeaderKind, Record

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ASSIGNED_BY_BROKER: Final = frozenset({"topic", "partition", "offset", "timestamp"})
_RECORD_FIELDS: Final = frozenset(
    {"key", "key_base64", "value", "value_base64", "headers", "id", "origin_timestamp", "event"}
)
_HEADER_FIELDS: Final = frozenset({"key", "key_base64", "key_kind", "value", "value_base64", "value_kind"})
_EVENT_FIELDS: Final = frozenset({"type", "schema_version", "aggregate_version", "metadata", "metadata_base64"})


class LineFormat(Enum):
    """Format of a record on a line."""

    JSONL = "jsonl"
    RAW = "raw"


def record_of_line(line: bytes, *, form: LineFormat, key: bytes | None) -> Record:
    """Parse one line without its line end. ``key`` is the key of lines that have none.

    Raises Invalid(INVALID_REQUEST) unless the line is a JSON object with known fields only.
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
    """Return one record as a line, with its line end. Raw values are unchanged unless ``for_terminal`` is set."""
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


def format_time(time_us: int) -> str | int:
    """Return a time as RFC 3339 in UTC with microseconds; unchanged if its year is outside the calendar's range."""
    try:
        return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:
        return time_us


def parse_time_us(text: str) -> int:
    """Parse an ISO 8601 time, in UTC unless it has a zone, into microseconds since 1970. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1)


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
    """Return a string as UTF-8, any other JSON value as compact JSON text, and the ``_base64`` field decoded."""
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
    """Return key and value, with their kinds if parsing would not infer these kinds."""
    members = _bytes_member("key", header.key)
    if header.key_kind is not HeaderKind.STRING:
        members["key_kind"] = header.key_kind.name.lower()
    members |= _bytes_member("value", header.value)
    if header.value_kind is not _inferred_kind(members):
        members["value_kind"] = header.value_kind.name.lower()
    return members


def _inferred_kind(members: Mapping[str, object]) -> HeaderKind:
    """Return the kind that a header value without ``value_kind`` has."""
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
