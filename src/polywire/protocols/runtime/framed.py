"""Split received bytes into length-prefixed requests and execute them.

Complete requests are executed in order, until one has to wait or the time slice is used up. If a request is incomplete,
the session reports its length, so that the connection can allocate memory for all of it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from polywire.broker.api import Pending
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import ENDING, SequentialSession, bytes_to_allocate
from polywire.protocols.runtime.session import QUANTUM_S

_Broker = TypeVar("_Broker", bound=WireBroker)


class FramedSession(SequentialSession[_Broker]):
    """A session whose requests have a length prefix.

    If responses are in the order of requests, combine it with ``PipelinedSession``.
    """

    __slots__ = ()

    @abstractmethod
    def _frame_bytes(self, data: memoryview, at: int) -> int:
        """Return the size in bytes of the request at ``at``, including its prefix; 0 if the prefix is incomplete.

        Several complete requests may be returned as one. Raises PeerError for an invalid prefix.
        """

    @abstractmethod
    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Execute the request ``data[at:end]``. Return False if it must wait; it is then passed again later.

        Raises PeerError for an invalid request. Raises Pending if another process must respond first; the request must
        have had no effect then, and is passed again, too.
        """

    def _repeat(self, data: memoryview, at: int, end: int) -> bool:
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
                self._wanted = bytes_to_allocate(size, stop - at)
                break
            self.requests += 1
            try:
                again = self._awaited is not None
                if not (self._repeat(data, at, at + size) if again else self._take(data, at, at + size)):
                    self.requests -= 1
                    break
            except Pending as pending:
                self.requests -= 1
                self._await_pending(pending)
                break
            at += size
            if self._phase >= ENDING:
                self._end_when_done()
                return stop
            if at < stop and now() >= quantum_end:
                self._end_quantum()
                break
        return at
