"""Decode responses of a Cursus broker and their errors, and encode batches.

* Each error response becomes an exception of ``polywire.errors``.
* A response that cannot be decoded becomes ``Unavailable``.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from struct import Struct
from typing import Final

import msgspec

from polywire.client.failures import bare_value
from polywire.errors import BrokerError, Conflict, Denied, ErrorCode, Invalid, Missing, NotOwner, Unavailable
from polywire.protocols.cursus import decoder
from polywire.protocols.cursus.messages import decoded, encoded
from polywire.records.columns import Event, Record

WIRE: Final = "Cursus"  # the protocol's name in error messages
_U16: Final = Struct(">H")
_HEAD: Final = Struct(">BQQi")  # idempotent, seqStart, seqEnd, count
_NUMBERS: Final = Struct(">QQ")
_EPOCH: Final = Struct(">qI")
_VERSIONS: Final = Struct(">IQ")
_PARTITION: Final = Struct(">i")
_PRESENT: Final = re.compile(r"(\w+)=(\[[^\]]*\]|\"(?:[^\"\\]|\\.)*\"|\S*)")

# The exception for each error code. Any other code becomes Invalid.
_KINDS: Final[Mapping[str, BrokerError]] = {
    "topic_not_found": Missing(ErrorCode.TOPIC_MISSING, ""),
    "partition_not_found": Missing(ErrorCode.PARTITION_MISSING, ""),
    "group_not_found": Missing(ErrorCode.GROUP_MISSING, ""),
    "member_not_found": Missing(ErrorCode.MEMBER_MISSING, ""),
    "OFFSET_OUT_OF_RANGE": Missing(ErrorCode.OFFSET_OUT_OF_RANGE, ""),
    "GEN_MISMATCH": Conflict(ErrorCode.GENERATION_STALE, ""),
    "NOT_OWNER": Conflict(ErrorCode.PARTITION_NOT_ASSIGNED, ""),
    "producer_fenced": Conflict(ErrorCode.PRODUCER_FENCED, ""),
    "stale_producer_epoch": Conflict(ErrorCode.PRODUCER_FENCED, ""),
    "create_topic_failed": Conflict(ErrorCode.TOPIC_EXISTS, ""),
    "invalid_topic_name": Invalid(ErrorCode.INVALID_TOPIC, ""),
    "invalid_partitions": Invalid(ErrorCode.INVALID_PARTITION_COUNT, ""),
    "invalid_name": Invalid(ErrorCode.INVALID_NAME, ""),
    "batch_decode_failed": Invalid(ErrorCode.INVALID_BATCH, ""),
    "authentication_required": Denied(ErrorCode.DENIED, ""),
    "authentication_failed": Denied(ErrorCode.DENIED, ""),
    "NOT_AUTHORIZED_FOR_OPERATION": Denied(ErrorCode.DENIED, ""),
    "NOT_AUTHORIZED_FOR_TOPIC": Denied(ErrorCode.DENIED, ""),
    "NOT_PARTITION_LEADER": NotOwner(ErrorCode.NOT_OWNER, ""),
    "request_cancelled": Unavailable(ErrorCode.STOPPING, ""),
}


class _Acknowledgement(msgspec.Struct):
    status: str = ""
    last_offset: int = 0
    error: str = ""


def nonsense(what: str) -> Unavailable:
    """Return the error for a response that cannot be decoded."""
    return Unavailable(ErrorCode.UNREACHABLE, f"invalid response: {what}")


def error_of(text: str) -> BrokerError:
    """Return the error of a response ``ERROR: …``."""
    code = text.removeprefix("ERROR: ").partition(" ")[0]
    if "does not exist" in text:
        code = "topic_not_found"
    elif "out of range for topic" in text:
        code = "partition_not_found"
    known = _KINDS.get(code, Invalid(ErrorCode.INVALID_REQUEST, ""))
    return type(known)(known.code, text.removeprefix("ERROR: "))


def fields(body: bytes) -> dict[str, str]:
    """Return the fields of a response ``OK k=v …``, including bracketed and quoted values. Raises BrokerError."""
    text = decoded(body)
    if text.startswith("ERROR:"):
        raise error_of(text)
    if not text.startswith("OK"):
        raise nonsense(text[:80])
    return dict(_PRESENT.findall(text))


def number(reply: Mapping[str, str], key: str) -> int:
    """Return a numeric field. Raises Unavailable."""
    try:
        return int(reply[key])
    except (KeyError, ValueError):
        raise nonsense(f"no number {key}") from None


def numbers(reply: Mapping[str, str], key: str) -> tuple[int, ...]:
    """Return a field that is a bracketed list of numbers. Raises Unavailable."""
    try:
        return tuple(map(int, reply[key].strip("[]").replace(",", " ").split()))
    except (KeyError, ValueError):
        raise nonsense(f"no list {key}") from None


def last_offset(body: bytes) -> int:
    """Return the offset of the last acknowledged record. Raises BrokerError."""
    if body.startswith(b"ERROR:"):
        raise error_of(decoded(body))
    try:
        acknowledgement = msgspec.json.decode(body, type=_Acknowledgement)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise nonsense(decoded(body[:80])) from None
    if acknowledgement.status == "OK":
        return acknowledgement.last_offset
    if "stale_producer_epoch" in acknowledgement.error:
        raise Conflict(ErrorCode.PRODUCER_FENCED, acknowledgement.error)
    if "idempotency" in acknowledgement.error:
        raise Invalid(ErrorCode.SEQUENCE_GAP, acknowledgement.error)
    raise Unavailable(ErrorCode.STORAGE_FAILED, acknowledgement.error)


def encode_batch(topic: str, partition: int, acks: str, records: Sequence[Record], *, producer: bytes = b"") -> bytes:
    """Encode a batch in the modern layout. Raises Invalid for records that the protocol does not support.

    A missing key is sent as an empty one. With a ``producer`` id, records get sequence numbers, so that the broker
    stores each record only once.
    """
    parts = [b"\xba\x7c", _text(encoded(topic)), _PARTITION.pack(partition), bytes((len(acks),)), acks.encode()]
    parts.append(_HEAD.pack(bool(producer), 0, 0, len(records)))
    for record in records:
        value = bare_value(WIRE, record, events=True)
        event = record.event or Event("", 0, 0)
        parts += (
            _NUMBERS.pack(0, record.sequence or 0),
            _text(producer),
            _text(record.key or b""),
            _EPOCH.pack(0, len(value)),
            value,
            _text(event.type.encode()),
            _VERSIONS.pack(event.schema_version, event.aggregate_version),
            _text(event.metadata or b""),
        )
    return b"".join(parts)


def _text(text: bytes) -> bytes:
    if len(text) > 65_535:
        raise Invalid(
            ErrorCode.RECORD_TOO_LARGE,
            f"key or event text is longer than the 65535 bytes of this protocol got={len(text)}",
        )
    return _U16.pack(len(text)) + text


def decode_batch(body: bytes) -> list[Record]:
    """Decode a batch in the modern layout. Raises Unavailable if the bytes are not a batch."""
    room = len(body) // decoder.MESSAGE_BYTES_MIN + 1
    head = array("q", bytes(8 * decoder.HEAD_WORDS))
    spans, details = array("q", bytes(32 * room)), array("q", bytes(8 * decoder.DETAIL_WORDS * room))
    if body[:2] != b"\xba\x7c" or decoder.scan(body, decoder.MODERN, head, spans, details) != 0:
        raise nonsense("not a batch")
    return [_record(body, spans, details, row) for row in range(head[decoder.COUNT])]


def _record(body: bytes, spans: array[int], details: array[int], row: int) -> Record:
    key_at, key_size, value_at, value_size = spans[4 * row : 4 * row + 4]
    detail = details[decoder.DETAIL_WORDS * row : decoder.DETAIL_WORDS * (row + 1)]
    offset = int.from_bytes(
        body[detail[decoder.MESSAGE_PRODUCER_AT] - 18 : detail[decoder.MESSAGE_PRODUCER_AT] - 10], "big"
    )
    event = None
    if detail[decoder.TYPE_SIZE] or detail[decoder.SCHEMA_VERSION] or detail[decoder.AGGREGATE_VERSION]:
        metadata = body[detail[decoder.METADATA_AT] : detail[decoder.METADATA_AT] + detail[decoder.METADATA_SIZE]]
        kind = decoded(body[detail[decoder.TYPE_AT] : detail[decoder.TYPE_AT] + detail[decoder.TYPE_SIZE]])
        event = Event(kind, detail[decoder.SCHEMA_VERSION], detail[decoder.AGGREGATE_VERSION], metadata or None)
    return Record(
        value=body[value_at : value_at + value_size],
        key=body[key_at : key_at + key_size] if key_size > 0 else None,
        offset=offset,
        sequence=detail[decoder.SEQUENCE] if detail[decoder.MESSAGE_PRODUCER_SIZE] else None,
        event=event,
    )
