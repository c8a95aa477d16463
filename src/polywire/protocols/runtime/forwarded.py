"""Requests that another process of this broker forwards: a session executes them, as for a client of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from polywire.broker.access import Principal
from polywire.errors import BrokerError, ErrorCode, PeerError, Unavailable
from polywire.log.base import Completion, Handle, Loop
from polywire.protocols.runtime.session import Output, Session
from polywire.protocols.runtime.shards import Shards
from polywire.types import Buffer

# responses to one client's requests, which are joined; far more than a page of HTTP with the largest record needs
RESPONSE_BYTES_MAX: Final = 64 * 1024 * 1024
PIECE_BYTES_MIN: Final = 64 * 1024  # smaller pieces wait for the next one
BACKLOG_BYTES_MAX: Final = 512 * 1024  # responses that the client has not taken, above which a session writes no piece


class Sender(msgspec.Struct, frozen=True, array_like=True):
    """The client that sent a request.

    Attributes:
        user: name of the user whom the other process has authenticated; None without one.
        peer: the client's address.
        context: what the protocol needs to know besides.
    """

    user: str | None
    peer: str
    context: bytes = b""


class Execution(Handle, Protocol):
    """Requests that are being executed."""

    def cancel(self) -> None:
        """End the requests, as if the client had closed its connection. Nothing more is reported."""

    def credit(self, count: int) -> None:
        """Count bytes of a piece of the responses that the client has taken."""


class ForwardedRequests:
    """Requests in one session. Implements ``Output`` for the session, and ``Execution``.

    Attributes:
        backlog: bytes of pieces that the client has not taken. It is 0 without pieces.
        certified: the client's user. See ``Output``.
        more: gets the beginning of long responses, in pieces. If it is None, all responses are reported at the end.
    """

    __slots__ = (
        "_answered",
        "_at",
        "_data",
        "_loop",
        "_parts",
        "_session",
        "_size",
        "backlog",
        "certified",
        "more",
        "peer",
    )

    backlog_max: Final = BACKLOG_BYTES_MAX
    local: Final = ("", 0)
    on_loopback: Final = False

    def __init__(
        self, loop: Loop, data: Buffer, peer: str, certified: Principal | None, answered: Completion[bytes]
    ) -> None:
        """``data`` is copied, because the requests may refer to it until they are answered."""
        self._loop: Final = loop
        self._data: Final = memoryview(bytearray(data))
        self._at = 0
        self._answered: Final = answered
        self._parts: list[bytes] = []
        self._size = 0  # bytes of the parts
        self.backlog = 0
        self.more: Callable[[bytes], None] | None = None
        self._session: Session | None = None
        self.peer: Final = peer
        self.certified: Final = certified

    def run(self, open_session: Callable[[Output, Callable[[], None]], Session]) -> ForwardedRequests:
        """Execute the requests."""
        try:
            self._session = open_session(self, self._offer)
        except PeerError as error:
            self._loop.call_soon(self._answered, _rejected(error))
        else:
            self._loop.call_soon(self._offer)
        return self

    def _offer(self) -> None:
        """Offer the session the requests that it has not accepted yet."""
        session = self._session
        if session is None:
            return
        try:
            while self._at < len(self._data) and not session.paused():
                taken = session.receive(self._data[self._at :])
                if not taken:
                    session.paused()  # so that a session that waits calls ``_offer``
                    break
                self._at += taken
        except PeerError as error:
            self.fail(error)
            return
        self._end_when_answered()

    def _end_when_answered(self) -> None:
        if self._session is not None and self._at == len(self._data) and not self._session.owes():
            self._end(b"".join(self._parts))

    def _end(self, result: bytes | BrokerError) -> None:
        self.cancel()
        self._answered(result)

    def cancel(self) -> None:
        """See ``Handle``."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def credit(self, count: int) -> None:
        """See ``Execution``."""
        was_full = self.backlog >= self.backlog_max
        self.backlog -= count
        if was_full and self.backlog < self.backlog_max and self._session is not None:
            self._session.drained()

    # Output

    def write(self, data: Buffer) -> None:
        self._size += len(data)
        if self._size > RESPONSE_BYTES_MAX:
            self.fail(PeerError(f"the response is too large limit={RESPONSE_BYTES_MAX}", fatal=True))
            return
        self._parts.append(bytes(data))
        if self.more is not None:
            self.backlog += len(data)
            if self._size >= PIECE_BYTES_MIN:
                piece, self._size = b"".join(self._parts), 0
                self._parts.clear()
                self.more(piece)
        self._loop.call_soon(self._end_when_answered)

    def write_many(self, parts: Sequence[Buffer], released: Callable[[], None] | None = None) -> None:
        for part in parts:
            self.write(part)
        if released is not None:
            released()

    def close(self) -> None:
        if self._session is not None:
            self._end(b"".join(self._parts))

    def fail(self, error: PeerError) -> None:
        """Report that the requests have no response."""
        if self._session is not None:
            self._end(_rejected(error))

    def identified(self, principal: Principal | None) -> None:
        """Do nothing, because the other process counts the client's connection."""

    def pin(self) -> Callable[[], None]:
        return _nothing


Executor = Callable[[Sender, memoryview, Completion[bytes]], ForwardedRequests]
"""Executes complete requests of a client, and reports all of their responses, joined.

If the requests are cancelled, nothing is reported.
"""


def _rejected(error: PeerError) -> Unavailable:
    return Unavailable(ErrorCode.STOPPING, f"a process has rejected a forwarded request reason={error}")


def _nothing() -> None:
    """Do nothing, because the requests are not overwritten."""


class Forwarding(Protocol):
    """Sends requests of clients to other processes."""

    @property
    def shards(self) -> Shards:
        """The shards, and which of them has a topic."""

    def execute(
        self,
        shard: int,
        protocol: str,
        sender: Sender,
        requests: bytes,
        then: Completion[bytes],
        more: Callable[[bytes], None] | None = None,
    ) -> Execution:
        """Execute complete requests of a client in another process. ``then`` gets their responses, joined.

        ``more`` gets the beginning of long responses, in pieces. Then the caller must report what the client has taken
        (``Execution.credit``), and ``then`` gets only the rest. Neither is called from inside this call. Raises
        Busy(BUSY) if too many bytes are on the way to the other process.
        """
