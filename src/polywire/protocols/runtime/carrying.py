"""Shared parts of sessions that forward requests to other shards, and of receiving sessions (decision 0127)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final, Literal

from polywire.errors import PeerError
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.sequential import SequentialSession

SIZE_BYTES: Final = 4


class CarryingSession(SequentialSession[Any]):
    """A session that forwards requests. List it as the first base class, before the protocol's own session.

    The subclass declares ``_links``, and closes them.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def _links(self) -> Links[Any]:
        """The links to shards to which requests were sent."""

    def _waits(self) -> bool:
        return super()._waits() or self._links.are_clogged

    def drained(self) -> None:
        self._links.resume()
        super().drained()

    def link_lost(self, shard: int) -> None:
        """Handle the loss of a link: the shard does not respond any more."""
        self._links.forget(shard)

    def relieved(self) -> None:
        self._go_on()

    def answers_came(self) -> None:
        """Send the responses of a shard. Pause shards while the client does not read."""
        if self.output.backlog > self.output.backlog_max:
            self._links.pause()


class LinkedSession(FramedSession[Any]):
    """The receiving end of a link with length-prefixed frames.

    List it as the first base class, before the protocol's own session.

    The subclass declares ``_opening``, the first bytes that are expected on the link. They are checked before anything
    else is read; then ``_opening`` is empty.
    """

    __slots__ = ()

    byte_order: ClassVar[Literal["big", "little"]]

    _opening: bytes

    @property
    @abstractmethod
    def frame_bytes_max(self) -> int:
        """The longest frame. The process at the other end has the shared key, and has already checked the length."""

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if self._opening:
            return len(self._opening)
        if len(data) - at < SIZE_BYTES:
            return 0
        size = SIZE_BYTES + int.from_bytes(data[at : at + SIZE_BYTES], self.byte_order)
        if size > self.frame_bytes_max:
            raise PeerError(f"frame is too long bytes={size}", fatal=True)
        return size
