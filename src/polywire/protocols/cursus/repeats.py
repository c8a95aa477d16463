"""Detect payloads that were already published to the topic within a configured time (spec: cursus#repeated-payloads).

The number of payloads that the broker remembers is limited; the oldest is forgotten first.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from itertools import islice
from typing import Final

from polywire.errors import BrokerError
from polywire.log.base import Completion
from polywire.types import Buffer

REPEATS_MAX: Final = 100_000  # payloads of all topics together; only digests are stored, some 200 bytes each
ENDED_MAX: Final = 64  # expired payloads to drop at a time
_DIGEST_BYTES: Final = 16


class Repeats:
    """Digests of payloads that were published in the last ``lasting_s`` seconds, to detect duplicates."""

    __slots__ = ("_lasting_s", "_monotonic", "_until")

    def __init__(self, lasting_s: float, monotonic: Callable[[], float]) -> None:
        self._lasting_s = lasting_s
        self._monotonic = monotonic
        self._until: dict[bytes, float] = {}  # time of expiry by digest, earliest first

    def __len__(self) -> int:
        return len(self._until)

    def digest(self, topic_id: bytes, payload: Buffer) -> bytes:
        return blake2b(payload, digest_size=_DIGEST_BYTES, key=topic_id).digest()

    def has(self, digest: bytes) -> bool:
        now = self._monotonic()
        for old in [old for old, until in islice(self._until.items(), ENDED_MAX) if until <= now]:
            del self._until[old]
        return self._until.get(digest, now) > now

    def add(self, digest: bytes) -> None:
        self._until.pop(digest, None)  # so that the new entry is at the end
        if len(self._until) >= REPEATS_MAX:
            del self._until[next(iter(self._until))]
        self._until[digest] = self._monotonic() + self._lasting_s

    def stored(self, digest: bytes, done: Completion[int], offset: int | BrokerError) -> None:
        """Call ``done`` with the result of an append. If it has failed, forget the payload."""
        if isinstance(offset, BrokerError):
            self._until.pop(digest, None)
        done(offset)
