"""Parse text requests and format responses (spec: cursus#bodies, cursus#envelope, cursus#reading-a-command).

``read_text`` parses any body that is not a batch, recognises its dialect (spec: cursus#recognising-the-dialect), and
raises only ``Refused``. Invalid UTF-8 is preserved as surrogates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from struct import Struct
from typing import Final

import msgspec

from polywire import names
from polywire.errors import Invalid
from polywire.matching import ANY, LOWER, ONE, UPPER, is_pattern, signed_64
from polywire.types import Buffer

# limit of received frames, the same as in older brokers and all clients (spec: cursus#frames)
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
REPLY_BYTES_MAX: Final = 16 * 1024 * 1024  # limit of sent frames, the smallest limit of any client
PREFIX_BYTES: Final = 4
# limit for names of topics that are created over this protocol; other protocols allow longer names (spec:
# cursus#topics)
TOPIC_BYTES_MAX: Final = 249
TEXT_BYTES_MAX: Final = 16 * 1024 * 1024  # limit of a command with its message, which must fit into a stored batch
TEXT_FRAME_BYTES_MAX: Final = TEXT_BYTES_MAX + 2 + 65_535  # limit of a command in its envelope
ARGUMENT_BYTES_MAX: Final = 256 * 1024  # limit of the text before the message; a commit of 10,000 partitions has 200 KB
SHOWN_BYTES_MAX: Final = 512  # bytes of a command that an error repeats
KEEPALIVE: Final = bytes(PREFIX_BYTES)

_quoted: Final = json.JSONEncoder(ensure_ascii=False).encode  # created once, because every acknowledgement needs it
_LENGTH: Final = Struct(">I")
_TOPIC_LENGTH: Final = Struct(">H")
_BLANK: Final = " \t\r\n"
_TO_BLANK: Final = str.maketrans(_BLANK, " " * len(_BLANK))
_PADDING: Final = "\0" + _BLANK
PADDING: Final = _PADDING.encode()  # characters that are stripped from the ends of commands
_MESSAGE: Final = b"message="
_NO_TOPIC: Final = b"\0\0"  # the start of an envelope with an empty topic, which must not be stripped like padding
_RESERVED: Final = (
    names.WHITE | names.CONTROLS | frozenset((ANY, ONE, ",", '"'))
)  # these end words, lists, patterns or values, so they are escaped


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Dialect(Enum):
    """The version of the protocol in which a request is written. The response has the same (spec: cursus#dialects)."""

    MODERN = "modern"
    POSITIONAL = "positional"
    LEGACY = "legacy"


# Commands of the current broker; below, commands between brokers and of other dialects (spec: cursus#bodies).
MODERN_NAMES: Final = words(
    "AUTH CREATE DELETE LIST LIST_CLUSTER CLUSTER_STATUS ELECT_LEADER PUBLISH CONSUME STREAM HELP HEARTBEAT JOIN_GROUP"
    " LEAVE_GROUP COMMIT_OFFSET BATCH_COMMIT REGISTER_GROUP GROUP_STATUS FETCH_OFFSET LIST_GROUPS LIST_OFFSETS SYNC_GROUP"
    " DESCRIBE INIT_PRODUCER_ID BEGIN_TXN TXN_PUBLISH SEND_OFFSETS_TO_TXN END_TXN TXN_STATUS APPEND_STREAM READ_STREAM"
    " SAVE_SNAPSHOT READ_SNAPSHOT STREAM_VERSION METADATA FIND_COORDINATOR PROTOCOL_INFO NEGOTIATE"
)
INTERNAL_NAMES: Final = words(
    "REPLICATE_MESSAGE REPLICATE_SNAPSHOT LIST_SNAPSHOTS FETCH_SNAPSHOT CATCHUP_SNAPSHOTS RAFT_APPLY INTERNAL_BATCH"
)
KNOWN_NAMES: Final = MODERN_NAMES | INTERNAL_NAMES | {"SUBSCRIBE", "COMMIT", "SETGROUP", "EXIT"}

# Arguments of the positional dialects, in their order. All other commands exist in the modern dialect only
POSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "CREATE": ("topic", "partitions"),
    "DELETE": ("topic",),
    "LIST": (),
    "HELP": (),
    "EXIT": (),
    "SETGROUP": ("group",),
    "SUBSCRIBE": ("topic", "group"),
    "PUBLISH": ("topic",),
    "CONSUME": ("topic", "partition", "offset"),
    "STREAM": ("topic", "partition", "offset"),
    "JOIN_GROUP": ("topic", "group", "member"),
    "SYNC_GROUP": ("topic", "group", "member", "generation"),
    "HEARTBEAT": ("topic", "group", "consumer", "member", "generation"),
    "LEAVE_GROUP": ("topic", "group", "member"),
    "COMMIT": ("topic", "group", "partition", "offset"),
    "BATCH_COMMIT": ("topic", "group", "member", "generation", "offsets"),
}
_LEGACY_ONLY: Final = words("PUBLISH HELP SETGROUP EXIT")
_SHARED: Final = words(
    "CREATE DELETE LIST SUBSCRIBE CONSUME"
)  # sent by the positional dialects, which expect different answers

