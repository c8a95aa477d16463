"""Send the replies of an Iggy connection in the order of its requests, with the headers of frames.

(spec: iggy#classic-framing, iggy#d3-frames)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from polywire.errors import BrokerError, ErrorCode, PeerError, Unavailable
from polywire.protocols.iggy import errors, vsr
from polywire.protocols.iggy.dialect import Dialect
from polywire.protocols.iggy.messages import HEAD
from polywire.protocols.runtime.pipelined import ReplySlot
from polywire.protocols.runtime.slices import Slices
from polywire.types import Buffer

if TYPE_CHECKING:
    from polywire.protocols.iggy.context import IggyBroker

# a longer reply is not stored for repeated requests; no command that changes state has one
REPLAY_BYTES_MAX: Final = 64 * 1024


class ReplyOwner(Protocol):
    """The methods of a session that its replies use."""

    @property
    def broker(self) -> IggyBroker:
        """The broker. Its event loop and clock are used for replies that take long to build."""

    @property
    def closed(self) -> bool: ...

    def slot_filled(self) -> None:
        """Send the replies that are next in order."""

    def end(self) -> None:
        """Accept no more requests. Replies to requests that have started are still sent."""

    def fail(self, error: PeerError) -> None:
        """Close the connection."""

    def store_reply(self, head: vsr.Head, reply: bytes) -> None:
        """Store the reply, so that it can be sent again if the client repeats the request."""


class Answer(ReplySlot[ReplyOwner]):
    """One reply, which is sent after the replies to all earlier requests.

    Attributes:
        payload: the payload that ``done`` sends.
        later: builds a payload for ``done`` in steps.
        head: header of the request; None for a request without one.
        number: number of the reply in its connection.
    """

    __slots__ = ("dialect", "head", "later", "number", "payload")

    def __init__(
        self,
        session: ReplyOwner,
        dialect: Dialect,
        head: vsr.Head | None = None,
        *,
        number: int = 0,
        blocking: bool = True,
    ) -> None:
        self.session = session
        self.dialect = dialect
        self.head = head
        self.number = number
        self.blocking = blocking
        self.payload = b""
        self.later: Iterator[bytes] | None = None
        self.parts = None
        self.released = None
        self.cancel = None

    def ok(self, payload: bytes = b"") -> None:
        self.fill([payload] if payload else [])

    def make(self, parts: Iterator[bytes]) -> None:
        """Reply with success, and the payload that the iterator builds in steps."""
        self.cancel = Slices(self.session.broker, parts, self._made).cancel

    def _made(self, parts: Sequence[Buffer] | BrokerError) -> None:
        if isinstance(parts, BrokerError):
            self.refuse(parts)
        else:
            self.fill(parts)

    def fill(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        """Reply with success, and a payload in parts. ``released`` is called when their buffers may be reused."""
        super().fill(self._framed(0, parts), released)

    def refuse(self, error: BrokerError) -> None:
        self.status(errors.number_of(error, self.dialect))

    def status(self, number: int) -> None:
        super().fill(self._framed(number, ()))

    def evict(self, reason: int, protocols: tuple[int, int] = (0, 0)) -> None:
        """End the login, and close the connection with a message that has this reason."""
        assert self.head is not None, "only the headered framing has evictions"
        self.session.end()
        super().fill([vsr.eviction(self.head.client, reason, protocols)])

    def done(self, result: object | BrokerError) -> None:
        """Completion that replies with ``payload``, or with the error."""
        if isinstance(result, BrokerError):
            self.refuse(result)
        elif self.later is not None:
            self.make(self.later)
        else:
            self.ok(self.payload)

    def sent(self, result: int | BrokerError) -> None:
        """Completion that replies to a request that sends messages.

        If another process has ended, it is unknown whether the messages are stored. Then the connection is closed;
        clients send the messages again.
        """
        if self.head is None and not isinstance(result, BrokerError):
            self.parts = _SENT  # the response of most sends, without the cost of ``fill``
            self.session.slot_filled()
        elif isinstance(result, Unavailable) and result.code is ErrorCode.STOPPING:
            self.session.fail(PeerError(result.message, fatal=True))
        else:
            self.done(result)

    def _framed(self, status: int, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the parts after the reply's header. ``status`` is 0 or an error number."""
        head = self.head
        if head is None:
            return [HEAD.pack(status, sum(map(len, parts))), *parts]
        if head.has_result:
            parts = [_RESULT_REFUSED + status.to_bytes(4, "little")] if status else [_RESULT_OK, *parts]
            status = 0
        elif head.operation == vsr.REGISTER:
            parts = [_RESULT_OK, *parts]
        size = sum(map(len, parts))
        framed = [self._reply_head(head, size, status), *parts]
        if head.has_result and head.operation < vsr.SEND and size <= REPLAY_BYTES_MAX:
            self.session.store_reply(head, b"".join(framed))
        return framed

    def _reply_head(self, head: vsr.Head, size: int, status: int) -> bytes:
        if not self.dialect.contexts:
            return vsr.reply_head(head, self.number, size, status)
        # Clients ignore a route whose position is below that of their last change, so both positions are in
        # microseconds.
        position = self.session.broker.clock.now_us() if head.changes_metadata else self.number
        committed = vsr.COMMITTED if head.operation != vsr.PLAIN and status == 0 else 0
        return vsr.reply_head(head, position, size, status, committed=committed, incarnation=head.incarnation)


_SENT: Final = (HEAD.pack(0, 0),)
_RESULT_OK: Final = bytes(4)
_RESULT_REFUSED: Final = b"\x01\0\0\0\0\0\0\0"
