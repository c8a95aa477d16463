"""How one connection's batches enter the log: at once, or, while the log is full, after a wait in their order. Compiled.

Promises: batches of a connection are appended in the order given; what still does not fit when the wait is over is refused, from the loop as
every completion (decision 0041); no task, and no timer unless something waits. Must not know: any wire, what a batch holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import cython

from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.types import Level

BUSY_PAUSE_S: Final = 0.005  # between two tries


_Append = tuple[Partition, bytearray, Level, Completion[int] | None, Caller]


def notify(done: Completion[int] | None, error: BrokerError) -> None:
    """Complete a batch that is refused."""
    if done is not None:
        done(error)


class AppendBroker(RecordVerbs, Protocol):
    """What appending needs of the broker."""

    @property
    def loop(self) -> Loop:
        """Where a wait ends."""


@cython.cclass
class AppendQueue:
    """The batches of one connection on their way into the log.

    Guards: while anything is in ``waiting`` whatever comes goes behind it, so a session handles no request as long as it is not empty.
    ``refuse`` is called with what the log does not take, while it is still in ``waiting``; ``go_on`` once nothing waits.
    """

    __slots__ = ("_broker", "_go_on", "_refuse", "_timer", "_until", "_wait_s", "waiting")

    def __init__(
        self,
        broker: AppendBroker,
        wait_s: float,
        go_on: Callable[[], None],
        refuse: Callable[[Completion[int] | None, BrokerError], None] = notify,
    ) -> None:
        self.waiting: Final[deque[_Append]] = deque()
        self._broker: Final = broker
        self._wait_s: Final = wait_s
        self._go_on = go_on
        self._refuse = refuse
        self._until = 0.0
        self._timer: Handle | None = None

    def produce(
        self,
        partition: Partition,
        batch: bytearray,
        level: Level,
        done: Completion[int] | None,
        *,
        by: Caller = NO_CALLER,
    ) -> None:
        """Append a batch, now or when the log has space. ``by``: who sends it, where its batches may name a producer."""
        if self.waiting:
            self.waiting.append((partition, batch, level, done, by))
            return
        try:
            self._broker.produce(partition, batch, by=by, level=level, done=done)
        except BrokerError as error:
            self.waiting.append((partition, batch, level, done, by))
            self._until = self._broker.clock.monotonic() + self._wait_s
            self._retry_later(at_once=not _is_full(error))

    def _retry_later(self, *, at_once: bool = False) -> None:
        loop = self._broker.loop
        self._timer = loop.call_soon(self._retry) if at_once else loop.call_later(BUSY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        """Try what waits again, oldest first; when it has waited too long, for the last time. What cannot be stored is refused here."""
        now, waiting = self._broker.clock.monotonic, self.waiting
        begun = now()
        late = begun >= self._until
        while waiting:
            if now() - begun >= QUANTUM_S:
                self._retry_later(at_once=True)
                return
            partition, batch, level, done, by = waiting[
                0
            ]  # it stays there, so that nothing overtakes what is behind it
            try:
                self._broker.produce(partition, batch, by=by, level=level, done=done)
            except BrokerError as error:
                full = _is_full(error)
                if full and not late:
                    self._retry_later()
                    return
                self._refuse(done, _still_full(self._wait_s) if full else error)
            if waiting:  # nobody has dropped it meanwhile
                waiting.popleft()
        self._timer = None
        self._go_on()

    def drop(self) -> None:
        """The session is closed: it waits for nothing any more, and is not called again."""
        self._go_on, self._refuse = _nothing, _nobody
        self.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    """Nobody goes on."""


def _nobody(_: Completion[int] | None, __: BrokerError) -> None:
    """Nobody waits for it."""


def _is_full(error: BrokerError) -> bool:
    """Whether the log is full now, and soon will not be."""
    return isinstance(error, Busy) and error.code is ErrorCode.BUSY


def _still_full(wait_s: float) -> Busy:
    return Busy(ErrorCode.BUSY, f"the log has no free space: nothing was stored waited_ms={int(wait_s * 1000)}")