# First arguments ``<key>=`` that make a request modern (spec: cursus#recognising-the-dialect).
KNOWN_KEYS: Final = words(
    "topic group partition partitions member generation offset version key producerId acks transactional_id txn transaction"
    " principal token auth_token isolation isolation_level batch wait_ms features require_features broker message epoch seqNum"
    " isIdempotent idempotent event_sourcing replication_factor cleanup_policy retention_hours retention_bytes partitioner"
    " auth_policy read_acl write_acl validate_only result event_type schema_version metadata from_version autoOffsetReset"
)


class Refused(Exception):
    """An error response: a code, details (``k=v``), and the text for the oldest clients.

    ``classed``: whether ``facts`` already has the error class.
    """

    def __init__(self, code: str, facts: str = "", *, legacy: str | None = None, classed: bool = False) -> None:
        self.code: Final = code
        self.facts: Final = facts
        self.legacy: Final = legacy
        self.classed: Final = classed
        super().__init__(f"{code} {facts}".rstrip())


class Request(msgspec.Struct, frozen=True):
    """One command.

    Attributes:
        name: in upper case.
        text: the command without white space at its ends, truncated to the length that errors repeat.
        arguments: the text after the name, without the message.
        words: the words of ``arguments``.
        options: values by key; positional arguments have the keys in ``POSITIONS``.
        message: everything after ``message=``; None if absent or empty. For a positional PUBLISH, the unchanged text
            after the blank that follows the topic.
        telling: whether only one protocol version has this syntax, so that the client's version is known.
        pattern: whether the topic has wildcards, which CONSUME allows; its escapes were not decoded.
    """

    name: str
    dialect: Dialect
    text: str
    arguments: str
    words: tuple[str, ...] = ()
    options: Mapping[str, str] = msgspec.field(default_factory=dict)
    message: bytes | None = None
    telling: bool = False
    pattern: bool = False

    def need(self, key: str) -> str:
        """Return a required argument. Raises Refused ``missing_<key> command=<name>`` if it is absent or empty."""
        value = self.options.get(key, "")
        if not value:
            raise Refused(f"missing_{snake(key)}", f"command={self.name}")
        return value

    def is_set(self, key: str) -> bool:
        return self.options.get(key, "").lower() == "true"


class BarePublish(msgspec.Struct, frozen=True):
    """An envelope (topic and payload) whose payload is not a command.

    For the oldest clients, the payload is published to the envelope's topic unless it is empty (spec: cursus#envelope).
    """

    topic: str
    payload: bytes


def read_text(body: bytes, spoken: Dialect | None, forced: Dialect | None = None) -> Request | BarePublish:
    """Parse a body that is not a batch.

    Args:
        body: only its first ``TEXT_FRAME_BYTES_MAX`` + 1 bytes are needed, because longer bodies are rejected.
        spoken: protocol version of the connection's latest unambiguous request; None before the first. Used for
            ambiguous requests.
        forced: the only version that the listener accepts, if it is configured.

    Raises Refused ``decode_failed`` or ``malformed_input``, after which the connection remains open.
    """
    if not body:
        raise Refused("decode_failed", 'reason="data too short"', legacy=no_command(body))
    name = None if body.startswith(_NO_TOPIC) else _command(body)
    if name is not None:
        return _read(body, name, None, spoken, forced)
    if len(body) > TEXT_FRAME_BYTES_MAX:
        raise _too_long("")
    if len(body) < 2:
        raise Refused("decode_failed", 'reason="data too short"', legacy=no_command(body))
    (size,) = _TOPIC_LENGTH.unpack_from(body)
    if len(body) - 2 < size:
        raise Refused("decode_failed", 'reason="invalid topic length"', legacy=no_command(body))
    topic = topic_name(decoded(body[2 : 2 + size]))
    payload = body[2 + size :]
    name = _command(payload)
    if name is not None:
        return _read(payload, name, topic, spoken, forced)
    if not size:
        raise Refused("malformed_input", "reason=missing_topic_or_payload", legacy=no_command(payload))
    return BarePublish(topic, payload)


