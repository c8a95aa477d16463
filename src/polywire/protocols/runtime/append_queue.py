"""How one connection's batches enter the log: at once, or, while the log has no room, after a wait in their order.

Promises: batches of a connection are handed over in the order given; what still finds no room when the wait is over is refused; no task, and
no timer unless something waits. Must not know: any wire, what a batch holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from polywire.broker.record_verbs import RecordVerbs
from polywire.broker.topics import Partition
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion, Handle, Loop
from polywire.types import Level

BUSY_PAUSE_S: Final = 0.005  # between two tries


def notify(done: Completion[int] | None, error: BrokerError) -> None:
    """A batch is refused: notify who waits for it."""
    if done is not None:
        done(error)


class AppendBroker(RecordVerbs, Protocol):
    """What appending needs of the broker."""

    @property
    def loop(self) -> Loop:
        """Where a wait ends."""


class AppendQueue:
    """The batches of one connection on their way into the log.

    Guards: while anything is in ``waiting`` whatever comes goes behind it, so a session handles no request as long as it is not empty.
    ``refuse`` is called with what the log does not take, at once, or later while it is still in ``waiting``; ``go_on`` once nothing waits.
    """

    __slots__ = ("_broker", "_go_on", "_refuse", "_timer", "_until", "_wait_s", "waiting")

    def __init__(
        self,
        broker: AppendBroker,
        wait_s: float,
        go_on: Callable[[], None],
        refuse: Callable[[Completion[int] | None, BrokerError], None] = notify,
    ) -> None:
        self.waiting: Final[deque[tuple[Partition, bytearray, Level, Completion[int] | None]]] = deque()
        self._broker: Final = broker
        self._wait_s: Final = wait_s
        self._go_on = go_on
        self._refuse = refuse
        self._until = 0.0
        self._timer: Handle | None = None

    def produce(self, partition: Partition, batch: bytearray, level: Level, done: Completion[int] | None) -> None:
        """Hand a batch to the broker, or let it wait for room. It may be refused at once."""
        if self.waiting:
            self.waiting.append((partition, batch, level, done))
            return
        try:
            self._broker.produce(partition, batch, level=level, done=done)
        except BrokerError as error:
            if not _is_full(error):
                self._refuse(done, error)
                return
            self.waiting.append((partition, batch, level, done))
            self._until = self._broker.clock.monotonic() + self._wait_s
            self._timer = self._broker.loop.call_later(BUSY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        """Try what waits again, oldest first; when it has waited too long, for the last time."""
        waiting, late = self.waiting, self._broker.clock.monotonic() >= self._until
        while waiting:
            partition, batch, level, done = waiting[0]  # it stays there, so that nothing overtakes what is behind it
            try:
                self._broker.produce(partition, batch, level=level, done=done)
            except BrokerError as error:
                full = _is_full(error)
                if full and not late:
                    self._timer = self._broker.loop.call_later(BUSY_PAUSE_S, self._retry)
                    return
                self._refuse(done, _no_room(self._wait_s) if full else error)
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
    """Nobody is told."""


def _is_full(error: BrokerError) -> bool:
    """Whether the log has no room now, and soon will."""
    return isinstance(error, Busy) and error.code is ErrorCode.BUSY


def _no_room(wait_s: float) -> Busy:
    return Busy(ErrorCode.BUSY, f"the log has no room, nothing was stored waited_ms={int(wait_s * 1000)}")
