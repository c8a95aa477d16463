"""Sessions whose requests come in frames that tell their length: the loop over what has come.

Promises: whole frames are carried out in order as long as nothing makes the next one wait; after a quantum other connections have their turn;
of a frame that is not whole the driver learns how long it will be. Must not know: any wire's bytes, what requests do.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import ENDING, SequentialSession, believed
from polywire.protocols.runtime.session import QUANTUM_S

_Broker = TypeVar("_Broker", bound=WireBroker)


class FramedSession(SequentialSession[_Broker]):
    """One peer; stands beside ``PipelinedSession`` where answers keep the order of requests."""

    __slots__ = ()

    @abstractmethod
    def _frame_bytes(self, data: memoryview, at: int) -> int:
        """Length of the frame at ``at``, with what tells it, or of several whole ones that are taken as one; 0 while it does not tell.
        Raises PeerError for what cannot be one."""

    @abstractmethod
    def _take(self, data: memoryview, at: int, end: int) -> bool:
        """Carry out what is at ``data[at:end]``; False when it must wait, and be offered again. Raises PeerError."""

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
            if not self._take(data, at, at + size):
                break
            at += size
            if self._phase >= ENDING:
                self._end_when_done()
                return stop
            if at < stop and now() >= quantum_end:
                self._end_quantum()
                break
        return at
