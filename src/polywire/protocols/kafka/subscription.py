"""Encode and decode subscriptions and assignments of classic group members (spec: kafka#subscription-bytes).

JoinGroup and SyncGroup contain them as opaque bytes. A member with a malformed subscription can still join, because
only the group's leader has to decode it. The broker then assumes that the member subscribes to no topics.

    subscription: i16 version | i32 count | count × (i16 length | topic) | i32 length, user data
                  since version 1 also: topics with partitions
    assignment:   i16 version | topics with partitions | i32 length, user data
    topics with partitions: i32 count | count × (i16 length | topic | i32 count | count × i32 partition)
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from struct import Struct, error
from typing import Final, NamedTuple

CONSUMER: Final = "consumer"  # the protocol type of consumers
TOPICS_MAX: Final = 10_000  # topics of one member; the broker's maximum
PARTITIONS_MAX: Final = 100_000  # partitions of one topic
OWNED_SINCE: Final = 1  # first version of a subscription that has the partitions that a member owns
EAGER: Final = frozenset({"range", "roundrobin", "RoundRobinAssigner", "sticky"})
"""Assignors whose members stop reading while they rejoin."""
COOPERATIVE: Final = frozenset({"cooperative-sticky"})
"""Assignors whose members continue to read, while they rejoin, the partitions that are not revoked."""
_I16: Final = Struct(">h")
_I32: Final = Struct(">i")

Partitions = Mapping[str, Collection[int]]


class Subscription(NamedTuple):
    """The topics that a member subscribes to.

    Attributes:
        owned: the partitions that the member continues to read while it joins.
        is_known: whether the broker can compute the member's assignment.
    """

    topics: frozenset[str]
    owned: Partitions
    is_known: bool


Steps = Generator[None, None, Subscription]
"""Decodes a subscription. Yields after each step, and returns the result."""

NO_SUBSCRIPTION: Final = Subscription(frozenset(), {}, is_known=False)


def read_subscriptions(protocols: Collection[tuple[str, bytes]]) -> Steps:
    """Decode a member's subscriptions, one for each assignor, and join them. Yields after each topic."""
    found: list[Subscription] = []
    for _, metadata in protocols:
        found.append((yield from _subscription(metadata)))
    names = {name for name, _ in protocols}
    topics = frozenset().union(*(one.topics for one in found))
    owned = found[0].owned if found and names <= COOPERATIVE else {}
    return Subscription(topics, owned, is_known=names <= EAGER | COOPERATIVE and all(one.is_known for one in found))


def _subscription(metadata: bytes) -> Steps:
    reader = _Reader(metadata)
    topics: set[str] = set()
    try:
        version = reader.number(_I16)
        for _ in range(reader.count()):
            topics.add(reader.text())
            yield
    except (ValueError, error):
        return NO_SUBSCRIPTION
    owned: dict[str, Collection[int]] = {}
    try:
        reader.skip(reader.number(_I32))
        if version >= OWNED_SINCE:
            for topic, partitions in reader.partitions():
                owned[topic] = partitions
                yield
    except (ValueError, error):
        return Subscription(frozenset(topics), {}, is_known=False)
    return Subscription(frozenset(topics), owned, is_known=True)


class _Reader:
    """A reader of big-endian values. Raises ValueError or struct.error for malformed bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, layout: Struct) -> int:
        (number,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return int(number)

    def count(self) -> int:
        count = self.number(_I32)
        if not 0 <= count <= min(TOPICS_MAX, len(self._data)):
            raise ValueError("subscription has too many entries")
        return count

    def text(self) -> str:
        length = self.number(_I16)
        start, self._at = self._at, self._at + length
        if length < 0 or self._at > len(self._data):
            raise ValueError("subscription is truncated")
        return self._data[start : self._at].decode()

    def skip(self, length: int) -> None:
        self._at += max(length, 0)

    def partitions(self) -> Iterator[tuple[str, Collection[int]]]:
        for _ in range(self.count()):
            topic, count = self.text(), self.number(_I32)
            if not 0 <= 4 * count <= len(self._data) - self._at or count > PARTITIONS_MAX:
                raise ValueError("subscription has too many entries")
            numbers = Struct(f">{count}i").unpack_from(self._data, self._at)
            self._at += 4 * count
            yield topic, numbers


class _Writing:
    """Implements ``broker.groups.classic_members.Writing``."""

    def encode(self, partitions: Partitions) -> bytes:
        """Encode an assignment in the first version, which all consumers can read."""
        parts = [_I16.pack(0), _I32.pack(len(partitions))]
        for topic, numbers in partitions.items():
            name = topic.encode()
            parts += [_I16.pack(len(name)), name, Struct(f">i{len(numbers)}i").pack(len(numbers), *numbers)]
        return b"".join([*parts, _I32.pack(-1)])

    def decode(self, assignment: bytes) -> Partitions:
        """Return the partitions of an assignment, or no partitions if it is malformed."""
        reader = _Reader(assignment)
        try:
            reader.number(_I16)
            return dict(reader.partitions())
        except (ValueError, error):
            return {}


WRITING: Final = _Writing()
