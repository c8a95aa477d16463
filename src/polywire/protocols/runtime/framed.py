"""Split received bytes into length-prefixed requests and execute them.

Complete requests are executed in order, until one has to wait or the time slice is used up. If a request is incomplete,
the session reports its length, so that the connection can allocate memory for all of it. This module is compiled.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import cython

from polywire.broker.api import Pending
from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import ENDING, SequentialSession, bytes_to_allocate
from polywire.protocols.runtime.session import QUANTUM_S

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.sequential import BareSequential
    from cython.cimports.polywire.records.memory import Lent, lend
else:
    from polywire.protocols.runtime.sequential import BareSequential
    from polywire.records.memory import Lent, lend

_Broker = TypeVar("_Broker", bound=WireBroker)
_LENGTH_BYTES = cython.declare(cython.Py_ssize_t, 4)


@cython.cfunc
def _short_frame(data: memoryview, at: cython.Py_ssize_t, bytes_max: cython.longlong) -> cython.longlong:
    """Return the size of the frame at ``at``, with its prefix of four bytes, or 0 if its length exceeds ``bytes_max``."""
    lent: Lent = lend(data)
    length: cython.longlong = 0
    i: cython.int
    for i in range(4):
        length = length * 256 + lent.p[at + i]
    return length + _LENGTH_BYTES if length <= bytes_max else 0


@cython.cclass
class BareFramed(BareSequential):
    """The compiled base class of ``FramedSession``."""

    if not cython.compiled:
        __slots__ = ()

    def _frame_bytes(self, data: memoryview, at: int) -> int:
        return 0  # overridden by protocols

    def _take(self, data: memoryview, at: int, end: int) -> bool:
        return True  # overridden by protocols

    def _repeat(self, data: memoryview, at: int, end: int) -> bool:
        pending = self._awaited
        assert pending is not None
        with pending:
            taken = self._take(data, at, end)
        if taken:
            self._awaited = None
        return bool(taken)

    def _receive(self, data: memoryview) -> int:
        at: cython.Py_ssize_t = 0
        stop: cython.Py_ssize_t = len(data)
        size: cython.longlong
        now = self.broker.clock.monotonic
        quantum_end: cython.double = -1.0  # read only if another request follows the first
        self._wanted = 0
        while at < stop and not self._waits():
            size = 0
            if self._short_bytes_max and stop - at >= _LENGTH_BYTES:
                size = _short_frame(data, at, self._short_bytes_max)
            if size == 0:
                size = self._frame_bytes(data, at)
            if size == 0 or size > stop - at:
                self._wanted = bytes_to_allocate(size, stop - at)
                break
            if quantum_end < 0 and at + size < stop:
                quantum_end = now() + QUANTUM_S
            self.requests += 1
            try:
                if self._awaited is not None:
                    taken = self._repeat(data, at, at + size)
                elif self.take_repeated is not None and self.take_repeated(self, data, at + _LENGTH_BYTES, at + size):
                    taken = True
                else:
                    taken = self._take(data, at, at + size)
                if not taken:
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


class FramedSession(BareFramed, SequentialSession[_Broker]):
    """A session whose requests have a length prefix.

    A protocol whose prefix is a length of four bytes, the most significant first, sets ``_short_bytes_max`` to a length
    that it always accepts. ``_frame_bytes`` is then called only for other requests.

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
