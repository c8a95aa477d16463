"""Staged batches: stored under a token until they are published, abandoned or expire (decision 0102).

* Staged data is limited in bytes and in batches.
* Only one publish at a time can use a token.
* Changes of the wall clock do not affect expiry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from polywire.clock import ElapsedClock
from polywire.errors import Busy, ErrorCode, Missing
from polywire.log.base import NEVER_US

NOWHERE: Final = -1


class StagedBatch:
    """One unpublished batch: its header, and the location of the whole batch.

    Attributes:
        serial: serial of the journal file that holds the batch, NOWHERE if a segment holds it.
        location: segment that holds the batch, NOWHERE if the journal holds it.
        position: byte position in that file.
        published: whether the batch was published to its partition.
        needed: whether its bytes must be retained. False once it is abandoned, or both published and in a segment.
    """

    __slots__ = ("header", "incarnation", "length", "location", "needed", "position", "published", "serial", "token")

    def __init__(self, token: bytes, incarnation: int, header: bytes, length: int) -> None:
        self.token: Final = token
        self.incarnation: Final = incarnation
        self.header: Final = header
        self.length: Final = length
        self.serial = NOWHERE
        self.location = NOWHERE
        self.position = 0
        self.published = False
        self.needed = True


class StagedToken:
    """All unpublished batches of one token.

    Attributes:
        claimed: whether a publish, or a deletion that is not yet written, has reserved the token.
        size: total size of the batches.
    """

    __slots__ = ("_by_partition", "batches", "claimed", "expires_at_us", "size", "token")

    def __init__(self, token: bytes, expires_at_us: int) -> None:
        self.token: Final = token
        self.expires_at_us = expires_at_us
        self.batches: Final[list[StagedBatch]] = []
        self._by_partition: dict[int, list[StagedBatch]] = {}  # empty while there is only one batch, the usual case
        self.claimed = False
        self.size = 0

    def add(self, batch: StagedBatch) -> None:
        batches, kept = self.batches, self._by_partition
        batches.append(batch)
        self.size += batch.length
        if len(batches) > 1:
            if not kept:
                kept[batches[0].incarnation] = batches[:1]
            kept.setdefault(batch.incarnation, []).append(batch)

    def by_partition(self) -> Collection[tuple[int, Sequence[StagedBatch]]]:
        """Return the batches, in order, grouped by the incarnation of their partition."""
        if len(self.batches) == 1:
            return ((self.batches[0].incarnation, self.batches),)
        return self._by_partition.items()


class Staging:
    """All tokens with unpublished batches.

    Attributes:
        size: bytes of batches that are neither published nor removed.
        count: number of these batches.
    """

    def __init__(self, *, bytes_max: int, batches_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._clock: ElapsedClock | None = None
        self._tokens: dict[bytes, StagedToken] = {}
        self.size = 0
        self.count = 0

    def expire_by(self, clock: ElapsedClock, *, age_us_max: int) -> None:
        self._clock = clock
        latest_us = clock.now_us() + age_us_max
        for staged in self:
            if staged.expires_at_us != NEVER_US:
                staged.expires_at_us = min(staged.expires_at_us, latest_us)

    def _now_us(self) -> int:
        """Return the time for expiry checks. Before the clock is set, this is -1, so that nothing expires."""
        return -1 if self._clock is None else self._clock.now_us()

    def __iter__(self) -> Iterator[StagedToken]:
        return iter(self._tokens.values())

    def __len__(self) -> int:
        return len(self._tokens)

    def admit(self, size: int) -> None:
        """Raise Busy(STAGE_FULL) if a batch of this size would exceed the limits."""
        if self.size + size > self._bytes_max or self.count >= self._batches_max:
            raise Busy(
                ErrorCode.STAGE_FULL,
                f"staged batches exceed the limit bytes={self.size} batches={self.count}",
                retry_after_ms=1000,
            )

    def add(self, batch: StagedBatch, expires_at_us: int) -> None:
        """Add a batch to its token. The token expires with its last batch."""
        token = batch.token
        staged = self._tokens.get(token)
        if staged is None:
            staged = self._tokens[token] = StagedToken(token, expires_at_us)
        staged.expires_at_us = max(staged.expires_at_us, expires_at_us)
        staged.add(batch)
        self.size += batch.length
        self.count += 1

    def get(self, token: bytes) -> StagedToken | None:
        return self._tokens.get(token)

    def claim(self, token: bytes) -> StagedToken:
        """Reserve a token for a publish. Raises Missing(STAGE_MISSING)."""
        staged = self._tokens.get(token)
        if staged is None or staged.claimed or staged.expires_at_us <= self._now_us():
            raise Missing(ErrorCode.STAGE_MISSING, f"no such staged batches token={token.hex()}")
        staged.claimed = True
        return staged

    def find(self, tokens: Iterable[bytes]) -> list[StagedToken]:
        """Return the given tokens. Raises Missing(STAGE_MISSING) if one of them cannot be published."""
        get, now_us, found = self._tokens.get, self._now_us(), []
        for token in tokens:
            staged = get(token)
            if staged is None or staged.claimed or staged.expires_at_us <= now_us:
                raise Missing(ErrorCode.STAGE_MISSING, f"no such staged batches token={token.hex()}")
            found.append(staged)
        return found

    def remove(self, tokens: Iterable[bytes]) -> list[StagedToken]:
        """Remove published or abandoned tokens. Return those that existed."""
        pop = self._tokens.pop
        found = [staged for token in tokens if (staged := pop(token, None)) is not None]
        for staged in found:
            self.count -= len(staged.batches)
            self.size -= staged.size
        return found

    def expired(self) -> Sequence[bytes]:
        now_us = self._now_us()
        return [staged.token for staged in self if staged.expires_at_us <= now_us and not staged.claimed]
