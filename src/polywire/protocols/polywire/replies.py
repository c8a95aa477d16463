"""Send responses at once, later, or built in slices.

While a long response is built, the session handles no other request, and other clients are served between slices. The
session accepts requests again before the response is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from polywire.errors import BrokerError
from polywire.protocols.polywire.messages import Head, Verb
from polywire.protocols.runtime.slices import Slices

if TYPE_CHECKING:
    from polywire.protocols.polywire.auth import Rights
    from polywire.protocols.polywire.context import PolywireBroker

_Part = TypeVar("_Part")


class ReplyOwner(Protocol):
    """The methods of the session that its commands use.

    ``round_robin`` chooses partitions for records without a key.
    """

    @property
    def broker(self) -> PolywireBroker: ...

    @property
    def admission(self) -> Rights: ...

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
    """A response that is built in slices. It is sent once, by ``make`` or by ``refuse``.

    Until then, the session accepts no further request.
    """

    __slots__ = ("_correlation", "_session", "_verb")

    def __init__(self, session: ReplyOwner, verb: Verb, correlation: int) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        session.hold()

    def make(self, parts: Iterator[_Part | None], whole: Callable[[list[_Part]], Head]) -> None:
        """Build the parts in slices, then send the result of ``whole``."""
        Slices(self._session.broker, parts, partial(self._made, whole))

    def _made(self, whole: Callable[[list[_Part]], Head], parts: list[_Part] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(parts)
        else:
            self._session.release()
            self._session.settle(self._verb, self._correlation, whole(parts))

    def refuse(self, error: BrokerError) -> None:
        """Send an error instead of the response."""
        self._session.release()
        self._session.settle_error(self._verb, self._correlation, error)
