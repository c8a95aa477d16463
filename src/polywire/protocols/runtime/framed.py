"""Split received bytes into length-prefixed requests and execute them.

Complete frames are executed in order, until one has to wait. After a time slice, other connections are served. If a
frame is incomplete, the session reports its length to the connection driver.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from polywire.broker.api import Pending
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import ENDING, SequentialSession, believed
from polywire.protocols.runtime.session import QUANTUM_S

_Broker = TypeVar("_Broker", bound=WireBroker)


class FramedSession(SequentialSession[_Broker]):
    """The session of one client. If responses are in the order of requests, combine it with ``PipelinedSession``."""

    __slots__ = ()

    @abstractmethod
    def _frame_bytes(self, data: memoryview, at: int) -> int:
        """Return the size of the frame at ``at``, including its prefix; 0 if the size is unknown.

        Several complete frames may be returned as one. Raises PeerError for an invalid frame.
        """

    @abstractmethod
    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Execute the frame ``data[at:end]``. Return False if it must wait; it is then offered again.

        Raises PeerError for an invalid request. Raises Pending if nothing was done, because another process must
        answer first. The frame is then offered again, too.
        """

    def _take_again(self, data: memoryview, at: int, end: int) -> bool:
        """Execute a frame that waited for another process, as ``_take``."""
        pending = self._awaited
        assert pending is not None
        with pending:
            taken = self._take(data, at, end)
        if taken:
            self._awaited = None
        return taken

    def _receive(self, data: memoryview) -> int:
        at, stop = 0, len(data)
        now = self.broker.clock.monotonic
        quantum_end = now() + QUANTUM_S
        self._wanted = 0
        while at < stop and not self._waits():
            size = self._frame_bytes(data, at)
            if size == 0 or size > stop - at:
                self._wanted = believed(size, stop - at)
                break
            try:
                again = self._awaited is not None
                if not (self._take_again(data, at, at + size) if again else self._take(data, at, at + size)):
                    break
            except Pending as pending:
                self._look_up(pending)
                break
            at += size
            if self._phase >= ENDING:
                self._end_when_done()
                return stop
            if at < stop and now() >= quantum_end:
                self._end_quantum()
                break
        return at
