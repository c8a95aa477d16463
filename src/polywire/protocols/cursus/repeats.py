"""Payloads published of late: what the API reference drops when it comes again within 30 minutes (spec: cursus#repeated-payloads).

Promises: a payload is a repeat only in its own topic, and only of one that was stored; memory has a limit, beyond which the oldest is
forgotten; time is the time that passes, not the wall clock's. Must not know: sessions, the log.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.types import Buffer

REPEATS_MAX: Final = 100_000  # remembered payloads of all topics together, some 200 bytes each whatever their length
ENDED_MAX: Final = 64  # forgotten at a time, because their time is over
_DIGEST_BYTES: Final = 16


class Repeats:
    """What was published in the last ``lasting_s`` seconds.

    Invariant: ``_until`` has digests in the order in which they end.
    """

    __slots__ = ("_lasting_s", "_monotonic", "_until")

    def __init__(self, lasting_s: float, monotonic: Callable[[], float]) -> None:
        self._lasting_s = lasting_s
        self._monotonic = monotonic
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def digest(self, topic_id: bytes, payload: Buffer) -> bytes:
        """What a payload of a topic is remembered by."""
        return blake2b(payload, digest_size=_DIGEST_BYTES, key=topic_id).digest()

    def has(self, digest: bytes) -> bool:
        """Whether this was published, not too long ago."""
        now = self._monotonic()
        for old in [old for old, until in islice(self._until.items(), ENDED_MAX) if until <= now]:
            del self._until[old]
        return self._until.get(digest, now) > now

    def add(self, digest: bytes) -> None:
        """Remember one that ``has`` does not know."""
        self._until.pop(digest, None)  # it goes to the end of the order
        if len(self._until) >= REPEATS_MAX:
            del self._until[next(iter(self._until))]
        self._until[digest] = self._monotonic() + self._lasting_s

    def stored(self, digest: bytes, done: Completion[int], offset: int | BrokerError) -> None:
        """A callback of the broker: passes on what became of the payload, and forgets one that was not stored."""
        if isinstance(offset, BrokerError):
            self._until.pop(digest, None)
        done(offset)
