"""A peer that asks for one thing at a time, and for the next when it is told to.

Promises: at most one request is not answered; what a kernel does not take is sent later. Must not know: bytes of wires, what is right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from polywire.testing.sim.chance import Chance
from polywire.testing.sim.story import Story
from polywire.testing.sim.wires.network import Link


class LonePeer(ABC):
    """Implements ``Caller``. Guards: ``_is_waiting`` while a request is not answered."""

    reads = True
    wire: ClassVar[str]
    moves = False
    """Whether it is to move positions, too, where that is not all it does."""

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
        """There is a connection."""
        self.link = link

    def disconnected(self) -> None:
        """The connection is gone, and with it what was not answered."""
        self.link = None
        self._is_waiting = False
        self._buffer.clear()
        self._unsent.clear()

    def hung_up(self, *, is_aborted: bool) -> None:
        self.disconnected()

    def started(self) -> None:
        """A process has started, and what is there was looked at."""
        return  # most begin anew with each connection

    def go_on(self) -> None:
        """Ask for the next thing, or send what did not fit."""
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
        """A request, which will be answered."""
        self._is_waiting = True
        self._unsent += request
        self.push()

    @abstractmethod
    def _step(self) -> None:
        """Ask for the next thing."""

    @abstractmethod
    def received(self, data: bytes) -> None:
        """What a peer is told."""
