"""Sessions whose answers leave in the order of the requests: places for answers, and what follows when one becomes known.

Promises: an answer is filled once; what is known is written as soon as everything before it is, in as few writes as can be; what had to wait
goes on. No task, no future and no extra call per request. Must not know: any wire's bytes, what is answered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from polywire.protocols.base import Output
from polywire.types import Buffer


class Asker(Protocol):
    """What a place needs of its session."""

    def answered(self) -> None:
        """An answer became known."""


_Asker = TypeVar("_Asker", bound=Asker)


class Place(Generic[_Asker]):
    """A place in the order of answers; ``parts`` are set when the answer is known. Wires set all of it when they make one.

    Invariant: filled once. ``blocking`` ones hold up the requests behind them; ``released`` is called once the parts may be reused,
    ``cancel`` when the connection goes first.
    """

    __slots__ = ("blocking", "cancel", "parts", "released", "session")

    session: _Asker
    blocking: bool
    parts: Sequence[Buffer] | None
    released: Callable[[], None] | None
    cancel: Callable[[], None] | None

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """The answer is known."""
        self.parts = parts
        self.released = released
        self.cancel = None
        self.session.answered()


_Place = TypeVar("_Place", bound=Place)  # type: ignore[type-arg]


class OrderedSession(ABC, Generic[_Place]):
    """One peer whose answers keep the order of its requests.

    Invariant: ``_answers`` holds what was asked and not yet sent, in request order; ``_blocking`` counts those among them that hold up the
    requests behind them. ``_held``: the driver was told to wait for ``_resume``. ``_settle``: the next request waits for all answers.
    ``_rest``: what the peer left when it finished. ``_yielding``: other connections have their turn.
    """

    __slots__ = (
        "_answers",
        "_blocking",
        "_closed",
        "_ending",
        "_held",
        "_receiving",
        "_rest",
        "_resume",
        "_settle",
        "_yielding",
        "output",
    )

    def __init__(self, output: Output, resume: Callable[[], None]) -> None:
        self.output = output
        self._resume = resume
        self._answers: deque[_Place] = deque()
        self._blocking = 0
        self._settle = False
        self._held = False
        self._receiving = False
        self._ending = False
        self._closed = False
        self._yielding = False
        self._rest = b""

    @abstractmethod
    def _waits(self) -> bool:
        """Whether something must come, or go, before the next request is handled."""

    @abstractmethod
    def _take_rest(self) -> None:
        """Handle what was left when the peer finished, as far as it goes now."""

    def paused(self) -> bool:
        """Whether an answer must come, or go, before the next request is handled; whoever was told so is resumed later."""
        self._held = self._waits()
        return self._held

    def append(self, answer: _Place) -> _Place:
        """Give an answer its place in the order."""
        self._answers.append(answer)
        self._blocking += answer.blocking
        return answer

    def answered(self) -> None:
        """An answer became known: send what is next in order, and go on with what had to wait."""
        if self._closed:
            self._drop()
            return
        answers = self._answers
        parts: list[Buffer] = []
        while answers and answers[0].parts is not None:
            answer = answers.popleft()
            self._blocking -= answer.blocking
            parts.extend(answer.parts or ())
            if answer.released is not None:
                self.output.write_many(parts, answer.released)
                parts = []
        if parts:
            self.output.write(parts[0] if len(parts) == 1 else b"".join(parts))
        if self._held or self._ending or self._rest:
            self._go_on()

    def _turn_again(self) -> None:
        """The others had their turn."""
        self._yielding = False
        self._go_on()

    def _go_on(self) -> None:
        """Take up what had to wait, unless it still must; never from inside ``receive``."""
        if self._receiving or self._closed or self._waits():
            return
        self._settle = False
        if self._rest:
            self._take_rest()
        if self._held and not self._rest:
            self._held = False
            self._resume()
        self._end_when_answered()

    def _finish(self, rest: bytes) -> None:
        """The peer is done, this is left of its requests; whole ones that have to wait are still answered."""
        self._rest = rest
        if not self._ending and rest:
            if self._waits():
                return
            self._take_rest()
        else:
            self._rest = b""
            self._ending = True
        self._end_when_answered()

    def _end_when_answered(self) -> None:
        if self._ending and not self._answers and not self._rest and not self._closed:
            self.output.close()

    def _abandon(self) -> None:
        """The connection is gone: nobody waits for anything."""
        self._closed = True
        for answer in self._answers:
            if answer.cancel is not None:
                answer.cancel()
        self._drop()

    def _drop(self) -> None:
        """Nobody will read these."""
        for answer in self._answers:
            released, answer.released = answer.released, None
            if answer.parts is not None and released is not None:
                released()
