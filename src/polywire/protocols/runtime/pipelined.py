"""Sessions whose answers leave in the order of the requests: reply slots, and what follows when one becomes known. Compiled.

Promises: an answer is filled once; what is known is written as soon as everything before it is, in as few writes as can be. No task, no
future and no extra call per request. Must not know: any wire's bytes, what is answered.
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

ANSWERS_MAX: Final = 64  # answers a connection may wait for before its next request is handled


class ReplyOwner(Protocol):
    """What a reply slot needs of its session."""

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""

    def answered(self) -> None:
        """An answer became known."""


_Owner = TypeVar("_Owner", bound=ReplyOwner)


@cython.cclass
class BareSlot:
    """A slot in the order of answers; ``parts`` are set when the answer is known. Wires set all of it when they make one.

    Invariant: filled once. ``blocking`` ones hold up the requests behind them; ``released`` is called once the parts may be reused,
    ``cancel`` when the connection goes first.
    """

    if not cython.compiled:  # compiled, pipelined.pxd declares them
        __slots__ = ("blocking", "cancel", "parts", "released", "session")

        session: Any
        blocking: bool
        parts: Sequence[Buffer] | None
        released: Callable[[], None] | None
        cancel: Callable[[], None] | None

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """The answer is known."""
        self.parts = parts
        self.cancel = None
        if self.session.closed:
            if released is not None:
                released()
            return
        self.released = released
        self.session.answered()


class ReplySlot(BareSlot, Generic[_Owner]):
    """A slot of a session of this kind."""

    __slots__ = ()

    session: _Owner


_Broker = TypeVar("_Broker", bound=WireBroker)
_Slot = TypeVar("_Slot", bound=BareSlot)


@cython.cclass
class BarePipelined(BareSequential):
    """One peer; see ``PipelinedSession``, which is what wires make a class of their own of.

    Invariant: ``_answers`` holds what was asked and not yet sent, in request order; ``_blocking`` counts those among them that hold up the
    requests behind them. While SETTLING is among the reasons the next request waits for all answers. ``_queued``: what the log does not take
    yet, of wires whose records wait for it; the next request waits for that, too.
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
        """Whether the connection is gone."""
        return self._phase is CLOSED

    def _waits(self) -> bool:
        if self._reasons or self._blocking or self._queued or len(self._answers) >= ANSWERS_MAX:
            return True
        output = self.output
        return output.backlog > output.backlog_max  # as the base says: one call less for every request

    def owes(self) -> bool:
        """Whether something that was asked for is not answered yet."""
        return bool(self._answers)

    def append(self, answer: _Slot) -> _Slot:
        """Give an answer its slot in the order."""
        self._answers.append(answer)
        self._blocking += answer.blocking
        return answer

    def _settled(self) -> bool:
        """Whether everything asked before is answered; what still is not makes the next request wait."""
        if self._answers:
            self.broker.commit()
        if self._answers:
            self._reasons |= Wait.SETTLING
            return False
        self._reasons &= ~Wait.SETTLING
        return True

    def answered(self) -> None:
        """An answer became known: send what is next in order, and go on with what had to wait."""
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
        """The connection is gone: nobody waits for anything."""
        assert self._phase is CLOSED, "answers are dropped at the end"
        answers, self._answers = self._answers, deque()  # an answer has its session: not each the other
        for answer in answers:
            if answer.cancel is not None:
                cancel, answer.cancel = answer.cancel, None
                cancel()
            released, answer.released = answer.released, None
            if released is not None:
                released()


class PipelinedSession(BarePipelined, SequentialSession[_Broker], Generic[_Broker, _Slot]):
    """One peer whose answers keep the order of its requests."""

    __slots__ = ()

    _answers: deque[_Slot]
