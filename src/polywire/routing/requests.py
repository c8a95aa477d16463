"""Execute requests of the `polywire` protocol on behalf of another process, which has authorized them."""

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
from polywire.protocols.polywire.replies import Reading

if TYPE_CHECKING:
    from polywire.broker.access import Principal
    from polywire.broker.broker import Broker
    from polywire.broker.owners import Caller

_round_robin: Final = count()


class Authorized(Rights):
    """The permissions of a client whose request another process has authorized."""

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
    """A request that another process forwarded. Implements ``ReplyOwner``.

    The methods for flow control do nothing, because the client's session in the other process limits its requests.
    """

    __slots__ = ("_respond", "admission", "broker", "pin")

    def __init__(
        self,
        broker: Broker,
        admission: Authorized,
        respond: Callable[[bytes], object],
        pin: Callable[[], Callable[[], None]],
    ) -> None:
        """``pin`` keeps the bytes of the request in memory until the function that it returned is called."""
        self.broker: Final = broker
        self.admission: Final = admission
        self._respond: Final = respond
        self.pin: Final = pin

    @property
    def round_robin(self) -> Iterator[int]:
        return _round_robin

    def answer(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        self._respond(encode_head(verb, correlation, head, payload_bytes=len(payload)) + payload)

    def respond(self, verb: int, correlation: int, head: Head, payload: bytes = b"") -> None:
        self.answer(verb, correlation, head, payload)

    def respond_error(self, verb: int, correlation: int, error: BrokerError) -> None:
        self._respond(encode_head(verb, correlation, failure_of(error), flags=ERROR))

    def owe(self) -> None:
        pass

    def share(self, group: str, member: str, reading: Reading) -> None:
        """Do nothing: if the client's connection closes, the locks of its records expire."""

    def hold(self) -> None:
        pass

    def release(self) -> None:
        pass


def nothing() -> None:
    pass


def execute(
    broker: Broker,
    by: Caller,
    frame: memoryview,
    respond: Callable[[bytes], object],
    *,
    pin: Callable[[], Callable[[], None]] = lambda: nothing,
    sees_files: bool,
) -> None:
    """Execute a request of another process.

    ``respond`` is called with the response's frame, possibly before this returns. By default, the bytes of ``frame``
    must not change until the request ends. With ``pin``, they must not change until the next commit, or until the
    function that ``pin`` returned is called.
    """
    # the sending process has checked the client's frame; its own may be longer
    prefix = decode_prefix(frame, length_max=len(frame), head_bytes_max=len(frame))
    head = PREFIX_BYTES + prefix.head_bytes
    owner: Any = ForwardedRequest(broker, Authorized(broker, by, sees_files=sees_files), respond, pin)
    try:
        request = decode_request(prefix.verb, frame[PREFIX_BYTES:head])
        COMMANDS[prefix.verb].handler(owner, prefix.correlation, request, frame[head:])
    except BrokerError as error:
        owner.respond_error(prefix.verb, prefix.correlation, error)
