"""Places in the order of answers of one Cursus connection.

Promises: an answer is filled once: at once, by a callback of the broker or by a timer. Must not know: how requests are read, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from polywire.errors import BrokerError
from polywire.protocols.cursus.errors import refused, spelled
from polywire.protocols.cursus.messages import Dialect, Refused, frame
from polywire.protocols.ordered import Place
from polywire.protocols.slices import Slices

if TYPE_CHECKING:
    from polywire.broker.broker import Broker


class Asker(Protocol):
    """What an answer needs of its session."""

    @property
    def broker(self) -> Broker:
        """Whose loop and clock long answers are made with."""

    @property
    def structured(self) -> bool: ...

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""

    def answered(self) -> None:
        """An answer became known."""


class Answer(Place[Asker]):
    """A place in the order of answers; ``parts`` are whole frames, their lengths included, and ``body`` is what ``done`` tells."""

    __slots__ = ("body", "dialect")

    def __init__(self, session: Asker, dialect: Dialect, *, blocking: bool = False) -> None:
        self.session = session
        self.dialect = dialect
        self.blocking = blocking
        self.body = b""
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, body: bytes) -> None:
        """One frame with this body."""
        self.fill([frame(body)])

    def make(self, parts: Iterator[bytes]) -> None:
        """One frame whose body takes long to make; the iterator gives it, a little at a time."""
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: list[bytes] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.fail(parts)
        else:
            self.ok(b"".join(parts))

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
