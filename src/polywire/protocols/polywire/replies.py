"""How the parts of a session answer: at once, later, or with what takes long to make.

Promises: while a long answer is made the session takes no other request, others have their turn between two slices of it, and the session
takes requests again before it is sent. Must not know: frames, what is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from polywire.errors import BrokerError
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.runtime.slices import Slices

if TYPE_CHECKING:
    from polywire.protocols.polywire.auth import Admission
    from polywire.protocols.polywire.context import PolywireBroker

_Part = TypeVar("_Part")


class ReplyOwner(Protocol):
    """What commands ask of the session that they came to. ``round_robin``: over the partitions, of records without a key."""

    @property
    def broker(self) -> PolywireBroker: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def round_robin(self) -> Iterator[int]: ...

    def owe(self) -> None: ...

    def settle(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None: ...

    def settle_error(self, verb: int, correlation: int, error: BrokerError) -> None: ...

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None: ...

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def pin(self) -> Callable[[], None]: ...


class LongAnswer:
    """Holds the session from the beginning. Guards: settled once, by what ``make`` makes or by ``refuse``."""

    __slots__ = ("_correlation", "_session", "_verb")

    def __init__(self, session: ReplyOwner, verb: Verb, correlation: int) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        session.hold()

    def make(self, parts: Iterator[_Part | None], whole: Callable[[list[_Part]], Head]) -> None:
        """Answer with what ``whole`` makes of these parts, which are made a little at a time."""
        Slices(self._session.broker, parts, partial(self._made, whole))

    def _made(self, whole: Callable[[list[_Part]], Head], parts: list[_Part] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(parts)
        else:
            self._session.release()
            self._session.settle(self._verb, self._correlation, whole(parts))

    def refuse(self, error: BrokerError) -> None:
        """Answer with an error."""
        self._session.release()
        self._session.settle_error(self._verb, self._correlation, error)
