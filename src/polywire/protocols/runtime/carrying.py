"""What sessions have in common that carry requests to other shards, and those at the other ends of their links (decision 0076).

Promises: a session takes no more while a shard takes none, and lets shards answer as far as its peer reads; over a link nothing is read
before the key has come. Must not know: any wire's requests, sockets, how topics are placed.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final, Literal

from polywire.errors import PeerError
from polywire.protocols.runtime.framed import FramedSession
from polywire.protocols.runtime.links import Links
from polywire.protocols.runtime.sequential import SequentialSession

SIZE_BYTES: Final = 4


class CarryingSession(SequentialSession[Any]):
    """Stands before a wire's own session among the bases of one that carries, which declares ``_links``, and closes them."""

    __slots__ = ()

    @property
    @abstractmethod
    def _links(self) -> Links[Any]:
        """One to each shard that was asked for something."""

    def _waits(self) -> bool:
        return super()._waits() or self._links.are_clogged

    def drained(self) -> None:
        """The peer reads again."""
        self._links.resume()
        super().drained()

    def link_lost(self, shard: int) -> None:
        """A shard answers nothing any more."""
        self._links.forget(shard)

    def relieved(self) -> None:
        """A shard takes more again."""
        self._go_on()

    def answers_came(self) -> None:
        """A shard has answered; where the peer takes no more, shards wait."""
        if self.output.backlog > self.output.backlog_max:
            self._links.pause()


class LinkedSession(FramedSession[Any]):
    """Stands before a wire's own session among the bases of the other end of a link, whose frames tell their size in front.

    That one declares ``_opening``, what the link opens with: empty once it has come, and only then anything else is read.
    """

    __slots__ = ()

    byte_order: ClassVar[Literal["big", "little"]]

    _opening: bytes

    @property
    @abstractmethod
    def frame_bytes_max(self) -> int:
        """Longest frame; whoever has the key has looked how long it may be."""

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        if self._opening:
            return len(self._opening)
        if len(data) - at < SIZE_BYTES:
            return 0
        size = SIZE_BYTES + int.from_bytes(data[at : at + SIZE_BYTES], self.byte_order)
        if size > self.frame_bytes_max:
            raise PeerError(f"frame is too long bytes={size}", fatal=True)
        return size