def _command(body: bytes) -> str | None:
    word = decoded(body[:128]).lstrip(_PADDING).translate(_TO_BLANK).partition(" ")[0]
    name = word.upper() if word.isascii() else ""
    return name if name in KNOWN_NAMES else None


def no_command(text: bytes) -> str:
    word = decoded(text.lstrip(PADDING)[:64]).split(maxsplit=1)
    return f"unknown command: {word[0]}" if word else "empty command"


def _read(body: bytes, name: str, envelope: str | None, spoken: Dialect | None, forced: Dialect | None) -> Request:
    trimmed = body.strip(PADDING)
    if len(trimmed) > TEXT_BYTES_MAX:
        raise _too_long(name)
    # A message may be long, and each copy takes some milliseconds, so it is copied once and only if needed.
    found = trimmed.find(_MESSAGE, len(name))
    marker = b"" if found < 0 else _MESSAGE
    end = len(trimmed) if found < 0 else found
    before = trimmed[len(name) : end].lstrip() if marker else trimmed[len(name) :].strip()
    shown = decoded(trimmed[:SHOWN_BYTES_MAX])
    behind = end + len(marker)
    beginning = (before + marker + trimmed[behind : behind + SHOWN_BYTES_MAX])[:SHOWN_BYTES_MAX]
    dialect, telling = (forced, True) if forced else _dialect(name, decoded(beginning), envelope, spoken)
    if dialect is Dialect.MODERN or name not in POSITIONS:
        if len(before) > ARGUMENT_BYTES_MAX:
            raise _too_long(name)
        message = trimmed[behind:].strip() if marker else b""
        return _modern(name, shown, decoded(before + marker), message, telling)
    # Padding at the ends of a PUBLISH belongs to its message.
    after = body.lstrip(PADDING)[len(name) :] if name == "PUBLISH" else trimmed[len(name) :].strip()
    return _positional(name, dialect, shown, after, telling)


def _too_long(name: str) -> Refused:
    return Refused("malformed_input", f'reason="command is too long" command={name}')


def _dialect(name: str, arguments: str, envelope: str | None, spoken: Dialect | None) -> tuple[Dialect, bool]:
    """Return the protocol version of a request, and whether only that version has its syntax.

    There are three versions. A request that is valid in both older ones counts as one of the oldest, except for an
    ambiguous CONSUME and a SUBSCRIBE with a group (spec: cursus#recognising-the-dialect).
    """
    words = arguments.split()
    key, equals, _ = words[0].partition("=") if words else ("", "", "")
    if (equals and key in KNOWN_KEYS) or name not in POSITIONS:
        return Dialect.MODERN, True
    if envelope or (name in _LEGACY_ONLY and words):
        return Dialect.LEGACY, True
    if name not in _SHARED and name not in _LEGACY_ONLY:
        return Dialect.POSITIONAL, True
    if not words:
        return spoken or Dialect.LEGACY, False
    if name == "LIST":
        return Dialect.MODERN, False  # the command takes no positional arguments, so this is a mistake of the client
    if envelope is not None or (name in ("CREATE", "SUBSCRIBE") and len(words) == 1):
        return Dialect.LEGACY, True
    newer = len(words) == len(POSITIONS[name]) and name in ("CONSUME", "SUBSCRIBE")
    if spoken is None:
        return Dialect.POSITIONAL if newer else Dialect.LEGACY, False
    return Dialect.LEGACY if spoken is Dialect.LEGACY else Dialect.POSITIONAL, False


def _modern(name: str, text: str, arguments: str, message: bytes, telling: bool) -> Request:
    words = tuple(arguments.removesuffix(_MESSAGE.decode()).split())
    options = {key: value for key, equals, value in (word.partition("=") for word in words) if equals}
    pattern = _read_options(options)
    return Request(name, Dialect.MODERN, text, arguments, words, options, message or None, telling, pattern=pattern)


