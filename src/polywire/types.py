"""Types and limits that all packages share: durability levels, topic names, key hashes."""

from __future__ import annotations

from array import array
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from polywire.errors import ErrorCode, Invalid
from polywire.names import CONTROLS, is_simple

if TYPE_CHECKING:
    Buffer: TypeAlias = bytes | bytearray | memoryview | array[int]
else:  # array cannot be subscripted before Python 3.12
    Buffer = bytes | bytearray | memoryview | array

NAME_BYTES_MAX: Final = 255  # limit of a stream or topic name in UTF-8: the longest that any protocol accepts (Iggy)
FULL_NAME_BYTES_MAX: Final = 2 * NAME_BYTES_MAX + 1  # limit of stream, dot and topic
DEFAULT_STREAM: Final = "default"
DEFAULT_PARTITION_COUNT: Final = 3
PORT_MAX: Final = 65_535
PORT_DIGITS_MAX: Final = 5  # longer texts are rejected before they are parsed
PARTITION_COUNT_MAX: Final = 10_000
SHARDS_MAX: Final = 64  # maximum number of shards of one broker; each has its own topics and its own process
NODE_TIMEOUT_S: Final = 8.0  # default: seconds without a heartbeat after which a broker of a cluster is considered dead
NODE_TIMEOUT_S_MIN: Final = 1.0  # a request to a bucket may take a quarter of it
NODE_TIMEOUT_S_MAX: Final = 60.0  # for so long, a leader may serve reads without a heartbeat


def spell_address(host: str, port: int | str) -> str:
    """Return ``HOST:PORT``, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Return the host of an address without brackets, or an empty text if the address has no port."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


class Level(IntEnum):
    """Durability that an acknowledgement guarantees (concepts: durability#levels).

    MEMORY: the broker accepted the records. WRITTEN: the operating system has them. SYNCED: they are on disk. STORED:
    they are in the bucket; without a bucket, this equals SYNCED.
    """

    MEMORY = 0
    WRITTEN = 1
    SYNCED = 2
    STORED = 3


class KeyHash(Enum):
    """Hash function that maps a record's key to a partition."""

    FNV32 = "fnv32"
    FNV64 = "fnv64"
    XXH32 = "xxh32"
    MURMUR3 = "murmur3"


class PositionKind(Enum):
    """Kind of owner of a committed offset: a single consumer or a group."""

    __hash__ = object.__hash__  # members are singletons; an enum's own hash is a Python call for every look-up

    CONSUMER = "consumer"
    GROUP = "group"


class Outcome(IntEnum):
    """An outcome that a member of a share group reports for a record. The numbers are those of Kafka's acknowledge types."""

    GAP = 0  # there is no record at this offset
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


class Assignor(Enum):
    """Strategy that assigns a group's partitions to its members."""

    ROUND_ROBIN = "round_robin"
    RANGE = "range"


class TopicName(msgspec.Struct, frozen=True):
    """Stream and name of a topic. In a full name, the first dot ends the stream (decision 0116)."""

    stream: str
    topic: str

    @classmethod
    def parse(cls, full: str) -> TopicName:
        """Split a full name at its first dot.

        The whole name is a topic of the stream ``default`` if it has no dot, if either side of the dot is empty, if
        the topic would be ``.`` or ``..``, or if the stream would be ``default``.
        """
        stream, _, topic = full.partition(".")
        if not stream or topic in ("", ".", "..") or stream == DEFAULT_STREAM:
            return cls(DEFAULT_STREAM, full)
        return cls(stream, topic)

    @property
    def is_plain(self) -> bool:
        """Return whether parsing the full name returns the same stream and topic."""
        return TopicName.parse(self.full) == self

    @property
    def full(self) -> str:
        """Return ``stream.topic``, or ``topic`` alone for the stream ``default``."""
        return self.topic if self.stream == DEFAULT_STREAM else f"{self.stream}.{self.topic}"


def is_name(text: str) -> bool:
    """Return whether a stream or topic may have this name (decision 0116).

    Valid names have 1 to 255 bytes of UTF-8 and no control characters, and are not ``.`` or ``..``.
    """
    if is_simple(text):
        return 0 < len(text) <= NAME_BYTES_MAX and text not in (".", "..")
    if len(text) > NAME_BYTES_MAX or not CONTROLS.isdisjoint(text):
        return False
    try:
        return len(text.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # lone surrogates: protocols decode invalid UTF-8 to them
        return False


def check_topic_name(name: TopicName) -> None:
    """Raise Invalid(INVALID_TOPIC) unless both parts of the name satisfy ``is_name``."""
    if not is_name(name.stream) or not is_name(name.topic):
        raise Invalid(ErrorCode.INVALID_TOPIC, f"topic name is invalid name={name.full[: FULL_NAME_BYTES_MAX + 1]!r}")


def shard_name(shard: int) -> str:
    """Return a shard number as used in names of files and objects: four hexadecimal digits."""
    return f"{shard:04x}"
