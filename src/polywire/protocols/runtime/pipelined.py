"""Sessions that send responses in the order of the requests, however long each request takes.

Every request gets a reply slot. When the responses to the oldest requests are in their slots, they are written
together. While later requests have no response, this happens at the end of the event loop's pass, because one commit
often answers many requests, and a system call costs more than a response. No asyncio task or future is created per
request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any, Final, Generic, Protocol, TypeVar

import cython

from polywire.protocols.runtime.broker import WireBroker
from polywire.protocols.runtime.sequential import CLOSED, OPEN, SequentialSession, Wait
from polywire.protocols.runtime.session import Output
from polywire.types import Buffer

if cython.compiled:
    from cython.cimports.polywire.protocols.runtime.sequential import BareSequential
else:
    from polywire.protocols.runtime.sequential import BareSequential

UNANSWERED_MAX: Final = 64  # unanswered requests of a connection; then the next one waits


class ReplyOwner(Protocol):
    """The methods of the session that its responses use."""

    @property
    def closed(self) -> bool: ...

    def slot_filled(self) -> None:
        """Send the responses that are next in order."""


_Owner = TypeVar("_Owner", bound=ReplyOwner)


@cython.cclass
class BareSlot:
    """One response, which is sent after the responses to all earlier requests.

    Attributes:
        session: the session that sends the response.
        blocking: whether later requests wait until the response is sent.
        parts: the response; None until it is known.
        released: called when the memory of the parts may be reused, if not None.
        cancel: called if the connection closes before the response is known, if not None.
    """

    if not cython.compiled:  # when compiled, pipelined.pxd declares the fields
        __slots__ = ("blocking", "cancel", "parts", "released", "session")

        session: Any
        blocking: bool
        parts: Sequence[Buffer] | None
        released: Callable[[], None] | None
        cancel: Callable[[], None] | None

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Set the response, which is sent after all earlier ones. Called once."""
        self.parts = parts
        self.cancel = None
        if self.session.closed:
            if released is not None:
                released()
            return
        self.released = released
        self.session.slot_filled()


class ReplySlot(BareSlot, Generic[_Owner]):
    """Base class of a protocol's responses, with sessions of type ``_Owner``."""

    __slots__ = ()

    session: _Owner


_Broker = TypeVar("_Broker", bound=WireBroker)
_Slot = TypeVar("_Slot", bound=BareSlot)


@cython.cclass
class BarePipelined(BareSequential):
    """The compiled base class of ``PipelinedSession``.

    Protocols may set ``_unanswered_max``, the number of unanswered requests with which the next one waits, and
    ``_ignores_backlog``: whether requests do not wait while the connection has too many unsent bytes.
    """

    if not cython.compiled:
        __slots__ = ("_blocking", "_ignores_backlog", "_is_sending_soon", "_queued", "_slots", "_unanswered_max")

    def __init__(self, broker: Any, output: Output, resume: Callable[[], None]) -> None:
        super().__init__(broker, output, resume)
        self._slots: deque[Any] = deque()  # in the order of the requests, without those whose responses were sent
        self._blocking = 0  # number of blocking slots in ``_slots``
        self._unanswered_max = UNANSWERED_MAX
        self._ignores_backlog = False
        self._is_sending_soon = False  # whether a call of ``_send_later`` is scheduled
        self._queued: Sized = ()  # batches that the log has not accepted yet; the next request waits for them

    @property
    def closed(self) -> bool:
        return self._phase is CLOSED

    def _waits(self) -> bool:
        if self._reasons or self._blocking or self._queued or len(self._slots) >= self._unanswered_max:
            return True
        if self._ignores_backlog:
            return False
        output = self.output
        # the same as in the base class, without the cost of a call for every request
        return output.backlog > output.backlog_max

    def owes(self) -> bool:
        return bool(self._slots)

    @cython.ccall
    def append(self, slot: _Slot) -> _Slot:
        self._slots.append(slot)
        self._blocking += slot.blocking
        return slot

    def _remove_newest(self, slot: BareSlot) -> None:
        """Remove the response of a request that raised ``Pending``. The repeated request creates a new one."""
        assert self._slots[-1] is slot, "only the newest request can be repeated"
        self._slots.pop()
        self._blocking -= slot.blocking

    def _earlier_answered(self) -> bool:
        """Return whether all earlier requests are answered. If not, accept no requests until they are."""
        if self._slots:
            self.broker.commit()
        if self._slots:
            self._reasons |= Wait.EARLIER
            return False
        self._reasons &= ~Wait.EARLIER
        return True

    @cython.ccall
    def slot_filled(self) -> None:
        slots = self._slots
        if slots:
            oldest: BareSlot = slots[0]
            newest: BareSlot = slots[-1]
            if newest.parts is None:
                if oldest.parts is not None and not self._is_sending_soon:
                    self._is_sending_soon = True
                    self.broker.loop.call_soon(self._send_later)
                return
        self._send_filled()

    def _send_later(self) -> None:
        self._is_sending_soon = False
        self._send_filled()

    @cython.cfunc
    def _send_filled(self) -> None:
        """Send the responses that are next in order."""
        if self._phase is CLOSED:
            return
        slots = self._slots
        parts: list[Buffer] = []
        while slots:
            slot: BareSlot = slots[0]
            if slot.parts is None:
                break
            slots.popleft()
            self._blocking -= slot.blocking
            parts += slot.parts
            if slot.released is not None:
                self.output.write_many(parts, slot.released)
                parts = []
        if parts:
            self.output.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if not slots:
            self._reasons &= ~Wait.EARLIER
        if self._held or self._phase is not OPEN:
            self._continue()

    def _drop_slots(self) -> None:
        assert self._phase is CLOSED, "slots are dropped at the end"
        slots, self._slots = self._slots, deque()  # slots refer to their session: break the reference cycle
        for slot in slots:
            if slot.cancel is not None:
                cancel, slot.cancel = slot.cancel, None
                cancel()
            released, slot.released = slot.released, None
            if released is not None:
                released()


class PipelinedSession(BarePipelined, SequentialSession[_Broker], Generic[_Broker, _Slot]):
    """The session of one client whose responses are in the order of its requests."""

    __slots__ = ()

    _slots: deque[_Slot]