def _read_options(options: dict[str, str]) -> bool:
    """Decode the topic, unless it may be a pattern. Return whether it may be one.

    Raises Refused for names that are not valid UTF-8, because other protocols must encode them. Keys may have any
    bytes.
    """
    for key, value in options.items():
        if key != "key" and not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise Refused("decode_failed", f"reason={quote('an argument is not valid UTF-8')}")
    topic = options.get("topic", "")
    if is_pattern(topic):
        return True
    if names.ESCAPE in topic:
        options["topic"] = topic_name(topic)
    return False


def _positional(name: str, dialect: Dialect, text: str, after: bytes, telling: bool) -> Request:
    message = None
    if name == "PUBLISH":
        after, message = _topic_and_message(after)
    if len(after) > ARGUMENT_BYTES_MAX:
        raise _too_long(name)
    arguments = decoded(after)
    words = tuple(arguments.split())
    options = dict(zip(POSITIONS[name], words, strict=False))
    pattern = _read_options(options)
    return Request(name, dialect, text, arguments, words, options, message, telling, pattern=pattern)


def _topic_and_message(after: bytes) -> tuple[bytes, bytes | None]:
    """Return the first word, and the text after the one blank that follows it; None if there is no such text."""
    after = after.lstrip(PADDING)
    topic = (after.split(None, 1) or [b""])[0]
    return topic, after[len(topic) + 1 :] or None


# Formatting


def frame(body: bytes) -> bytes:
    """Return a body with its length before it."""
    return _LENGTH.pack(len(body)) + body


def bodies_of(frames: Buffer) -> list[bytes]:
    """Return the bodies of complete frames."""
    view, at, found = memoryview(frames), 0, []
    while at < len(view):
        end = at + PREFIX_BYTES + int.from_bytes(view[at : at + PREFIX_BYTES], "big")
        found.append(bytes(view[at + PREFIX_BYTES : end]))
        at = end
    return found


def enveloped(topic: str, payload: bytes) -> bytes:
    name = encoded(topic)
    return _TOPIC_LENGTH.pack(len(name)) + name + payload


def decoded(text: bytes) -> str:
    """Decode text. ``encoded`` restores bytes that are not valid UTF-8."""
    return text.decode("utf-8", "surrogateescape")


def encoded(text: str) -> bytes:
    """Encode text that ``decoded`` has decoded, including bytes that are not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")


def quote(text: str) -> str:
    return _quoted(text)


def bracketed(items: Iterable[object]) -> str:
    """Format a list as ``[0 1 2]``: Java's client accepts only digits and blanks."""
    return f"[{' '.join(map(str, items))}]"


def truth(value: bool) -> str:
    return "true" if value else "false"


def snake(key: str) -> str:
    """Convert ``producerId`` to ``producer_id``, the form of keys in errors."""
    pairs = zip(key[:1] + key, key, strict=False)
    return "".join("_" + char.lower() if before in LOWER and char in UPPER else char for before, char in pairs)


def integer(text: str) -> int | None:
    """Parse a signed 64-bit decimal number; None for anything else."""
    return signed_64(text)


def topic_word(name: str) -> str:
    """Encode a topic's name as one word, with ``%XX`` where necessary (decision 0116)."""
    word = names.escape(name, _RESERVED)
    return word.replace("message=", "message%3D")  # otherwise the text after it would be taken for a message


def topic_name(word: str) -> str:
    """Decode a topic's name that was encoded with ``topic_word``. Raises Refused for an invalid escape."""
    try:
        return names.unescape(word)
    except Invalid:
        reason = "the topic name has invalid escapes (use %XX)"
        raise Refused("invalid_topic_name", f"topic={quote(word)} reason={quote(reason)}", legacy=reason) from None


def topic_fault(name: str) -> str | None:
    """Return why Cursus clients cannot create a topic with this name; None if they can (spec: cursus#topics)."""
    if names.is_simple(name) and 0 < len(name) <= TOPIC_BYTES_MAX and name not in (".", ".."):
        return None
    if not name or len(encoded(name)) > TOPIC_BYTES_MAX:
        return f"topic name must have 1 to {TOPIC_BYTES_MAX} bytes"
    reason = "is reserved" if name in (".", "..") else "contains unsupported characters"
    return f"topic name {quote(name)} {reason}"
