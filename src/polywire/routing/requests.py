"""Execute requests of the `polywire` protocol that were authorized for a client of this or another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from polywire.errors import BrokerError
from polywire.protocols.polywire.auth import Rights
from polywire.protocols.polywire.codec import ERROR, PREFIX_BYTES, decode_prefix, decode_request, encode_head
from polywire.protocols.polywire.errors import failure_of
from polywire.protocols.polywire.factory import COMMANDS
from polywire.protocols.polywire.messages import Head

if TYPE_CHECKING:
    from polywire.broker.access import Principal
    from polywire.broker.broker import Broker
    from polywire.broker.owners import Caller

_round_robin: Final = count()


class Authorized(Rights):
    """The rights of a caller whose request was authorized."""

    __slots__ = ("_caller", "_sees_files")

    def __init__(self, broker: Broker, caller: Caller, *, sees_files: bool) -> None:
        super().__init__(broker)
        self._caller: Final = caller
        self._sees_files: Final = sees_files

    @property
    def principal(self) -> Principal | None:
        return self._caller.principal

    @property
    def caller(self) -> Caller:
        return self._caller

    def sees_files(self) -> bool:
        return self._sees_files


class ForwardedRequest:
    """One request. Implements ``ReplyOwner``."""

    __slots__ = ("_answered", "admission", "broker", "pin")

    def __init__(
        self,
        broker: Broker,
        admission: Authorized,
        answered: Callable[[bytes], object],
        pin: Callable[[], Callable[[], None]],
    ) -> None:
        """Create the request. ``pin`` preserves its bytes until the returned function is called."""
        self.broker: Final = broker
        self.admission: Final = admission
        self._answered: Final = answered
        self.pin: Final = pin

    @property
    def round_robin(self) -> Iterator[int]:
        """See ``ReplyOwner``."""
        return _round_robin

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        """See ``ReplyOwner``."""
        self._answered(encode_head(verb, correlation, head, payload_bytes=len(payload)) + payload)

    def respond(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        """See ``ReplyOwner``."""
        self.answer(verb, correlation, head, payload)

    def respond_error(self, verb: int, correlation: int, error: BrokerError) -> None:
        """See ``ReplyOwner``."""
        self._answered(encode_head(verb, correlation, failure_of(error), flags=ERROR))

    def owe(self) -> None:
        """Do nothing, because the client's session counts its requests."""

    def hold(self) -> None:
        """Do nothing, because the client's session holds its requests if it must."""

    def release(self) -> None:
        """Do nothing, as in ``hold``."""


def nothing() -> None:
    """Do nothing."""


def execute(
    broker: Broker,
    by: Caller,
    frame: memoryview,
    answered: Callable[[bytes], object],
    *,
    pin: Callable[[], Callable[[], None]] = lambda: nothing,
    sees_files: bool,
) -> None:
    """Execute a request. ``answered`` gets the frame of its only response, now or later.

    The bytes of the frame stay valid until the next commit, or as long as ``pin`` preserves them. By default they are
    used for nothing else.
    """
    # the sending process has checked the client's frame; its own may be longer
    prefix = decode_prefix(frame, length_max=len(frame), head_bytes_max=len(frame))
    head = PREFIX_BYTES + prefix.head_bytes
    owner: Any = ForwardedRequest(broker, Authorized(broker, by, sees_files=sees_files), answered, pin)
    try:
        request = decode_request(prefix.verb, frame[PREFIX_BYTES:head])
        COMMANDS[prefix.verb].handler(owner, prefix.correlation, request, frame[head:])
    except BrokerError as error:
        owner.respond_error(prefix.verb, prefix.correlation, error)
