"""Append a connection's batches to the log, in order. Batches wait while the log is full.

If the log has no space for a batch before the time limit, the batch is rejected (decision 0107).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

import cython

from polywire.broker.api import Records
from polywire.broker.owners import NO_CALLER, Caller
from polywire.broker.topics import Partition
from polywire.clock import Clock
from polywire.errors import BrokerError, Busy, ErrorCode
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.session import QUANTUM_S
from polywire.types import Level

BUSY_PAUSE_S: Final = 0.005  # pause between two attempts


_Append = tuple[Partition, bytearray, Level, Completion[int] | None, Caller]


def notify(done: Completion[int] | None, error: BrokerError) -> None:
    if done is not None:
        done(error)


class AppendBroker(Records, Protocol):
    """The operations of the broker that appending uses."""

    @property
    def loop(self) -> Loop: ...

    @property
    def clock(self) -> Clock: ...


@cython.cclass
class AppendQueue:
    """The batches of one connection that wait for space in the log's write buffer.

    While batches are ``waiting``, later ones queue behind them, and the session handles no further request.
    """

    __slots__ = ("_broker", "_emptied", "_refuse", "_timer", "_until", "_wait_s", "waiting")

    def __init__(
        self,
        broker: AppendBroker,
        wait_s: float,
        emptied: Callable[[], None],
        refuse: Callable[[Completion[int] | None, BrokerError], None] = notify,
    ) -> None:
        """Create an empty queue.

        Args:
            wait_s: seconds that batches may wait. Then they are rejected.
            emptied: called on the event loop when the last waiting batch was appended or rejected.
            refuse: called on the event loop with the completion of a rejected batch and the error. By default, it calls
                the completion with the error.
        """
        self.waiting: Final[deque[_Append]] = deque()
        self._broker: Final = broker
        self._wait_s: Final = wait_s
        self._emptied = emptied
        self._refuse = refuse
        self._until = 0.0  # when the waiting batches are rejected
        self._timer: Handle | None = None

    @cython.ccall
    def produce(
        self,
        partition: Partition,
        batch: bytearray,
        level: Level,
        done: Completion[int] | None,
        by: Caller = NO_CALLER,
    ) -> None:
        """Append a batch now, or as soon as the log has space.

        Args:
            done: called with the batch's offset. The completion of a rejected batch is passed to ``refuse`` instead.
            by: the client that sent the batch; needed for a batch with a producer id.
        """
        if self.waiting:
            self.waiting.append((partition, batch, level, done, by))
            return
        try:
            self._broker.produce(partition, batch, by=by, level=level, done=done)
        except BrokerError as error:
            self.waiting.append((partition, batch, level, done, by))
            self._until = self._broker.clock.monotonic() + self._wait_s
            self._retry_later(at_once=not is_full(error))

    def _retry_later(self, *, at_once: bool = False) -> None:
        loop = self._broker.loop
        self._timer = loop.call_soon(self._retry) if at_once else loop.call_later(BUSY_PAUSE_S, self._retry)

    def _retry(self) -> None:
        now, waiting = self._broker.clock.monotonic, self.waiting
        begun = now()
        late = begun >= self._until
        while waiting:
            if now() - begun >= QUANTUM_S:
                self._retry_later(at_once=True)
                return
            # the batch stays in the queue, so that no other batch overtakes the remaining ones
            partition, batch, level, done, by = waiting[0]
            try:
                self._broker.produce(partition, batch, by=by, level=level, done=done)
            except BrokerError as error:
                full = is_full(error)
                if full and not late:
                    self._retry_later()
                    return
                self._refuse(done, _still_full(self._wait_s) if full else error)
            if waiting:  # unless the queue was dropped meanwhile
                waiting.popleft()
        self._timer = None
        self._emptied()

    def drop(self) -> None:
        self._emptied, self._refuse = _nothing, _ignore
        self.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    pass


def _ignore(_: Completion[int] | None, __: BrokerError) -> None:
    pass


def is_full(error: BrokerError) -> bool:
    return isinstance(error, Busy) and error.code is ErrorCode.BUSY


def _still_full(wait_s: float) -> Busy:
    return Busy(ErrorCode.BUSY, f"the log has no free space: nothing was stored waited_ms={int(wait_s * 1000)}")
