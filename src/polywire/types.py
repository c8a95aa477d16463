"""Ids and values shared by everyone.

Promises: plain values without behaviour beyond checking themselves. Must not know: log, broker, wires.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from polywire.errors import ErrorCode, Invalid
from polywire.names import CONTROLS, is_simple

if TYPE_CHECKING:
    Buffer: TypeAlias = bytes | bytearray | memoryview | array[int]
else:  # array cannot be subscripted before Python 3.12
    Buffer = bytes | bytearray | memoryview | array

NAME_BYTES_MAX: Final = 255  # of a stream's name and of a topic's, in UTF-8: what the wire with the longest names takes
FULL_NAME_BYTES_MAX: Final = 2 * NAME_BYTES_MAX + 1  # both and the dot between
DEFAULT_STREAM: Final = "default"
DEFAULT_PARTITION_COUNT: Final = 3
PORT_MAX: Final = 65_535
PORT_DIGITS_MAX: Final = 5  # longer ones are not turned into numbers
PARTITION_COUNT_MAX: Final = 10_000
SHARDS_MAX: Final = 64  # that have topics between them, each with a process of its own


def spell_address(host: str, port: int | str) -> str:
    """Return ``HOST:PORT``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of a spelled address without brackets, empty where there is no port."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


class Level(IntEnum):
    """What an acknowledgement means (concepts: guarantees#levels): accepted, in the operating system, on the disk, in the bucket.

    Where there is no bucket, what is on the disk is stored.
    """

    MEMORY = 0
    WRITTEN = 1
    SYNCED = 2
    STORED = 3


class KeyHash(Enum):
    """Functions that map a key to a partition."""

    FNV32 = "fnv32"
    FNV64 = "fnv64"
    XXH32 = "xxh32"
    MURMUR3 = "murmur3"


class PositionKind(Enum):
    """Whose position it is."""

    CONSUMER = "consumer"
    GROUP = "group"


class Assignor(Enum):
    """How a group's partitions are dealt out."""

    ROUND_ROBIN = "round_robin"
    RANGE = "range"


@dataclass(frozen=True, slots=True)
class TopicName:
    """A topic's stream and name; ``full`` is ``stream.topic``, or just ``topic`` in the stream ``default``.

    One meaning of a dotted name (decision 0027): in a full name the first dot ends the stream.
    """

    stream: str
    topic: str

    @classmethod
    def parse(cls, full: str) -> TopicName:
        """What a full name means. Without a stream or a topic beside its first dot, and behind ``default.``, it lies in ``default`` whole."""
        stream, _, topic = full.partition(".")
        if not stream or topic in ("", ".", "..") or stream == DEFAULT_STREAM:
            return cls(DEFAULT_STREAM, full)
        return cls(stream, topic)

    @property
    def is_plain(self) -> bool:
        """Whether the full name means this stream and topic, so that everybody who spells it means the same."""
        return TopicName.parse(self.full) == self

    @property
    def full(self) -> str:
        """The full name: ``stream.topic``, or just ``topic`` in the stream ``default``."""
        return self.topic if self.stream == DEFAULT_STREAM else f"{self.stream}.{self.topic}"


def is_name(text: str) -> bool:
    """Whether a stream or a topic may be called so (decision 0037): 1 to 255 bytes of UTF-8, no control characters, not ``.`` or ``..``."""
    if is_simple(text):
        return 0 < len(text) <= NAME_BYTES_MAX and text not in (".", "..")
    if len(text) > NAME_BYTES_MAX or not CONTROLS.isdisjoint(text):
        return False
    try:
        return len(text.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # halves of surrogate pairs, as which wires keep bytes that are no UTF-8
        return False


def check_topic_name(name: TopicName) -> None:
    """Refuse a name whose stream or topic nothing may be called, as ``is_name`` says. Raises Invalid(INVALID_TOPIC)."""
    if not is_name(name.stream) or not is_name(name.topic):
        raise Invalid(ErrorCode.INVALID_TOPIC, f"invalid topic name name={name.full[: FULL_NAME_BYTES_MAX + 1]!r}")


def shard_name(shard: int) -> str:
    """A shard's number as it stands in names of files and objects: four hexadecimal digits."""
    return f"{shard:04x}"
