"""Sessions with reply slots, which keep responses in the order of the requests.

A slot is filled once. Its response is written when all earlier ones are known, with as few writes as possible. Requests
need no tasks or futures.
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

ANSWERS_MAX: Final = 64  # with this many unanswered requests, a connection's next request waits


class ReplyOwner(Protocol):
    """The methods of the session that a reply slot uses."""

    @property
    def closed(self) -> bool: ...

    def answered(self) -> None:
        """Continue after a slot was filled."""


_Owner = TypeVar("_Owner", bound=ReplyOwner)


@cython.cclass
class BareSlot:
    """The slot of one response.

    Protocols set all fields when they create a slot. ``parts`` is None until the response is known. The slot is filled
    once. If it is ``blocking``, later requests wait.

    ``released`` is called when the memory of the parts may be reused. ``cancel`` is called if the connection closes
    before the slot is filled.
    """

    if not cython.compiled:  # when compiled, pipelined.pxd declares the fields
        __slots__ = ("blocking", "cancel", "parts", "released", "session")

        session: Any
        blocking: bool
        parts: Sequence[Buffer] | None
        released: Callable[[], None] | None
        cancel: Callable[[], None] | None

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        self.parts = parts
        self.cancel = None
        if self.session.closed:
            if released is not None:
                released()
            return
        self.released = released
        self.session.answered()


class ReplySlot(BareSlot, Generic[_Owner]):
    """A slot whose session is an ``_Owner``."""

    __slots__ = ()

    session: _Owner


_Broker = TypeVar("_Broker", bound=WireBroker)
_Slot = TypeVar("_Slot", bound=BareSlot)


@cython.cclass
class BarePipelined(BareSequential):
    """The session of one client; see ``PipelinedSession``, the base class for protocols.

    * ``_answers``: the slots whose responses were not sent yet, in the order of the requests.
    * ``_blocking``: number of slots that delay later requests.
    * ``_queued``: batches that the log has not accepted yet. The next request waits for these, too.

    While SETTLING is a reason to wait, the next request waits for all responses.
    """

    if not cython.compiled:
        __slots__ = ("_answers", "_blocking", "_queued")

    def __init__(self, broker: Any, output: Output, resume: Callable[[], None]) -> None:
        super().__init__(broker, output, resume)
        self._answers: deque[Any] = deque()
        self._blocking = 0
        self._queued: Sized = ()

    @property
    def closed(self) -> bool:
        return self._phase is CLOSED

    def _waits(self) -> bool:
        if self._reasons or self._blocking or self._queued or len(self._answers) >= ANSWERS_MAX:
            return True
        output = self.output
        # the same as in the base class, without the cost of a call for every request
        return output.backlog > output.backlog_max

    def owes(self) -> bool:
        return bool(self._answers)

    def append(self, answer: _Slot) -> _Slot:
        self._answers.append(answer)
        self._blocking += answer.blocking
        return answer

    def _take_back(self, answer: BareSlot) -> None:
        """Remove the newest slot, because its request is offered again later (see ``Pending``)."""
        assert self._answers[-1] is answer, "only the newest request can be repeated"
        self._answers.pop()
        self._blocking -= answer.blocking

    def _settled(self) -> bool:
        """Return whether all earlier requests are answered. If not, the next request waits until they are."""
        if self._answers:
            self.broker.commit()
        if self._answers:
            self._reasons |= Wait.SETTLING
            return False
        self._reasons &= ~Wait.SETTLING
        return True

    def answered(self) -> None:
        """Send the responses that are next in order, and continue with requests that wait."""
        if self._phase is CLOSED:
            return
        answers = self._answers
        parts: list[Buffer] = []
        while answers:
            answer: BareSlot = answers[0]
            if answer.parts is None:
                break
            answers.popleft()
            self._blocking -= answer.blocking
            parts += answer.parts
            if answer.released is not None:
                self.output.write_many(parts, answer.released)
                parts = []
        if parts:
            self.output.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if not answers:
            self._reasons &= ~Wait.SETTLING
        if self._held or self._phase is not OPEN:
            self._go_on()

    def _abandon(self) -> None:
        assert self._phase is CLOSED, "answers are dropped at the end"
        answers, self._answers = self._answers, deque()  # slots refer to their session: break the reference cycle
        for answer in answers:
            if answer.cancel is not None:
                cancel, answer.cancel = answer.cancel, None
                cancel()
            released, answer.released = answer.released, None
            if released is not None:
                released()


class PipelinedSession(BarePipelined, SequentialSession[_Broker], Generic[_Broker, _Slot]):
    """The session of one client whose responses are in the order of its requests."""

    __slots__ = ()

    _answers: deque[_Slot]
