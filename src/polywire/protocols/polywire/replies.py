"""Responses that are sent immediately, later, or built in slices.

While a long response is built, the session executes no other request, and other clients are served between the slices.
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


class Reading(Protocol):
    """A request in progress that waits for records.

    Attributes:
        is_over: whether it has ended.
    """

    @property
    def is_over(self) -> bool: ...

    def stop(self) -> None:
        """Respond soon, with the records found so far."""

    def cancel(self) -> None: ...


class ReplyOwner(Protocol):
    """The methods of the session that handlers use."""

    @property
    def broker(self) -> PolywireBroker: ...

    @property
    def admission(self) -> Rights: ...

    @property
    def round_robin(self) -> Iterator[int]:
        """A counter. A record without a key goes to partition ``next(counter) % number of partitions``."""

    def owe(self) -> None:
        """Reserve a response that is sent later with ``respond`` or ``respond_error``."""

    def respond(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        """Send a response that was reserved with ``owe`` or ``hold``."""

    def respond_error(self, verb: int, correlation: int, error: BrokerError) -> None: ...

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        """Send a response that was not reserved."""

    def hold(self) -> None:
        """Reserve a response, and delay later requests until ``release``."""

    def release(self) -> None: ...

    def share(self, group: str, member: str, reading: Reading) -> None:
        """When the connection closes, cancel ``reading`` and release the records that the member holds."""

    def pin(self) -> Callable[[], None]:
        """Keep the request's bytes in the receive buffer until the returned function is called."""


class LongAnswer:
    """A response that is built in several passes of the loop.

    The session executes no further request until it is sent.
    """

    __slots__ = ("_correlation", "_session", "_verb")

    def __init__(self, session: ReplyOwner, verb: Verb, correlation: int) -> None:
        self._session: Final = session
        self._verb: Final = verb
        self._correlation: Final = correlation
        session.hold()

    def make(self, parts: Iterator[_Part | None], whole: Callable[[list[_Part]], Head]) -> None:
        """Build the response's parts in several passes, then send the header that ``whole`` makes of them."""
        Slices(self._session.broker, parts, partial(self._made, whole))

    def _made(self, whole: Callable[[list[_Part]], Head], parts: list[_Part] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(parts)
        else:
            self._session.release()
            self._session.respond(self._verb, self._correlation, whole(parts))

    def refuse(self, error: BrokerError) -> None:
        self._session.release()
        self._session.respond_error(self._verb, self._correlation, error)
