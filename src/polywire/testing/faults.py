"""Faults between clients and a broker that runs in a thread: slow requests and lost acknowledgements.

``FaultyFactory`` wraps the factory of a protocol, so the faults are the same for each protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from polywire.protocols.runtime.session import Output, Session, SessionFactory
from polywire.types import Buffer


class CountsAppends(Protocol):
    """The broker's log, which counts appends. A request that increases the count has stored records."""

    @property
    def appended(self) -> int:
        """Number of requests to append records so far."""


class Faults:
    """The current faults.

    Attributes:
        delay_s: time for which each request waits before it is executed.
        lost: number of acknowledgements of records that will be lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Callable[[], CountsAppends]) -> None:
        self.loop: Final = loop
        self.log: Final = log
        self.delay_s = 0.0
        self.lost = 0


class FaultyFactory:
    """Opens sessions with faults. Implements ``SessionFactory``."""

    def __init__(self, factory: SessionFactory, faults: Faults) -> None:
        self._factory: Final = factory
        self._faults: Final = faults

    @property
    def wire(self) -> str:
        return self._factory.wire

    def recognise(self, prefix: bytes) -> bool | None:
        return self._factory.recognise(prefix)

    def open(self, output: Output, resume: Callable[[], None]) -> Session:
        faulty = _FaultyOutput(output, self._faults)
        return _FaultySession(self._factory.open(faulty, resume), faulty, self._faults, resume)


class _FaultyOutput:
    """A connection that may break instead of sending an acknowledgement. Implements ``Output``."""

    def __init__(self, output: Any, faults: Faults) -> None:
        self._output: Final = output
        self._faults: Final = faults
        self._is_broken = False
        self.owes_acknowledgement = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)

    def write(self, data: Buffer) -> None:
        if not self._breaks():
            self._output.write(data)

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        if not self._breaks():
            self._output.write_many(parts, released)
        elif released is not None:
            released()

    def _breaks(self) -> bool:
        if self.owes_acknowledgement and self._faults.lost and not self._is_broken:
            self._faults.lost -= 1
            self._is_broken = True
            self._faults.loop.call_soon(self._output.abort)  # not now, because the session is writing
        self.owes_acknowledgement = False
        return self._is_broken


class _FaultySession:
    """A session whose requests may wait. Implements ``Session``."""

    def __init__(self, session: Session, output: _FaultyOutput, faults: Faults, resume: Callable[[], None]) -> None:
        self._session: Final = session
        self._output: Final = output
        self._faults: Final = faults
        self._resume: Final = resume
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False

    @property
    def spoken_dialect(self) -> str:
        return self._session.spoken_dialect

    @property
    def requests(self) -> int:
        return self._session.requests

    @property
    def frame_bytes_max(self) -> int:
        return self._session.frame_bytes_max

    def receive(self, data: memoryview) -> int:
        if self._faults.delay_s and not self._is_due:
            self._timer = self._faults.loop.call_later(self._faults.delay_s, self._continue)
            return 0
        self._is_due = False
        log = self._faults.log()
        before = log.appended
        consumed = self._session.receive(data)
        self._output.owes_acknowledgement |= log.appended > before
        return consumed

    def _continue(self) -> None:
        self._timer, self._is_due = None, True
        self._resume()

    def wanted(self) -> int:
        return self._session.wanted()

    def paused(self) -> bool:
        return self._timer is not None or self._session.paused()

    def owes(self) -> bool:
        return self._timer is not None or self._session.owes()

    def drained(self) -> None:
        self._session.drained()

    def finish(self, data: memoryview) -> None:
        self._session.finish(data)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._session.close()
