"""Shared parts of sessions that forward requests to other shards, and of the receiving sessions (decision 0127)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final, Literal

from polywire.errors import PeerError
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.sequential import SequentialSession

SIZE_BYTES: Final = 4


class CarryingSession(SequentialSession[Any]):
    """Base, before a protocol's own session, of one that forwards; it declares and closes ``_links``."""

    __slots__ = ()

    @property
    @abstractmethod
    def _links(self) -> Links[Any]:
        """Links to shards that were sent requests."""

    def _waits(self) -> bool:
        return super()._waits() or self._links.are_clogged

    def drained(self) -> None:
        """The client reads again."""
        self._links.resume()
        super().drained()

    def link_lost(self, shard: int) -> None:
        """A shard does not respond any more."""
        self._links.forget(shard)

    def relieved(self) -> None:
        """A shard accepts bytes again."""
        self._go_on()

    def answers_came(self) -> None:
        """A shard has responded; pause shards while the client does not read."""
        if self.output.backlog > self.output.backlog_max:
            self._links.pause()


class LinkedSession(FramedSession[Any]):
    """Base, before a protocol's own session, of the receiving end of a link with length-prefixed frames.

    The session declares ``_opening``, the expected opening of the link, empty once received; nothing else is read
    before.
    """

    __slots__ = ()

    byte_order: ClassVar[Literal["big", "little"]]

    _opening: bytes

    @property
    @abstractmethod
    def frame_bytes_max(self) -> int:
        """Longest frame; the sender, which has the key, has checked it."""

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if self._opening:
            return len(self._opening)
        if len(data) - at < SIZE_BYTES:
            return 0
        size = SIZE_BYTES + int.from_bytes(data[at : at + SIZE_BYTES], self.byte_order)
        if size > self.frame_bytes_max:
            raise PeerError(f"frame is too long bytes={size}", fatal=True)
        return size
