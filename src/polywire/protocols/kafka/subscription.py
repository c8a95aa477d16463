"""What consumers write when they join a group: the topics that they want to read (spec: kafka#subscription-bytes).

Promises: bytes that are no consumer's name no topics, so nobody is kept from joining by what only its leader reads. Must not know: groups.

    i16 version | i32 count | count × (i16 length | topic) | what later versions add
"""

from __future__ import annotations

from typing import Final

CONSUMER: Final = "consumer"  # the type of protocols whose members write this
TOPICS_MAX: Final = 10_000  # of one member: as many as a broker has
_HEAD_BYTES: Final = 6


def topics_of(metadata: bytes) -> frozenset[str]:
    """The topics of a subscription; none where it cannot be read."""
    count = int.from_bytes(metadata[2:_HEAD_BYTES], "big", signed=True)
    at, topics = _HEAD_BYTES, set()
    if not 0 <= count <= min(TOPICS_MAX, len(metadata)):
        return frozenset()
    for _ in range(count):
        start = at + 2
        at = start + int.from_bytes(metadata[at:start], "big")
        if at > len(metadata):
            return frozenset()
        try:
            topics.add(metadata[start:at].decode())
        except UnicodeDecodeError:
            return frozenset()
    return frozenset(topics)
