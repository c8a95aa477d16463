"""Places in the order of answers of one Cursus connection.

Promises: an answer is filled once: at once, by a callback of the broker or by a timer. Must not know: how requests are read, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polywire.errors import BrokerError
from polywire.protocols.cursus.errors import refused, spelled
from polywire.protocols.cursus.messages import Dialect, Refused, frame
from polywire.types import Buffer


class Asker(Protocol):
    """What an answer needs of its session."""

    @property
    def structured(self) -> bool: ...

    def answered(self) -> None:
        """An answer became known."""


class Answer:
    """A place in the order of answers; ``parts``, the bytes of its frames, are set when it is known.

    Invariant: filled once. ``blocking`` answers hold up the requests behind them; ``cancel`` is called when the connection goes first.
    """

    __slots__ = ("blocking", "body", "cancel", "dialect", "ending", "parts", "released", "session")

    def __init__(self, session: Asker, dialect: Dialect, *, blocking: bool = False) -> None:
        self.session = session
        self.dialect = dialect
        self.blocking = blocking
        self.ending = False
        self.body = b""
        self.parts: Sequence[Buffer] | None = None
        self.released: Callable[[], None] | None = None
        self.cancel: Callable[[], None] | None = None

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """The answer is known: whole frames, their lengths included. ``released``: called once ``parts`` may be reused."""
        self.parts = parts
        self.released = released
        self.cancel = None
        self.session.answered()

    def ok(self, body: bytes) -> None:
        """One frame with this body."""
        self.fill([frame(body)])

    def refuse(self, error: Refused) -> None:
        """An error, in the words of the request's dialect."""
        self.ok(spelled(error, self.dialect, structured=self.session.structured))

    def fail(self, error: BrokerError) -> None:
        """An error of the broker."""
        self.refuse(refused(error))

    def done(self, offset: int, error: BrokerError | None) -> None:
        """A callback of the broker: answers with ``body`` as it was set before, or with the error."""
        del offset
        if error is None:
            self.ok(self.body)
        else:
            self.fail(error)
