"""Parse and format single FLUX requests and responses (spec: flux#requests, flux#replies).

``parse`` reads every line as the original broker does, and raises only ``Refused``. Text is represented as bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

import msgspec

from polywire import names
from polywire.errors import Invalid, PeerError
from polywire.matching import signed_64
from polywire.types import TopicName, is_name

VERSION: Final = b"V1"
ARGUMENTS: Final = b"expected format V1|<correlation_id>|<command>|<args>"

COMMAND_BYTES_MAX: Final = 64  # a longer text is not a command, so converting its case would be wasted
LIST_ITEMS_MAX: Final = 1_000  # replicas of one partition, as many as a topic may have

_WHITE_ASCII: Final = b"\t\n\v\f\r "
WHITE: Final = (  # exactly the characters in spec: flux#white-space
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
)
_TO_BLANK: Final = str.maketrans(WHITE, " " * len(WHITE))
# these end words and lists, so they are escaped in names
_RESERVED: Final = frozenset(WHITE) | names.CONTROLS | frozenset("|[]")
_CONTROL: Final = bytes((*range(0x20), 0x7F))


# Requests that a web page can make a browser send begin with one of these. Such a page must not be able to write to the
# log by posting a form to this port.
HTTP_METHODS: Final = tuple(
    f"{method} ".encode()
    for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "PRI"]
)
HTTP_METHOD_BYTES_MAX: Final = max(map(len, HTTP_METHODS))
KAFKA_BYTES: Final = 7  # enough to recognise a Kafka client
# API and the upper byte of its version, after a length: ApiVersions, or Metadata from clients that know their versions
KAFKA_FIRST: Final = frozenset({b"\0\x12\0", b"\0\x03\0"})


class WireCode(Enum):
    """Error codes of the protocol (spec: flux#errors)."""

    BAD_REQUEST = b"BAD_REQUEST"
    UNKNOWN_COMMAND = b"UNKNOWN_COMMAND"
    NOT_LEADER = b"NOT_LEADER"
    REPLICATION_TIMEOUT = b"REPLICATION_TIMEOUT"
    GENERATION_MISMATCH = b"GENERATION_MISMATCH"


class Refused(Exception):
    """A request that gets an error: code and text for the client."""

    def __init__(self, code: WireCode, text: bytes | str) -> None:
        self.code: Final = code
        self.text: Final = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        super().__init__(f"{code.name.lower()} text={self.text!r}")


def bad(text: bytes | str) -> Refused:
    return Refused(WireCode.BAD_REQUEST, text)


class Request(msgspec.Struct, frozen=True):
    """A valid request.

    Attributes:
        id: the correlation id, which the response repeats.
        command: in upper case.
    """

    id: bytes
    command: str
    args: list[bytes]


class Acks(Enum):
    NONE = b"0"
    LEADER = b"1"
    ALL = b"all"


class Role(Enum):
    LEADER = b"leader"
    FOLLOWER = b"follower"


def text_of(line: bytes) -> str:
    """Decode a line. Invalid UTF-8 is preserved for ``bytes_of``."""
    return line.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """Encode a text from ``text_of``."""
    return text.encode("utf-8", "surrogateescape")


def trim(line: bytes) -> bytes:
    if line.isascii():
        return line.strip(_WHITE_ASCII)
    return bytes_of(text_of(line).strip(WHITE))


def has_white(line: bytes) -> bool:
    if line.isascii():
        return len(line.translate(None, _WHITE_ASCII)) != len(line)
    text = text_of(line)
    return any(char in text for char in WHITE)


def words(line: bytes) -> list[bytes]:
    if line.isascii():
        return line.split()
    return [bytes_of(word) for word in text_of(line).translate(_TO_BLANK).split(" ") if word]


def _upper(command: bytes) -> str:
    """Convert a command to upper case. Characters whose upper case has another length remain unchanged."""
    text = text_of(command[:COMMAND_BYTES_MAX])
    return "".join(c.upper() if len(c.upper()) == 1 else c for c in text)


def is_http(line: bytes) -> bool:
    """Return whether a line begins an HTTP request. No FLUX request begins like this."""
    return line[:HTTP_METHOD_BYTES_MAX].upper().startswith(HTTP_METHODS)


def refuse_kafka(data: bytes) -> None:
    """Raise PeerError if data begins like the first request of a Kafka client. No FLUX request begins like this."""
    if data[:2] == b"\0\0" and data[4:KAFKA_BYTES] in KAFKA_FIRST:
        raise PeerError(
            "a Kafka client connected to the FLUX port (use the Kafka listener, by default port 9094, or serve Kafka here:"
            " --kafka HOST:PORT --flux off)",
            fatal=True,
        )


def parse(line: bytes, *, pipes: bool = False) -> Request:
    """Parse a line without its LF. ``pipes``: whether arguments may contain pipes.

    Raises Refused. The error is sent with the correlation id 0.
    """
    if line.endswith(b"\r"):
        line = line[:-1]
    parts = trim(line).split(b"|", 3)
    if len(parts) < 4 or (not pipes and b"|" in parts[3]):
        raise bad(ARGUMENTS)
    version, correlation, command, args = (trim(part) for part in parts)
    if version != VERSION:
        raise bad(b"unsupported version")
    if not correlation:
        raise bad(b"correlation id required")
    if not command:
        raise bad(b"command required")
    return Request(correlation, _upper(command), words(args))


def is_plain(value: bytes) -> bool:
    """Return whether a value is UTF-8 without control bytes.

    Records with other values get a flag, so that responses return the values unchanged (spec: flux#values-in-replies).
    """
    if len(value.translate(None, _CONTROL)) != len(value):
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def usage(request: Request, text: str, *counts: int) -> None:
    """Raise Refused with the usage text unless the number of arguments is one of ``counts``."""
    if len(request.args) not in counts:
        raise bad(f"{request.command} requires: {text}")


def integer(text: bytes, field: str) -> int:
    """Parse a signed 64-bit decimal number. Raises Refused ``invalid <field>``."""
    value = signed_64(text_of(text))
    if value is None:
        raise bad(f"invalid {field}")
    return value


def integers(text: bytes) -> list[int]:
    """Parse a comma-separated list of numbers, skipping empty items. Raises Refused ``invalid integer list``."""
    items = [item for item in text.split(b",") if item]
    if len(items) > LIST_ITEMS_MAX:
        raise bad(f"more than {LIST_ITEMS_MAX} numbers in an integer list")
    return [integer(item, "integer list") for item in items]


def topic_word(name: str) -> str:
    """Encode a topic's name as one word. Characters that would end a word or a list become ``%XX`` (decision 0116)."""
    return names.escape(name, _RESERVED)


def named(text: bytes) -> str:
    """Decode a topic's name that was encoded with ``topic_word``.

    Raises Refused ``invalid topic`` if it cannot be decoded.
    """
    try:
        return names.unescape(text_of(text))
    except Invalid:
        raise bad(b"invalid topic") from None


def topic_name(text: bytes) -> str:
    """Decode a topic's name that was encoded with ``topic_word``.

    Raises Refused ``invalid topic`` if the name is not allowed (decision 0116).
    """
    name = named(text)
    parts = TopicName.parse(name)
    if not is_name(parts.stream) or not is_name(parts.topic):
        raise bad(b"invalid topic")
    return name


def plain_name(text: bytes, field: str) -> str:
    """Decode a group, consumer id or host (spec: flux#names).

    Raises Refused ``invalid <field>`` unless it has at most 255 bytes of UTF-8 without control bytes.
    """
    if len(text) > 255 or not is_plain(text):
        raise bad(f"invalid {field}")
    return text.decode()


def acks(text: bytes) -> Acks:
    """Parse ``acks=…``. Raises Refused for an unknown mode."""
    name, _, value = text.partition(b"=")
    try:
        if name == b"acks":
            return Acks(value)
    except ValueError:
        pass
    raise bad(b"invalid ack mode; expected acks=0|1|all")


def role(text: bytes) -> Role:
    """Parse a role. Raises Refused for an unknown role."""
    try:
        return Role(text)
    except ValueError:
        raise bad(b"invalid role") from None


def ok(correlation: bytes, payload: bytes) -> bytes:
    """Return a success response with its line ending. Without payload, it does not have the last pipe."""
    return b"V1|%b|OK|%b\n" % (correlation, payload) if payload else b"V1|%b|OK\n" % correlation


def err(correlation: bytes, refused: Refused) -> bytes:
    return b"V1|%b|ERR|%b|%b\n" % (correlation, refused.code.value, refused.text)


def listed(items: Iterable[object]) -> str:
    """Format a list as ``[0 2]``."""
    return f"[{' '.join(str(item) for item in items)}]"


def flag(value: bool) -> str:
    return "true" if value else "false"
