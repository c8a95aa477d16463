"""A client with at most one outstanding request, which makes the next one on demand.

It sends later what the kernel does not accept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from tests.sim.chance import Chance
from tests.sim.story import Story
from tests.sim.wires.network import Link


class LonePeer(ABC):
    """Implements ``Caller``. Guards: ``_is_waiting`` while a request is outstanding."""

    reads = True
    wire: ClassVar[str]
    moves = False
    """Whether it commits positions, too, if it does other things."""

    def __init__(self, chance: Chance, story: Story) -> None:
        self.link: Link | None = None
        self.may_be_refused = False
        """Whether storage has failed."""
        self._chance: Final = chance
        self._story: Final = story
        self._count = 0
        """Requests so far."""
        self._buffer = bytearray()
        self._unsent = bytearray()
        self._is_waiting = False

    def connected(self, link: Link) -> None:
        """Note a connection."""
        self.link = link

    def disconnected(self) -> None:
        """Note the loss of the connection and of the request."""
        self.link = None
        self._is_waiting = False
        self._buffer.clear()
        self._unsent.clear()

    def hung_up(self, *, is_aborted: bool) -> None:
        self.disconnected()

    def started(self) -> None:
        """Note that a process has started and was checked."""
        return  # most begin again with each connection

    def go_on(self) -> None:
        """Make the next request, or send the rest of the last one."""
        if self._unsent:
            self.push()
        elif self.link is not None and not self.link.is_cut and not self._is_waiting:
            self._step()

    def push(self) -> None:
        """Send what fits."""
        link = self.link
        if link is not None and self._unsent and link.free > 0:
            count = min(link.free, len(self._unsent))
            link.send(bytes(self._unsent[:count]))
            del self._unsent[:count]

    def _send(self, request: bytes) -> None:
        """Send a request that will be answered."""
        self._is_waiting = True
        self._unsent += request
        self.push()

    @abstractmethod
    def _step(self) -> None:
        """Make the next request."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """Handle received bytes."""
