"""UPDATE_RESOURCE of Iggy 0.12: change some fields of a stream, topic or user (spec: iggy#d4-patches).

The request is translated to an older command, or refused with an error number of the specification.
"""

from __future__ import annotations

from typing import Final

from polywire.protocols.iggy import errors
from polywire.protocols.iggy.dialect import D4A
from polywire.protocols.iggy.messages import Code, Refused, name_bytes
from polywire.protocols.iggy.options import RESETTABLE_KEYS, encode_default, encode_option, is_known, parse_options
from polywire.protocols.iggy.reader import Reader

TOPIC: Final = 1
STREAM: Final = 2
USER: Final = 3
_TEXT: Final = 2
_STATUSES: Final = {b"active": b"\1", b"inactive": b"\2"}


def translate(body: memoryview) -> tuple[Code, bytes]:
    """Convert a request that changes only some fields (since protocol 0.12) to the older command and its payload.

    If the request does not change a topic's name, the name in the payload is empty. Raises Refused for an invalid
    request.
    """
    reader = Reader(body, D4A)
    scope = reader.u8()
    if scope not in (TOPIC, STREAM, USER):
        raise Refused(errors.UNKNOWN_COMMAND)
    begin = reader.at
    for _ in range(2 if scope == TOPIC else 1):
        reader.ident()
    target = bytes(body[begin : reader.at])
    resets = [reader.name().encode() for _ in range(reader.u8())]
    values = parse_options(bytes(reader.take(reader.left)))
    if len(set(resets)) < len(resets) or not values.keys().isdisjoint(resets) or not (values or resets):
        raise Refused(errors.UNKNOWN_COMMAND)
    if scope == TOPIC:
        return Code.UPDATE_TOPIC, target + _topic_fields(resets, values)
    if resets:
        raise Refused(errors.NOT_RESETTABLE)
    if scope == STREAM:
        if values.keys() != {b"name"}:
            raise Refused(errors.UNKNOWN_OPTION)
        return Code.UPDATE_STREAM, target + name_bytes(_text(values, b"name"))
    return Code.UPDATE_USER, target + _user_fields(values)


def _topic_fields(resets: list[bytes], values: dict[bytes, tuple[int, bytes]]) -> bytes:
    if not set(resets) <= set(RESETTABLE_KEYS):
        raise Refused(errors.NOT_RESETTABLE)
    for key in values.keys() - {b"name", *RESETTABLE_KEYS}:
        raise Refused(errors.NOT_UPDATABLE if is_known(key) else errors.UNKNOWN_OPTION)
    name = _text(values, b"name") if b"name" in values else ""
    options = [encode_option(key, kind, value) for key, (kind, value) in values.items() if key != b"name"]
    return name_bytes(name) + b"".join([*options, *map(encode_default, resets)])


def _user_fields(values: dict[bytes, tuple[int, bytes]]) -> bytes:
    if not values.keys() <= {b"username", b"status"}:
        raise Refused(errors.UNKNOWN_OPTION)
    name = b"\1" + name_bytes(_text(values, b"username")) if b"username" in values else b"\0"
    if b"status" not in values:
        return name + b"\0"
    status = _STATUSES.get(_text(values, b"status").encode())
    if status is None:
        raise Refused(errors.BAD_OPTION)
    return name + b"\1" + status


def _text(values: dict[bytes, tuple[int, bytes]], key: bytes) -> str:
    kind, value = values[key]
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = ""
    if kind != _TEXT or not text or len(value) > 255:
        raise Refused(errors.BAD_OPTION)
    return text
