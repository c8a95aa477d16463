"""FLUX requests and replies, one line at a time: the precise rules of dossier §2 and §3.

Promises: ``parse`` reads any line as the reference does and never fails but with ``Refused``; texts are bytes throughout, nothing is decoded.
Must not know: sockets, sessions, the broker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

VERSION: Final = b"V1"
INTEGER_DIGITS_MAX: Final = 19  # of a signed 64-bit number
ARGUMENTS: Final = b"expected format V1|<correlation_id>|<command>|<args>"

_WHITE = rb"(?:[\x09-\x0d\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
WHITE: Final = re.compile(_WHITE)
_WHITES: Final = re.compile(_WHITE + rb"+")
_LEADING: Final = re.compile(_WHITE + rb"*")
_TRAILING: Final = re.compile(_WHITE + rb"+\Z")
_INTEGER: Final = re.compile(rb"([+-]?)0*([0-9]*)")
_TOPIC: Final = re.compile(rb"[A-Za-z0-9._-]{1,249}")
_CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]")


class WireCode(Enum):
    """The five error codes of the wire (dossier §4)."""

    BAD_REQUEST = b"BAD_REQUEST"
    UNKNOWN_COMMAND = b"UNKNOWN_COMMAND"
    NOT_LEADER = b"NOT_LEADER"
    REPLICATION_TIMEOUT = b"REPLICATION_TIMEOUT"
    GENERATION_MISMATCH = b"GENERATION_MISMATCH"


class Refused(Exception):
    """A request answered with an error: its code and text, as they go on the wire."""

    def __init__(self, code: WireCode, text: bytes | str) -> None:
        self.code: Final = code
        self.text: Final = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        super().__init__(f"{code.name.lower()} text={self.text!r}")


def bad(text: bytes | str) -> Refused:
    """A BAD_REQUEST with this text."""
    return Refused(WireCode.BAD_REQUEST, text)


@dataclass(frozen=True, slots=True)
class Request:
    """One well-formed request: the correlation id to echo, the command in upper case, the arguments."""

    id: bytes
    command: str
    args: list[bytes]


class Acks(Enum):
    """Acknowledgement modes of PRODUCE."""

    NONE = b"0"
    LEADER = b"1"
    ALL = b"all"


class Role(Enum):
    """Local role of a partition."""

    LEADER = b"leader"
    FOLLOWER = b"follower"


def trim(text: bytes) -> bytes:
    """Without white space at both ends; white space is the exact set of dossier §2."""
    start = _LEADING.match(text)
    text = text[start.end() :] if start is not None else text
    if text and (text[-1] <= 0x20 or text[-1] >= 0x80):
        end = _TRAILING.search(text)
        if end is not None:
            return text[: end.start()]
    return text


def words(text: bytes) -> list[bytes]:
    """The words between runs of white space."""
    return [word for word in _WHITES.split(text) if word]


def _upper(command: bytes) -> str:
    """Upper case character by character; the few characters whose upper case is longer stay as they are."""
    text = command.decode("utf-8", "surrogateescape")
    return "".join(c.upper() if len(c.upper()) == 1 else c for c in text)


def lower(text: bytes) -> str:
    """Lower case for the words that are compared so."""
    return text.decode("utf-8", "surrogateescape").lower()


def parse(line: bytes) -> Request:
    """Read one line without its LF. Raises Refused, which is to be answered with correlation id 0."""
    if line.endswith(b"\r"):
        line = line[:-1]
    parts = trim(line).split(b"|", 3)
    if len(parts) < 4:
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
    """Whether a value is UTF-8 without control bytes; others are marked as having come on a line, to be shown as they are (§7)."""
    if _CONTROL.search(value) is not None:
        return False
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def integer(text: bytes, field: str) -> int:
    """A signed 64-bit number in decimal. Raises Refused ``invalid <field>``."""
    match = _INTEGER.fullmatch(text)
    if match is not None and text[-1:].isdigit() and len(match[2]) <= INTEGER_DIGITS_MAX:
        value = int(match[2] or b"0")
        value = -value if match[1] == b"-" else value
        if -(2**63) <= value < 2**63:
            return value
    raise bad(f"invalid {field}")


def integers(text: bytes) -> list[int]:
    """A comma-separated list, empty items skipped. Raises Refused ``invalid integer list``."""
    try:
        return [integer(item, "integer list") for item in text.split(b",") if item]
    except Refused:
        raise bad(b"invalid integer list") from None


def topic_name(text: bytes) -> str:
    """A topic this wire may name (dossier Q11). Raises Refused ``invalid topic``."""
    if _TOPIC.fullmatch(text) is None or text in (b".", b".."):
        raise bad(b"invalid topic")
    return text.decode("ascii")


def plain_name(text: bytes, field: str) -> str:
    """A group, consumer id or host: at most 255 bytes of UTF-8 without control bytes (dossier Q11). Raises Refused ``invalid <field>``."""
    if len(text) > 255 or not is_plain(text):
        raise bad(f"invalid {field}")
    return text.decode()


def acks(text: bytes) -> Acks:
    """The argument ``acks=…``. Raises Refused."""
    name, equals, value = lower(text).partition("=")
    if name == "acks" and equals and value in ("0", "1", "all"):
        return Acks(value.encode())
    raise bad(b"invalid ack mode; expected acks=0|1|all")


def role(text: bytes) -> Role:
    """A role in any case. Raises Refused."""
    try:
        return Role(lower(text).encode("utf-8", "surrogateescape"))
    except ValueError:
        raise bad(b"invalid role") from None


def ok(correlation: bytes, payload: bytes) -> bytes:
    """A success reply with its line ending."""
    return b"V1|%b|OK|%b\n" % (correlation, payload)


def err(correlation: bytes, refused: Refused) -> bytes:
    """An error reply with its line ending."""
    return b"V1|%b|ERR|%b|%b\n" % (correlation, refused.code.value, refused.text)


def listed(items: Iterable[object]) -> str:
    """A list as the wire prints it: ``[0 2]``."""
    return f"[{' '.join(str(item) for item in items)}]"


def flag(value: bool) -> str:
    """A truth value as the wire prints it."""
    return "true" if value else "false"
